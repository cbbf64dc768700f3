"""Two machines with disks of their own, on one: each process gets a mount namespace in which a folder is another one.

What one process writes below `disk` the other does not see, though the paths are the same, as it is with `/scratch` or
the home folders of a cluster. Everything else is shared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ranks


def unshare() -> list[str]:
    """The command that starts a mount namespace here; the test is skipped where the system allows none."""
    for command in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    pytest.skip("no mount namespaces here (unshare --mount)")


def launch(function: Callable[[], object], root: Path) -> None:
    """Run a function on two nodes of one process each, with the environment of torchrun, and wait for both.

    Args:
        function: called in each process.
        root: shared by both, but for ``root/disk``: node r sees ``root/node-r`` there.
    """
    unshare()
    (root / "disk").mkdir(parents=True, exist_ok=True)

    def prepare(rank: int) -> None:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        (root / f"node-{rank}").mkdir(exist_ok=True)
        ranks.mount(root / "disk", root / f"node-{rank}")

    ranks.launch(function, 2, root, prepare=prepare)
