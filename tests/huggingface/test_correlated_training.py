"""Correlated noise through the trainer: what changes with it, how a run goes on, what it costs, what stays secret."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, get_epsilon_gaussian
from dp_accounting.pld import PLDAccountant

from hf_dpopt import DPBudgetExceeded, DPConfigError, PrivacyConfig, make_plan
from hf_dpopt.noise import Participation
from hf_dpopt.report.release_scan import scan_for_secrets
from hf_dpopt.run.keys import secrets_in
from hf_dpopt.run.ledger import Ledger
from tests.helpers import tiny

NUM_STEPS = 8  # two epochs of four
CASES = {
    "nu_dpftrl": {"noise_mechanism": "nu_dpftrl"},
    "nu_dpftrl, exact": {"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.1, "backend": "regenerate"}},
    "blt": {"noise_mechanism": "blt", "noise_kwargs": {"num_buffers": 2}},
    "banded": {"noise_mechanism": "banded", "noise_kwargs": {"num_bands": 2}},
    "banded, fixed order": {"noise_mechanism": "banded", "sampling": "fixed_order"},
    "banded_inverse": {"noise_mechanism": "banded_inverse", "noise_kwargs": {"num_bands": 4}},
    "tree": {"noise_mechanism": "tree"},
    "honaker": {"noise_mechanism": "honaker", "noise_restart_every": 4},
    "dense": {"noise_mechanism": "dense"},
    "anti-PGD": {"noise_mechanism": "banded_inverse", "noise_kwargs": {"coefs": [1, -0.9]}},
    "nu_dpftrl, balls in bins": {"noise_mechanism": "nu_dpftrl", "sampling": "balls_in_bins"},
    "auto": {"noise_mechanism": "auto", "noise_multiplier": None, "target_epsilon": 8.0},
}


def trainer(folder: Path, **changes):
    return tiny.trainer(
        folder / "out", private_state_dir=str(folder / "keys"),
        **{"max_steps": NUM_STEPS, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 1, **changes},
    )  # fmt: skip


def run_and_die_everywhere(tmp_path, **options):
    (tmp_path / "whole").mkdir()
    whole = trainer(tmp_path / "whole", **options)
    copy = lambda state, model: shutil.copytree(tmp_path / "whole", tmp_path / "died" / str(state.global_step))  # noqa: E731
    whole.add_callback(tiny.At("save", copy))
    whole.train()
    return whole


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("name", CASES)
def test_one_field_switches_everything_that_must_change_with_it(tmp_path, name):
    run = trainer(tmp_path, save_strategy="no", **CASES[name])
    run.train()
    spent, plan = run.privacy_spent(), run.plan
    assert spent.num_steps == NUM_STEPS and 0 < spent.epsilon < float("inf")
    report = json.loads((tmp_path / "out/privacy/report.json").read_text())
    assert report["plan"]["noise_strategy"] == json.loads(json.dumps(plan.strategy.parameters()))
    statement = (tmp_path / "out/privacy/statement.md").read_text()
    assert plan.config.noise_mechanism in statement and plan.adjacency in statement
    if plan.sampler.name == "fixed_order":
        # the same number from the strategy, the epochs and nothing else of the plan
        sensitivity = plan.strategy.sensitivity(NUM_STEPS, Participation(2, 4, "fixed_epoch"))
        alone = get_epsilon_gaussian(plan.draw_stddev / sensitivity, plan.delta)
        assert spent.epsilon == pytest.approx(alone, rel=1e-6)


USERS = {
    "privacy_unit": "user", "user_id_column": "author", "records_per_user": 3, "expected_batch_size": 5,
    "train_dataset": [{**row, "author": i % 11 if i % 3 else 0} for i, row in enumerate(tiny.records())],
}  # fmt: skip
RESUMED = {
    **{name: CASES[name] for name in ("blt", "nu_dpftrl, exact", "banded", "honaker", "dense")},
    "one query": {
        "preconditioner": "one_query", "preconditioner_kwargs": {"query_noise": 3.0}, "optim": "sgd",
        **CASES["nu_dpftrl"], "noise_kwargs": {"nu": 0.1}, "sampling": "fixed_order",
    },
    "quantile": {
        "preconditioner": "quantile", "preconditioner_kwargs": {"quantile": 0.4}, "optim": "dp_adam_bc"
    },
    "users": USERS,
    "users, local training": {**USERS, "local_training": {"learning_rate": 0.5}, **CASES["nu_dpftrl"]},
    "records of users": {**USERS, "sampling": "capped_poisson", "expected_batch_size": 12},
}  # fmt: skip


@pytest.mark.slow
def test_what_auto_chose_is_kept_by_a_resume(tmp_path, monkeypatch):
    """Even if the comparison would end differently today: the noise is that of the ledger."""
    whole = run_and_die_everywhere(
        tmp_path, **CASES["auto"], optimizers=(_sgd(model := tiny.model()), None), model=model
    )
    assert whole.plan.config.noise_mechanism != "gaussian"
    folder = tmp_path / "died/5"
    monkeypatch.setattr("hf_dpopt.plan.choose.all_candidates", lambda: [("gaussian", "truncated_poisson")])
    resumed = trainer(folder, **CASES["auto"], optimizers=(_sgd(model := tiny.model()), None), model=model)
    assert resumed.plan.strategy == whole.plan.strategy and resumed.plan.sampler == whole.plan.sampler
    resumed.train(resume_from_checkpoint=str(folder / "out/checkpoint-5"))
    want = tiny.weights(whole.model)
    assert all(torch.equal(p, want[n]) for n, p in tiny.weights(resumed.model).items())


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("name", ["blt", "honaker", "dense"])
def test_a_branch_has_noise_of_its_own_and_adds_its_cost(tmp_path, name):
    """rho of the branch on top of that of the run, by hand: 1 / (2 sigma^2) with the sensitivity of each chain."""
    whole = trainer(tmp_path, **CASES[name])
    whole.train()
    branch = trainer(tmp_path, **CASES[name])
    branch.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-3"))
    ledger = Ledger.read(tmp_path / "out/privacy/ledger.jsonl")
    first, second = ledger.chains
    assert ledger.charged == (NUM_STEPS, NUM_STEPS - 3) and first.key_id != second.key_id
    strategy, stddev = whole.plan.strategy, whole.plan.draw_stddev
    steps = (NUM_STEPS, NUM_STEPS - 3 if strategy.anytime else NUM_STEPS)
    rho = sum((strategy.sensitivity(n, Participation(2, 4, "fixed_epoch")) / stddev) ** 2 / 2 for n in steps)
    together = get_epsilon_gaussian(float(np.sqrt(0.5 / rho)), whole.plan.delta)
    assert branch.privacy_spent().epsilon == pytest.approx(together, rel=1e-6)
    assert branch.privacy_spent().epsilon > whole.privacy_spent().epsilon


def test_a_run_without_a_horizon_goes_on_beyond_its_plan(tmp_path):
    """The noise stays what it was, and epsilon is that of the longer run; a dense matrix has no noise to go on with."""
    options = CASES["blt"] | {"save_steps": NUM_STEPS}
    first = trainer(tmp_path / "blt", **options)
    first.train()
    copied = tmp_path / "interrupted"
    longer = trainer(tmp_path / "blt", **options | {"max_steps": NUM_STEPS + 4})
    assert longer.plan.strategy == first.plan.strategy and longer.plan.draw_stddev == first.plan.draw_stddev
    longer.train(resume_from_checkpoint=str(tmp_path / f"blt/out/checkpoint-{NUM_STEPS}"))
    assert longer.privacy_spent().epsilon > first.privacy_spent().epsilon
    assert not copied.exists()

    dense = trainer(tmp_path / "dense", **CASES["dense"] | {"save_steps": NUM_STEPS})
    dense.train()
    with pytest.raises((DPBudgetExceeded, DPConfigError), match="noise_strategy|made for 8 steps"):
        more = trainer(tmp_path / "dense", **CASES["dense"] | {"max_steps": NUM_STEPS + 1})
        more.train(resume_from_checkpoint=str(tmp_path / f"dense/out/checkpoint-{NUM_STEPS}"))


def test_a_longer_run_that_was_interrupted_continues_its_own_noise(tmp_path):
    """More steps are planned at the resume: the chain, its key and its buffers go on; equal to a run planned longer."""
    options = {"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.1, "num_buffers": None}}
    short = run_and_die_everywhere(tmp_path, **options)
    folder = tmp_path / "died/5"
    longer = trainer(folder, **options | {"max_steps": NUM_STEPS + 4})
    longer.train(resume_from_checkpoint=str(folder / "out/checkpoint-5"))
    assert len(Ledger.read(folder / "out/privacy/ledger.jsonl").chains) == 1
    assert longer.privacy_spent().num_steps == NUM_STEPS + 4
    saved = trainer(folder, **options | {"max_steps": NUM_STEPS + 4}, model=tiny.model())
    at_eight = type(saved.model).from_pretrained(folder / f"out/checkpoint-{NUM_STEPS}")
    want = tiny.weights(short.model)
    assert all(torch.equal(p, want[n]) for n, p in tiny.weights(at_eight).items())


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    "changes, field",
    [
        ({"noise_kwargs": {"num_buffers": 1}}, "noise_kwargs"),
        ({"noise_mechanism": "honaker", "noise_kwargs": None}, "noise_mechanism"),
        ({"noise_restart_every": 4}, "noise_restart_every"),
        ({"adjacency": "replace_one"}, "adjacency"),
        ({"noise_mechanism": "gaussian", "noise_kwargs": None, "adjacency": "zero_out"}, "sampler"),
        ({"clipping": "automatic", "clipping_norm": 0.5}, "clipping"),
        ({"train_dataset": tiny.records(60)}, "a run on another dataset, of 64 records"),
    ],
)
def test_resuming_with_another_plan_is_refused(tmp_path, changes, field):
    trainer(tmp_path, **CASES["blt"]).train()
    before = (tmp_path / "out/privacy/ledger.jsonl").read_bytes()
    with pytest.raises(DPConfigError, match=field):
        trainer(tmp_path, **CASES["blt"] | changes).train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    assert (tmp_path / "out/privacy/ledger.jsonl").read_bytes() == before


def test_bands_are_charged_for_columns_that_a_longer_run_fills():
    """A plan shorter than the bands has smaller columns; more steps are charged at theirs, by dp_accounting itself."""
    coefs = [1.0, 0.8, 0.6, 0.5]
    config = PrivacyConfig(
        noise_multiplier=1.0, expected_batch_size=10, target_delta=1e-3, noise_mechanism="banded",
        noise_kwargs={"coefs": coefs},
    )  # fmt: skip
    plan = make_plan(config, num_examples=80, num_steps=2)
    for steps in (1, 2, 4, 6):
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        norm = float(np.linalg.norm(coefs[:steps]))
        event = PoissonSampledDpEvent(0.5, GaussianDpEvent(plan.draw_stddev / norm))
        accountant.compose(event, -(-steps // 4))
        assert plan.epsilon(steps) == pytest.approx(accountant.get_epsilon(1e-3), rel=0.02), steps
    assert plan.epsilon(4) > 1.1 * plan.epsilon(2)


def test_a_finished_run_that_goes_on_is_asked_for_the_cost_of_two_chains(tmp_path):
    """Its key is gone, so the next steps have noise of their own: refused at the start, not at the first step."""
    options = {"noise_mechanism": "blt", "noise_multiplier": None, "save_steps": 6}
    first = trainer(tmp_path, **options | {"max_steps": 6}, target_epsilon=3.0)
    first.train()
    before = (tmp_path / "out/privacy/ledger.jsonl").read_bytes()
    one_chain, two_chains = first.plan.epsilon(8), first.plan.epsilon((6, 2))
    assert one_chain < two_chains - 0.1
    more = trainer(tmp_path, **options, target_epsilon=(one_chain + two_chains) / 2)
    with pytest.raises(DPBudgetExceeded, match="still to run would bring epsilon"):
        more.train(resume_from_checkpoint=True)
    assert (tmp_path / "out/privacy/ledger.jsonl").read_bytes() == before


@pytest.mark.slow
def test_explicit_wishes_beside_auto_are_not_overruled_by_the_ledger(tmp_path):
    trainer(tmp_path, **CASES["auto"]).train()
    for wish in ({"sampling": "poisson"}, {"adjacency": "replace_one"}):
        with pytest.raises(DPConfigError, match="sampl|adjacency"):
            trainer(tmp_path, **CASES["auto"] | wish).train(resume_from_checkpoint=True)
    with pytest.raises(DPConfigError, match="chooses the options, too"):
        trainer(tmp_path, **CASES["auto"] | {"noise_kwargs": {"nu": 0.1}})


def test_neither_a_finished_run_nor_its_upload_holds_keys_or_buffers(tmp_path, monkeypatch):
    """Every file that a run writes and a push would send is looked through for the noise's key and its buffers."""
    secrets: list[bytes] = []

    def collect(state, model):
        secrets.extend(secrets_in(tmp_path / "keys"))
        for tensors in run._session.run.noise._buffers.values():
            secrets.extend(t.flatten()[:16].numpy().tobytes() for t in tensors if t.numel() >= 16)

    pushed: list[str] = []
    run = trainer(tmp_path, **CASES["blt"])
    run.add_callback(tiny.At("save", collect))
    monkeypatch.setattr("transformers.Trainer.push_to_hub", lambda self, *a, **k: pushed.append(self.args.output_dir))
    run.train()
    run.save_model()
    run.push_to_hub()
    assert pushed and len(secrets) > 20
    for path in (tmp_path / "out").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not any(secret in content for secret in secrets), path
    # the scan that stands before every push finds a buffer that somebody copied
    (tmp_path / "out/state.bin").write_bytes(b"abc" + secrets[-1] + b"def")
    assert scan_for_secrets(tmp_path / "out", secrets)


