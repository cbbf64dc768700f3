"""The secrets of a run: one key per chain of steps, from the operating system, outside everything that is published.

Whoever has a key, or the buffers of correlated noise, can recompute the noise and subtract it. So both live in a
directory of their own (mode 0700, never inside ``output_dir``) and only for as long as a run may have to be continued.
Optimizer steps that follow each other under one key are a *chain*; `continue_or_branch` decides when a resumed run may
stay on its chain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hf_dpopt.common.checks import check_noise_key
from hf_dpopt.common.durable import fsync_directory, has_directory_fsync, read_whole, write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.randomness.cipher import KEY_BYTES, derive_key
from hf_dpopt.run.kept_noise import noise_state_key, read_noise, write_noise
from hf_dpopt.run.key_memory import KeyMemory, is_own
from hf_dpopt.run.ledger import ChainRecord, Ledger
from hf_dpopt.run.noise_marker import noise_marker
from hf_dpopt.run.seal import FILE as SEAL_FILE
from hf_dpopt.run.seal import Seal


@dataclasses.dataclass(frozen=True)
class Chain:
    """A chain of steps and its root key; prints only what is public.

    Attributes:
        chain_id: public name.
        root: 32 secret bytes.
        unsafe: the key was fixed by the user, so nothing made with it is private.
    """

    chain_id: str
    root: bytes = dataclasses.field(repr=False)
    unsafe: bool = False

    def __post_init__(self) -> None:
        assert len(self.root) == KEY_BYTES

    @functools.cached_property
    def key_id(self) -> str:
        """Public commitment to the key, 32 hexadecimal digits: tells two keys apart and reveals neither."""
        return hashlib.blake2b(key=self.root, digest_size=16, person=b"hf_dpopt key id").hexdigest()

    # The three streams never share a word: one learned or badly used tells nothing about the others.

    @functools.cached_property
    def noise_key(self) -> bytes:
        """Key of the noise source; secret."""
        return derive_key(self.root, "noise")

    @functools.cached_property
    def sampling_key(self) -> bytes:
        """Key of the sampler's draws; secret, for amplification by sampling holds against who does not know them."""
        return derive_key(self.root, "sampling")

    @functools.cached_property
    def dropout_key(self) -> bytes:
        """Key of dropout and augmentation; secret."""
        return derive_key(self.root, "dropout")

    @functools.cached_property
    def journal_key(self) -> bytes:
        """Key that seals the journal of releases; it hides nothing, but nobody without it can write an entry."""
        return derive_key(self.root, "journal")

    def secrets(self) -> list[bytes]:
        """All keys that are made of the root, and itself."""
        keys = [self.root, self.noise_key, self.sampling_key, self.dropout_key, self.journal_key]
        return [*keys, opening_key(self.noise_key), noise_state_key(self.root)]


def fixed_chain(key_hex: str) -> Chain:
    """A chain under a key that the user chose, marked unsafe; for tests of equivalence, never for a private run.

    Raises:
        DPConfigError: if ``key_hex`` is not 64 hexadecimal digits.
    """
    check_noise_key(key_hex)
    return Chain(f"unsafe{secrets.token_hex(8)}", bytes.fromhex(key_hex), unsafe=True)


def default_private_dir(output_dir: str | os.PathLike[str]) -> Path:
    """Folder of the keys of the runs in ``output_dir``: one per real path, in the user's state directory.

    Below ``$HF_DPOPT_PRIVATE_DIR`` if it is set, else ``$XDG_STATE_HOME/hf_dpopt``, else ``~/.local/state/hf_dpopt``.
    """
    real = os.path.realpath(Path(output_dir).expanduser())
    name = hashlib.blake2b(os.fsencode(real), digest_size=16).hexdigest()
    if base := os.environ.get("HF_DPOPT_PRIVATE_DIR"):
        return Path(base).expanduser() / name
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state_home) / "hf_dpopt" / name


def private_folder(given: str | os.PathLike[str] | None, output_dir: str | os.PathLike[str]) -> Path:
    """Folder of the secrets of a run, made if it is not there; for what is private and no key.

    Raises:
        DPConfigError: as `PrivateState`.
    """
    return PrivateState(given or default_private_dir(output_dir), forbidden=output_dir).directory


