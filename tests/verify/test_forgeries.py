"""`hf-dpopt verify` on forged reports and ledgers: each fails, at the check that names what was forged."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_dpopt.cli.app import app
from hf_dpopt.verify import FAILED, claims, epsilons, verify
from hf_dpopt.verify.chain import read_ledger
from hf_dpopt.verify.outcome import Contradiction
from hf_dpopt.verify.reading import Fields
from tests.verify import runs
from tests.verify.forging import Folder

FORGED = runs.REPORTS.with_name("forged")
PLAN, SPENT = "epsilon of the plan", "epsilon of the steps charged"
Forge = Callable[[str], Folder]


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    """A new copy of a run's public files."""
    numbers = itertools.count()
    return lambda name: Folder(runs.REPORTS / name, tmp_path / str(next(numbers)))


# --- forged ledgers ---


def _lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Folder], Any]:
    return lambda folder: folder.write_lines(change(folder.lines))


def _report(**changes: Any) -> Callable[[Folder], Any]:
    return lambda folder: folder.edit_report(lambda report: report.update(changes))


def _records(change: Callable[[list[dict]], Any], **how: Any) -> Callable[[Folder], Any]:
    return lambda folder: folder.edit_ledger(change, **how)


def _share_a_key(records: list[dict]) -> None:
    first, second = [record for record in records if record["kind"] == "chain"]
    second["key_id"] = first["key_id"]


def _plan_fewer_steps(report: dict) -> None:
    report["plan"].update(num_steps=2, epsilon=6.0)
    report.update(steps_planned=2)


