"""Two machines with disks of their own, on one: each process gets a mount namespace in which a folder is another one.

What one process writes below `disk` the other does not see, though the paths are the same, as it is with `/scratch` or
the home folders of a cluster. Everything else is shared.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 280


def unshare() -> list[str]:
    """The command that starts a mount namespace here; the test is skipped where the system allows none."""
    for command in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    pytest.skip("no mount namespaces here (unshare --mount)")


def launch(script: Path, root: Path, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a script on two nodes of one process each, as torchrun would, and wait for both.

    Args:
        script: called with the root folder and the arguments.
        root: shared by both, but for ``root/disk``: node r sees ``root/node-r`` there.
        *arguments: further arguments.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (root / "disk").mkdir(parents=True, exist_ok=True)
    started = []
    for rank in range(2):
        node = root / f"node-{rank}"
        node.mkdir(exist_ok=True)
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(script.parents[1]),
        }  # fmt: skip
        mounted = ["sh", "-c", 'mount --bind "$1" "$2" && shift 2 && exec "$@"', "sh", str(node), str(root / "disk")]
        command = [*unshare(), *mounted, sys.executable, str(script), str(root), *arguments]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))  # fmt: skip
    done = []
    try:
        for process in started:
            out, err = process.communicate(timeout=LIMIT_S)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in started:
            process.kill()
    return done
