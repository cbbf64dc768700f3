"""`hf-dpopt verify`: true claims pass, and what it writes again from the papers is what the library made."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hf_dpopt.noise as noise
from hf_dpopt.cli.app import app
from hf_dpopt.noise.tree import TreeAggregation
from hf_dpopt.verify import FAILED, NOT_CHECKED, verify
from hf_dpopt.verify.matrices import Strategy, Uses, by_formula
from hf_dpopt.verify.reading import Fields
from tests.helpers import tiny
from tests.verify import runs
from tests.verify.__main__ import BEGIN, END, PAGE, folders
from tests.verify.forging import Folder

PLAN, SPENT = "epsilon of the plan", "epsilon of the steps charged"


def test_there_is_a_report_of_every_run() -> None:
    assert {path.name for path in runs.REPORTS.iterdir()} == set(runs.RUNS)


def test_the_page_has_a_row_for_every_report() -> None:
    """`python -m tests.verify --table` writes it."""
    text = PAGE.read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text[text.index(BEGIN) : text.index(END)].splitlines() if "`tests/" in line]
    assert [row[0].removeprefix("| ") for row in rows] == list(folders()) and len(rows) >= 10
    assert all((row[1] == "1") == ("forged" in row[0]) and float(row[3].split()[0]) < 10 for row in rows)


# --- true claims ---


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("name", runs.RUNS)
def test_true_claims_are_verified(name: str) -> None:
    outcome = verify(runs.REPORTS / name)
    assert not outcome.has_failed, outcome.verdict
    assert outcome.has_epsilon and outcome.exit_code(is_strict=False) == 0
    recomputed = [check.numbers for check in outcome.checks if "PLD" in check.name or "Gaussian" in check.name]
    assert recomputed or "bins" in name
    left = {check.name for check in outcome.checks if check.status == NOT_CHECKED}
    # of correlated noise in bins a bound is known, for batches that are known
    assert left <= {"released files", *([f"{PLAN}, exact Gaussian", "attackers"] if "bins" in name else [])}


def test_the_accountants_agree() -> None:
    """PLD within 0.1 %, and the PRV around it."""
    checks = {check.name: check.numbers for check in verify(runs.REPORTS / "resumed").checks}
    pld = checks[f"{SPENT}, dp-accounting PLD"]
    assert pld["claimed"] == pytest.approx(pld["recomputed"], rel=1e-3)
    prv = checks.get(f"{SPENT}, opacus PRV")
    assert prv is not None and prv["recomputed"] == pytest.approx(pld["recomputed"], rel=0.01)


def test_the_report_alone_or_its_folder_will_do(tmp_path: Path) -> None:
    folder = runs.REPORTS / "lora"
    by_report, by_privacy = verify(folder / "privacy" / "report.json"), verify(folder / "privacy")
    assert by_report == by_privacy == verify(folder)
    (tmp_path / "alone.json").write_bytes((folder / "privacy" / "report.json").read_bytes())
    outcome = verify(tmp_path / "alone.json")
    failed = {check.name for check in outcome.checks if check.status == FAILED}
    assert failed == {"ledger chain", "ledger digest", "steps", "plan"}, "without a ledger nothing shows what ran"


# --- what is written again ---


def _blt(n: int) -> noise.NoiseStrategy:
    return noise.fit_blt(0.05, 2, num_steps=n)


@pytest.mark.parametrize(
    "made",
    [
        noise.NuDPFTRL(0.0),
        noise.NuDPFTRL(0.3),
        _blt(40),
        noise.BandedToeplitz((1.0, 0.5, 0.25)),
        noise.BandedToeplitz((1.0, -0.5, 0.6)),
        noise.BandedInverse((1.0, -0.5, -0.125)),
        TreeAggregation("vanilla"),
        TreeAggregation("honaker", restart_every=10),
        TreeAggregation("honaker", restart_every=12, tree_completion=False),
        noise.Restarted(noise.NuDPFTRL(0.1), 12),
        noise.Restarted(noise.BandedInverse((1.0, -0.5)), 5),
    ],
    ids=lambda made: f"{made.name} {json.dumps(made.parameters())[:60]}",
)
def test_matrices_and_sensitivities_are_those_of_the_library(made: noise.NoiseStrategy) -> None:
    """Two ways to the same numbers: their inner products, and the sensitivity over the epochs of a fixed order."""
    n = 40
    own = Strategy(Fields(json.loads(json.dumps(made.parameters())), "the plan"))
    theirs = made.strategy_matrix(n)
    matrix = own.matrix(n)
    np.testing.assert_allclose(matrix.T @ matrix, theirs.T @ theirs, rtol=1e-9, atol=1e-9)
    assert own.is_anytime == made.anytime
    for k, b in ((1, 40), (4, 10), (6, 7), (14, 3)):
        expected = made.sensitivity(n, noise.Participation(k, b, "fixed_epoch"))
        found = by_formula(own, n, Uses(k, b))
        # where coefficients rise or have both signs, the library may bound what is computed here
        assert found <= expected * (1 + 1e-9)
        if made.name not in ("banded", "banded_inverse", "restarted"):
            assert found == pytest.approx(expected, rel=1e-9), (k, b)
    for k, b in ((1, 8), (2, 3), (3, 3), (8, 1)):
        assert _worst(own.matrix(8), Uses(k, b)) <= by_formula(own, 8, Uses(k, b)) * (1 + 1e-9), (k, b)


def _worst(matrix: np.ndarray, uses: Uses) -> float:
    """Largest ``||C u||`` over every pattern of participation and every choice of signs."""
    return max(
        float(np.linalg.norm(matrix[:, pattern] @ np.array(signs)))
        for pattern in uses.patterns(matrix.shape[1])
        for signs in itertools.product((1.0, -1.0), repeat=len(pattern))
    )


def test_formulas_for_long_runs_are_those_for_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toeplitz coefficients that rise take another way when the matrix is too large."""
    own = Strategy(Fields({"name": "banded", "coefs": [1.0, 0.2, 0.6, 0.1]}, "the plan"))
    short = by_formula(own, 60, Uses(20, 3))
    monkeypatch.setattr("hf_dpopt.verify.matrices.MOST_DENSE", 10)
    assert by_formula(own, 60, Uses(20, 3)) == pytest.approx(short, rel=1e-12)


