"""What a finished run cost, read again from its folder: no option that changes its event is forgotten on the way.

A run is read by `earlier_runs` of a later one, by `hf-dpopt doctor` and by `hf-dpopt verify`.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_dpopt import DPConfigError, PrivacyConfig
from hf_dpopt.accounting.best_of_runs import RunCount
from hf_dpopt.accounting.events import flatten
from hf_dpopt.cli.app import app
from hf_dpopt.noise import MECHANISMS
from hf_dpopt.preclip import PRECLIPS
from hf_dpopt.sampling import SAMPLERS
from tests.helpers import tiny
from tests.tuning.in_process import tune
from tests.verify.forging import Folder

SHAPE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 16}
TUNED = {"target_epsilon": 3.0, "noise_multiplier": None, "tuned_runs": 3.0}
USERS = {"privacy_unit": "user", "user_id_column": "author", "records_per_user": 2, "expected_batch_size": 4}
BANDED = {"noise_mechanism": "banded", "noise_kwargs": {"num_bands": 2}}

# field of the config -> arguments that set it to another value than its default
FIELDS: dict[str, dict[str, Any]] = {
    "target_epsilon": {"target_epsilon": 3.0, "noise_multiplier": None},
    "target_delta": {"target_delta": 1e-4},
    "allow_large_delta": {"allow_large_delta": True},
    "tuned_runs": TUNED,
    "noise_multiplier": {"noise_multiplier": 2.0},
    "clipping_norm": {"clipping_norm": 0.5},
    "clipping": {"clipping": "per_layer"},
    "expected_batch_size": {"expected_batch_size": 8},
    "sampling": {"sampling": "fixed_order"},
    "adjacency": {"adjacency": "replace_one"},
    "privacy_unit": USERS,
    "user_id_column": USERS,
    "records_per_user": {**USERS, "records_per_user": 3},
    "user_weighting": {**USERS, "user_weighting": "mean"},
    "local_training": {**USERS, "local_training": {"learning_rate": 0.1}},
    "noise_mechanism": BANDED,
    "noise_kwargs": {**BANDED, "noise_kwargs": {"num_bands": 3}},
    "noise_restart_every": {"noise_mechanism": "honaker", "noise_restart_every": 2},
    "noise_at_changes": {
        **BANDED, "preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 2}, "noise_at_changes": "carry_on",
    },
    "preconditioner": {"preconditioner": "one_query", "preconditioner_kwargs": {"query_noise": 2.0}},
    "preconditioner_kwargs": {"preconditioner": "quantile", "preconditioner_kwargs": {"count_noise": 0.1}},
    "log_private_metrics": {"log_private_metrics": 0.1, "private_metrics_kwargs": {"loss_bound": 2.0}},
    "private_metrics_kwargs": {"log_private_metrics": 0.1, "private_metrics_kwargs": {"loss_bound": 3.0}},
    "amplification_samples": {"sampling": "balls_in_bins", **BANDED, "amplification_samples": 2000},
    "unsafe_fixed_noise_key": {"unsafe_fixed_noise_key": "5" * 64},
}  # fmt: skip
NAMED: dict[str, dict[str, dict[str, Any]]] = {  # registry -> name -> arguments besides the name
    "sampling": {"capped_poisson": USERS},
    "noise_mechanism": {"banded": {"noise_kwargs": {"num_bands": 2}}},
    "preconditioner": {
        "one_query": {"preconditioner_kwargs": {"query_noise": 2.0}},
        "quantile": {"preconditioner_kwargs": {"count_noise": 0.1}},
        "adadps": {"public_dataset": tiny.records(40)},
        "subspace": {"public_dataset": tiny.records(40)},
        **{f"dp2_{name}": {"preconditioner_kwargs": {"delay": 2}} for name in ("rmsprop", "adagrad", "yogi")},
    },
}
TOGETHER = {  # options that change one event in several ways
    "tuned, one query, users": {**TUNED, **USERS, **FIELDS["preconditioner"]},
    "tuned, banded": {**TUNED, **BANDED},
    "tuned, fixed order": {**TUNED, "sampling": "fixed_order"},
}
NOT_COMPOSED = {"unsafe_fixed_noise_key": "was not private", "noise_mechanism=dense": "noise matrix of"}


def made(folder: Path, **options: Any) -> Any:
    rows = [row | {"author": f"user {i % 11}"} for i, row in enumerate(tiny.records())]
    return tiny.trainer(
        folder, model=tiny.model(dropout=0.0, **SHAPE), train_dataset=rows,
        **{"max_steps": 4, "advisor": "none", "optim": "sgd", "private_state_dir": f"{folder}-keys", **options},
    )  # fmt: skip


def trained(folder: Path, **options: Any) -> Any:
    trainer = made(folder, **options)
    trainer.train()
    return trainer


def after(folder: Path, earlier: Any, **options: Any) -> Any:
    """A trainer of the same records and unit, whose budget includes what `earlier` left in its folder."""
    same = {name: value for name, value in options.items() if not name.startswith("tuned_")}
    alike = {"noise_multiplier": 1.0, "target_epsilon": None, "adjacency": earlier.plan.adjacency}
    return made(folder, **{**same, **alike, "earlier_runs": [earlier.args.output_dir]})


def test_every_option_of_the_config_has_a_line() -> None:
    assert set(FIELDS) == {field.name for field in dataclasses.fields(PrivacyConfig)}


def _cases() -> list[Any]:
    registered = {"sampling": SAMPLERS, "noise_mechanism": MECHANISMS, "preconditioner": PRECLIPS}
    cases = [*FIELDS.items(), *TOGETHER.items()]
    for option, names in registered.items():
        cases += [
            (f"{option}={name}", {option: name, **NAMED.get(option, {}).get(name, {})})
            for name in names
            if FIELDS[option].get(option) != name
        ]
    return [
        pytest.param(name, options, id=name, marks=[pytest.mark.slow] if "=" in name else [])
        for name, options in cases
    ]


@pytest.mark.parametrize("name, options", _cases())
def test_a_run_that_is_read_again_has_the_event_of_its_plan(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    first = trained(tmp_path / "a", **options)
    if name in FIELDS:
        default = made(tmp_path / "default").plan.config
        assert getattr(first.plan.config, name) != getattr(default, name), "the line changes nothing"
    if name in NOT_COMPOSED:
        with pytest.raises(DPConfigError, match=NOT_COMPOSED[name]):
            after(tmp_path / "b", first, **{**options, "unsafe_fixed_noise_key": None})
        return
    second = after(tmp_path / "b", first, **options)
    (run,) = second.plan.earlier
    assert flatten(run.event) == flatten(first.plan.event)


def test_a_chain_of_earlier_runs_forgets_none(tmp_path: Path) -> None:
    first = trained(tmp_path / "a", **TUNED)
    second = after(tmp_path / "b", first)
    second.train()
    third = after(tmp_path / "c", second)
    assert [flatten(run.event) for run in third.plan.earlier] == [
        flatten(first.plan.event),
        flatten(second.plan.release.alone.event(second.plan.noise_multiplier, 4)),
    ]
    assert third.plan.epsilon((0,)) == pytest.approx(second.plan.epsilon(), rel=0.05)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The best of a tuning, and a finished run of epsilon 4 that includes it."""
    tmp_path = tmp_path_factory.mktemp("tuned")
    asked = {**TUNED, "target_delta": 1e-3, "eval_dataset": tiny.records(16), "eval_data_privacy": "public"}
    first = made(tmp_path / "a", **asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunCount, "draw", lambda self, source: 2)
        tune(
            lambda folder, **options: made(folder, **asked, **options), tmp_path / "a", RunCount(mean=3.0), [0.1, 0.2]
        )
    again = {"noise_multiplier": None, "target_epsilon": 4.0, "earlier_runs": [first.args.output_dir]}
    second = trained(tmp_path / "b", **again)
    second.save_model()
    return first, second


