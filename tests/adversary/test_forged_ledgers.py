"""Somebody who can write to `output_dir` alone forges its ledger: he may spoil the run or raise its cost, no more.

Whatever he writes, a further training uses no noise twice, charges no fewer steps than ran, writes nothing outside of the
run's folders, and runs no code of his. A refusal is as good. To add a forgery is to add a line to `FORGERIES`; records
that no run writes are refused when the ledger is read, see tests/run/test_ledger.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dpopt import DPBudgetExceeded, DPConfigError, DPTrainer
from tests.adversary import forging
from tests.adversary.forging import LEDGER, assert_fresh, records_of, write
from tests.helpers import tiny

SAVED_AT, RAN, NUM_STEPS = 2, 4, 6
Records = list[dict[str, Any]]


def train(
    out: Path, keys: Path, *, stop: int, resume: Any = None, **changes: Any
) -> tuple[DPTrainer, dict[int, torch.Tensor]]:
    return forging.train(out, stop=stop, resume=resume, private_state_dir=str(keys), save_steps=SAVED_AT, **changes)


class Scene:
    """A run that was stopped, another one with the same private folder, and folders of somebody else."""

    def __init__(self, root: Path):
        self.root, self.out, self.other, self.keys = root, root / "out", root / "other", root / "keys"
        self.victim = root / "victim"

    @property
    def chain(self) -> dict[str, Any]:
        return next(one for one in records_of(self.out) if one["kind"] == "chain")

    @property
    def other_chain(self) -> dict[str, Any]:
        return next(one for one in records_of(self.other) if one["kind"] == "chain")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, torch.Tensor]]:
    scene = Scene(tmp_path_factory.mktemp("made"))
    _, released = train(scene.out, scene.keys, stop=RAN)
    train(scene.other, scene.keys, stop=1, save_strategy="no")
    scene.victim.mkdir()
    (scene.victim / "ledger.jsonl").write_bytes((scene.other / LEDGER).read_bytes())
    (scene.victim / f"checkpoint-{NUM_STEPS}").mkdir()
    (scene.victim / f"checkpoint-{NUM_STEPS}" / "file").write_text("of somebody else")
    return scene.root, released


def _chain(scene: Scene, **changes: Any) -> dict[str, Any]:
    return {"kind": "chain", "key_id": "e" * 32, "note": "first run", "parent": None, "start_step": 0, "unsafe": False,
            "chain_id": "d" * 16, **changes}  # fmt: skip


def _rename(change: Callable[[str], Any]) -> Callable[[Scene], Records]:
    """Give the chain another id, everywhere."""

    def forge(scene: Scene) -> Records:
        name = scene.chain["chain_id"]
        return [
            one | {"chain_id": change(name)} if one.get("chain_id") == name else one for one in records_of(scene.out)
        ]

    return forge


def _before(**changes: Any) -> Callable[[Scene], Records]:
    """Put a chain before all others, so that the run's keys are looked for under its name; forget the last steps."""

    def forge(scene: Scene) -> Records:
        named = {key: value(scene) if callable(value) else value for key, value in changes.items()}
        records = [one for one in records_of(scene.out) if one.get("step", 0) <= SAVED_AT]
        place = next(i for i, one in enumerate(records) if one["kind"] == "chain")
        return [*records[:place], _chain(scene, **named), *records[place:]]

    return forge


def _with(*added: Callable[[Scene], dict[str, Any]]) -> Callable[[Scene], Records]:
    return lambda scene: [*records_of(scene.out), *(one(scene) for one in added)]


def _step(step: int) -> Callable[[Scene], dict[str, Any]]:
    return lambda scene: {"kind": "step", "chain_id": scene.chain["chain_id"], "step": step}


def _plan(**changes: Any) -> Callable[[Scene], Records]:
    def forge(scene: Scene) -> Records:
        return [
            one | {"plan": one["plan"] | changes} if one["kind"] == "plan" else one for one in records_of(scene.out)
        ]

    return forge


