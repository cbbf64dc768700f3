"""The examples of docs/extending.md run as they stand, keep their contracts, and train."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import TrainerCallback

from hf_dpopt.clipping.rules import RULES
from hf_dpopt.noise import MECHANISMS
from hf_dpopt.noise.strategy import _BY_NAME
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.sampling import SAMPLERS
from tests import tiny
from tests.contract import noise, optimizers, postprocess, rules, sampling

REGISTRIES = (MECHANISMS, _BY_NAME, SAMPLERS, RULES, OPTIMIZERS)


@pytest.fixture(scope="module")
def examples(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ModuleType]]:
    """File name -> the example as a module; what it registered is forgotten afterwards."""
    before = [dict(registry) for registry in REGISTRIES]
    folder, made = tmp_path_factory.mktemp("examples"), {}
    text = (repo / "docs" / "extending.md").read_text(encoding="utf-8")
    for code in re.findall(r"^```python\n(# \S+\.py\n.*?)^```", text, re.DOTALL | re.MULTILINE):
        file = folder / Path(code.splitlines()[0].removeprefix("# ")).name
        file.write_text(code, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made[file.stem] = module
    yield made
    for registry, kept in zip(REGISTRIES, before, strict=True):
        registry.clear()  # type: ignore[attr-defined]
        registry.update(kept)  # type: ignore[attr-defined]


def test_there_are_five(examples):
    assert sorted(examples) == ["gain", "power_law", "repeated_poisson", "sign", "two_step_mean"]


@pytest.mark.parametrize("check", noise.CHECKS, ids=lambda check: check.__name__)
def test_mechanism(examples, check):
    check("power_law")


def test_mechanism_draws_once_a_step(examples):
    assert noise.plan_of("power_law").cost.draws == 1


@pytest.mark.parametrize("check", sampling.CHECKS, ids=lambda check: check.__name__)
def test_sampler(examples, check):
    check("repeated_poisson")


def test_sampler_with_the_trap_left_in_is_found(examples, monkeypatch):
    monkeypatch.delattr(examples["repeated_poisson"].RepeatedPoissonSampler, "excess")
    with pytest.raises(AssertionError):
        sampling.check_excess("repeated_poisson")


def test_rule(examples):
    inputs = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rules.check_rule(lambda: rules.Case(examples["gain"].Gain(6), inputs))


@pytest.mark.parametrize("check", postprocess.CHECKS, ids=lambda check: check.__name__)
def test_filter(examples, check):
    check(examples["two_step_mean"].TwoStepMean)


@pytest.mark.parametrize("check", optimizers.CHECKS, ids=lambda check: check.__name__)
def test_optimizer(examples, check):
    check("dp_sign_sgd")


@pytest.mark.parametrize(
    "options",
    [
        {"noise_mechanism": "power_law", "noise_kwargs": {"exponent": 0.7}},
        {"sampling": "repeated_poisson"},
        {"optim": "dp_sign_sgd", "filter": "first_order_v1"},
    ],
    ids=["mechanism", "sampler", "optimizer"],
)
def test_a_run_trains_stops_and_goes_on(examples, tmp_path, options):
    """What went on from a checkpoint ends in the same weights as what never stopped."""
    ends = []
    for name, stops in (("whole", [6]), ("resumed", [3, 6])):
        for i, stop in enumerate(stops):
            trainer = tiny.trainer(
                tmp_path / name, model=tiny.model(dropout=0.0), private_state_dir=str(tmp_path / f"keys {name}"),
                save_strategy="steps", save_steps=3, max_steps=6, unsafe_fixed_noise_key="5a" * 32, **options,
            )  # fmt: skip
            if stop < 6:
                trainer.add_callback(_StopAt(stop))
            trainer.train(resume_from_checkpoint=bool(i))
        ends.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_run_with_a_filter_of_ones_own(examples, tmp_path):
    stage = examples["two_step_mean"].TwoStepMean()
    trainer = tiny.trainer(tmp_path / "out", private_state_dir=str(tmp_path / "keys"), postprocess=[stage])
    trainer.train()
    assert set(stage.state_dict()["last"]) == {n for n, p in trainer.model.named_parameters() if p.requires_grad}


class _StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        control.should_training_stop |= state.global_step == self.step
