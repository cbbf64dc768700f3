"""Every refusal goes through the real trainer: it raises with the mend in its message, and touched nothing before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hf_dpopt import DPConfigError, DPTrainingArguments
from tests.refusals.base import num_charged


@pytest.fixture(autouse=True)
def _own_environment(tmp_path):
    """Keys in a folder of the test's own, and what accelerate leaves in the environment taken out again."""
    before = dict(os.environ)
    os.environ["HF_DPOPT_PRIVATE_DIR"] = str(tmp_path / "keys")
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def arguments(tmp_path) -> Callable[..., DPTrainingArguments]:
    """Arguments of a small private run; `late` values are set afterwards, for what the host itself refuses here."""

    def make(late: dict[str, Any] | None = None, **values: Any) -> DPTrainingArguments:
        defaults = {
            "output_dir": str(tmp_path / "out"), "use_cpu": True, "report_to": "none", "disable_tqdm": True,
            "noise_multiplier": 1.0, "max_steps": 2, "expected_batch_size": 8, "per_device_train_batch_size": 4,
            "save_strategy": "no", "remove_unused_columns": False,
        }  # fmt: skip
        args = DPTrainingArguments(**(defaults | values))
        for name, value in (late or {}).items():
            setattr(args, name, value)
        return args

    return make


@pytest.fixture
def refused(tmp_path) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """Inside, the trainer must refuse with these words before anything happens: no folder, no key, no seeding."""

    @contextlib.contextmanager
    def block(mend: str, error: type[Exception] = DPConfigError) -> Iterator[None]:
        before = torch.get_rng_state()
        with pytest.raises(error, match=f"(?s){mend}"):
            yield
        assert not (tmp_path / "out").exists() and not (tmp_path / "keys").exists()
        assert torch.equal(torch.get_rng_state(), before)  # the Trainer's constructor begins with set_seed

    return block


@pytest.fixture
def refused_in_training(tmp_path) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """For what only training shows: refused with these words, at most `charged` steps charged, no parameter moved."""

    @contextlib.contextmanager
    def block(
        mend: str, model: nn.Module, *, charged: int = 0, error: type[Exception] = DPConfigError
    ) -> Iterator[None]:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(error, match=f"(?s){mend}"):
            yield
        assert num_charged(tmp_path / "out") == charged
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    return block
