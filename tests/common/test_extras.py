"""A missing optional package is named with the line that installs it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers import BertConfig, BertModel

from hf_dpopt import DPConfigError
from hf_dpopt.common.extras import EXTRAS
from hf_dpopt.noise import IdentityStrategy
from recipes.canaries import _adapted
from recipes.models import add_lora
from recipes.options import ModelArguments
from recipes.paper.correlated_noise.strongly_convex import strongly_convex_bound
from recipes.paper.runs import pyplot
from recipes.stackoverflow_files import H5Rows
from recipes.synthetic_table import _matcher

# Packages that are loaded before code of ours asks for them: by a model with adapters, or by a dataset of Arrow files.
BROUGHT = {
    "peft": ("clipping/rules/adapters.py", "huggingface/shards.py"),
    "datasets": ("records/overlap.py", "huggingface/preferences.py"),  # trl needs it
    "trl": ("huggingface/preferences.py", "huggingface/sft.py"),  # bases of its classes; the same error
}


def _adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "bert"}')
    _adapted(BertModel(_TINY), str(folder))


_TINY = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
USES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "figures": ("matplotlib", lambda folder: pyplot()),
    "convex": ("cvxpy", lambda folder: strongly_convex_bound(IdentityStrategy(), mu=0.1, L=1.0, eta=0.1)),
    "h5": ("h5py", lambda folder: H5Rows(folder / "a.h5").count()),
    "--lora_r": ("peft", lambda folder: add_lora(BertModel(_TINY), ModelArguments(lora_r=2), "FEATURE_EXTRACTION")),
    "adapter": ("peft", _adapter),
    "--schema": ("llguidance.hf", lambda folder: _matcher(None, None)),
}


@pytest.mark.parametrize("use", USES)
def test_what_is_missing_is_named_with_its_install_line(use: str, tmp_path: Path, monkeypatch) -> None:
    module, call = USES[use]
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(
        DPConfigError, match=rf"needs the package {package} .*pip install 'hf-dpopt\[{EXTRAS[package]}\]'"
    ):
        call(tmp_path)


@pytest.mark.parametrize("package", ["datasets", "sacrebleu"])
def test_a_recipe_ends_with_the_install_line(repo: Path, package: str) -> None:
    script = f"import sys; sys.modules[{package!r}] = None; import recipes"
    done = subprocess.run([sys.executable, "-c", script], cwd=repo, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install 'hf-dpopt[recipes]'" in done.stderr


def test_the_extras_bring_the_packages(repo: Path) -> None:
    extras = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert package in {canonicalize_name(Requirement(text).name) for text in extras[extra]}


def test_optional_packages_are_imported_by_the_one_helper(repo: Path) -> None:
    """No bare import statement, which would end in a ModuleNotFoundError."""
    for file in (repo / "hf_dpopt").rglob("*.py"):
        place = file.relative_to(repo / "hf_dpopt").as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for package in {re.split(r"\.", name)[0] for name in names} & set(EXTRAS):
                assert place in BROUGHT.get(package, ()), f"{place} imports {package}"
