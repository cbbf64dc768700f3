"""Build the wheel, install it where nothing else is, and run what a stranger runs first, away from the repository.

    python -m tests.house.bare_install --python python3.12 [--torch 'torch==2.13.0'] [--quick]

Needs a package registry: torch (of machines without a GPU: name a CPU build as for `make env`), the dependencies of
the wheel, and twine, which checks both distributions. Prints exit code, seconds and processor seconds of each command,
and ends with 1 if one failed. `--quick` leaves out demo and audit, which take minutes.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
QUICK = {
    "import": ["python", "-c", "import hf_dpopt"],
    "help": ["hf-dpopt", "--help"],
    "plan": ["hf-dpopt", "plan", "-n", "10000", "-b", "500", "--epochs", "3", "--epsilon", "8"],
}
LONG = {
    "demo": ["hf-dpopt", "demo", "demo"],
    "verify": ["hf-dpopt", "verify", "demo/private"],
    "audit": ["hf-dpopt", "audit"],
}


def run(command: list[str], folder: Path) -> int:
    """Run one command without the repository, the home and the hub of whoever starts it; print what it took."""
    hidden = {"PYTHONPATH": "", "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    code = subprocess.run(command, cwd=folder, env=os.environ | hidden).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    words = [Path(command[0]).name, *command[1:]]
    print(f"== exit {code}, {time.monotonic() - start:.1f} s, CPU {cpu:.1f} s: {' '.join(words)}", flush=True)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="Interpreter of the new environment.")
    parser.add_argument("--torch", default="torch", help="What pip installs as torch, first.")
    parser.add_argument(
        "--folder", type=Path, help="Keep the environment here, and use it again. Default: a temporary one."
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        place, dist = folder / "place", folder / "dist"
        place.mkdir(parents=True, exist_ok=True)
        for old in dist.glob("*"):
            old.unlink()
        bins = {name: folder / name / "bin" for name in ("tools", "bare")}
        for name, interpreter in {"tools": sys.executable, "bare": options.python}.items():
            if not bins[name].exists():
                subprocess.run([interpreter, "-m", "venv", bins[name].parent], check=True)
        pip = {name: [str(path / "python"), "-m", "pip", "install", "--quiet"] for name, path in bins.items()}
        subprocess.run([*pip["tools"], "build", "twine"], check=True)
        subprocess.run(
            [bins["tools"] / "python", "-m", "build", "--outdir", dist, REPO], check=True, stdout=subprocess.DEVNULL
        )
        subprocess.run([bins["tools"] / "twine", "check", "--strict", *dist.iterdir()], check=True)
        (wheel,) = dist.glob("*.whl")
        subprocess.run([*pip["bare"], *options.torch.split()], check=True)
        subprocess.run([*pip["bare"], "--force-reinstall", "--no-deps", wheel], check=True)
        subprocess.run([*pip["bare"], f"{wheel}[recipes]"], check=True)
        commands = QUICK if options.quick else QUICK | LONG
        with tempfile.TemporaryDirectory(dir=place) as empty:
            codes = [run([str(bins["bare"] / name), *rest], Path(empty)) for name, *rest in commands.values()]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