def opening_key(noise_key: bytes) -> bytes:
    """Key of the noise of an opening query, which no other noise of the chain has."""
    return derive_key(noise_key, "opening query")


Shard = tuple[int, int]  # number of the rank, 0-based, and how many there are


class PrivateState:
    """The secrets of one ``output_dir``: ``chains/<chain_id>.key``, and ``.noise``, the state of its noise stream.

    A file ``<chain_id>.born.<digest of the ledger's path>`` lies beside a key until the ledger knows its chain. In
    ``used`` is how far each key was used, see `hf_dpopt.run.key_memory`.

    Formal guarantee: nobody but the owner (and root) can list or read it, and it is not inside ``forbidden``, so
    saving or pushing that directory publishes no key. A key is on the disk before its chain is returned.

    Args:
        directory: created with mode 0700 if it does not exist; see `default_private_dir`.
        forbidden: the run's ``output_dir``; neither may lie inside the other.
        is_read: whether the secrets are looked at alone: no folder is made then.

    Raises:
        DPConfigError: if the directories overlap, if others have access to ``directory`` or own it, or if a key there
            could be lost in a crash.
    """

    def __init__(self, directory: str | os.PathLike[str], *, forbidden: str | os.PathLike[str], is_read: bool = False):
        self.directory = Path(directory).expanduser()
        _refuse_overlap(self.directory, forbidden)
        _refuse_foreign_link(self.directory)
        self._chains_dir = self.directory / "chains"
        for folder in (self.directory, self._chains_dir):
            if not is_read:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.exists():
                _refuse_shared(folder)
        if not is_read and not has_directory_fsync(self._chains_dir):
            raise DPConfigError(
                f"The filesystem of {self.directory} cannot make a new file durable: a power cut could lose how far "
                "a noise key was used. Give --private_state_dir a folder on a local disk; output_dir may stay."
            )
        self._known: dict[str, Chain] = {}

    def __repr__(self) -> str:
        return f"PrivateState({str(self.directory)!r})"

    def new_chain(self, ledger: Path | None = None) -> Chain:
        """A chain with a fresh 256-bit key, which is written first.

        Args:
            ledger: file that will know the chain; until `settle_birth` a note says so, by which a key that a kill left
                without a use is told from one that another ledger needs.
        """
        chain = Chain(secrets.token_hex(8), os.urandom(KEY_BYTES))
        if ledger is not None:
            self._birth_note(chain.chain_id, ledger).touch(mode=0o600, exist_ok=False)
        write_durably(self._key_file(chain.chain_id), chain.root, mode=0o600)
        self._known[chain.chain_id] = chain
        return chain

    def settle_birth(self, chain_id: str, ledger: Path) -> None:
        """Delete the note of `new_chain`: the ledger and the memory of keys know the chain now."""
        self._birth_note(chain_id, ledger).unlink(missing_ok=True)

    def births(self, ledger: Path) -> list[str]:
        """Chains that runs on this ledger made, and of which no run noted that the ledger knows them."""
        return [path.name.partition(".")[0] for path in self._chains_dir.glob(self._birth_note("*", ledger).name)]

    def _birth_note(self, chain_id: str, ledger: Path) -> Path:
        name = hashlib.blake2b(os.fsencode(os.path.realpath(ledger)), digest_size=8).hexdigest()
        return self._chains_dir / f"{chain_id}.born.{name}"

    def load_chain(self, chain_id: str) -> Chain | None:
        """The chain whose key is kept here, or None.

        Raises:
            DPConfigError: if others have access to the key file, or it does not hold a key.
        """
        path = self._key_file(chain_id)
        if not path.exists():
            return None
        _refuse_shared(path)
        root = read_whole(path)
        if len(root) != KEY_BYTES:
            raise DPConfigError(
                f"{path} holds {len(root)} bytes instead of a key of {KEY_BYTES}; it was damaged. Delete it: the next "
                "run then starts a new chain with a fresh key."
            )
        return self._known.setdefault(chain_id, Chain(chain_id, root))

    def save_noise(self, chain: Chain, state: dict[str, Any], shard: Shard | None = None) -> None:
        """Keep the state of a chain's noise stream, in place of an older one: secret, and signed by the key.

        Args:
            chain: the chain.
            state: what `NoiseStream.state` gave.
            shard: which part of how many it is, where each rank keeps the noise of its own shards; None for all.
        """
        write_noise(self._noise_file(chain.chain_id, shard), state, chain.root)

    def load_noise(
        self, chain: Chain, num_steps: int | None = None, shard: Shard | None = None
    ) -> dict[str, Any] | None:
        """The state that was kept last, or None: it can always be drawn again from the key.

        Args:
            chain: the chain.
            num_steps: steps of the chain; a state that was kept after more of them is not read. None for any.
            shard: see `save_noise`.
        """
        path = self._noise_file(chain.chain_id, shard)
        if not path.is_file():
            return None
        _refuse_shared(path)
        return read_noise(path, chain.root, num_steps=num_steps)

    def memory(self, ledger: Ledger) -> KeyMemory:
        """Knowledge about the use of the keys of a ledger, and of copies of it."""
        return KeyMemory(self.directory, ledger)

    def seal(self, ledger: Ledger) -> Seal | None:
        """The seal of the run that a ledger records; None if it has none.

        Raises:
            DPConfigError: if it is damaged.
        """
        return Seal.load(self.memory(ledger).folder)

    def data_mark(self, chain: Chain) -> str | None:
        """The note of `check_data`, if there is one."""
        path = self._data_file(chain)
        return read_whole(path).decode(errors="replace") if path.exists() and not chain.unsafe else None

    def check_data(self, chain: Chain, mark: str, *, is_proven: bool | None = None) -> None:
        """Note of what data a chain is, or check that it is still the same.

        Records and users are numbers to a sampler: where it relies on when each took part before, they have to keep
        their numbers for as long as the key is the same. The mark is made of private data, so it stays here.

        Args:
            chain: that a run begins, or goes on with.
            mark: a digest of the records, or of their users, in their order.
            is_proven: whether the signed mark of the checkpoint has the same digest; None if it has none. It counts
                more than the note, which may be damaged.

        Raises:
            DPConfigError: if it is another one than the chain began with.
        """
        if chain.unsafe:
            return
        known = self.data_mark(chain)
        if is_proven or (known is None and is_proven is None):
            if known != mark:
                write_durably(self._data_file(chain), mark.encode(), mode=0o600)
        elif known != mark or is_proven is False:
            raise DPConfigError(
                "The training records are not those that this run began with, or not in that order: each would take "
                "part in the steps of another one, oftener and sooner than the noise was made for. Go on with the "
                "same dataset (no shuffling, or one with a fixed seed), or start over in another output_dir, whose "
                "epsilon comes on top."
            )

    def secrets(self) -> list[bytes]:
        """Secrets of the chains kept here or used by this object, which no release may contain: keys, noise buffers.

        Keys are root and derived ones, and those of the seals, each as its raw bytes; spelling them out (hexadecimal,
        base64) is the release scan's part. Of every noise state kept here a marker, see `noise_marker`, and the marks
        of the data.
        """
        for path in self._chains_dir.glob("*.key"):
            self.load_chain(path.stem)
        chains = self._known.values()
        keys = [key for chain in chains for key in chain.secrets()]
        keys += [seal.key for seal in self._seals()]
        kept = [path for chain in chains for path in self._noise_files(chain.chain_id)]
        buffers = [marker for path in kept for marker in noise_marker(path)]
        return keys + buffers + [mark for path in self._chains_dir.glob("*.data") for mark in _bytes_of_mark(path)]

    def _seals(self) -> Iterator[Seal]:
        """Yield the seals of all runs whose keys are kept here; one that is damaged is no secret any more."""
        for folder in self.directory.glob(f"used/*/{SEAL_FILE}"):
            with contextlib.suppress(DPConfigError):
                if (seal := Seal.load(folder.parent)) is not None:
                    yield seal

    def forget(self, chain_ids: Iterable[str] | None = None) -> None:
        """Delete keys of a run that will not be continued. `secrets` still knows those used by this object.

        The marks of their use stay: an ``output_dir`` that is put back to a backup must still be found out.

        Args:
            chain_ids: chains to forget, whether their keys are here or not; None: all that the directory holds.
        """
        if not self._chains_dir.is_dir():  # deleted while the run was going on
            return
        mine = None if chain_ids is None else tuple(chain_ids)
        for path in self._chains_dir.iterdir():  # also what a crash left half-written: .ID.key.PID.tmp
            if mine is None or path.name.lstrip(".").partition(".")[0] in mine:
                path.unlink()
        fsync_directory(self._chains_dir)

    def _data_file(self, chain: Chain) -> Path:
        return self._key_file(chain.chain_id).with_suffix(".data")

    def _noise_file(self, chain_id: str, shard: Shard | None = None) -> Path:
        return self._key_file(chain_id).with_suffix(".noise" if shard is None else f".{shard[0]}of{shard[1]}.noise")

    def _noise_files(self, chain_id: str) -> list[Path]:
        """Noise states of a chain: the whole one, and those of shards."""
        return sorted(self._chains_dir.glob(f"{chain_id}.noise")) + sorted(
            self._chains_dir.glob(f"{chain_id}.*of*.noise")
        )

    def forget_noise(self, chain: Chain) -> None:
        """Delete the noise that was kept of a chain, on machines that have nothing else of it."""
        for path in self._noise_files(chain.chain_id):
            path.unlink(missing_ok=True)

    def _key_file(self, chain_id: str) -> Path:
        return self._chains_dir / f"{chain_id}.key"


