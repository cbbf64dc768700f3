"""`python -m tests.ledgers`: writes the runs of this release, if they are not there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hf_dpopt
from tests.ledgers import runs

NOT_KEPT = ("model.safetensors", "training_args.bin", "config.json", "*.lock", "lock")


def main() -> None:
    for name in runs.RUNS:
        target = runs.HERE / hf_dpopt.__version__ / name
        if target.exists():
            print(f"{target.relative_to(runs.HERE)} is there")
            continue
        with tempfile.TemporaryDirectory() as folder:
            trainer = runs.trainer(name, Path(folder), stops=True)
            trainer.train()
            trainer.save_model()
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("training_args.bin", "*.lock", "lock"))
        for left in ("model.safetensors", "config.json"):  # those of the checkpoint are enough
            (target / "out" / left).unlink()


if __name__ == "__main__":
    main()
