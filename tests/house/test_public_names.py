"""The public names: nothing heavy is imported before one is asked for, and all of them are what docs/ say."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_dpopt

NOT_OF_A_PLAN = {"transformers", "accelerate", "peft", "bitsandbytes", "datasets", "matplotlib"}
HEAVY = (*NOT_OF_A_PLAN, "torch", "scipy", "numpy", "dp_accounting")


def python(repo: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter, outside the checkout."""
    path = os.pathsep.join(filter(None, [str(repo), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, text=True, capture_output=True, timeout=120)


def imported(repo: Path, module: str) -> tuple[set[str], float]:
    """The heavy libraries that an import brings along, and the CPU seconds it takes."""
    code = f"""
import json, sys, time
import {module}
print(json.dumps([[name for name in {HEAVY!r} if name in sys.modules], time.process_time()]))
"""
    result = python(repo, code)
    assert result.returncode == 0, result.stderr
    found, seconds = json.loads(result.stdout.splitlines()[-1])
    return set(found), seconds


@pytest.mark.parametrize("module", ["hf_dpopt", "hf_dpopt.common.errors", "hf_dpopt.cli.app", "hf_dpopt.run.ledger"])
def test_an_import_is_light(repo: Path, module: str) -> None:
    found, seconds = imported(repo, module)
    assert not found
    assert seconds < 0.3, "a bare interpreter takes 0.02 s of CPU, and an import of torch alone more than 1"


def test_a_plan_needs_no_trainer(repo: Path) -> None:
    """Transformers and what it imports along take several times as long as the plan."""
    found, _ = imported(repo, "hf_dpopt.cli.planning")
    assert not found & NOT_OF_A_PLAN


@pytest.mark.slow
def test_accounting_needs_no_torch(repo: Path) -> None:
    """scipy is what dp_accounting computes with; beyond that library, our own modules take a tenth of a second."""
    found, seconds = imported(repo, "hf_dpopt.accounting")
    _, theirs = imported(repo, "dp_accounting")
    assert found <= {"scipy", "numpy", "dp_accounting"}
    assert seconds < 1.5 * theirs + 0.2


def test_every_name_resolves(repo: Path) -> None:
    assert hf_dpopt.__all__ == sorted(set(hf_dpopt.__all__))
    assert set(hf_dpopt.__all__) == set(hf_dpopt._ORIGIN)
    for name in hf_dpopt.__all__:
        assert getattr(hf_dpopt, name).__name__ == name
    assert set(hf_dpopt.__all__) | {"__version__"} <= set(dir(hf_dpopt))
    with pytest.raises(AttributeError, match="no attribute 'DPTrainr'"):
        _ = hf_dpopt.DPTrainr
    star = python(repo, "from hf_dpopt import *\nprint(DPTrainer, make_plan)")
    assert star.returncode == 0, star.stderr


def test_the_type_checker_sees_the_same_names(repo: Path) -> None:
    tree = ast.parse((repo / "hf_dpopt" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == hf_dpopt._ORIGIN


# --- the command line ---


def test_python_m_is_the_command_line(repo: Path) -> None:
    path = os.pathsep.join(filter(None, [str(repo), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "hf_dpopt", "--help"]
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, text=True, capture_output=True, timeout=120
    )
    assert result.returncode == 0 and not result.stderr
    assert "Differentially private finetuning" in result.stdout and "verify" in result.stdout


# --- what is not ours ---

# A processor on which bitsandbytes looks for a kernel that is not there, while transformers imports it.
ANOTHER_PROCESSOR = """
import importlib.abc, importlib.machinery, runpy, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "bitsandbytes.functional":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module.has_avx512bf16 = lambda: True
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""
COMMANDS = {
    "hf-dpopt": "from hf_dpopt.cli import main\nsys.argv = ['hf-dpopt', 'plan', '-n', '2000', '-b', '50', '--steps', '9', "
    "'--noise-multiplier', '1']\nmain()",
    "trainer": "from hf_dpopt import DPTrainer",
    "recipe": "sys.argv = ['glue.py', '--help']\nrunpy.run_path(sys.path.pop(0) + '/recipes/glue.py', run_name='__main__')",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_start_is_quiet(repo: Path, command: str) -> None:
    pytest.importorskip("bitsandbytes", reason="what is imported along is silent already")
    result = python(repo, f"{ANOTHER_PROCESSOR}\nsys.path.insert(0, {str(repo)!r})\n{COMMANDS[command]}")
    assert result.returncode == 0, result.stderr
    assert not result.stderr
