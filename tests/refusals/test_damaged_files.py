"""Faults that damaged files once met: each is one line now, at once, or is made good; nothing is charged for it."""

from __future__ import annotations

import io
import json
import math
import shutil

import pytest
import torch

from hf_dpopt import DPConfigError
from hf_dpopt.cli import app
from hf_dpopt.cli.doctor import show_health
from hf_dpopt.common.errors import DPBudgetExceeded
from hf_dpopt.convex import HeadConfig, HeadRun, compute_features, head_training, make_head_plan
from hf_dpopt.report.report import read_report
from hf_dpopt.run.ledger import LEDGER, Ledger
from hf_dpopt.sampling import SAMPLERS
from tests.helpers import tiny
from tests.refusals.test_bad_input import _charged

PoissonSampler = SAMPLERS["poisson"]

DAMAGED = ("emptied", "{", "5", "[]", "unreadable text", "NaN", "brackets", "a folder")


def spoil(path, way):
    """Damage one file."""
    content, mode = path.read_bytes(), path.stat().st_mode
    path.unlink()
    if way == "a folder":
        path.mkdir()
    elif way != "deleted":
        spoilt = {
            "emptied": b"",
            "cut in half": content[: len(content) // 2],
            "brackets": b"[" * 100_000,  # more than a reader of JSON can follow
            "unreadable text": b"\xff\xfe" + content,
            "last byte changed": content[:-2] + bytes((byte + 1) % 256 for byte in content[-2:-1]) + content[-1:],
        }
        path.write_bytes(spoilt.get(way, way.encode()))
        path.chmod(mode)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder with a run that has ended: out, keys; and a head in `head`, whose keys are in `head_keys`."""
    folder = tmp_path_factory.mktemp("finished")
    given = dict(max_steps=2, save_strategy="steps", save_steps=1, sampling="fixed_order")
    tiny.trainer(folder / "out", private_state_dir=str(folder / "keys"), **given).train()
    run = _head(folder)
    run.train(*HEAD_DATA, 2)
    run.finish(2)
    return folder


HEAD_DATA = (0.1 * torch.rand(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2)


def _head(folder, **changes):
    given = dict(head_radius=1.0, feature_norm=1.0, expected_batch_size=8, num_steps=4, noise_multiplier=1.0)
    plan = make_head_plan(HeadConfig(**given | changes), num_examples=40)
    return HeadRun(plan, output_dir=folder / "head", private_state_dir=folder / "head_keys")


def _command(monkeypatch, capsys, *words):
    """Run `hf-dpopt`; return its exit code, what it printed, and the lines on stderr, which are all its own."""
    monkeypatch.setattr("sys.argv", ["hf-dpopt", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        app.main()
    said = capsys.readouterr()
    assert all(line.startswith("hf-dpopt: ") for line in said.err.splitlines())
    return stopped.value.code, said.out, said.err


@pytest.mark.parametrize("way", DAMAGED)
@pytest.mark.parametrize("name", ["out/privacy/report.json", "out/privacy/statement.md", "head/privacy/head.json",
                                  "head/privacy/statement.md", "out/privacy/ledger.jsonl", "head/privacy/ledger.jsonl"])  # fmt: skip
def test_a_damaged_report_is_named(name, way, finished, tmp_path, monkeypatch, capsys):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path / name, way)
    code, out, err = _command(monkeypatch, capsys, "verify", tmp_path / name.partition("/")[0])
    assert (code == 1 and "FAILED" in out) or (code == 2 and "report" in err)


FIELDS = {  # of a report, by what was done to it
    "a plan that is a list": lambda report: report.update(plan=[report["plan"]]),
    "a plan that lacks its adjacency": lambda report: report["plan"].pop("adjacency"),
    "a plan whose noise is a text": lambda report: report["plan"].update(noise_multiplier="1"),
    "steps that are a list": lambda report: report.update(steps_charged=[2]),
    "an epsilon that is no number": lambda report: report.update(epsilon_spent=math.nan),
    "an epsilon below 0": lambda report: report.update(epsilon_spent=-1.0),
    "callbacks that are a text": lambda report: report.update(callbacks="x"),
    "versions of the wrong type": lambda report: report.update(versions=5),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_report_with_an_edited_field_is_named(name, finished, tmp_path):
    shutil.copytree(finished / "out", tmp_path / "out")
    path = tmp_path / "out" / "privacy" / "report.json"
    report = json.loads(path.read_text())
    FIELDS[name](report)
    path.write_text(json.dumps(report))
    with pytest.raises(DPConfigError, match="was damaged or edited"):
        read_report(tmp_path / "out")


@pytest.mark.parametrize("way", ["emptied", "{", "a folder"])
@pytest.mark.parametrize("kind", ["out", "head"])
def test_doctor_says_all_the_rest_where_a_key_is_damaged(kind, way, finished, tmp_path, monkeypatch, capsys):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    ledger = Ledger.read(tmp_path / kind / LEDGER)
    (chain,) = ledger.chains
    keys = tmp_path / {"out": "keys", "head": "head_keys"}[kind]
    key = keys / "runs" / ledger.run / f"{chain.chain_id}.key"
    key.touch(mode=0o600)
    spoil(key, way)
    code, out, _ = _command(monkeypatch, capsys, "doctor", tmp_path / kind, "--private-state-dir", keys)
    names = [line.split()[0] for line in out.splitlines()]
    assert code == 1 and {"run", "ledger", "cost", "keys", "lock"} <= set(names)
    assert sum(str(key) in line and "!" in line for line in out.splitlines()) == 1


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_doctor_knows_what_a_head_has_cost_and_whether_it_can_go_on(noise, tmp_path, monkeypatch, capsys):
    run = _head(tmp_path, noise_multiplier=noise)
    run.train(*HEAD_DATA, 2)
    where = (tmp_path / "head", "--private-state-dir", tmp_path / "head_keys")
    for is_over in (False, True):
        if is_over:
            run.finish(2)
        show_health(where[0], where[2])
        lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
        assert f"all 4 steps charged at once: epsilon {run.plan.epsilon():.4g} at delta" in lines["cost"]
        assert ("not possible" if is_over else "nothing more is charged") in lines["resume"]


def test_a_scan_that_cannot_read_a_key_says_so(finished, tmp_path, monkeypatch, capsys):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    run = Ledger.read(tmp_path / "out" / LEDGER).run
    (tmp_path / "keys" / "runs" / run / "0123456789abcdef.key").mkdir(mode=0o700)
    code, _, err = _command(monkeypatch, capsys, "scan", tmp_path / "out", "--private-state-dir", tmp_path / "keys")
    assert code == 2 and "cannot be read (not a regular file)" in err


@pytest.mark.parametrize("way", DAMAGED)
@pytest.mark.parametrize("pattern", ["out/checkpoint-1/privacy_ledger.json", "out/checkpoint-1/trainer_state.json",
                                     "keys/runs/*/log.jsonl"])  # fmt: skip
def test_a_damaged_manifest_or_log_is_refused(pattern, way, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (path,) = tmp_path.glob(pattern)
    spoil(path, way)
    with pytest.raises(DPConfigError) as found:
        trainer = tiny.trainer(
            tmp_path / "out", private_state_dir=str(tmp_path / "keys"), max_steps=2, save_strategy="steps",
            save_steps=1, sampling="fixed_order",
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert "\n" not in str(found.value) and _charged(tmp_path) == 2


# --- a head, and what users and features are kept in ---


SPOILT = ("emptied", "cut in half", "last byte changed", "brackets")


class Killed(BaseException):
    """The end of a process."""


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Folder with a head that was killed after two steps, and one whose weights were returned."""
    folder = tmp_path_factory.mktemp("heads")
    draw = PoissonSampler.draw

    def draw_twice(self, key, step):
        if step > 2:
            raise Killed
        return draw(self, key, step)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(PoissonSampler, "draw", draw_twice)
        patch.setattr(head_training, "SAVE_EVERY", -1.0)
        _head(folder / "killed").train(*HEAD_DATA, 2)
    shutil.copytree(folder / "killed", folder / "returned")
    weights = _head(folder / "returned").train(*HEAD_DATA, 2)
    return folder, weights


def _give_other_weights(path):
    """Write a state that torch reads, under the checksum of another one."""
    content, file = path.read_bytes(), io.BytesIO()
    kept = torch.load(io.BytesIO(content), weights_only=True)
    torch.save({**kept, "weights": kept["weights"] + 0.5}, file)
    path.write_bytes(file.getvalue() + content[-32:])


@pytest.mark.parametrize("way", [*SPOILT, "other weights"])
def test_a_damaged_state_of_a_killed_head_is_made_again_under_its_key(way, heads, tmp_path, caplog):
    shutil.copytree(heads[0] / "killed", tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / "head_keys").glob("runs/*/head-*.pt")
    _give_other_weights(path) if way == "other weights" else spoil(path, way)
    assert torch.equal(_head(tmp_path).train(*HEAD_DATA, 2), heads[1])
    assert len(_lines(tmp_path, "step")) == 1 and f"{path} is damaged" in caplog.text


@pytest.mark.parametrize("way", [*SPOILT, "deleted"])
def test_after_its_weights_were_returned_a_head_draws_no_noise_again(way, heads, tmp_path):
    shutil.copytree(heads[0] / "returned", tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / "head_keys").glob("runs/*/head-*.pt")
    assert torch.equal(_head(tmp_path).train(*HEAD_DATA, 2), heads[1])
    spoil(path, way)
    with pytest.raises(DPBudgetExceeded, match="weights of its run were returned before"):
        _head(tmp_path).train(HEAD_DATA[0].flip(0), HEAD_DATA[1], 2)


@pytest.mark.parametrize("way", SPOILT)
def test_damaged_features_are_computed_again(way, tmp_path, caplog):
    rows = [{"input_ids": row["input_ids"]} for row in tiny.records(6)]

    def features():
        return compute_features(tiny.model(), rows, _collate_inputs, cache=tmp_path)

    first, (path,) = features(), tmp_path.iterdir()
    spoil(path, way)
    assert torch.equal(features(), first) and f"{path} is damaged" in caplog.text


def _collate_inputs(rows):
    batch = tiny.collate([{**row, "label": 0} for row in rows])
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _lines(folder, kind):
    lines = (folder / "head" / LEDGER).read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]