def test_the_best_of_a_tuning_costs_what_the_tuning_cost(tuned: tuple[Any, Any]) -> None:
    first, second = tuned
    assert flatten(second.plan.earlier[0].event) == flatten(first.plan.event)
    assert 2.9 < first.plan.epsilon() == pytest.approx(second.plan.epsilon((0,)), rel=1e-3)
    assert 3.9 < second.plan.epsilon() <= 4.0


def test_verify_leaves_it_open_and_passes_no_forgery(tuned: tuple[Any, Any], tmp_path: Path) -> None:
    def verified(folder: Path) -> int:
        return CliRunner().invoke(app, ["verify", str(folder)]).exit_code

    source = Path(tuned[1].args.output_dir)
    assert verified(source) == 3
    for number, forge in enumerate(FORGERIES):
        folder = Folder(source, tmp_path / str(number))
        forge(folder)
        assert verified(folder.path) in (1, 3), f"forgery {number}"


def _without(name: str) -> Any:
    """Delete an entry of the earlier run, in the report and in the ledger."""
    return lambda folder: folder.edit_plan(lambda plan: plan["earlier_runs"][0].pop(name))


FORGERIES = [
    _without("tuned"),
    _without("opening_noise"),
    lambda folder: folder.claim(3.9),
    lambda folder: folder.edit_plan(lambda plan: plan["earlier_runs"][0]["tuned"].update(mean=30.0)),
    lambda folder: folder.edit_plan(lambda plan: plan["earlier_runs"][0]["tuned"].update(shape="poisson")),
    lambda folder: folder.edit_report(lambda report: report["plan"]["earlier_runs"][0].update(tuned=None)),
]


def test_doctor_counts_the_selection(tmp_path: Path) -> None:
    """Of steps that are not those of the plan, here of two calls to train, epsilon is computed from the ledger."""
    options = {**TUNED, "target_epsilon": None, "noise_multiplier": 2.0}
    first = trained(tmp_path / "a", **options)
    trained(tmp_path / "a", **options)
    said = CliRunner().invoke(app, ["doctor", str(tmp_path / "a"), "--private-state-dir", f"{tmp_path / 'a'}-keys"])
    (epsilon,) = re.findall(r"8 steps charged in 2 chains: epsilon (\S+) at", said.output)
    assert float(epsilon) == pytest.approx(first.plan.epsilon((4, 4)), rel=0.02)