Forgery = tuple[str, Callable[[Folder], Any], set[str]]  # run, what is done to it, checks that fail
FORGERIES: dict[str, Forgery] = {
    **{f"line {n} removed": ("independent", _lines(lambda lines, n=n: lines[:n] + lines[n + 1 :]), {"ledger chain"})
       for n in range(6)},
    "lines swapped": ("independent", _lines(lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]]), {"ledger chain"}),
    "a line edited": ("independent", _lines(lambda lines: [one.replace(b"first run", b"first ran") for one in lines]),
                      {"ledger chain"}),
    "the end cut off": ("independent", _lines(lambda lines: lines[:-1]), {"ledger digest", "steps"}),
    "a step after the report": ("independent", _records(lambda records: records.append(records[-1] | {"step": 5}),
                                                        names_digest=False), {"ledger digest", "steps", SPENT}),
    "a step less, sealed again": ("independent", _records(lambda records: records.pop(4)), {"steps"}),
    "a step less, sealed and counted": (
        "independent", lambda folder: (_records(lambda records: records.pop(4))(folder), _report(steps_charged=3)(folder)),
        {"steps"},
    ),
    "a lowered count": ("resumed", _report(steps_charged=6, chains=1), {"steps"}),
    "a key of two chains": ("resumed", _records(_share_a_key), {"ledger chain"}),
    "no ledger": ("independent", lambda folder: folder.ledger_path.unlink(), {"ledger chain"}),
    "an empty ledger": ("independent", lambda folder: folder.ledger_path.write_bytes(b""), {"ledger chain"}),
    # a run that stopped early owes the epsilon of its plan: the stop may be due to the data
    "fewer planned steps": ("independent", lambda folder: folder.edit_report(_plan_fewer_steps), {"plan"}),
    "unsafe": ("independent", _report(unsafe=True), {"private"}),
    "not private": ("independent", _report(private=False), {"private"}),
    "an epsilon of infinity": ("independent", _report(epsilon_spent="inf"), {"private"}),
    "a chain unsafe": ("independent", _records(lambda records: records[2].update(unsafe=True)), {"private"}),
    "numbers of a head": ("head", _report(noise_multiplier=3.0), {"plan"}),
    "the end of a head's ledger": ("head", _lines(lambda lines: lines[:-1]), {"ledger digest", "steps"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_what_was_forged_is_named(name: str, forge: Forge) -> None:
    run, change, expected = FORGERIES[name]
    folder = forge(run)
    change(folder)
    assert expected <= folder.failed()


def test_a_record_that_a_kill_tore_is_no_forgery(forge: Forge) -> None:
    folder = forge("independent")
    with folder.ledger_path.open("ab") as file:
        file.write(b'{"chain_id":"00')
    outcome = folder.verify()
    assert not outcome.has_failed and "not finished" in outcome.checks[0].detail


def test_a_whole_record_without_a_newline_counts(forge: Forge) -> None:
    folder = forge("independent")
    folder.ledger_path.write_bytes(folder.ledger_path.read_bytes().rstrip(b"\n"))
    assert not folder.failed()


# --- forged claims ---


def test_the_committed_forgery_fails() -> None:
    """Epsilon halved in report, ledger and statement, all digests made to fit."""
    outcome = verify(FORGED)
    assert [check.name for check in outcome.checks if check.status == FAILED and "PLD" in check.name]
    assert outcome.exit_code(is_strict=False) == 1
    assert "FAILED" in CliRunner().invoke(app, ["verify", str(FORGED)]).output


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("name", runs.RUNS)
def test_a_lower_epsilon_fails_for_every_mechanism(name: str, forge: Forge) -> None:
    folder = forge(name)
    report = folder.report
    claimed = report["epsilon"] if name == "head" else max(report["plan"]["epsilon"], report["epsilon_spent"])
    share = 0.75 if name == "blt_in_bins" else 0.97  # the computed bound of correlated bins is loose
    folder.claim(claimed * share)
    what = {"epsilon of the release"} if name == "head" else {PLAN, SPENT}
    assert folder.failed() & what
    if name != "head":
        assert not folder.failed() & {"ledger chain", "ledger digest", "plan", "report"}


def test_the_tolerance_is_a_tenth_of_a_percent(forge: Forge) -> None:
    folder = forge("independent")
    epsilon = folder.report["plan"]["epsilon"]
    folder.edit_plan(lambda plan: plan.update(epsilon=epsilon * 0.9995))
    assert not {PLAN, SPENT} & folder.failed()
    folder.edit_plan(lambda plan: plan.update(epsilon=epsilon * 0.998))
    assert PLAN in folder.failed()


def test_a_claim_above_the_truth_is_true(forge: Forge) -> None:
    folder = forge("independent")
    folder.claim(9.0)
    assert not folder.failed()


@pytest.mark.slow_but(4)
@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("independent", {"delta": 1e-2}, "delta"),
        ("independent", {"delta": 0.5}, "delta"),
        ("independent", {"adjacency": "both"}, "unit"),
        ("independent", {"num_examples": 10**6}, "sampler"),
        ("independent", {"noise_multiplier": 5.0}, "sensitivity"),
        ("independent", {"noise_multiplier": 5.0, "draw_stddev": 5.0 - 1e-4}, "sensitivity"),
        ("independent", {"draw_stddev": 0.3, "noise_multiplier": 0.3}, PLAN),
        ("independent", {"num_steps": 2}, "report"),
        ("independent", {"is_private": False}, "private"),
        ("independent", {"noise_multiplier": 0.0, "draw_stddev": 0.0}, "private"),
        ("independent", {"noise_strategy": {"name": "banded", "coefs": [1.0, 0.5]}}, "sampler"),
        ("independent", {"dp_accounting": "0.1"}, "versions"),
        ("independent", {"users": {"sampled": "users"}}, "unit"),
        ("independent", {"privacy_unit": "person"}, "unit"),
        ("users", {"privacy_unit": "example"}, "unit"),
        ("users", {"users": None}, "unit"),
        ("records_of_users", {"privacy_unit": "example", "users": None}, "unit"),
        ("banded", {"noise_strategy": {"name": "banded", "coefs": [1.0, 0.9]}}, "sensitivity"),
        ("banded", {"noise_strategy": {"name": "banded", "coefs": [1.0, 0.1, 0.9]}}, "sampler"),
        ("banded", {"noise_strategy": {"name": "banded", "coefs": [1.0, "0.4"]}}, "sensitivity"),
        ("banded", {"adjacency": "replace_one"}, "sampler"),
        ("nu_dpftrl", {"noise_strategy": {"name": "nu_dpftrl", "nu": 0.0}}, "sensitivity"),
        ("nu_dpftrl", {"noise_strategy": {"name": "nu_dpftrl", "nu": 2.0}}, "sensitivity"),
        ("nu_dpftrl", {"adjacency": "add_or_remove_one"}, "sampler"),
        ("nu_dpftrl", {"draw_stddev": 1.0}, "sensitivity"),
        ("tree", {"draw_stddev": 3.0}, "sensitivity"),
        ("one_query", {"opening_noise": 0.5}, PLAN),
        ("one_query", {"opening_noise": None}, "preconditioner"),
        ("quantile", {"preclip": {"name": "quantile", "count_noise": 0.001}}, "preconditioner"),
    ],
)  # fmt: skip
def test_plans_that_were_changed_everywhere_fail(name: str, changes: dict, expected: str, forge: Forge) -> None:
    """In the report and the ledger, all digests made to fit: what is left is that the numbers contradict each other."""
    folder = forge(name)
    assert expected not in folder.failed()
    folder.edit_plan(lambda plan: plan.update(changes))
    if "delta" in changes and changes["delta"] == 0.5:
        folder.edit_report(lambda report: report.update(delta=0.5))
    assert expected in folder.failed()