def continue_or_branch(
    ledger: Ledger,
    state: PrivateState,
    resume_step: int | None,
    *,
    mark: str | None = None,
    unsafe_fixed_noise_key: str | None = None,
) -> Chain:
    """The chain that the next steps of a run belong to; a new one is recorded in the ledger, and gets a mark.

    The run stays on its last chain if that was charged up to exactly ``resume_step``, the checkpoint is its own, its
    key is here, and the mark beside the key knows of no step that this ledger does not: then no noise of a later step
    was ever drawn. Otherwise (steps beyond the checkpoint were charged and may have been seen; the checkpoint is that
    of another chain; training starts over; the key is gone, or was used behind the ledger's back) the next steps get a
    fresh key, and what they cost comes on top.

    Args:
        ledger: open for writing.
        state: the keys that belong to it.
        resume_step: optimizer step of the checkpoint the run continues from, or None when it starts at step 0.
        mark: digest of the ledger that the checkpoint notes; None if the caller answers for its origin.
        unsafe_fixed_noise_key: 64 hexadecimal digits; always a new chain, marked unsafe in the ledger.

    Raises:
        DPConfigError: if the ledger has charged no run that reached ``resume_step``, or a mark is damaged.
    """
    check_resumable(ledger, resume_step)
    start_step = resume_step or 0
    if unsafe_fixed_noise_key is not None:
        chain, note = fixed_chain(unsafe_fixed_noise_key), "NOT PRIVATE: unsafe_fixed_noise_key"
    else:
        note = _why_branch(ledger, state, resume_step, mark)
        if not note:
            assert (last := last_own_chain(ledger)) is not None
            assert (kept := state.load_chain(last.chain_id)) is not None
            return kept
        chain = state.new_chain(ledger.path)
    record = ledger.start_chain(
        chain_id=chain.chain_id,
        key_id=chain.key_id,
        start_step=start_step,
        parent=ledger.last_chain.chain_id if ledger.last_chain is not None else None,
        note=note,
        unsafe=chain.unsafe,
    )
    if not chain.unsafe:
        state.memory(ledger).begin(record)
        state.settle_birth(chain.chain_id, ledger.path)
    return chain


