"""As many processes as `accelerate launch --num_processes N` was asked for, on a machine without GPUs, too.

`accelerate launch --cpu --num_processes N` starts one process unless it is given an MPI hostfile (accelerate 1.15),
and says nothing. A private run in one process is as private as one in N, but not what was asked for.
"""

from __future__ import annotations

import os
import sys

import psutil  # accelerate depends on it


def requested() -> int:
    """What `--num_processes` of the accelerate launcher above this process says; 1 without such a launcher."""
    parent = psutil.Process(os.getppid()).cmdline()
    if not any("accelerate" in word for word in parent) or "launch" not in " ".join(parent):
        return 1
    for i, word in enumerate(parent):
        name, _, value = word.partition("=")
        if name.replace("-", "_") == "__num_processes":
            value = value or (parent[i + 1] if i + 1 < len(parent) else "1")
            return int(value) if value.isdigit() else 1
    return 1


def start_requested(argv: list[str]) -> None:
    """Replaces this process by torchrun with the requested number of processes, where accelerate started only one."""
    alone = "RANK" not in os.environ and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    if not alone or (number := requested()) < 2:
        return
    print(f"accelerate --cpu started one process of the {number} asked for; starting them with torchrun.", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={number}",
        "--",  # or torchrun takes --start of glue.py for an abbreviation of its own --start-method
        sys.argv[0],
    ]
    os.execv(sys.executable, [*command, *argv])
