"""Keys are fresh, stay out of what is published, and only their owner can read them."""

from __future__ import annotations

import base64
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.run.keys import (
    Chain,
    Keys,
    default_private_dir,
    fixed_chain,
    new_chain,
    opening_key,
    private_dir,
    private_folder,
    read_state,
    secrets_in,
    write_state,
)
from tests.helpers import tiny


@pytest.fixture
def output_dir(tmp_path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def keys(tmp_path, output_dir) -> Keys:
    return Keys(private_dir(tmp_path / "private", output_dir) / "runs" / ("0" * 16))


def _added(keys: Keys) -> Chain:
    chain = new_chain()
    keys.add(chain)
    return chain


def spellings(key: bytes) -> list[bytes]:
    plain, url = base64.b64encode(key).rstrip(b"="), base64.urlsafe_b64encode(key).rstrip(b"=")
    # also a piece of 16 hexadecimal digits: a public name must not be cut out of a key
    return [key, key.hex().encode(), key.hex()[:16].encode(), key.hex()[-16:].encode(), plain, url]


# --- keys ---


def test_every_chain_has_its_own_keys():
    chains = [new_chain() for _ in range(20)]
    drawn = [key for c in chains for key in c.secrets()]
    assert len(set(drawn)) == 100 and {len(key) for key in drawn} == {32}
    assert len({c.chain_id for c in chains}) == len({c.key_id for c in chains}) == 20
    assert not any(c.unsafe for c in chains)


def test_the_public_names_of_a_chain_tell_nothing_of_its_key(keys):
    chain = _added(keys)
    assert len(chain.key_id) >= 16 and chain.key_id not in chain.root.hex()
    assert repr(chain) == f"Chain(chain_id={chain.chain_id!r}, unsafe=False)"
    for key in chain.secrets():
        assert not set(spellings(key)) & {chain.key_id.encode(), chain.chain_id.encode()}
        assert key.hex() not in repr(chain) + repr(keys)


def test_forked_processes_never_share_a_key(tmp_path):
    """A fork copies every generator that lives in memory."""
    for name in "ab":
        child = os.fork()
        if child == 0:
            Keys(tmp_path / name).add(new_chain())
            os._exit(0)
        os.waitpid(child, 0)
    _assert_keys_differ(tmp_path)


def test_processes_with_one_seed_never_share_a_key(tmp_path):
    code = (
        "import random, sys, pathlib, numpy, torch; random.seed(42); numpy.random.seed(42); torch.manual_seed(42);"
        "from hf_dpopt.run.keys import Keys, new_chain;"
        "Keys(pathlib.Path(sys.argv[1])).add(new_chain())"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=True)
    random_state = random.getstate()
    random.seed(42)
    np.random.seed(42)
    torch.manual_seed(42)
    Keys(tmp_path / "b").add(new_chain())
    random.setstate(random_state)
    _assert_keys_differ(tmp_path)


def _assert_keys_differ(folder: Path) -> None:
    drawn = [path.read_bytes() for path in folder.rglob("*.key")]
    assert len(drawn) == 2 and drawn[0] != drawn[1] and {len(key) for key in drawn} == {32}


def test_a_kept_chain_is_the_same_chain(keys):
    chain = _added(keys)
    loaded = Keys(keys.folder).load(chain.chain_id, chain.key_id)
    assert loaded == chain and loaded.key_id == chain.key_id and loaded.noise_key == chain.noise_key
    assert keys.load("0" * 16) is None and keys.load(chain.chain_id, "0" * 32) is None


def test_a_damaged_key_is_not_used(keys):
    chain = _added(keys)
    (keys.folder / f"{chain.chain_id}.key").write_bytes(b"short")
    with pytest.raises(DPConfigError, match="5 bytes instead of a key of 32.*Delete it"):
        Keys(keys.folder).load(chain.chain_id)


def test_destroyed_keys_are_gone_but_still_searched_for(keys):
    mine, other = _added(keys), _added(keys)
    (keys.folder / f".{mine.chain_id}.key.00000000.tmp").write_bytes(b"half")  # what a crash leaves
    keys.destroy(mine.chain_id)
    assert [path.name for path in keys.folder.iterdir()] == [f"{other.chain_id}.key"]
    keys.destroy()
    assert list(keys.folder.iterdir()) == [] and {mine.root, other.root} <= set(keys.secrets())


def test_secrets_are_the_keys_of_all_runs_that_are_kept(keys):
    chain = _added(keys)
    wanted = {chain.root, chain.noise_key, chain.sampling_key, chain.dropout_key, opening_key(chain.noise_key)}
    assert set(secrets_in(keys.folder.parent.parent)) == wanted


@pytest.mark.parametrize("key", ["", "ab", "xy" * 32, "ab" * 33])
def test_a_fixed_key_has_32_bytes(key):
    with pytest.raises(DPConfigError, match="64 hexadecimal digits"):
        fixed_chain(key)


# --- the private folder ---


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_has_access(tmp_path, output_dir, umask):
    old = os.umask(umask)
    try:
        folder = private_dir(tmp_path / "p" / "run", output_dir)
        keys = Keys(folder / "runs" / ("0" * 16))
        keys.add(new_chain())
        work = private_folder(folder, output_dir)
    finally:
        os.umask(old)
    for made in (folder, folder / "runs", keys.folder, work):
        assert stat.S_IMODE(made.stat().st_mode) & 0o077 == 0
    (key,) = keys.folder.iterdir()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o770, 0o707])