def _without(*kinds: str, after: int = SAVED_AT) -> Callable[[Scene], Records]:
    """Leave out steps after one, and records of some kinds."""
    return lambda scene: [
        one for one in records_of(scene.out) if one["kind"] not in kinds and one.get("step", 0) <= after
    ]


FORGERIES: dict[str, Callable[[Scene], Records]] = {
    "as it is": lambda scene: records_of(scene.out),
    "steps removed": _without(),
    "all steps removed": _without(after=0),
    "steps added": _with(_step(RAN + 1), _step(RAN + 2)),
    "a step backwards": _with(_step(1)),
    "a step beyond all": _with(_step(2**70)),
    "steps noted as lost": _with(lambda scene: {"kind": "lost", "chain_id": scene.chain["chain_id"], "step": RAN}),
    "a chain twice": _with(lambda scene: scene.chain),
    "a second chain with the key": _with(lambda scene: scene.chain | {"chain_id": "d" * 16}),
    "a key as unsafe": _with(
        lambda scene: scene.chain | {"chain_id": f"unsafe{'d' * 16}", "unsafe": True, "parent": scene.chain["chain_id"]}
    ),
    "the chain as found elsewhere": lambda scene: [
        one | {"note": "ran in a copy of this ledger, or before it was put back to an earlier state"}
        if one["kind"] == "chain" else one for one in records_of(scene.out)
    ],
    "another chain first": _before(),
    "the other run first": _before(
        chain_id=lambda scene: scene.other_chain["chain_id"], key_id=lambda scene: scene.other_chain["key_id"]
    ),
    "another start": lambda scene: [
        one | {"start_step": 3} if one["kind"] == "chain" else one
        for one in records_of(scene.out) if one.get("step", 9) > 3 or one["kind"] != "step"
    ],
    "the ledger of the other run": lambda scene: records_of(scene.other),
    "the other run's id": lambda scene: _rename(lambda name: scene.other_chain["chain_id"])(scene),
    "a path as id": _rename(lambda name: f"../../victim/{name}"),
    "a path first": _before(chain_id="../../victim"),
    "an absolute path first": _before(chain_id=lambda scene: str(scene.victim)),
    "the private folder first": _before(chain_id=".."),
    "a prefix as id": _before(chain_id=lambda scene: scene.other_chain["chain_id"][:1]),
    "a glob as id": _before(chain_id="*"),
    "digits of another script": _before(chain_id="١" * 16),
    "more noise": _plan(noise_multiplier=9.0),
    "more records": _plan(num_examples=10**6),
    "smaller batches": _plan(expected_batch_size=1),
    "a plan of another kind": _plan(kind="convex_head"),
    "an empty plan": lambda scene: [
        one | {"plan": {}} if one["kind"] == "plan" else one for one in records_of(scene.out)
    ],
    "no plan": _without("plan", after=RAN),
    "no header": _without("header", after=RAN),
    "nothing but a header": _without("plan", "chain", "step"),
}  # fmt: skip
WAYS = [pytest.param(True, id="resumed"), pytest.param(False, id="anew", marks=pytest.mark.slow)]


def _tree(folder: Path) -> dict[str, bytes | str | None]:
    found: dict[str, bytes | str | None] = {}
    for path in folder.rglob("*"):
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return found


def _check_places(scene: Scene, before: dict[str, Any]) -> None:
    """Nothing was written outside of the folders of the run, nor under another name than a run gives."""
    assert {path.name for path in scene.root.iterdir()} == {"out", "other", "keys", "victim"}
    assert _tree(scene.victim) == before
    for name in _tree(scene.keys):
        assert re.fullmatch(r"runs(/lock|/[0-9a-f]{16}(/lock|/log\.jsonl|/[0-9a-f]{16}\.\w+)?)?", name), name


