"""D7: whatever must not be published is found in every form, across chunk borders, and a clean folder passes."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import TrainerState, TrainingArguments

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import SECRET_LOG_KEYS
from hf_dpopt.report import release_scan
from hf_dpopt.report.model_card import add_privacy_section
from hf_dpopt.report.release_scan import Finding, refuse_release, scan_for_secrets
from hf_dpopt.report.report import write_report
from tests.helpers import tiny
from tests.report.conftest import MakeFacts


@pytest.fixture
def key() -> bytes:
    """Fresh in every run. That a clean folder holds it by chance has a probability below 2**-200."""
    return os.urandom(32)


@pytest.fixture
def clean(tmp_path: Path, make_facts: MakeFacts) -> Path:
    """What a private run leaves: model, optimizer, state, arguments, report, card."""
    folder = tmp_path / "out"
    checkpoint = folder / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    torch.save({"weight": torch.randn(64, 64)}, checkpoint / "optimizer.pt")
    (folder / "model.safetensors").write_bytes(os.urandom(50_000))
    torch.save(TrainingArguments(output_dir=str(folder), report_to=[]), folder / "training_args.bin")
    state = TrainerState(
        global_step=2, log_history=[{"grad_norm": 3.25, "epsilon": 1.0, "learning_rate": 1e-3, "step": 1}]
    )
    state.save_to_json(str(checkpoint / "trainer_state.json"))
    (folder / "all_results.json").write_text(
        json.dumps({"eval_loss": 0.5, "eval_accuracy": 0.9, "train_runtime": 3.0})
    )
    write_report(folder, make_facts())
    card = "# Card\n\n| Training Loss | Epoch |\n|---|---|\n| No log | 1 |\n"
    (folder / "README.md").write_text(add_privacy_section(card, make_facts()))
    return folder


def test_a_clean_folder_passes(clean: Path, key: bytes) -> None:
    findings = scan_for_secrets(clean, [key])
    assert findings == []
    refuse_release(findings)


ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "raw": lambda key: key,
    "hex": lambda key: key.hex().encode(),
    "HEX": lambda key: key.hex().upper().encode(),
    "base64": base64.b64encode,
    "urlsafe base64": base64.urlsafe_b64encode,
    "base64 at offset 1": lambda key: base64.b64encode(b"a" + key + b"tail"),
    "base64 at offset 2": lambda key: base64.b64encode(b"ab" + key + b"x"),
    "pickle": lambda key: pickle.dumps({"key": key}),
    "torch": lambda key: _torch_bytes(key),
}


def _torch_bytes(key: bytes) -> bytes:
    buffer = io.BytesIO()
    torch.save(torch.frombuffer(bytearray(key), dtype=torch.uint8), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_key_is_found_in_every_encoding(clean: Path, key: bytes, name: str) -> None:
    path = clean / "checkpoint-2" / "extra.bin"
    path.write_bytes(os.urandom(1000) + ENCODINGS[name](key) + os.urandom(1000))
    (finding,) = scan_for_secrets(clean, [os.urandom(32), key])
    assert finding.path == "checkpoint-2/extra.bin" and "a secret key" in finding.what
    assert key.hex() not in str(finding), "the finding must not tell the secret"
    path.write_bytes(os.urandom(1000) + ENCODINGS[name](os.urandom(32)))
    assert scan_for_secrets(clean, [key]) == []


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_shortest_secret_allowed_is_found_too(tmp_path: Path, name: str) -> None:
    secret = os.urandom(release_scan.MIN_SECRET_BYTES)
    (tmp_path / "weights").write_bytes(bytes(100) + ENCODINGS[name](secret) + bytes(100))
    assert len(scan_for_secrets(tmp_path, [secret])) == 1


@pytest.mark.parametrize("name", ["raw", "hex", "base64 at offset 2"])
@pytest.mark.parametrize("shift", range(-160, 1, 13))
def test_a_key_across_the_border_of_two_chunks_is_found(
    tmp_path: Path, key: bytes, name: str, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_scan, "WINDOW", 1000)
    (tmp_path / "big").write_bytes(b"\0" * (3000 + shift) + ENCODINGS[name](key) + b"\0" * 500)
    assert [finding.path for finding in scan_for_secrets(tmp_path, [key])] == ["big"]


def test_links_are_findings_and_not_followed(tmp_path: Path, key: bytes) -> None:
    """An upload follows links, also into folders that are not scanned."""
    outside, folder = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    (folder / "real").mkdir(parents=True)
    (outside / "notes.txt").write_text(key.hex())
    for name, target in {
        "linked": folder / "real",
        "loop": folder,
        "file": outside / "notes.txt",
        "no": "gone",
    }.items():
        (folder / name).symlink_to(target)
    found = scan_for_secrets(folder, [key])
    assert [finding.path for finding in found] == ["file", "linked", "loop", "no"]
    assert {finding.kind for finding in found} == {release_scan.LINK}


@pytest.mark.parametrize("name", ["rng_state.pth", "rng_state_1.pth", "noise.key"])
@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_names_of_private_state_are_found(clean: Path, name: str, make: Callable[[Path], None]) -> None:
    make(clean / "checkpoint-2" / name)
    (finding,) = scan_for_secrets(clean)
    assert finding.path == f"checkpoint-2/{name}" and "private state" in finding.what


@pytest.mark.parametrize("file", ["all_results.json", "train_results.json", "checkpoint-2/trainer_state.json"])
@pytest.mark.parametrize("name", [*sorted(SECRET_LOG_KEYS), "unprivatized_clip_fraction"])
def test_un_noised_numbers_are_found_in_results_and_state(clean: Path, file: str, name: str) -> None:
    path = clean / file
    content = json.loads(path.read_text()) if path.exists() else {}
    entry = {name: 0.125, "grad_norm": 2.0}
    content = content | ({"log_history": [{}, entry]} if "log_history" in content else entry)
    path.write_text(json.dumps(content))
    (finding,) = scan_for_secrets(clean)
    assert finding.path == file and finding.what == f"un-noised value of {name}"
    path.write_text(path.read_text().replace("0.125", "0"))
    assert scan_for_secrets(clean) == [], "0 is the placeholder of a value that was not released"


def test_nan_losses_are_found(clean: Path) -> None:
    """That a loss was not a number is a fact about the data."""
    (clean / "all_results.json").write_text('{"train_loss": NaN}')
    (finding,) = scan_for_secrets(clean)
    assert finding.what == "un-noised value of train_loss"


def test_nothing_is_unpickled(clean: Path) -> None:
    (clean / "training_args.bin").write_bytes(pickle.dumps(tiny.Bomb(clean / "exploded.txt")))
    scan_for_secrets(clean)
    assert not (clean / "exploded.txt").exists()


@pytest.mark.parametrize(("file", "content"), [("all_results.json", b"{"), ("checkpoint-2/trainer_state.json", b"[")])
def test_what_cannot_be_read_is_not_taken_for_clean(clean: Path, file: str, content: bytes) -> None:
    (clean / file).write_bytes(content)
    (finding,) = scan_for_secrets(clean)
    assert finding.path == file and "not checked" in finding.what


def test_what_a_stock_script_writes_after_training_can_be_released(tmp_path: Path) -> None:
    """The end of run_glue.py: metrics and state lie beside the model, and everything is saved or pushed once more."""
    trainer = tiny.trainer(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1)
    result = trainer.train()
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    trainer.save_model()
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert any("train_runtime" in entry for entry in state["log_history"])  # the values of the end are in there
    assert scan_for_secrets(tmp_path / "out", allowed=release_scan.ALLOWED_NAMES) == []


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr("transformers.Trainer.push_to_hub", lambda self, *a, **k: names.append(self.args.output_dir))
    return names


FOREIGN = ("samples.txt", ".env", "history.csv", "backup/model.safetensors", "checkpoint-1/cache.pkl", "modeling_x.py")


@pytest.mark.parametrize("name", FOREIGN)
def test_a_push_refuses_a_file_that_no_private_run_writes(tmp_path: Path, pushed: list[str], name: str) -> None:
    trainer = tiny.trainer(tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.push_to_hub()
    assert len(pushed) == 1
    (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / name).write_text("what a user put there")
    trainer.save_model()
    with pytest.raises(DPConfigError, match=f"{name}: no file that a private run writes .move it out"):
        trainer.push_to_hub()
    assert len(pushed) == 1


def test_a_push_takes_the_files_of_a_tokenizer_and_of_the_model_s_code(tmp_path: Path, pushed: list[str]) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "vocab.txt").write_text("a\nb\n")
            (Path(folder) / "parts").mkdir(exist_ok=True)
            (Path(folder) / "parts" / "merges.txt").write_text("a b\n")

    trainer = tiny.trainer(tmp_path / "out", max_steps=1)
    trainer.train()
    for name in ("vocab.txt", "parts/merges.txt"):
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_text("a")
    with pytest.raises(DPConfigError, match=r"2 finding\(s\)"):
        trainer.push_to_hub()
    trainer.processing_class = Tokenizer()
    trainer.push_to_hub()
    assert pushed
    (tmp_path / "out" / "parts" / "merges.txt").write_bytes(trainer._session.run.secrets()[0])
    with pytest.raises(DPConfigError, match="merges.txt: a secret key, as raw bytes"):
        trainer.push_to_hub()


def test_a_release_with_findings_is_refused_with_all_of_them() -> None:
    findings = [
        Finding("a/b.pt", "a secret key, as raw bytes", "delete the file"),
        Finding("c.json", "loss", "remove it"),
    ]
    with pytest.raises(DPConfigError, match=r"2 finding\(s\).*a/b.pt.*delete the file.*c.json.*remove it.*Fix each"):
        refuse_release(findings)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DPConfigError, match="Give the output_dir of a run"):
        scan_for_secrets(tmp_path / "missing")
    with pytest.raises(DPConfigError, match="Use secrets of 16 bytes or more"):
        scan_for_secrets(tmp_path, [b"short"])