def check_resumable(ledger: Ledger, resume_step: int | None) -> None:
    """Refuse a checkpoint whose cost the ledger does not know.

    Raises:
        DPConfigError: if the ledger has charged no run that reached ``resume_step``.
    """
    start_step = resume_step or 0
    if start_step and not any(c.start_step <= start_step <= _last_charged_step(ledger, c) for c in ledger.chains):
        reached = max((_last_charged_step(ledger, c) for c in ledger.chains), default=0)
        raise DPConfigError(
            f"The checkpoint is at step {start_step}, but {ledger.path} has charged no run that reached it (it ends "
            f"at step {reached}): what the checkpoint cost is unknown. Resume with the ledger of the run that wrote "
            "the checkpoint; to start from a model that was trained elsewhere, load it as the initial model."
        )


def last_own_chain(ledger: Ledger) -> ChainRecord | None:
    """The chain that a run may go on with: the last one that was begun in this ledger, not in a copy of it."""
    return next((chain for chain in reversed(ledger.chains) if is_own(chain)), None)


def stays_on_its_chain(ledger: Ledger, state: PrivateState, resume_step: int | None, mark: str | None = None) -> bool:
    """Whether `continue_or_branch` would go on with the last chain."""
    return not _why_branch(ledger, state, resume_step, mark)


