"""Run by `tests.contract.test_hidden_stages` on a copy of the package that lacks some files: `hidden_run FOLDER`."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import hf_dpopt
from hf_dpopt import DPConfigError, PrivacyConfig, make_plan
from tests.helpers import tiny

REFUSED = {  # file that is missing -> arguments that name it
    "noise/tree.py": {"noise_mechanism": "tree"},
    "noise/dense.py": {"noise_mechanism": "dense"},
    "preclip/subspace_projection.py": {"preconditioner": "subspace"},
    "optim/galore.py": {"optim": "dp_galore", "optim_args": "rank=2"},
}


def main(folder: Path) -> None:
    package = Path(hf_dpopt.__file__).parent
    assert package.parent == folder / "copy", package
    config = PrivacyConfig(target_epsilon=2.0, expected_batch_size=16, target_delta=1e-5)
    assert make_plan(config, num_examples=1000, num_steps=10).epsilon() <= 2.0
    trained = tiny.trainer(folder / "out", private_state_dir=str(folder / "keys"), max_steps=2)
    trained.train()
    assert trained.privacy_spent().epsilon > 0 and (folder / "out/privacy/statement.md").exists()
    for file, named in REFUSED.items():
        if not (package / file).exists():
            ((option, name), *_) = named.items()
            try:
                tiny.trainer(folder / "refused", **named)
            except (DPConfigError, ValueError) as error:
                said = str(error)
                assert repr(name) in said and "Use one of: " in said and repr(name) not in said.split("Use one of")[1]
            else:
                raise AssertionError(f"{option}={name} without {file}")
    for module in pkgutil.walk_packages([str(package)], "hf_dpopt."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
