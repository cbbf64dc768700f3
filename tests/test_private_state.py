"""Keys are fresh, stay out of what is published, and no step's noise is drawn twice under one of them."""

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
from hf_dpopt.randomness.cipher import derive_key
from hf_dpopt.run.keys import Chain, PrivateState, continue_or_branch, default_private_dir, fixed_chain, opening_key
from hf_dpopt.run.ledger import Ledger

FIXED = "ab" * 32


@pytest.fixture
def output_dir(tmp_path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def state(tmp_path, output_dir) -> PrivateState:
    return PrivateState(tmp_path / "private" / "run", forbidden=output_dir)


@pytest.fixture
def ledger(output_dir):
    with Ledger.open(output_dir / "ledger.jsonl") as ledger:
        yield ledger


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- keys ---


def test_every_chain_has_its_own_keys(state):
    chains = [state.new_chain() for _ in range(20)]
    keys = [key for c in chains for key in (c.root, c.noise_key, c.sampling_key, c.dropout_key)]
    assert len(set(keys)) == 80 and {len(key) for key in keys} == {32}
    assert len({c.chain_id for c in chains}) == len({c.key_id for c in chains}) == 20
    assert not any(c.unsafe for c in chains)


def test_the_public_names_of_a_chain_tell_nothing_of_its_key(state):
    chain = state.new_chain()
    assert len(chain.key_id) >= 16 and chain.key_id not in chain.root.hex()
    assert repr(chain) == f"Chain(chain_id={chain.chain_id!r}, unsafe=False)"
    for key in (chain.root, chain.noise_key, chain.sampling_key, chain.dropout_key):
        assert not set(_spellings(key)) & {chain.key_id.encode(), chain.chain_id.encode()}
        assert key.hex() not in repr(chain) + repr(state)


def test_forked_processes_never_share_a_key(tmp_path, output_dir):
    """A fork copies every generator that lives in memory."""
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        child = os.fork()
        if child == 0:
            PrivateState(directory, forbidden=output_dir).new_chain()
            os._exit(0)
        os.waitpid(child, 0)
    _assert_keys_differ(directories)


def test_processes_with_one_seed_never_share_a_key(tmp_path, output_dir):
    directories = [tmp_path / "a", tmp_path / "b"]
    code = (
        "import random, sys, numpy, torch; random.seed(42); numpy.random.seed(42); torch.manual_seed(42);"
        "from hf_dpopt.run.keys import PrivateState;"
        "PrivateState(sys.argv[1], forbidden=sys.argv[2]).new_chain()"
    )
    subprocess.run([sys.executable, "-c", code, str(directories[0]), str(output_dir)], check=True)
    random_state = random.getstate()
    random.seed(42)
    np.random.seed(42)
    torch.manual_seed(42)
    PrivateState(directories[1], forbidden=output_dir).new_chain()
    random.setstate(random_state)  # the random histories below shall differ from run to run
    _assert_keys_differ(directories)


def _assert_keys_differ(directories: list[Path]) -> None:
    keys = [path.read_bytes() for directory in directories for path in (directory / "chains").glob("*.key")]
    assert len(keys) == 2 and keys[0] != keys[1] and {len(key) for key in keys} == {32}


def test_a_kept_chain_is_the_same_chain(state, tmp_path, output_dir):
    chain = state.new_chain()
    loaded = PrivateState(tmp_path / "private" / "run", forbidden=output_dir).load_chain(chain.chain_id)
    assert loaded == chain and loaded.key_id == chain.key_id and loaded.noise_key == chain.noise_key
    assert state.load_chain("0" * 16) is None


def test_a_damaged_key_is_not_used(state, tmp_path, output_dir):
    chain = state.new_chain()
    (state.directory / "chains" / f"{chain.chain_id}.key").write_bytes(b"short")
    with pytest.raises(DPConfigError, match="5 bytes instead of a key of 32.*Delete it"):
        PrivateState(state.directory, forbidden=output_dir).load_chain(chain.chain_id)


def test_forgotten_keys_are_gone_but_still_searched_for(state):
    chain = state.new_chain()
    (state.directory / "chains" / ".x.key.1.tmp").write_bytes(b"half")  # what a crash leaves
    state.forget()
    assert list((state.directory / "chains").iterdir()) == []
    assert chain.root in state.secrets()


def test_a_run_forgets_its_own_keys_only(state):
    mine, other = state.new_chain(), state.new_chain()
    (state.directory / "chains" / f".{mine.chain_id}.key.1.tmp").write_bytes(b"half")
    state.forget([mine.chain_id])
    assert [path.stem for path in (state.directory / "chains").iterdir()] == [other.chain_id]


def test_secrets_are_all_keys_also_of_earlier_processes(state, output_dir):
    chain = state.new_chain()
    secrets = PrivateState(state.directory, forbidden=output_dir).secrets()
    derived = {opening_key(chain.noise_key), derive_key(chain.root, "noise state")}
    keys = {chain.root, chain.noise_key, chain.sampling_key, chain.dropout_key, chain.journal_key}
    assert set(secrets) == keys | derived


def test_a_fixed_key_is_marked_unsafe_and_never_written(state, ledger):
    chain = continue_or_branch(ledger, state, None, unsafe_fixed_noise_key=FIXED)
    assert chain.unsafe and chain.root == bytes.fromhex(FIXED)
    assert ledger.last_chain.unsafe and "NOT PRIVATE" in ledger.last_chain.note
    assert list((state.directory / "chains").iterdir()) == []
    ledger.charge(chain.chain_id, 1)
    again = continue_or_branch(ledger, state, 1, unsafe_fixed_noise_key=FIXED)  # the point of a fixed key: same noise
    assert again.noise_key == chain.noise_key and again.chain_id != chain.chain_id
    assert not continue_or_branch(ledger, state, None).unsafe


@pytest.mark.parametrize("key", ["", "ab", "xy" * 32, "ab" * 33])
def test_a_fixed_key_has_32_bytes(key):
    with pytest.raises(DPConfigError, match="64 hexadecimal digits"):
        fixed_chain(key)


# --- the directory ---


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_has_access(tmp_path, output_dir, umask):
    old = os.umask(umask)
    try:
        (tmp_path / "p").mkdir(mode=0o755)
        (tmp_path / "p").chmod(0o755)
        state = PrivateState(tmp_path / "p" / "run", forbidden=output_dir)
        state.new_chain()
    finally:
        os.umask(old)
    assert _mode(state.directory) == _mode(state.directory / "chains") == 0o700
    (key,) = (state.directory / "chains").iterdir()
    assert _mode(key) == 0o600


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o770, 0o707])
def test_a_directory_open_to_others_is_refused(state, output_dir, mode):
    state.directory.chmod(mode)
    with pytest.raises(DPConfigError, match=f"has permissions {mode:04o}.*chmod go="):
        PrivateState(state.directory, forbidden=output_dir)