def _go_on(scene: Scene, released: dict[int, torch.Tensor], resume: bool) -> bool:
    """Train after a forgery, with some labels changed, and check all that may not happen; return whether it ran."""
    before = _tree(scene.victim)
    rows = [row | {"label": 1 - row["label"]} if i < 3 else row for i, row in enumerate(tiny.records())]
    try:
        made, again = train(scene.out, scene.keys, stop=NUM_STEPS, resume=resume, train_dataset=rows)
    except (DPConfigError, DPBudgetExceeded):
        _check_places(scene, before)
        return False
    _check_places(scene, before)
    assert_fresh(made, released, again)
    assert made.privacy_spent().num_steps >= RAN + len(again), "a step that ran is not charged"
    alone = made.plan.epsilon((RAN, len(again)) if again else (RAN,))
    assert made.privacy_spent().epsilon >= min(alone, made.plan.epsilon((NUM_STEPS,))) * (1 - 1e-9)
    return True


@pytest.fixture
def scene(made: tuple[Path, dict[int, torch.Tensor]], tmp_path: Path) -> Scene:
    shutil.copytree(made[0], tmp_path / "scene", symlinks=True)
    return Scene(tmp_path / "scene")


@pytest.mark.parametrize("resume", WAYS)
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_ledger_gains_nothing(scene, made, name, resume):
    (key,) = scene.keys.glob(f"runs/*/{scene.other_chain['chain_id']}.key")
    write(scene.out, FORGERIES[name](scene))
    _go_on(scene, made[1], resume)
    assert key.exists() or name == "the ledger of the other run", "the key of another run was deleted"


def test_a_manifest_of_another_step_is_refused(scene, made):
    """Else the releases after a checkpoint would be those of other weights, as nobody planned."""
    path = scene.out / f"checkpoint-{RAN}" / "privacy_ledger.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": RAN + 9}))
    with pytest.raises(DPConfigError, match=f"its privacy_ledger.json is that of step {RAN + 9}"):
        train(scene.out, scene.keys, stop=NUM_STEPS, resume=str(path.parent))


def test_a_plan_with_more_noise_makes_no_step_cheaper(tmp_path):
    """A run with a budget keeps the noise that its ledger names: steps that ran would be read as ones with more."""
    scene, budget = Scene(tmp_path), {"noise_multiplier": None, "target_epsilon": 3.0}
    train(scene.out, scene.keys, stop=RAN, **budget)
    records = records_of(scene.out)
    plan = next(one["plan"] for one in records if one["kind"] == "plan")
    for name in ("noise_multiplier", "draw_stddev"):
        plan[name] *= 3
    write(scene.out, records)
    with pytest.raises(DPConfigError, match="is not the one that the keys of this run were used for"):
        train(scene.out, scene.keys, stop=NUM_STEPS, **budget)


def test_a_ledger_that_is_as_it_was_goes_on(scene, made):
    """Else every forgery above could be refused for another reason."""
    write(scene.out, FORGERIES["as it is"](scene))
    made, again = train(scene.out, scene.keys, stop=NUM_STEPS, resume=True)
    assert made.privacy_spent().num_steps == NUM_STEPS and sorted(again) == [RAN + 1, RAN + 2]


LINKS = {
    "privacy": "victim", "privacy/ledger.jsonl": "victim/ledger.jsonl", "privacy/ledger.jsonl.lock": "victim/ledger.jsonl",
    "privacy/report.json": "victim/ledger.jsonl", "privacy/statement.md": "victim/ledger.jsonl", "_journal": "victim",
    "_unfinished_checkpoints": "victim", f"checkpoint-{NUM_STEPS}": "victim", f"checkpoint-{RAN}": "victim",
}  # fmt: skip