def test_a_folder_open_to_others_is_refused(tmp_path, output_dir, mode):
    private_dir(tmp_path / "private", output_dir).chmod(mode)
    with pytest.raises(DPConfigError, match=f"has permissions {mode:04o}.*chmod go="):
        private_dir(tmp_path / "private", output_dir)


def test_a_key_open_to_others_is_refused(keys):
    chain = _added(keys)
    (keys.folder / f"{chain.chain_id}.key").chmod(0o640)
    with pytest.raises(DPConfigError, match="has permissions 0640"):
        Keys(keys.folder).load(chain.chain_id)


@pytest.mark.parametrize("relative", [".", "private", "a/b/c", ".."])
def test_a_folder_that_overlaps_the_output_is_refused(output_dir, relative):
    with pytest.raises(DPConfigError, match="overlap.*Use two folders side by side"):
        private_dir(output_dir / relative, output_dir)
    assert list(output_dir.iterdir()) == []


def test_a_link_into_the_output_is_refused(tmp_path, output_dir):
    (output_dir / "hidden").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(output_dir / "hidden")
    with pytest.raises(DPConfigError, match="overlap"):
        private_dir(tmp_path / "link", output_dir)
    (tmp_path / "out2").symlink_to(output_dir)
    with pytest.raises(DPConfigError, match="overlap"):
        private_dir(output_dir / "private", tmp_path / "out2")


def test_a_neighbour_whose_name_begins_alike_is_allowed(output_dir):
    private_dir(output_dir.with_name("out_private"), output_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_somebody_else_owns_is_refused(tmp_path, output_dir):
    (tmp_path / "own").mkdir(mode=0o700)
    os.chown(tmp_path / "own", 12345, 12345)
    with pytest.raises(DPConfigError, match="belongs to user 12345.*private folder of your own"):
        private_dir(tmp_path / "own", output_dir)


def test_the_default_folder_is_one_per_user(tmp_path, output_dir, monkeypatch):
    monkeypatch.setenv("HF_DPOPT_PRIVATE_DIR", str(tmp_path / "keys"))
    assert default_private_dir() == tmp_path / "keys"
    monkeypatch.delenv("HF_DPOPT_PRIVATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_private_dir() == tmp_path / "state" / "hf_dpopt"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert private_dir(None, output_dir) == tmp_path / ".local" / "state" / "hf_dpopt"


def test_what_is_private_and_no_key_has_a_folder_for_each_output(tmp_path, output_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(output_dir)
    mine = private_folder(tmp_path / "p", output_dir)
    assert mine == private_folder(tmp_path / "p", "out") == private_folder(tmp_path / "p", "link/../out")
    assert mine != private_folder(tmp_path / "p", "out2") and mine.is_dir()


# --- states in files ---


def test_a_state_runs_no_code(tmp_path):
    path = tmp_path / "state"
    write_state(path, {"step": 3})
    assert read_state(path) == {"step": 3}
    torch.save({"step": tiny.Bomb(tmp_path / "touched")}, path)
    assert read_state(path) is None and not (tmp_path / "touched").exists()


def test_a_damaged_state_is_no_error_and_no_state(tmp_path):
    """Bytes changed anywhere, the pickle and the directory of the archive among them; what is kept must not be used."""
    path, rng = tmp_path / "state", random.Random(0)
    write_state(path, {"step": 3, "shapes": {"w": (4,)}, "weights": torch.ones(4)})
    whole = path.read_bytes()
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] ^= rng.randint(1, 255)
        path.write_bytes(content[: rng.choice([len(content), rng.randrange(len(content))])])
        assert read_state(path) is None
