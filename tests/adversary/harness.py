"""How far one record moves what is released before the noise, through the real `DPTrainer`, in clipping norms.

Nothing of the trainer is replaced but the draw of the batch and the end of the step: which records a step holds is
forced, and the clipped sums are read at the door to the noise. Models are float64, so the promise, at most 1, can be
held to 1e-5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from hf_dpopt import DPConfigError, DPTrainer, UnsupportedModuleError
from hf_dpopt.preclip import queries
from hf_dpopt.sampling import SAMPLERS
from hf_dpopt.sampling.check import ParticipationCheck
from tests.helpers import tiny

CLIPPING_NORM = 1.0
SLACK = 1e-5
REFUSALS = (DPConfigError, UnsupportedModuleError)

Make = Callable[..., DPTrainer]


@contextlib.contextmanager
def forced_draws(
    indices: Sequence[int] | Callable[[int], Sequence[int]],
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Every step holds exactly the records `indices`; yields what the steps summed, before the noise.

    Args:
        indices: of the records; or a function of the step, which counts from 1.
    """
    seen: list[dict[str, torch.Tensor]] = []
    join = queries.join

    def spy(sums: Any) -> Any:
        seen.append({name: total.detach().double().clone() for name, total in sums[0].items()})
        return join(sums)

    with pytest.MonkeyPatch.context() as patch:
        drawn = indices if callable(indices) else lambda step: indices
        for sampler in SAMPLERS.values():
            patch.setattr(sampler, "draw", lambda self, key, step: np.array(drawn(step), dtype=np.int64))
        patch.setattr(ParticipationCheck, "observe", lambda self, step, drawn: None)  # it knows what was promised
        patch.setattr(queries, "join", spy)
        yield seen


def trainer(output_dir: Path, dataset: Any, **changes: Any) -> DPTrainer:
    """A tiny run of one step in float64 without dropout, to be changed by the adversary."""
    values: dict[str, Any] = dict(
        train_dataset=dataset, max_steps=1, expected_batch_size=4, clipping_norm=CLIPPING_NORM, noise_multiplier=1.0,
        learning_rate=0.0, per_device_train_batch_size=16, skip_self_check=False,
    )  # fmt: skip
    values |= changes
    if "model" not in values and "model_init" not in values:
        values["model"] = tiny.model(dropout=0.0)
    if isinstance(values.get("model"), torch.nn.Module) and not values.get("bf16"):
        values["model"] = values["model"].double()
    return tiny.trainer(output_dir, **values)


def making(make_model: Callable[[], Any] | None = None, **changes: Any) -> Make:
    """A `Make` of such trainers, each with a model of its own."""

    def make(output_dir: Path, dataset: Any, **more: Any) -> DPTrainer:
        torch.manual_seed(0)
        model = {} if make_model is None else {"model": make_model()}
        return trainer(output_dir, dataset, **model | changes | more)

    return make


def words(padding_side: str = "right") -> Any:
    """A tokenizer of the words w3, w4 and so on, which are their own numbers."""
    vocabulary = {"<eos>": 0, "<pad>": 1, "<other>": 2, **{f"w{i}": i for i in range(3, tiny.VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<other>"))
    tokenizer.pre_tokenizer = Whitespace()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side=padding_side, pad_token="<pad>", eos_token="<eos>"
    )


class Lazy(torch.utils.data.Dataset):
    """Makes its records when they are asked for, so that most are met in a step first.

    Args:
        rows: the records.
        bad: called in the place of the record ``at``.
    """

    def __init__(self, rows: list[Any], bad: Callable[[], Any] | None = None, at: int = -1):
        self.rows, self.bad, self.at = rows, bad, at

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.bad() if self.bad is not None and i == self.at else self.rows[i]


def raising(error: BaseException) -> Callable[[], Any]:
    """A record that cannot be read."""

    def fail() -> Any:
        raise error

    return fail


def masked(num: int) -> list[dict[str, Any]]:
    """Records with a mask of their own."""
    return [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in tiny.records(num)]


def clipped_sums(make: Make, dataset: Any, indices: Sequence[int], output_dir: Path) -> dict[str, torch.Tensor]:
    """Sums of clipped gradients of one step that holds `indices`, float64, by parameter."""
    with forced_draws(indices) as seen:
        made = make(output_dir, dataset)
        made.train()
    assert len(seen) == 1, f"{len(seen)} steps ran"
    return seen[0]


def influence(
    make: Make,
    dataset: Any,
    record: int,
    folder: Path,
    *,
    drawn: Sequence[int] | None = None,
    without: Any = None,
) -> float:
    """How far `record` moves the clipped sum of a step, in clipping norms; the promise is at most 1.

    Args:
        make: (output_dir, dataset, **changes) -> trainer.
        dataset: the records.
        record: index of the one that is removed.
        folder: empty; the runs write here.
        drawn: records of the step; None for all of them.
        without: the dataset that lacks the record, in which the others keep their order; None keeps the dataset and
            leaves the record out of the draw, which is the same for what happens inside a step.
    """
    with_it, without_it = _with_and_without(make, dataset, record, folder, drawn, without)
    squares = [(with_it[name] - without_it[name]).square().sum() for name in with_it]
    return float(torch.stack(squares).sum().sqrt()) / CLIPPING_NORM


def _with_and_without(
    make: Make, dataset: Any, record: int, folder: Path, drawn: Sequence[int] | None, without: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    everyone = list(range(len(dataset))) if drawn is None else list(drawn)
    others = [i for i in everyone if i != record]
    with_it = clipped_sums(make, dataset, everyone, folder / "with")
    if without is None:
        return with_it, clipped_sums(make, dataset, others, folder / "without")
    return with_it, clipped_sums(make, without, [i - (i > record) for i in others], folder / "without")


def assert_adds_nothing(make: Make, dataset: Any, record: int, folder: Path, *, drawn: Sequence[int]) -> None:
    """The record is left out of the sum of its step, and the others are not."""
    with_it, without_it = _with_and_without(make, dataset, record, folder, drawn, None)
    assert all(torch.equal(with_it[name], without_it[name]) for name in without_it)
    assert any(bool(total.any()) for total in without_it.values()), "nobody added anything"


def assert_kept(make: Make, dataset: Any, record: int, folder: Path, **how: Any) -> None:
    """The record moves the sum by at most a clipping norm."""
    ratio = influence(make, dataset, record, folder, **how)
    assert ratio <= 1 + SLACK, f"one record moved the clipped sum by {ratio:.4g} clipping norms"


def assert_kept_or_refused(make: Make, dataset: Any, record: int, folder: Path, **how: Any) -> str:
    """The run keeps the promise, or is refused before its first step; returns the refusal or an empty text.

    Training that is refused must not have charged a step: what stops in the step that sampled a record tells of it.
    """
    try:
        assert_kept(make, dataset, record, folder, **how)
    except REFUSALS as error:
        assert_nothing_charged(folder)
        return str(error)
    return ""


def assert_refused(make: Make, dataset: Any, folder: Path, match: str) -> None:
    """The run is refused before its first step, in words that match."""
    with pytest.raises(REFUSALS, match=match):
        clipped_sums(make, dataset, range(len(dataset)), folder / "refused")
    assert_nothing_charged(folder)


def assert_nothing_charged(folder: Path) -> None:
    """No step of any run below `folder` is in a ledger."""
    charged = [path for path in folder.rglob("ledger.jsonl") if '"kind":"step"' in path.read_text()]
    assert not charged, f"{charged} charged a step before the run was refused"
