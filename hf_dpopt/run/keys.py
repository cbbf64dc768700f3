"""The secrets of a run: one key per chain of steps, from the operating system, outside everything that is published.

Whoever has a key can recompute the noise and subtract it. So keys live in a private folder (mode 0700, never inside
``output_dir``), one for all runs of a user, and only for as long as a run may have to be continued. ``runs/<id>/``
there holds the log of a run (`hf_dpopt.run.run_log`), and ``<chain_id>.key`` for each of its chains.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import os
import secrets
import stat
from pathlib import Path
from typing import Any

import torch

from hf_dpopt.common.checks import check_noise_key
from hf_dpopt.common.durable import fsync_directory, has_directory_fsync, read_whole, write_durably, writing_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.randomness.source import KEY_BYTES, derive_key

RUNS = "runs"  # in the private folder
CHECKSUM_BYTES = 32  # at the end of a state in a file


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

    # The streams never share a word: one learned or badly used tells nothing about the others.

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

    def secrets(self) -> list[bytes]:
        """All keys that are made of the root, and itself."""
        return [self.root, self.noise_key, self.sampling_key, self.dropout_key, opening_key(self.noise_key)]


def new_chain() -> Chain:
    """A chain with a fresh 256-bit key, which is in memory alone."""
    return Chain(secrets.token_hex(8), os.urandom(KEY_BYTES))


def fixed_chain(key_hex: str) -> Chain:
    """A chain under a key that the user chose, marked unsafe; for tests of equivalence, never for a private run.

    Raises:
        DPConfigError: if ``key_hex`` is not 64 hexadecimal digits.
    """
    check_noise_key(key_hex)
    return Chain(f"unsafe{secrets.token_hex(8)}", bytes.fromhex(key_hex), unsafe=True)


def opening_key(noise_key: bytes) -> bytes:
    """Key of the noise of an opening query, which no other noise of the chain has."""
    return derive_key(noise_key, "opening query")


# --- the private folder ---


def default_private_dir() -> Path:
    """Private folder of a user: ``$HF_DPOPT_PRIVATE_DIR``, else ``hf_dpopt`` in the user's state directory.

    That is ``$XDG_STATE_HOME``, else ``~/.local/state``.
    """
    if base := os.environ.get("HF_DPOPT_PRIVATE_DIR"):
        return Path(base).expanduser()
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state_home) / "hf_dpopt"


def private_dir(
    given: str | os.PathLike[str] | None, output_dir: str | os.PathLike[str], *, is_read: bool = False
) -> Path:
    """The private folder, made if it is not there.

    Formal guarantee: nobody but the owner (and root) can list or read it, and it is not inside ``output_dir``, so
    saving or pushing that folder publishes no key.

    Args:
        given: the folder that was asked for; None for the default.
        output_dir: folder of the run; neither may lie inside the other.
        is_read: whether the secrets are looked at alone: no folder is made then.

    Raises:
        DPConfigError: if the folders overlap, if others have access to it or own it, or if a key there could be lost
            in a crash.
    """
    folder = Path(given).expanduser() if given else default_private_dir()
    _refuse_overlap(folder, output_dir)
    for one in (folder, folder / RUNS):
        if not is_read:
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
        if one.exists():
            refuse_shared(one)
    if not is_read and not has_directory_fsync(folder / RUNS):
        raise DPConfigError(
            f"The filesystem of {folder} cannot make a new file durable: a power cut could lose how far a noise key "
            "was used. Give --private_state_dir a folder on a local disk; output_dir may stay."
        )
    return folder


def private_folder(given: str | os.PathLike[str] | None, output_dir: str | os.PathLike[str]) -> Path:
    """Folder for what is private to the run in ``output_dir`` and no key, such as features; made if it is not there.

    Raises:
        DPConfigError: as `private_dir`.
    """
    real = os.path.realpath(Path(output_dir).expanduser())
    name = hashlib.blake2b(os.fsencode(real), digest_size=16).hexdigest()
    folder = private_dir(given, output_dir) / "work" / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_shared(folder)
    return folder


def _refuse_overlap(directory: Path, forbidden: str | os.PathLike[str]) -> None:
    inner, outer = Path(os.path.realpath(directory)), Path(os.path.realpath(Path(forbidden).expanduser()))
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise DPConfigError(
            f"The private folder {inner} and the output folder {outer} overlap, so saving or pushing the output would "
            "publish noise keys. Use two folders side by side, or leave private_state_dir out: the default is in your "
            "home directory."
        )


def refuse_shared(path: Path) -> None:
    """Refuse keys that others could read, replace or have placed there: they are no secrets."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise DPConfigError(
            f"{path} belongs to user {status.st_uid}, not to you ({os.geteuid()}), who could read the noise keys. "
            "Choose a private folder of your own."
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise DPConfigError(
            f"{path} has permissions {stat.S_IMODE(status.st_mode):04o}, so other users may have access to the noise "
            f"keys. Run `chmod go= {path}`; if somebody may have read keys, delete them: the next run takes new ones."
        )


