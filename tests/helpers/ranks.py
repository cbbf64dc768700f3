"""Processes of several ranks, forked from the one that tests: what takes seconds to import is there already.

Each rank is a process of its own with the environment that torchrun would give it, and begins as a fresh process would:
nothing that accelerate or torch.distributed keeps about processes is left.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

LIMIT_S = 280.0
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000  # flags of unshare(2)


class Ranks:
    """The processes that run a function.

    Args:
        function: called in each rank, whose number is in ``RANK``.
        size: number of ranks; 1 is a process without a group.
        folder: the output of each rank is appended to a file there.
        prepare: called before in each rank, with its number.

    Attributes:
        codes: exit codes of those that have ended and were waited for, by rank.
    """

    def __init__(
        self, function: Callable[[], object], size: int, folder: Path, prepare: Callable[[int], object] | None = None
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        folder.mkdir(parents=True, exist_ok=True)
        self._logs = [folder / f"rank-{rank}.log" for rank in range(size)]
        self._pids = [_fork(function, rank, size, port, self._logs[rank], prepare) for rank in range(size)]
        self.codes: dict[int, int] = {}

    def have_ended(self) -> bool:
        """Whether all have ended."""
        self._wait(os.WNOHANG)
        return len(self.codes) == len(self._pids)

    def wait(self) -> None:
        """Wait until all have ended."""
        self._wait(0)

    def _wait(self, how: int) -> None:
        for rank, pid in enumerate(self._pids):
            if rank not in self.codes:
                done, status = os.waitpid(pid, how)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)

    def kill(self, first: int = 0, pause: float = 0.0) -> None:
        """Kill one, and the others a moment later, as launchers do."""
        for number, rank in enumerate(sorted(range(len(self._pids)), key=lambda rank: rank != first)):
            if number == 1:
                time.sleep(pause)
            if rank not in self.codes:
                os.kill(self._pids[rank], signal.SIGKILL)
        self.wait()

    def said(self, rank: int) -> str:
        """The end of what a rank printed."""
        return self._logs[rank].read_text()[-3000:]


def launch(
    function: Callable[[], object], size: int, folder: Path, *, prepare: Callable[[int], object] | None = None
) -> None:
    """Run a function in so many ranks and wait for them; one that fails ends the others, and the test; see `Ranks`."""
    ranks, end = Ranks(function, size, folder, prepare), time.monotonic() + LIMIT_S
    while not ranks.have_ended():
        if any(ranks.codes.values()) or time.monotonic() > end:
            time.sleep(1.0)  # those that fail by the same fault say so
            ranks.kill()
        time.sleep(0.02)
    failed = [rank for rank, code in sorted(ranks.codes.items()) if code]
    assert not failed, "\n".join(f"rank {rank}: {ranks.said(rank)}" for rank in failed)


def _fork(
    function: Callable[[], object],
    rank: int,
    size: int,
    port: int,
    log: Path,
    prepare: Callable[[int], object] | None,
) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:  # the child must never return into pytest
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        if size > 1:
            os.environ |= {
                "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        _forget_processes()
        if prepare is not None:
            prepare(rank)
        function()
        status = 0
    except BaseException:
        with open(log, "a") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(status)


def _forget_processes() -> None:
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState

    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


def mount(over: Path, node: Path) -> None:
    """Give this process alone another folder at a place, as each machine of a cluster has its own ``/scratch``.

    Raises:
        OSError: The system allows no mount namespaces.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_MOUNTS) != 0:
        if libc.unshare(_NEW_MOUNTS | _NEW_USER) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", str(node), str(over)], check=True)