@pytest.mark.parametrize("resume", WAYS)
@pytest.mark.parametrize("name", LINKS)
def test_a_link_leads_nowhere(scene, made, name, resume):
    place = scene.out / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    os.symlink(scene.root / LINKS[name], place)
    before = _tree(scene.victim)
    try:
        train(scene.out, scene.keys, stop=NUM_STEPS, resume=resume)
    except DPConfigError:
        pass
    _check_places(scene, before)


def list_files(folder: Path) -> None:
    """List the files of a checkpoint anew, as anybody can who may write to it."""
    path = folder / "privacy_ledger.json"
    files = {
        one.name: {"bytes": one.stat().st_size, "sha256": hashlib.sha256(one.read_bytes()).hexdigest()}
        for one in folder.iterdir()
        if one != path
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": files}))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "weights"])
def test_a_checkpoint_runs_no_code(scene, name):
    """Files of a checkpoint are pickles, and a list of them that fits is easily made."""
    folder, bomb = scene.out / f"checkpoint-{RAN}", scene.root / "out" / "boom"
    path = folder / {"weights": "pytorch_model.bin"}.get(name, name)
    if name == "weights":
        (folder / "model.safetensors").unlink()
    path.write_bytes(pickle.dumps(tiny.Bomb(bomb)))
    list_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(scene.out)
        if name == "training_args.bin":  # which nobody loads
            train(scene.out, scene.keys, stop=NUM_STEPS, resume=str(folder))
        else:
            with pytest.raises(DPConfigError, match="cannot be loaded|rng_state.pth: a name that belongs to private"):
                train(scene.out, scene.keys, stop=NUM_STEPS, resume=str(folder))
    assert not bomb.exists()


@pytest.mark.parametrize("content", [[], {"global_step": RAN, "unknown": 1}])
def test_a_state_that_no_trainer_writes_is_refused(scene, content):
    folder = scene.out / f"checkpoint-{RAN}"
    (folder / "trainer_state.json").write_text(json.dumps(content))
    list_files(folder)
    with pytest.raises(DPConfigError, match="cannot be loaded|trainer_state.json is not that of step"):
        train(scene.out, scene.keys, stop=NUM_STEPS, resume=str(folder))


@pytest.mark.parametrize("index", ["../../victim/file.safetensors", "/etc/passwd", "..", "", 5])
def test_weights_come_from_the_checkpoint_alone(scene, index):
    """An index of weights that names a file elsewhere would publish what is in there."""
    folder = scene.out / f"checkpoint-{RAN}"
    shutil.move(folder / "model.safetensors", scene.victim / "file.safetensors")
    weights = {"weight_map": dict.fromkeys(tiny.model().state_dict(), index), "metadata": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    list_files(folder)
    with pytest.raises(DPConfigError, match="names files outside of its folder"):
        train(scene.out, scene.keys, stop=NUM_STEPS, resume=str(folder))


@pytest.mark.parametrize("how", ["put back", "less noise than there was", "gone on elsewhere"])
def test_an_earlier_run_costs_what_its_keys_were_used_for(how, tmp_path, monkeypatch):
    """Who can write to its folder cannot make the run that comes after it cheaper."""
    monkeypatch.setenv("HF_DPOPT_PRIVATE_DIR", str(tmp_path / "private"))
    out = tmp_path / "a"
    tiny.trainer(out, max_steps=3).train()
    lines = records_of(out)
    if how == "put back":
        lines = lines[:-1]
    elif how == "gone on elsewhere":
        (chain,) = {line["chain_id"] for line in lines if line["kind"] == "step"}
        lines = [line for line in lines if line.get("chain_id") != chain or line["kind"] == "chain"]
    for line in lines:
        if how == "less noise than there was" and line["kind"] == "plan":
            line["plan"]["draw_stddev"] *= 100
    write(out, lines)
    with pytest.raises(DPConfigError, match="put back to an earlier state|not the one that the keys"):
        tiny.trainer(tmp_path / "b", earlier_runs=str(out), max_steps=1)