@pytest.mark.parametrize(
    "changes, mend",
    [
        ({"noise_mechanism": "blt", "sampling": "poisson"}, "no privacy proof.*sampling='fixed_order'"),
        ({"noise_mechanism": "blt", "sampling": "cyclic_poisson"}, "without bands.*noise_mechanism='banded'"),
        ({"noise_mechanism": "tree", "sampling": "truncated_poisson"}, "no privacy proof"),
        ({"noise_mechanism": "honaker", "sampling": "balls_in_bins"}, "needs a square matrix. Use nu_dpftrl"),
        (
            {"noise_mechanism": "banded", "sampling": "balls_in_bins", "noise_kwargs": {"coefs": [1.0, -0.3]}},
            "entries",
        ),
        ({"noise_mechanism": "blt", "sampling": "balls_in_bins", "adjacency": "replace_one"}, "a record with none"),
        ({"noise_mechanism": "banded", "sampling": "poisson", "noise_kwargs": {"num_bands": 2}}, "cyclic_poisson"),
        ({"noise_mechanism": "blt", "adjacency": "add_or_remove_one"}, "Use adjacency='zero_out'"),
        ({"noise_mechanism": "banded", "noise_kwargs": {"num_bands": 9}, "sampling": "fixed_order"}, "Use at most 8"),
        ({"noise_mechanism": "banded", "noise_kwargs": {"num_bands": 5}}, "num_groups <= 4"),
        ({"noise_mechanism": "blt", "noise_kwargs": {"num_buffers": "three"}}, "num_buffers"),
        ({"noise_mechanism": "blt", "noise_kwargs": {"poles": {0.9}, "zeros": {0.5}}}, "is not JSON-serialisable"),
        ({"noise_mechanism": "banded", "noise_kwargs": {"coefs": [1e200, 1]}, "sampling": "fixed_order"}, "near 1"),
        ({"noise_mechanism": "banded_inverse", "noise_kwargs": {"coefs": [1e200, 1.0]}}, "near 1|does not fit"),
        (
            {"noise_mechanism": "banded_inverse", "noise_kwargs": {"coefs": [1, 5e3]}, "noise_restart_every": 4},
            "grows",
        ),
        ({"noise_mechanism": "blt", "noise_multiplier": 0.0}, "noise_mechanism='gaussian'"),
        ({"noise_mechanism": "auto"}, "give target_epsilon"),
        ({"noise_mechanism": "banded"}, "Use target_epsilon, or say how many"),
        ({"noise_mechanism": "honaker", "noise_kwargs": {"backend": "history"}}, "backend='auto'"),
        ({"noise_mechanism": "gaussian", "noise_restart_every": 4}, "nothing to restart"),
        ({"noise_mechanism": "banded", "noise_kwargs": {"coefs": [1.0, 3.0]}, "max_steps": 60}, "grows"),
    ],
)
def test_what_has_no_proof_or_makes_no_sense_is_refused_at_construction(tmp_path, changes, mend):
    with pytest.raises(DPConfigError, match=mend):
        trainer(tmp_path, **changes)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
