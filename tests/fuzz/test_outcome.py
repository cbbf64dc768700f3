"""The judge of the cases: it tells a run from a refusal, and both from what a user must never see."""

from __future__ import annotations

import pytest

from hf_dpopt import DPConfigError
from hf_dpopt.run.keys import new_chain, private_dir
from hf_dpopt.run.run_log import RunLog
from tests.fuzz.outcome import Case, outcome_of


def _charge_and_fail(folder):
    with RunLog.open(folder / "out", private_dir(folder / "keys", folder / "out")) as log:
        chain = new_chain()
        log.start_chain(chain, 0, "first run")
        log.charge(chain.chain_id, 1)
    raise DPConfigError("Something is wrong. Do something else.")


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        ("ran", lambda folder: None),
        ("refused", lambda folder: _raise(DPConfigError("x=1 is wrong. Use 2."))),
        ("raw", lambda folder: _raise(ValueError("x=1 is wrong. Use 2."))),
        ("raw", lambda folder: _raise(DPConfigError(""))),
        ("raw", lambda folder: _raise(SystemExit(2))),
        ("charged", _charge_and_fail),
        ("hung", lambda folder: [None for _ in iter(int, 1)]),
    ],
)
def test_every_end_has_its_name(kind, run, tmp_path):
    assert outcome_of(Case("any", "case", run), tmp_path, seconds=0.05).kind == kind
