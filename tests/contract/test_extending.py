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

from hf_dpopt.clipping.rules import RULES, class_path, rule_for
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import MECHANISMS
from hf_dpopt.noise.strategy import _BY_NAME
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.sampling import SAMPLERS
from tests.contract import noise, optimizers, postprocess, rules, sampling
from tests.helpers import tiny
from tests.huggingface.test_correlated_training import run_and_die_everywhere, trainer

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


def test_a_sampler_does_not_inherit_how_costs_compare(examples, monkeypatch):
    sampler = examples["repeated_poisson"].RepeatedPoissonSampler
    assert SAMPLERS["poisson"].repeats_one_event and not sampler.repeats_one_event
    monkeypatch.setattr(sampler, "repeats_one_event", True)
    with pytest.raises(AssertionError):
        sampling.check_excess("repeated_poisson")


def test_a_sampler_that_draws_says_what_that_costs():
    """A shuffle that kept the event of Poisson sampling would have half of its epsilon."""
    with pytest.raises(
        TypeError, match="draws its own batches, so it needs name and event and describe and adjacencies"
    ):
        type("Shuffled", (SAMPLERS["poisson"],), {"draw": lambda self, key, step: None})


def test_the_example_of_a_sampler_has_no_adjacency_without_a_proof(examples):
    with pytest.raises(DPConfigError, match="replace_one"):
        examples["repeated_poisson"].RepeatedPoissonSampler(num_examples=10, expected_batch_size=2).check_adjacency(
            "replace_one"
        )


def test_rule(examples):
    gain = examples["gain"].Gain
    assert rule_for(gain(6)) is RULES[class_path(gain)]
    inputs = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rules.check_rule(lambda: rules.Case(examples["gain"].Gain(6), inputs))


@pytest.mark.parametrize("check", postprocess.CHECKS, ids=lambda check: check.__name__)
def test_filter(examples, check):
    check(examples["two_step_mean"].TwoStepMean)


@pytest.mark.parametrize("check", optimizers.CHECKS, ids=lambda check: check.__name__)
def test_optimizer(examples, check):
    check("dp_sign_sgd")


@pytest.mark.slow_but(1)
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
    """A process that died after the third step goes on from its checkpoint, to the weights it would have had."""
    whole = run_and_die_everywhere(tmp_path, **options)
    resumed = trainer(tmp_path / "died/3", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "died/3/out/checkpoint-3"))
    want = tiny.weights(whole.model)
    assert all(torch.equal(p, want[n]) for n, p in tiny.weights(resumed.model).items())
    assert resumed.privacy_spent() == whole.privacy_spent()


def test_a_run_with_a_filter_of_ones_own(examples, tmp_path):
    stage = examples["two_step_mean"].TwoStepMean()
    run = tiny.trainer(tmp_path / "out", private_state_dir=str(tmp_path / "keys"), postprocess=[stage])
    run.train()
    assert set(stage.state_dict()["last"]) == {n for n, p in run.model.named_parameters() if p.requires_grad}