# --- the keys of one run ---


class Keys:
    """The keys of one run.

    Args:
        folder: ``runs/<id>`` in the private folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._used: dict[str, Chain] = {}

    def add(self, chain: Chain) -> None:
        """Write the key of a new chain; it is on the disk when this returns."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(self._key_file(chain.chain_id), chain.root, mode=0o600)
        self._used[chain.chain_id] = chain

    def load(self, chain_id: str, key_id: str | None = None) -> Chain | None:
        """The chain whose key is kept here, or None.

        Args:
            key_id: commitment to the key that is wanted; None for any.

        Raises:
            DPConfigError: if others have access to the key file, or it does not hold a key.
        """
        path = self._key_file(chain_id)
        if not path.exists():
            return None
        refuse_shared(path)
        root = read_whole(path)
        if len(root) != KEY_BYTES:
            raise DPConfigError(
                f"{path} holds {len(root)} bytes instead of a key of {KEY_BYTES}; it was damaged. Delete it: the next "
                "run then starts a new chain with a fresh key."
            )
        chain = self._used.setdefault(chain_id, Chain(chain_id, root))
        return chain if key_id in (None, chain.key_id) else None

    def destroy(self, chain_id: str | None = None) -> None:
        """Delete the key of a chain, or of all; `secrets` still knows those used by this object."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():  # also what a crash left half-written: .ID.key.XXXX.tmp
            is_secret = path.suffix in (".key", ".tmp")
            if is_secret and chain_id in (None, path.name.lstrip(".").partition(".")[0]):
                path.unlink(missing_ok=True)
        fsync_directory(self.folder)

    def secrets(self) -> list[bytes]:
        """Root and derived keys of the chains that are kept here or were used by this object.

        Raises:
            DPConfigError: for a key that cannot be read, and so not be looked for.
        """
        for path in self.folder.glob("*.key"):
            self.load(path.stem)
        return [key for chain in self._used.values() for key in chain.secrets()]

    def _key_file(self, chain_id: str) -> Path:
        return self.folder / f"{chain_id}.key"


def secrets_in(directory: Path) -> list[bytes]:
    """Keys of all runs that are kept in a private folder, root and derived."""
    return [key for folder in sorted((directory / RUNS).glob("*")) for key in Keys(folder).secrets()]


# --- states in files: torch's own format, with a checksum behind it ---


class _Hashed:
    """A file that is written to and hashed in one pass, without a copy of the whole in memory."""

    def __init__(self, file: io.BufferedWriter):
        self._file, self.digest = file, hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state in place of an older one, readable by its owner alone."""
    with writing_durably(path, mode=0o600) as file:
        hashed = _Hashed(file)
        try:
            torch.save(state, hashed)  # type: ignore[arg-type]
        except RuntimeError as error:  # torch then tells the place in its archive, not what the disk said
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.write(hashed.digest.digest())


def read_state(path: Path) -> dict[str, Any] | None:
    """The state that was written, or None if one bit of it is another.

    Raises:
        DPConfigError: if it is not a regular file, or cannot be read.
    """
    content = read_whole(path)
    written, checksum = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
    if hashlib.sha256(written).digest() != checksum:
        return None
    return torch.load(io.BytesIO(written), weights_only=True, map_location="cpu")  # a rank's device is its own affair