# --- the command ---


def test_the_command_prints_a_line_for_every_check() -> None:
    result = CliRunner().invoke(app, ["verify", str(runs.REPORTS / "lora")])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[-1].startswith("verified: ") and len(lines) == 1 + len(verify(runs.REPORTS / "lora").checks)
    assert CliRunner().invoke(app, ["verify", str(runs.REPORTS / "lora"), "--strict"]).exit_code == 0


def test_what_is_left_open_is_a_failure_if_asked() -> None:
    path = str(runs.REPORTS / "independent")  # its weights are not kept here
    assert CliRunner().invoke(app, ["verify", path]).exit_code == 0
    assert CliRunner().invoke(app, ["verify", path, "--strict"]).exit_code == 1


def test_json_for_programs() -> None:
    content = json.loads(CliRunner().invoke(app, ["verify", str(runs.REPORTS / "lora"), "--json"]).output)
    assert content["epsilon_supported"] is True and content["failed"] is False and content["exit_code"] == 0
    pld = next(check for check in content["checks"] if check["name"] == f"{PLAN}, dp-accounting PLD")
    assert pld["numbers"]["claimed"] == pytest.approx(pld["numbers"]["recomputed"], rel=1e-3)


def test_a_folder_without_a_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hf_dpopt.cli import app as module

    sys.argv = ["hf-dpopt", "verify", str(tmp_path)]
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 2 and "There is no report" in capsys.readouterr().err


def test_no_torch_is_needed(repo: Path) -> None:
    """On a machine without torch, transformers or opacus: the same checks, but for the PRV accountant."""
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'opacus'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from hf_dpopt.cli.app import main\n"
        f"sys.argv = ['hf-dpopt', 'verify', {str(runs.REPORTS / 'banded')!r}]\n"
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=repo, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "verified: " in result.stdout and "pip install 'hf-dpopt[verify]'" in result.stdout


def test_a_long_plan_is_verified_in_seconds(tmp_path: Path) -> None:
    """1,300 steps of 1,024 of 67,349 records, as of SST-2; the accountants are loaded by then."""
    folder = Folder(runs.REPORTS / "independent", tmp_path / "long")

    def longer(plan: dict) -> None:
        size = {"num_examples": 67349, "expected_batch_size": 1024}
        plan.update(size, num_steps=1300, noise_steps=1300, noise_multiplier=0.8, draw_stddev=0.8, delta=1e-6)
        plan["sampler"].update(size, cap=1254)
        plan.update(epsilon=20.0)

    folder.edit_plan(longer)
    folder.edit_report(lambda report: report.update(steps_planned=1300, delta=1e-6, epsilon_spent=20.0))
    folder.edit_report(lambda report: report.update(epsilon_replace_one=30.0))
    folder.verify()
    start = time.monotonic()
    assert PLAN not in folder.failed()
    assert time.monotonic() - start < 10


# --- what the trainer writes for it ---


def test_a_saved_model_is_named_by_its_digests(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path / "out", max_steps=2)
    made.train()
    report = json.loads((tmp_path / "out/privacy/report.json").read_text())
    assert report["released_files"] == {}, "nothing was saved yet"
    made.save_model()
    made.save_model(str(tmp_path / "copy"))
    report = json.loads((tmp_path / "out/privacy/report.json").read_text())
    assert set(report["released_files"]) == {"config.json", "model.safetensors"}
    assert _released(tmp_path / "out") == "ok"
    again = tiny.trainer(tmp_path / "out", max_steps=2)
    again._release.write_report()  # as before a push: it keeps what it did not save
    assert _released(tmp_path / "out") == "ok"
    with (tmp_path / "out/model.safetensors").open("ab") as file:
        file.write(b"!")
    assert _released(tmp_path / "out") == FAILED


def _released(folder: Path) -> str:
    return next(check.status for check in verify(folder).checks if check.name == "released files")
