"""Every planted secret is found that the documents say is found, and each plant alone is what is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_dpopt.report.release_scan import ReleaseScan, scan_for_secrets
from tests.report import plants

EVERY = plants.PLANTS + plants.OWN


def test_the_list_is_as_long_as_it_says() -> None:
    assert len(plants.PLANTS) == 27 and sum(one.promised for one in plants.OWN) >= 20
    assert len({one.name for one in EVERY}) == len(EVERY)


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
def test_a_planted_secret(tmp_path: Path, one: plants.Plant) -> None:
    assert plants.is_found(one, tmp_path) == one.promised


@pytest.mark.parametrize("one", [one for one in EVERY if "key" in one.name and one.promised], ids=lambda one: one.name)
def test_another_run_s_key_is_none_of_ours(tmp_path: Path, one: plants.Plant) -> None:
    """So it is the secret that is found, not the container. Credentials have no owner, and are left out."""
    if not any(word in one.name for word in ("AWS", "OpenAI", "private")):
        one.write(tmp_path, plants.Secrets())
        assert scan_for_secrets(tmp_path, plants.Secrets().known()) == []


def test_no_finding_tells_the_secret(tmp_path: Path) -> None:
    secrets = plants.Secrets()
    for number, one in enumerate(EVERY):
        folder = tmp_path / str(number)
        folder.mkdir()
        one.write(folder, secrets)
    told = "\n".join(map(str, scan_for_secrets(tmp_path, secrets.known())))
    assert told and secrets.root.hex() not in told and "AKIA" not in told and "Keller" not in told


def test_the_scan_of_a_save_finds_a_noise_buffer_in_a_large_file(tmp_path: Path, monkeypatch) -> None:
    """At a save, large tensors of floats are looked at by their ends: a buffer by its beginning, other keys anywhere."""
    monkeypatch.setattr("hf_dpopt.report.release_scan.WHOLE", 10_000)
    monkeypatch.setattr("hf_dpopt.report.release_scan.EDGE", 256)
    for name in ("noise buffer in optimizer.pt", "noise buffer in safetensors", "root key, bytes in optimizer.pt",
                 "root key, list in optimizer.pt", "noise key, int64 tensor in optimizer.pt"):  # fmt: skip
        (one,) = (one for one in plants.PLANTS if one.name == name)
        folder, secrets = tmp_path / name, plants.Secrets()
        folder.mkdir()
        one.write(folder, secrets)
        assert max(file.stat().st_size for file in folder.iterdir()) > 10_000
        assert ReleaseScan(secrets.known(), is_thorough=False).findings(folder), name


def test_a_file_that_was_clean_is_not_searched_again_unless_it_changes(tmp_path: Path) -> None:
    secrets = plants.Secrets()
    scan = ReleaseScan(secrets.known())
    (tmp_path / "a.txt").write_text("nothing here")
    assert scan.findings(tmp_path) == [] == scan.findings(tmp_path)
    (tmp_path / "a.txt").write_text(f"nothing here {secrets.root.hex()}")
    assert len(scan.findings(tmp_path)) == 1 == len(scan.findings(tmp_path)), "what was found once is found again"
