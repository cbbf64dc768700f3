"""Preconditioners, filters and optimizers by the Trainer's arguments: what runs, what a checkpoint holds, refusals."""

from __future__ import annotations

import json

import pytest
import torch

from hf_dpopt import DPConfigError
from hf_dpopt.optim import DPAdamBC, DPAdamW, NoiseAwareOptimizer
from hf_dpopt.optim.galore import DPGaLore
from hf_dpopt.postprocess import IndependentNoise, Postprocess
from hf_dpopt.postprocess.adaptive_fir import AdaptiveFIR
from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.preclip import ScaleThenPrivatize
from hf_dpopt.run.ledger import Ledger
from tests.helpers import tiny
from tests.huggingface.test_correlated_training import RESUMED, run_and_die_everywhere, trainer
from tests.reference import clipping as reference
from tests.run.preempted import assert_same

DP2 = {"preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 2, "clipping_norm": 3.0}}
PUBLIC = [tiny.records(80)[i] for i in range(64, 80)]
CASES = {
    "dp2": {**DP2, "optim": "sgd"},
    "dp2, factored": {
        **DP2, "preconditioner_kwargs": {"delay": 2, "factored": True, "adaptive_steps": 1}, "optim": "dp_adam_bc",
        "filter": "first_order_v1",
    },
    "dp2, two queries": {**DP2, "preconditioner_kwargs": {"delay": 2, "variant": "extra_query"}, "preconditioner": "dp2_yogi"},
    "dp2, two queries, algorithm 2": {**DP2, "preconditioner_kwargs": {"delay": 3, "variant": "algorithm2"}, "optim": "sgd"},
    "dp2, noise first": {**DP2, "preconditioner_kwargs": {"delay": 2, "variant": "noise_first"}, "preconditioner": "dp2_adagrad"},
    "dp2, correlated": {
        **DP2, "noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.1}, "sampling": "fixed_order",
        "optim": "dp_adam_bc",
    },
    "adadps": {
        "preconditioner": "adadps", "preconditioner_kwargs": {"refresh_every": 2}, "public_dataset": PUBLIC,
        "public_batch_size": 5, "optim": "sgd",
    },
    "filter before sgd": {"filter": "butterworth:2:0.3", "optim": "sgd"},
    "filter in adamw": {"filter": "second_order"},
    "galore": {
        "optim": "dp_galore", "optim_args": "rank=4,refresh_every=3", "filter": "momentum",
    },
    "adaptive": {"filter": "adaptive:3:2", "optim": "sgd", "noise_mechanism": "blt", "sampling": "fixed_order"},
    "adaptive, as printed": {"filter": "adaptive_as_printed:3:2", "optim": "dp_adamw"},
    "subspace, before the clip": {
        "preconditioner": "subspace", "public_dataset": PUBLIC, "optim": "sgd", "average_iterate": "tail",
        "preconditioner_kwargs": {"rank": 3, "num_public": 8, "refresh_every": 3, "adagrad": "released"},
    },
    "subspace, after the noise": {
        "preconditioner": "subspace", "public_dataset": PUBLIC, "filter": "momentum",
        "preconditioner_kwargs": {"rank": 3, "num_public": 8, "refresh_every": 2, "project": "after_noise"},
    },
    "mirror descent": {
        "public_mirror_descent": "cosine", "public_dataset": PUBLIC, "public_batch_size": 4, "optim": "dp_adam_bc",
        "average_iterate": "exponential",
    },
    "rmsprop": {"optim": "dp_rmsprop", "optim_args": "unbiased=true"},
    "adagrad": {"optim": "dp_adagrad"},
}  # fmt: skip


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("options", [*CASES.values(), *RESUMED.values()], ids=[*CASES, *RESUMED])
def test_a_resume_at_every_step_is_bit_equal(tmp_path, options):
    """The same records, dropout, noise and state of every stage, under one key."""
    whole = run_and_die_everywhere(tmp_path, **options)
    assert all(p.isfinite().all() for p in whole.model.parameters())
    for step in range(1, whole.state.global_step):
        folder = tmp_path / "died" / str(step)
        resumed = trainer(folder, **options)
        resumed.train(resume_from_checkpoint=str(folder / f"out/checkpoint-{step}"))
        assert_same(resumed, whole)
        assert len(Ledger.read(folder / "out/privacy/ledger.jsonl").chains) == 1


@pytest.mark.slow_but(4)
@pytest.mark.parametrize("name", CASES)
def test_accounting_is_that_of_the_same_run_without_these_stages(tmp_path, name):
    stages = ("preconditioner", "preconditioner_kwargs", "filter", "optim", "optim_args", "public_dataset",
              "public_batch_size", "public_mirror_descent", "average_iterate")  # fmt: skip
    plain = {k: v for k, v in CASES[name].items() if k not in stages}
    with_it, without = trainer(tmp_path / "a", **CASES[name]), trainer(tmp_path / "b", **plain)
    assert with_it.plan.epsilon() == without.plan.epsilon()
    assert with_it.plan.sensitivity == pytest.approx(without.plan.sensitivity * (2**0.5 if "two" in name else 1))


def test_the_names_choose_the_optimizers(tmp_path):
    kinds = {}
    for i, (optim, text) in enumerate(
        [("dp_adam_bc", None), ("adamw_torch", "momentum"), ("dp_galore", None), ("adamw_torch", None), ("sgd", "f1")]
    ):
        run = trainer(tmp_path / str(i), optim=optim, filter=text, max_steps=1, save_strategy="no",
                      optim_args="rank=3" if optim == "dp_galore" else None)  # fmt: skip
        run.train()
        optimizer = run.optimizer.optimizer
        kinds[optim, text] = type(optimizer)
        if isinstance(optimizer, NoiseAwareOptimizer):
            assert optimizer.noise.variance() == pytest.approx(
                (run.plan.draw_stddev * run.plan.sensitivity / 16) ** 2
            )  # fmt: skip
            assert (optimizer.filter is None) == (text is None)
            assert run._session.stages.after_noise == ()
        else:
            assert len(run._session.stages.after_noise) == (text is not None)
    assert list(kinds.values()) == [DPAdamBC, DPAdamW, DPGaLore, torch.optim.AdamW, torch.optim.SGD]


def test_log_statement_and_ledger_name_the_preconditioner(tmp_path, caplog):
    run = trainer(tmp_path, **DP2, filter="momentum", max_steps=3, average_iterate="tail", log_level="debug")
    with caplog.at_level("DEBUG", logger="hf_dpopt"):
        run.train()
    assert "Preconditioner: dp2 (delay=2" in caplog.text
    assert "LowPassFilter {'b': [0.1], 'a': [-0.9]" in caplog.text and "IterateAverage" in caplog.text
    statement = (tmp_path / "out/privacy/statement.md").read_text()
    assert "preconditioner" in statement and "dp2" in statement
    report = json.loads((tmp_path / "out/privacy/report.json").read_text())
    plan = report["plan"]
    assert report["after_noise"][0].startswith("LowPassFilter") or "IterateAverage" in report["after_noise"][0]
    assert report["after_noise"][-1] == "DPAdamW" and "DPAdamW" in statement
    assert plan["preclip"]["name"] == "dp2" and plan["preclip"]["delay"] == 2


def test_a_preconditioner_of_ones_own(tmp_path):
    scale = {"classifier.weight": torch.full((2, 16), 10.0)}
    run = trainer(tmp_path, preclip=ScaleThenPrivatize(scale=scale), max_steps=2)
    run.train()
    assert run.plan.record.to_json()["preclip"]["name"] == "scale"
    with pytest.raises(DPConfigError, match="preclip"):
        trainer(
            tmp_path, preclip=ScaleThenPrivatize(scale={"classifier.weight": torch.ones(2, 16)}), max_steps=4
        ).train(resume_from_checkpoint=True)


class Halved(Postprocess):
    """A map of one's own, with state."""

    gain = None

    def __init__(self):
        self.calls = 0

    def __call__(self, released):
        self.calls += 1
        return {name: g * 0.5 for name, g in released.items()}

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_a_map_of_ones_own_runs_last_and_is_kept(tmp_path):
    run = trainer(tmp_path, postprocess=[own := Halved()], filter="momentum", optim="sgd", max_steps=3)
    run.train()
    assert own.calls == 3 and run._session.stages.after_noise[-1] is own and len(run._session.stages.after_noise) == 2
    more = trainer(tmp_path, postprocess=[again := Halved()], filter="momentum", optim="sgd", max_steps=4)
    more.train(resume_from_checkpoint=True)
    assert again.calls == 4


def test_a_checkpoint_with_other_stages_is_refused(tmp_path):
    trainer(tmp_path, filter="momentum", optim="sgd", max_steps=3).train()
    for changes in ({"filter": "second_order"}, {"filter": None, "postprocess": [Halved(), Halved()]}):
        resumed = trainer(tmp_path, **{"optim": "sgd", "max_steps": 4, **changes})
        with pytest.raises(DPConfigError, match="filter|Resume with the options"):
            resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-3"))


def adaptive() -> AdaptiveFIR:
    """Return a filter that corrects for the noise level."""
    return AdaptiveFIR(3, IndependentNoise())


SUBSPACE = {"preconditioner": "subspace", "public_dataset": PUBLIC}
NOISE_FIRST = {**DP2, "preconditioner_kwargs": {"delay": 2, "variant": "noise_first"}}
REFUSED = [
    (
        {"postprocess": [adaptive(), adaptive()], "optim": "sgd"},
        "AdaptiveFIR corrects .*first",
    ),
    ({"postprocess": [LowPassFilter.preset("momentum"), adaptive()], "optim": "sgd"}, "corrects .*first"),
    ({"postprocess": [adaptive()], "filter": "adaptive:3", "optim": "dp_adamw"}, "corrects .*first"),
    (
        {"postprocess": [adaptive()], "optim": "dp_adam_bc"},
        "know the noise",
    ),
    ({**NOISE_FIRST, "postprocess": [adaptive()], "optim": "sgd"}, "AdaptiveFIR corrects for one level"),
    (
        {
            "optimizer_cls_and_kwargs": (DPAdamW, {"lr": 0.1, "filter": adaptive()}),
            "optim": "adamw_torch",
            "max_grad_norm": 1.0,
        },
        "max_grad_norm at 0",
    ),
    ({"preconditioner": "dp2"}, "Use one of"),
    ({"preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 8}}, "no step of 8"),
    ({"preconditioner_kwargs": {"delay": 5}}, "preconditioner='none' does not know delay"),
    ({"preconditioner": "adadps"}, "public_dataset"),
    ({"preclip": ScaleThenPrivatize(scale={}), **DP2}, "Give one of them"),
    ({"filter": "lowpass"}, "butterworth:ORDER:CUTOFF"),
    ({**NOISE_FIRST, "optim": "dp_adam_bc"}, "coordinate to coordinate"),
    ({**NOISE_FIRST, "filter": "adaptive:3"}, "coordinate to coordinate"),
    ({"optim": "dp_adam_bc", "max_grad_norm": 1.0}, "max_grad_norm at 0"),
    ({"optim": "dp_rmsprop", "optim_args": "unbiased=true", "max_grad_norm": 1.0}, "max_grad_norm at 0"),
    ({"preconditioner": "subspace"}, "public_dataset"),
    ({"public_mirror_descent": "cosine"}, "public_dataset"),
    ({"public_mirror_descent": "cosine", "public_dataset": PUBLIC, "public_batch_size": 99}, "public_batch_size"),
    ({**SUBSPACE, "preconditioner_kwargs": {"rank": 9, "num_public": 8}}, "m gradients span m directions"),
    ({**SUBSPACE, "preconditioner_kwargs": {"adagrad": "clean"}}, "un-noised"),
    ({**SUBSPACE, "preconditioner_kwargs": {"rank": 3}, "optim": "dp_adam_bc"}, "coordinate to coordinate"),
    ({"average_iterate": "polyak"}, "Use one of"),
    ({"public_mirror_descent": "constant", "public_dataset": PUBLIC}, "Use one of"),
    (
        {
            "average_iterate": "tail",
            "load_best_model_at_end": True,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "eval_dataset": PUBLIC,
        },
        "Leave out one",
    ),
    ({"filter": " adaptive:3", "max_grad_norm": 1.0}, "max_grad_norm at 0"),
    ({"preclip": "dp2"}, "is no preconditioner"),
    ({"postprocess": ["x"]}, "no map of gradients"),
    ({"optimizer_cls_and_kwargs": (DPAdamBC, {}), "max_grad_norm": 1.0}, "max_grad_norm at 0"),
    ({"optimizer_cls_and_kwargs": (DPAdamBC, {}), "filter": "momentum"}, "Give the filter to the optimizer"),
    (
        {"optimizer_cls_and_kwargs": (torch.optim.SGD, {}), "optim": "dp_adam_bc", "filter": "momentum"},
        "Two optimizers",
    ),
    (
        {
            **DP2,
            "noise_mechanism": "blt",
            "sampling": "fixed_order",
            "noise_restart_every": 3,
            "noise_at_changes": "restart",
        },
        "divisor of 2",
    ),
]


@pytest.mark.parametrize(("changes", "match"), REFUSED)
def test_what_does_not_go_together_is_refused_at_construction(tmp_path, changes, match):
    with pytest.raises((DPConfigError, ValueError), match=match):
        trainer(tmp_path, **changes)
    assert not (tmp_path / "out").exists()


def test_a_run_ends_with_the_average(tmp_path):
    run = trainer(tmp_path, average_iterate="uniform", optim="sgd", learning_rate=10.0)
    before, seen = tiny.weights(run.model), []

    run.add_callback(tiny.At("step_end", lambda state, model: seen.append(tiny.weights(model))))
    run.train()
    mean = {n: torch.stack([weights[n] for weights in seen]).mean(0) for n in before}
    assert reference.relative_error(tiny.weights(run.model), mean) < 1e-6


def test_an_unknown_gain_is_not_taken_for_one(tmp_path):
    with pytest.raises(DPConfigError, match="attribute gain"):
        trainer(tmp_path, postprocess=[Halved()], optim="dp_adam_bc")
    known = Halved()
    known.gain = 0.5
    run = trainer(tmp_path / "known", postprocess=[known], optim="dp_adam_bc", max_steps=2)
    run.train()
    level = (run.plan.draw_stddev * run.plan.sensitivity / 16) ** 2
    assert run.optimizer.optimizer.noise.variance() == pytest.approx(0.25 * level)


def test_public_records_that_are_training_records_are_refused(tmp_path):
    records, others = tiny.records(), PUBLIC
    Subset, Concat = torch.utils.data.Subset, torch.utils.data.ConcatDataset
    equal = [dict(row) for row in records[:16]]
    for train, public in [
        (records, records), (records, Subset(records, [0, 1])), (Subset(records, range(32)), records),
        (Concat([records, others]), others), (records, records[:16]), (records, list(records)), (records, equal),
        (Subset(Subset(records, range(8, 64)), range(56)), Subset(records, [9])), (records, [*others, *equal]),
    ]:  # fmt: skip
        with pytest.raises(DPConfigError, match="in the training dataset"):
            trainer(tmp_path, train_dataset=train, public_dataset=public, preconditioner="adadps")
    few = [*others, dict(records[0])]  # short texts repeat
    adadps = {"preconditioner": "adadps", "public_batch_size": 4}
    trainer(tmp_path, train_dataset=records, public_dataset=few, **adadps)
    apart = Subset(records, range(32)), Subset(records, range(32, 64))
    trainer(tmp_path, train_dataset=apart[0], public_dataset=apart[1], **adadps)


def test_what_does_not_fit_the_model_is_found_before_the_ledger_is_opened(tmp_path):
    options = {"preconditioner": "subspace", "public_dataset": PUBLIC, "preconditioner_kwargs": {"rank": 3}}
    for i, changes in enumerate([
        {"preclip": ScaleThenPrivatize(scale={"classifier.weight": torch.ones(3)})},
        {**options, "clipping": "per_layer"},
    ]):  # fmt: skip
        with pytest.raises(DPConfigError, match="parameter's shape|per_layer"):
            trainer(tmp_path / str(i), **changes).train()
        assert not (tmp_path / str(i) / "out/privacy/ledger.jsonl").exists()


def test_another_optimizer_or_average_at_a_resume_is_refused(tmp_path):
    trainer(tmp_path, optim="dp_adam_bc", average_iterate="uniform", max_steps=3).train()
    for changes in (
        {"optim": "adamw_torch", "average_iterate": "uniform"}, {"optim": "dp_adam_bc", "average_iterate": "exponential"},
        {"optim": "dp_adam_bc"},
    ):  # fmt: skip
        with pytest.raises(DPConfigError, match="Resume with the options"):
            trainer(tmp_path, max_steps=4, **changes).train(resume_from_checkpoint=True)