def _why_branch(ledger: Ledger, state: PrivateState, resume_step: int | None, mark: str | None) -> str:
    """Reason why the last chain cannot go on (the note of the new one), or an empty string if it can."""
    last = last_own_chain(ledger)
    if last is None:
        return "first run"
    if resume_step is None:
        return "training started over"
    reached, kept = _last_charged_step(ledger, last), state.load_chain(last.chain_id)
    if reached != resume_step:
        return f"resumed at step {resume_step}; step {reached} of the chain before was charged"
    charge = ledger.charge_digest(last.chain_id, resume_step)
    if mark is not None and charge is not None and not ledger.is_not_before(mark, charge):
        return f"resumed at step {resume_step}; the checkpoint is that of an earlier chain, with other weights"
    if kept is None or kept.key_id != last.key_id:
        return f"resumed at step {resume_step}; the key of the chain before is not here"
    use = state.memory(ledger).mark(last.chain_id)
    if use is None:
        return f"resumed at step {resume_step}; nothing says how far the key of the chain before was used"
    if use.step > reached or use.digest is None or not ledger.contains(use.digest):
        return f"resumed at step {resume_step}; the key of the chain before was used behind this ledger's back"
    return ""


def _last_charged_step(ledger: Ledger, chain: ChainRecord) -> int:
    """The last step charged to a chain, or where it starts."""
    return ledger.last_step(chain.chain_id) or chain.start_step


def _bytes_of_mark(path: Path) -> list[bytes]:
    """The digest of the training data in a file; none if it is damaged."""
    text = read_whole(path).decode(errors="replace").strip()
    is_digest = len(text) >= 32 and len(text) % 2 == 0 and set(text) <= set("0123456789abcdef")
    return [bytes.fromhex(text)] if is_digest else []


def _refuse_overlap(directory: Path, forbidden: str | os.PathLike[str]) -> None:
    inner, outer = Path(os.path.realpath(directory)), Path(os.path.realpath(Path(forbidden).expanduser()))
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise DPConfigError(
            f"The private directory {inner} and the output directory {outer} overlap, so saving or pushing the output "
            "would publish noise keys. Use two directories side by side, or leave the private one out: the default is "
            "in your home directory."
        )


def _refuse_foreign_link(directory: Path) -> None:
    if directory.is_symlink() and directory.lstat().st_uid != os.geteuid():
        raise DPConfigError(
            f"The private directory {directory} is a link owned by user {directory.lstat().st_uid}, who could point "
            "it somewhere else. Remove the link, or choose another private directory."
        )


def _refuse_shared(path: Path) -> None:
    """Keys that others could read, replace or have placed there are no secrets."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise DPConfigError(
            f"{path} belongs to user {status.st_uid}, not to you ({os.geteuid()}), who could read the noise keys. "
            "Choose a private directory of your own."
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise DPConfigError(
            f"{path} has permissions {stat.S_IMODE(status.st_mode):04o}, so other users may have access to the noise "
            f"keys. Run `chmod go= {path}`; if somebody may have read keys, delete them: the next run takes new ones."
        )