def test_a_key_open_to_others_is_refused(state, output_dir):
    chain = state.new_chain()
    (state.directory / "chains" / f"{chain.chain_id}.key").chmod(0o640)
    with pytest.raises(DPConfigError, match="has permissions 0640"):
        PrivateState(state.directory, forbidden=output_dir).load_chain(chain.chain_id)


@pytest.mark.parametrize("relative", [".", "private", "a/b/c", ".."])
def test_a_directory_that_overlaps_the_output_is_refused(output_dir, relative):
    with pytest.raises(DPConfigError, match="overlap.*Use two directories side by side"):
        PrivateState(output_dir / relative, forbidden=output_dir)
    assert list(output_dir.iterdir()) == []


def test_a_link_into_the_output_is_refused(tmp_path, output_dir):
    (output_dir / "hidden").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(output_dir / "hidden")
    with pytest.raises(DPConfigError, match="overlap"):
        PrivateState(tmp_path / "link", forbidden=output_dir)
    (tmp_path / "out2").symlink_to(tmp_path / "out")
    with pytest.raises(DPConfigError, match="overlap"):
        PrivateState(output_dir / "private", forbidden=tmp_path / "out2")


def test_a_neighbour_whose_name_begins_alike_is_allowed(output_dir):
    PrivateState(output_dir.with_name("out_private"), forbidden=output_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_somebody_else_owns_is_refused(tmp_path, output_dir):
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    PrivateState(tmp_path / "link", forbidden=output_dir)  # our own link is fine
    os.lchown(tmp_path / "link", 12345, 12345)
    with pytest.raises(DPConfigError, match="is a link owned by user 12345.*Remove the link"):
        PrivateState(tmp_path / "link", forbidden=output_dir)
    os.chown(tmp_path / "own", 12345, 12345)
    with pytest.raises(DPConfigError, match="belongs to user 12345.*private directory of your own"):
        PrivateState(tmp_path / "own", forbidden=output_dir)


def test_the_default_directory_is_one_per_output_outside_of_it(tmp_path, output_dir, monkeypatch):
    monkeypatch.setenv("HF_DPOPT_PRIVATE_DIR", str(tmp_path / "keys"))
    mine = default_private_dir(output_dir)
    assert mine.parent == tmp_path / "keys"
    (tmp_path / "link").symlink_to(output_dir)
    monkeypatch.chdir(tmp_path)
    assert mine == default_private_dir("out") == default_private_dir(tmp_path / "link" / ".." / "out")
    assert mine != default_private_dir(tmp_path / "out2")
    monkeypatch.delenv("HF_DPOPT_PRIVATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_private_dir(output_dir) == tmp_path / "state" / "hf_dpopt" / mine.name
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_private_dir(output_dir) == tmp_path / ".local" / "state" / "hf_dpopt" / mine.name
    PrivateState(default_private_dir(output_dir), forbidden=output_dir).new_chain()


class _Code:
    """A pickle of it writes a file where it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_state_of_noise_runs_no_code(tmp_path, output_dir):
    """What the key has not signed is not read: the noise is drawn again from the key."""
    state = PrivateState(tmp_path / "keys", forbidden=output_dir)
    chain = state.new_chain()
    state.save_noise(chain, {"num_done": 3})
    assert state.load_noise(chain) == {"num_done": 3}
    (file,) = (path for path in (tmp_path / "keys").rglob("*") if path.suffix == ".noise")
    torch.save({"num_done": _Code(tmp_path / "touched")}, file)
    assert state.load_noise(chain) is None and not (tmp_path / "touched").exists()


def _bytes_read() -> tuple[int, int]:
    """Bytes that this process has read from files so far, by calls and through maps; and memory of its own."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    called = dict(line.split(":") for line in Path("/proc/self/io").read_text().splitlines())["rchar"]
    return int(called) + 1024 * int(status["RssFile"].split()[0]), 1024 * int(status["RssAnon"].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts what a process reads")
def test_a_kept_state_is_read_once_and_only_where_it_is_needed(tmp_path, output_dir):
    """The scan's marker and a state of a later moment need its first bytes; a resume maps it, and copies nothing."""
    state = PrivateState(tmp_path / "keys", forbidden=output_dir)
    chain = state.new_chain()
    noise = {"num_done": 5, "draws": {name: [torch.randn(2**23)] for name in "ab"}}
    state.save_noise(chain, noise)
    size = (state.directory / "chains" / f"{chain.chain_id}.noise").stat().st_size
    assert size > 2**26
    state.secrets()  # what is imported and allocated the first time
    for look in (state.secrets, lambda: state.load_noise(chain, 4)):
        (before, _), seen, (after, _) = _bytes_read(), look(), _bytes_read()
        assert after - before < size / 50, f"{after - before} bytes of {size}"
        assert seen is None or noise["draws"]["a"][0][:16].numpy().tobytes() in seen
    (before, held), kept, (after, holds) = _bytes_read(), state.load_noise(chain, 5), _bytes_read()
    assert after - before < size / 50 and holds - held < size / 2  # the pages go when they were hashed
    assert kept["num_done"] == 5 and torch.equal(kept["draws"]["b"][0], noise["draws"]["b"][0])


def test_the_name_of_the_default_directory_does_not_change(tmp_path, monkeypatch):
    """A run finds its keys again: the name is a digest of the path."""
    monkeypatch.setenv("HF_DPOPT_PRIVATE_DIR", str(tmp_path))
    assert default_private_dir("/no/such/run") == tmp_path / "dda8a84244252573463ace56e202a88f"


# --- continuing a run ---


def _run(ledger: Ledger, chain: Chain, first: int, last: int) -> None:
    for step in range(first, last + 1):
        ledger.charge(chain.chain_id, step)


def test_a_run_goes_on_with_its_key_only_from_where_it_stopped(ledger, state):
    first = continue_or_branch(ledger, state, None)
    assert (ledger.last_chain.chain_id, ledger.last_chain.key_id) == (first.chain_id, first.key_id)
    assert (ledger.last_chain.start_step, ledger.last_chain.parent) == (0, None)
    _run(ledger, first, 1, 5)
    assert continue_or_branch(ledger, state, 5) == first and len(ledger.chains) == 1
    _run(ledger, first, 6, 7)
    branch = continue_or_branch(ledger, state, 5)
    assert branch != first and branch.key_id == ledger.last_chain.key_id != first.key_id
    assert (ledger.last_chain.start_step, ledger.last_chain.parent) == (5, first.chain_id)
    assert "resumed at step 5; step 7 of the chain before was charged" in ledger.last_chain.note
    assert continue_or_branch(ledger, state, 5) == branch  # nothing was charged to it yet
    _run(ledger, branch, 6, 6)
    assert continue_or_branch(ledger, state, 6) == branch
    assert ledger.num_charged == 8


def test_training_again_starts_a_new_chain(ledger, state):
    first = continue_or_branch(ledger, state, None)
    _run(ledger, first, 1, 5)
    second = continue_or_branch(ledger, state, None)
    assert second.noise_key != first.noise_key
    assert (ledger.last_chain.start_step, ledger.last_chain.parent) == (0, first.chain_id)


@pytest.mark.parametrize("how", ["forgotten", "exchanged"])
def test_a_run_whose_key_is_gone_gets_a_new_one(ledger, state, output_dir, how):
    first = continue_or_branch(ledger, state, None)
    _run(ledger, first, 1, 5)
    state.forget()
    if how == "exchanged":
        other = state.new_chain()
        chains = state.directory / "chains"
        (chains / f"{other.chain_id}.key").rename(chains / f"{first.chain_id}.key")
    second = continue_or_branch(ledger, PrivateState(state.directory, forbidden=output_dir), 5)
    assert second.chain_id != first.chain_id and second.noise_key != first.noise_key
    assert (ledger.last_chain.start_step, ledger.last_chain.parent) == (5, first.chain_id)
    assert "the key of the chain before is not here" in ledger.last_chain.note


@pytest.mark.parametrize("charged", [0, 4])
def test_a_checkpoint_that_the_ledger_does_not_know_is_refused(ledger, state, charged):
    if charged:
        _run(ledger, continue_or_branch(ledger, state, None), 1, charged)
    before = ledger.digest()
    with pytest.raises(DPConfigError, match=f"at step 5, .*ends at step {charged}.*Resume with the ledger of the run"):
        continue_or_branch(ledger, state, 5)
    assert ledger.digest() == before


def test_no_history_of_crashes_and_resumes_uses_noise_twice(output_dir, tmp_path):
    """Random histories: crash before or after a charged step ran, resume anywhere, start over, lose the keys."""
    path = output_dir / "ledger.jsonl"
    for history in range(15):
        path.unlink(missing_ok=True)
        executed: list[tuple[bytes, int]] = []
        checkpoints: list[int | None] = [None]
        for _ in range(6):
            state = PrivateState(tmp_path / str(history), forbidden=output_dir)
            if random.random() < 0.15:
                state.forget()
            with Ledger.open(path) as ledger:
                resume_step = random.choice([checkpoints[-1], random.choice(checkpoints)])
                chain = continue_or_branch(ledger, state, resume_step)
                for step in range((resume_step or 0) + 1, (resume_step or 0) + 1 + random.randrange(6)):
                    ledger.charge(chain.chain_id, step)
                    if random.random() < 0.1:
                        break  # killed before the step ran
                    executed.append((chain.noise_key, step))
                    if random.random() < 0.5:
                        checkpoints.append(step)
        assert len(set(executed)) == len(executed) <= Ledger.read(path).num_charged


def test_nothing_secret_is_in_the_ledger(ledger, state):
    for resume_step in (None, None, 3, 2):
        chain = continue_or_branch(ledger, state, resume_step)
        _run(ledger, chain, (ledger.last_step(chain.chain_id) or ledger.last_chain.start_step) + 1, 3)
    content = ledger.path.read_bytes()
    assert len(ledger.chains) == 3 and len(state.secrets()) == 3 * 7
    assert not [s for key in state.secrets() for s in _spellings(key) if s in content]
    assert any(s in content + chain.root.hex().encode() for s in _spellings(chain.root))  # the search can find


def _spellings(key: bytes) -> list[bytes]:
    plain, url = base64.b64encode(key).rstrip(b"="), base64.urlsafe_b64encode(key).rstrip(b"=")
    # also a piece of 16 hexadecimal digits: a public name must not be cut out of a key
    return [key, key.hex().encode(), key.hex()[:16].encode(), key.hex()[-16:].encode(), plain, url]


def test_a_birth_that_was_settled_before_is_settled(state, tmp_path):
    """A run that is killed right after it settles one settles it again."""
    ledger = tmp_path / "ledger.jsonl"
    chain = state.new_chain(ledger)
    assert state.births(ledger) == [chain.chain_id]
    for _ in range(2):
        state.settle_birth(chain.chain_id, ledger)
        assert state.births(ledger) == []


def test_a_chain_keeps_the_records_it_began_with(state):
    chain = state.new_chain()
    assert state.data_mark(chain) is None
    state.check_data(chain, "one order")
    assert state.data_mark(chain) == "one order"
    state.check_data(chain, "one order")
    for is_proven in (None, False):
        with pytest.raises(DPConfigError, match="not those that this run began with"):
            state.check_data(chain, "another order", is_proven=is_proven)
    state.check_data(chain, "another order", is_proven=True)  # a signed checkpoint counts more than the note
    assert state.data_mark(chain) == "another order"


def test_a_damaged_state_of_noise_is_no_error_and_no_state(state):
    """Bytes changed anywhere, the pickle and the directory of the archive among them; what is kept must not be used."""
    chain, rng = state.new_chain(), random.Random(0)
    state.save_noise(chain, {"num_done": 3, "shapes": {"w": (4,)}, "bound_to": {"a": 1}, "ahead": torch.ones(4)})
    (path,) = state.directory.rglob("*.noise")
    whole = path.read_bytes()
    assert state.load_noise(chain, 3)["num_done"] == 3 and state.load_noise(chain, 2) is None
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] ^= rng.randint(1, 255)
        path.write_bytes(content[: rng.choice([len(content), rng.randrange(len(content))])])
        assert state.load_noise(chain, 3) is None
