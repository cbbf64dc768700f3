"""D7: whatever must not be published is found in every form, across chunk borders, and a clean folder passes."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import TrainerState, TrainingArguments

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import SECRET_LOG_KEYS
from hf_dpopt.report import Finding, add_privacy_section, refuse_release, scan_for_secrets, write_report
from hf_dpopt.report.scan import needles, sources
from tests import tiny
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
    "list": lambda key: json.dumps(list(key)).encode(),
    "compact list": lambda key: json.dumps({"key": list(key)}, separators=(",", ":")).encode(),
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
    secret = os.urandom(needles.MIN_SECRET_BYTES)
    (tmp_path / "weights").write_bytes(bytes(100) + ENCODINGS[name](secret) + bytes(100))
    assert len(scan_for_secrets(tmp_path, [secret])) == 1


@pytest.mark.parametrize("name", ["raw", "hex", "base64 at offset 2", "list"])
@pytest.mark.parametrize("shift", range(-160, 1, 13))
def test_a_key_across_the_border_of_two_chunks_is_found(
    tmp_path: Path, key: bytes, name: str, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "WINDOW", 1000)
    (tmp_path / "big").write_bytes(b"\0" * (3000 + shift) + ENCODINGS[name](key) + b"\0" * 500)
    assert [finding.path for finding in scan_for_secrets(tmp_path, [key])] == ["big"]


def test_links_inside_are_read_and_links_out_are_a_finding(tmp_path: Path, key: bytes) -> None:
    """Uploading follows links: one that leads out is refused unread, and one that leads back does not go round."""
    outside, folder = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    (folder / "real").mkdir(parents=True)
    (outside / "notes.txt").write_text(key.hex())
    (folder / "real" / "mine.txt").write_text(key.hex())
    (folder / "linked").symlink_to(folder / "real")
    (folder / "loop").symlink_to(folder)
    (folder / "out").symlink_to(outside)
    (folder / "file").symlink_to(outside / "notes.txt")
    (folder / "nowhere").symlink_to(folder / "gone")
    found = {finding.path: finding.what for finding in scan_for_secrets(folder, [key])}
    assert set(found) in ({"linked/mine.txt", *LINKS}, {"real/mine.txt", *LINKS})
    assert "not followed" in found["out"] and "not followed" in found["file"] and "ENOENT" in found["nowhere"]


LINKS = {"out", "file", "nowhere"}


@pytest.mark.parametrize("name", ["rng_state.pth", "rng_state_1.pth", "noise.key", "noise_buffer.pt", "x.dp_private"])
@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_names_of_private_state_are_found(clean: Path, name: str, make: Callable[[Path], None]) -> None:
    make(clean / "checkpoint-2" / name)
    (finding,) = scan_for_secrets(clean)
    assert finding.path == f"checkpoint-2/{name}" and "private state" in finding.what


def test_other_names_can_be_forbidden(clean: Path) -> None:
    (finding,) = scan_for_secrets(clean, forbidden_names=["optimizer.*"])
    assert finding.path == "checkpoint-2/optimizer.pt"


@pytest.mark.parametrize("file", ["all_results.json", "train_results.json", "checkpoint-2/trainer_state.json"])
@pytest.mark.parametrize("name", [*sorted(SECRET_LOG_KEYS), "unprivatized_clip_fraction"])
def test_un_noised_numbers_are_found_in_results_and_state(clean: Path, file: str, name: str) -> None:
    path = clean / file
    content = json.loads(path.read_text()) if path.exists() else {}
    entry = {name: 0.125, "grad_norm": 2.0}
    content = content | ({"log_history": [{}, entry]} if "log_history" in content else entry)
    path.write_text(json.dumps(content))
    (finding,) = scan_for_secrets(clean)
    assert finding.path == file and f"{name}=0.125" in finding.what
    path.write_text(path.read_text().replace("0.125", "0"))
    assert scan_for_secrets(clean) == [], "0 is the placeholder of a value that was not released"


def test_nan_losses_are_found(clean: Path) -> None:
    """That a loss was not a number is a fact about the data."""
    (clean / "all_results.json").write_text('{"train_loss": NaN}')
    (finding,) = scan_for_secrets(clean)
    assert "train_loss=nan" in finding.what


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("as_zip", [True, False])
def test_a_token_in_the_training_arguments_is_found(clean: Path, protocol: int, as_zip: bool) -> None:
    arguments = TrainingArguments(output_dir=str(clean), report_to=[], hub_token="hf_" + "x" * 30)
    path = clean / "training_args.bin"
    torch.save(arguments, path, pickle_protocol=protocol, _use_new_zipfile_serialization=as_zip)
    (finding,) = scan_for_secrets(clean)
    assert finding.path == "training_args.bin" and "hub_token" in finding.what and "xxx" not in str(finding)
    arguments.hub_token = None
    torch.save(arguments, path, pickle_protocol=protocol, _use_new_zipfile_serialization=as_zip)
    assert scan_for_secrets(clean) == []


def test_a_token_that_stands_elsewhere_in_the_pickle_is_found(clean: Path) -> None:
    """The second time, the pickle only refers to the first; and the field's own name may be such a reference."""
    token = "hf_" + "x" * 30
    torch.save([token, "hub_token", None, {"hub_token": token}], clean / "training_args.bin")
    (finding,) = scan_for_secrets(clean)
    assert "hub_token" in finding.what


class Bomb:
    """Leaves a file behind when somebody unpickles it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(clean: Path) -> None:
    (clean / "training_args.bin").write_bytes(pickle.dumps(Bomb(clean / "exploded.txt")))
    scan_for_secrets(clean)
    assert not (clean / "exploded.txt").exists()


@pytest.mark.parametrize(("file", "content"), [("all_results.json", b"{"), ("training_args.bin", b"\x80garbage")])
def test_what_cannot_be_read_is_not_taken_for_clean(clean: Path, file: str, content: bytes) -> None:
    (clean / file).write_bytes(content)
    (finding,) = scan_for_secrets(clean)
    assert finding.path == file and "not checked" in finding.what


def event(tag: str, value: float) -> bytes:
    """A scalar as in the protobuf of a TensorBoard event: field 1 the tag, field 2 the float."""
    return b"\x0a" + bytes([len(tag)]) + tag.encode() + b"\x15" + struct.pack("<f", value)


def test_losses_in_tensorboard_files_are_found(clean: Path) -> None:
    events = clean / "runs" / "events.out.tfevents.1.host"
    events.parent.mkdir()
    events.write_bytes(
        os.urandom(20) + event("train/grad_norm", 2.5) + event("eval/loss", 0.5) + event("train/total_flos", 0)
    )
    assert scan_for_secrets(clean) == []
    events.write_bytes(events.read_bytes() + event("train/loss", 0.75))
    (finding,) = scan_for_secrets(clean)
    assert "train/loss" in finding.what


def test_losses_in_the_model_card_are_found(clean: Path) -> None:
    (clean / "README.md").write_text("| Training Loss | Epoch |\n|---|---|\n| 0.693 | 1 |\n")
    (finding,) = scan_for_secrets(clean)
    assert finding.path == "README.md"


def test_what_a_stock_script_writes_after_training_can_be_released(tmp_path: Path) -> None:
    """The end of run_glue.py: metrics and state lie beside the model, and everything is saved or pushed once more."""
    trainer = tiny.trainer(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1)
    result = trainer.train()
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    trainer.save_model()
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert any("train_runtime" in entry for entry in state["log_history"])  # the values of the end are in there
    assert scan_for_secrets(tmp_path / "out") == []


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