@pytest.mark.parametrize("name", ["independent", "users", "banded", "nu_dpftrl", "resumed"])
def test_every_entry_of_the_plan_is_compared_with_the_ledger(name: str, forge: Forge) -> None:
    folder = forge(name)
    ledger, whole = read_ledger(folder.ledger_path), folder.report
    claims.check_plan(claims.Report(Fields(whole, "the report"), ledger))
    free = {"epsilon", "accountant", "dp_accounting", "certificate", "advised", "allow_large_delta"}
    for entry in set(whole["plan"]) - free:
        changed = whole | {"plan": whole["plan"] | {entry: "other"}}
        with pytest.raises(Contradiction, match=f"{entry} is .other. in the report"):
            claims.check_plan(claims.Report(Fields(changed, "the report"), ledger))


@pytest.mark.parametrize(
    ("name", "law", "expected"),
    [
        ("independent", {"cap": 16}, PLAN),  # most batches are cut, and one record pushes out another
        ("independent", {"cap": 3}, "sampler"),
        ("independent", {"expected_batch_size": 2}, "sampler"),
        ("banded", {"num_groups": 4}, PLAN),  # all of a group take part: no amplification
        ("banded", {"num_groups": 1}, "sampler"),
        ("banded", {"num_groups": 8}, "sampler"),
        ("records_of_users", {"records_per_user": 1}, "unit"),
        ("nu_dpftrl", {"name": "poisson"}, "sampler"),
    ],
)
def test_laws_of_batches_that_were_changed_fail(name: str, law: dict, expected: str, forge: Forge) -> None:
    folder = forge(name)
    folder.edit_plan(lambda plan: plan["sampler"].update(law))
    assert expected in folder.failed()


@pytest.mark.parametrize(
    "change",
    [
        {"sampler": {"name": "made_up", "num_examples": 64, "expected_batch_size": 16}},
        {"noise_strategy": {"name": "dense", "num_steps": 4, "sha256": "0" * 64}, "adjacency": "zero_out",
         "sampler": {"name": "fixed_order", "num_examples": 64, "expected_batch_size": 16}},
    ],
)  # fmt: skip
def test_what_nobody_can_recompute_is_not_verified(change: dict, forge: Forge) -> None:
    """No failure, and no success either: exit code 3."""
    folder = forge("independent")
    folder.edit_plan(lambda plan: plan.update(change))
    folder.edit_report(lambda report: report.update(epsilon_replace_one=None))
    outcome = folder.verify()
    assert not outcome.has_failed, outcome.verdict
    assert outcome.exit_code(is_strict=False) == 3 and outcome.exit_code(is_strict=True) == 1
    assert outcome.verdict.startswith("NOT VERIFIED")


def test_a_swapped_record_is_recomputed(forge: Forge) -> None:
    folder = forge("independent")
    folder.edit_report(lambda report: report.update(epsilon_replace_one=8.0))
    assert folder.failed() == {"epsilon of a swapped record"}
    folder = forge("banded")  # groups that take turns have no such proof
    folder.edit_report(lambda report: report.update(epsilon_replace_one=50.0))
    assert folder.failed() == {"epsilon of a swapped record"}


def test_a_cost_of_the_steps_charged_that_was_left_out_fails(forge: Forge) -> None:
    """The plan's epsilon is true; that of the two chains that ran is larger."""
    folder = forge("resumed")
    folder.edit_report(lambda report: report.update(epsilon_spent=report["plan"]["epsilon"]))
    assert SPENT in folder.failed() and PLAN not in folder.failed()


@pytest.mark.slow_but(22)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, '"8"', "null", "true", "-1",
                                   "[8]", "{}"])  # fmt: skip
