"""No secret leaves with the training arguments: not in a pickle, a push, a log or a `repr`."""

from __future__ import annotations

import base64
import copy
import dataclasses
import gc
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
import trl
from huggingface_hub.utils import filter_repo_objects

from hf_dpopt import DPConfigError, DPSeq2SeqTrainingArguments, DPTrainer, DPTrainingArguments
from tests.helpers import tiny

TOKEN, KEY = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH", "ab" * 32


class Hub:
    """The hub as the Trainer calls it; keeps what each upload takes."""

    def __init__(self, kept: Path):
        self.kept, self.num_uploads = kept, 0

    def create_repo(self, name: str, **options: Any) -> Any:
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(
        self, *, folder_path: str, ignore_patterns: Any = None, run_as_future: bool, **options: Any
    ) -> Any:
        names = [str(p.relative_to(folder_path)) for p in Path(folder_path).rglob("*") if p.is_file()]
        for name in filter_repo_objects(names, ignore_patterns=ignore_patterns):
            target = self.kept / str(self.num_uploads) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(folder_path) / name, target)
        self.num_uploads += 1
        return SimpleNamespace(done=lambda: True) if run_as_future else "https://hub/commit"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "uploads")
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: made)
    return made


def _options(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments that hold every secret there is but a fixed key, which only tests use."""
    return {
        "hub_token": TOKEN, "private_state_dir": str(folder / "hidden_keys"), "save_strategy": "steps", "save_steps": 1,
        "max_steps": 3, "privacy_ledger": str(folder / "hidden_ledger"), "privacy_ledger_epsilon": 1000.0, **changes,
    }  # fmt: skip


def _assert_clean(folder: Path, *others: str) -> None:
    held = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert any(p.name == "training_args.bin" for p in held)
    for path, data in held.items():
        for secret in (TOKEN, "hidden_keys", "hidden_ledger", *others):
            assert secret.encode() not in data, f"{secret} is in {path}"


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints", "end"])
def test_pushes_of_a_run_hold_no_secret(strategy: str, tmp_path: Path, hub: Hub) -> None:
    trainer = tiny.trainer(tmp_path / "out", **_options(tmp_path, push_to_hub=True, hub_strategy=strategy))
    trainer.train()
    assert trainer.state.global_step == 3
    trainer.push_to_hub()
    assert hub.num_uploads == {"every_save": 4, "checkpoint": 7, "all_checkpoints": 7, "end": 1}[strategy]
    _assert_clean(tmp_path / "uploads")
    reports = list((tmp_path / "uploads").glob("*/privacy/report.json"))
    assert reports
    for report in reports:  # names the weights that were pushed with it, not those of the push before
        upload, named = report.parents[1], json.loads(report.read_text())["released_files"]
        assert named == {name: hashlib.sha256((upload / name).read_bytes()).hexdigest() for name in named}
        assert "model.safetensors" in named
    for folder in (tmp_path / "out").glob("checkpoint-*"):
        _assert_clean(folder)
    assert trainer.args.hub_token == TOKEN and trainer.args.private_state_dir == str(tmp_path / "hidden_keys")


@dataclasses.dataclass
class NewerArguments(DPTrainingArguments, trl.SFTConfig):  # repr=False is forgotten
    """As a newer transformers may declare them."""

    tracker_token: str | None = None
    bucket_secret_key: str | None = None


CLASSES = (DPTrainingArguments, DPSeq2SeqTrainingArguments, NewerArguments)
SECRETS = {
    "hub_token": TOKEN, "unsafe_fixed_noise_key": KEY, "private_state_dir": "hidden_keys",
    "privacy_ledger": "hidden_ledger", "tracker_token": "hidden_tracker", "bucket_secret_key": "hidden_bucket",
}  # fmt: skip
# Options whose names sound like secrets or places, and that say nothing beyond what the released files do.
PUBLIC = {
    "output_dir", "logging_dir", "resume_from_checkpoint",  # where the released files are
    "eos_token", "pad_token", "max_new_tokens", "average_tokens_across_devices", "include_num_input_tokens_seen",
    "shuffle_dataset", "dataset_text_field", "dataset_kwargs", "dataset_num_proc", "chat_template_path", "project",
    "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision", "push_to_hub",
    "privacy_unit", "privacy_ledger_epsilon", "privacy_ledger_entry", "eval_data_privacy", "log_private_metrics",
    "private_metrics_kwargs", "noise_kwargs", "restore_callback_states_from_checkpoint", "enable_jit_checkpoint",
    "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
}  # fmt: skip
SOUNDS = re.compile(
    r"token|key|secret|passw|credential|auth|hub|dir$|path|folder|file|ledger|private|privacy|checkpoint"
)


def _full(cls: type, folder: Path) -> Any:
    names = {f.name for f in dataclasses.fields(cls)}
    given = {name: value for name, value in SECRETS.items() if name in names}
    if "model_init_kwargs" in names:
        given["model_init_kwargs"] = {
            "token": TOKEN,
            "nested": {"api_key": "hidden_api", "trackers": [({"API_KEY": "hidden_list"},)]},
            "revision": "main",
        }
    return cls(output_dir=str(folder / "out"), noise_multiplier=1.0, report_to="none", use_cpu=True, **given)


def _secrets_in(data: bytes) -> list[str]:
    return [s for s in (*SECRETS.values(), "hidden_api", "hidden_list") if s.encode() in data]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_option_that_sounds_secret_is_left_out_or_known_to_be_public(cls: type, tmp_path: Path) -> None:
    """An option that a newer transformers or we add has to be looked at here."""
    cleaned = vars(pickle.loads(pickle.dumps(_full(cls, tmp_path))))
    for field in dataclasses.fields(cls):
        if SOUNDS.search(field.name) and field.name not in PUBLIC and "_token_" not in field.name:
            assert cleaned[field.name] == f"<{field.name.upper()}>", field.name


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "shown",
    [pickle.dumps, lambda a: pickle.dumps(a, 0), lambda a: pickle.dumps({"kept": [a]}),
     lambda a: pickle.dumps(copy.copy(a)), lambda a: pickle.dumps(copy.deepcopy(a)),
     lambda a: pickle.dumps(dataclasses.replace(a)), lambda a: pickle.dumps(pickle.loads(pickle.dumps(a))),
     lambda a: repr(a).encode(), lambda a: str([a]).encode(), lambda a: a.to_json_string().encode(),
     lambda a: str(a.to_sanitized_dict()).encode()],
)  # fmt: skip
def test_no_secret_is_pickled_or_shown(cls: type, shown: Any, tmp_path: Path) -> None:
    made = _full(cls, tmp_path)
    assert not _secrets_in(shown(made))
    assert made.hub_token == TOKEN and b"noise_multiplier" in shown(made)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, dataclasses.replace, lambda a: copy.deepcopy({"kept": [a, a]})["kept"][1]]
)
def test_copies_in_a_process_keep_everything(cls: type, copied: Any, tmp_path: Path) -> None:
    made = _full(cls, tmp_path)
    other = copied(made)
    assert type(other) is cls and other is not made
    for field in dataclasses.fields(cls):
        assert getattr(other, field.name) == getattr(made, field.name), field.name
    other.hub_token = "other"
    assert made.hub_token == TOKEN


def _tell(args: Any, queue: Any) -> None:
    queue.put((args.private_state_dir, args.hub_token))


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))]
)
def test_a_child_process_of_this_machine_gets_everything(method: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_tell, args=(_full(DPTrainingArguments, tmp_path), queue))
    child.start()
    assert queue.get(timeout=120) == ("hidden_keys", TOKEN)
    child.join()


@pytest.mark.parametrize("name", ["private_state_dir", "hub_token", "privacy_ledger", "unsafe_fixed_noise_key"])
def test_arguments_of_a_pickle_are_not_trained_with_until_they_are_complete(name: str, tmp_path: Path) -> None:
    """A worker of another launcher (Ray, joblib) would use other keys, or charge no ledger, without a word."""
    given = {name: SECRETS[name] if name != "private_state_dir" else str(tmp_path / "hidden_keys")}
    if name == "privacy_ledger":
        given = {name: str(tmp_path / "ledger"), "privacy_ledger_epsilon": 1000.0}
    args = pickle.loads(pickle.dumps(tiny.arguments(tmp_path / "out", max_steps=1, **given)))
    make = lambda: DPTrainer(  # noqa: E731
        tiny.model(), args, train_dataset=tiny.records(), data_collator=tiny.collate
    )
    with pytest.raises(
        DPConfigError, match=f"^{name}=<{name.upper()}>: .* left out when .* pickled.* Set args.{name}"
    ):
        make()
    assert not (tmp_path / "out").exists()
    setattr(args, name, given[name])
    make().train()


class _Reprs(transformers.TrainerCallback):
    """Collects between two steps what every live object of the library shows of itself."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.derived: list[bytes] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.derived += self.trainer._session.run.secrets()
        for one in gc.get_objects():
            if type(one).__module__.startswith("hf_dpopt."):
                self.shown += [repr(one), str(one)]


@pytest.mark.parametrize("fixed", [None, KEY])
def test_no_repr_log_or_file_of_a_run_shows_a_key(
    fixed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reprs stand in tracebacks, crash reports and loggers of locals."""
    made: list[bytes] = []
    urandom = os.urandom

    def noted(size: int) -> bytes:
        made.append(urandom(size))
        return made[-1]

    monkeypatch.setattr(os, "urandom", noted)
    caplog.set_level(1)
    reprs = _Reprs()
    trainer = tiny.trainer(
        tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1, private_state_dir=str(tmp_path / "keys"),
        noise_mechanism="blt", optim="sgd", unsafe_fixed_noise_key=fixed, callbacks=[reprs],
    )  # fmt: skip
    reprs.trainer = trainer
    trainer.train()
    keys = [k for k in made if len(k) >= 16] if fixed is None else [bytes.fromhex(fixed)]
    assert fixed or set(keys) & set(reprs.derived), "a key of the run is among them"
    public = "".join(p.read_text(errors="ignore") for p in (tmp_path / "out" / "privacy").glob("*"))
    secret = [k for k in keys if k.hex() not in public]  # ids of chains are made of random bytes, too
    secret += reprs.derived
    assert secret and len(reprs.shown) > 100
    for text in [repr(trainer.plan), caplog.text, *reprs.shown]:
        for key in secret:
            for form in (key.hex(), repr(key)[2:-1], base64.b64encode(key).decode()):
                assert form not in text, text[max(0, text.index(form) - 300) : text.index(form) + 20]


def test_nothing_loads_a_pickle_that_runs_code() -> None:
    root = Path(__file__).resolve().parents[2]
    unsafe = re.compile(r"weights_only\s*=\s*False|\bpickle\.loads?\(|\bUnpickler\(|allow_pickle\s*=\s*True")
    for path in [*(root / "hf_dpopt").rglob("*.py"), *(root / "recipes").rglob("*.py")]:
        assert not unsafe.search(path.read_text()), path