@pytest.mark.parametrize("entry", ["epsilon", "delta", "num_examples", "num_steps", "draw_stddev", "noise_steps"])
def test_numbers_that_are_none_fail(entry: str, value: str, forge: Forge) -> None:
    folder = forge("independent")
    report = folder.report
    report["plan"][entry] = "PLACE"
    folder.report_path.write_text(json.dumps(report).replace('"PLACE"', value))
    assert folder.verify().exit_code(is_strict=False) == 1


def test_a_name_that_occurs_twice_fails(forge: Forge) -> None:
    """Readers differ in which of the two counts."""
    folder = forge("independent")
    text = folder.report_path.read_text()
    folder.report_path.write_text(text.replace('"delta": 0.001,', '"delta": 1e-9, "delta": 0.001,', 1))
    assert folder.failed() == {"report"}
    folder.report_path.write_text("{" * 10**5)
    assert folder.failed() == {"report"}


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("name", ["independent", "blt_in_bins", "tree", "users", "head"])
def test_no_garbage_raises(name: str, forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in any entry, the outcome is a check that failed, and no exception."""
    monkeypatch.delitem(epsilons.ACCOUNTANTS, epsilons.PRV)  # for the time it takes
    folder = forge(name)
    whole = folder.report
    inner = whole.get("plan", whole)
    free = {"advised", "certificate", "accountant", "epsilon", "allow_large_delta", "dp_accounting"}
    not_compared = {"eval_data_privacy", "data_dependent_preprocessing"}
    for entry, garbage in itertools.product(set(inner) - free - not_compared, ("x" * 50, -3, 1e300)):
        folder.edit_report(functools.partial(_put, entry, garbage))
        assert folder.verify().has_failed, (entry, garbage)
        folder.report_path.write_text(json.dumps(whole))


def _put(entry: str, value: Any, report: dict) -> None:
    report.get("plan", report)[entry] = value


def test_files_that_were_replaced_fail(forge: Forge) -> None:
    folder = forge("lora")
    assert not folder.failed()
    weights = folder.path / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert folder.failed() == {"released files"}
    weights.unlink()
    assert folder.failed() == {"released files"}, "one of two is missing"
    folder.edit_report(lambda report: report.update(released_files={"../../etc/passwd": "0" * 64}))
    assert folder.failed() == {"released files"}


def test_a_statement_that_promises_something_else_fails(forge: Forge) -> None:
    folder = forge("independent")
    text = folder.statement.read_text()
    folder.statement.write_text(text.replace("epsilon = 7.99", "epsilon = 0.99"))
    assert folder.failed() == {"statement"}
    folder.statement.write_text(text.replace("delta = 0.001**", "delta = 1e-09**"))
    assert folder.failed() == {"statement"}
    folder.statement.write_text("# This model is private.")
    assert folder.failed() == {"statement"}
    folder.statement.write_text(text)
    (folder.path / "README.md").write_text("<!-- hf_dpopt privacy statement: start --> **epsilon = 1, delta = 0.001**")
    assert folder.failed() == {"model card"}


# --- the head ---


@pytest.mark.slow_but(5)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"horizon": 10}, "epsilon of the release"),  # little noise hides what came before
        ({"horizon": 7000}, "epsilon of the release"),
        ({"noise_share": 0.7}, "epsilon of the release"),
        ({"noise_multiplier": 1.8}, "epsilon of the release"),
        ({"head_radius": 0.5}, "geometry"),
        ({"head_radius": 5.0, "diameter": 10.0}, "epsilon of the release"),
        ({"lipschitz": 1.0}, "geometry"),
        ({"smoothness": 1.0}, "geometry"),
        ({"step_size": 1.5}, "geometry"),
        ({"step_size": 0.99}, "epsilon of the release"),  # batches that are no contraction are too likely
        ({"num_examples": 390}, "epsilon of the release"),
        ({"num_steps": 500}, "steps"),
        ({"adjacency": "replace_one"}, "unit"),
        ({"unit": "user"}, "unit"),
        ({"delta": 0.01}, "delta"),
        ({"epsilon": None}, "report"),
    ],
)
def test_heads_that_were_changed_fail(changes: dict[str, Any], expected: str, forge: Forge) -> None:
    folder = forge("head")
    folder.edit_plan(lambda plan: plan.update(changes))
    assert expected in folder.failed()
    assert "statement" not in folder.failed()
