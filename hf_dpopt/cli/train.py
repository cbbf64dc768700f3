"""`hf-dpopt train FILE`: runs the script of a job under `recipes/`, with its flags from a YAML file.

Each key of the file is the flag of that name. Values are passed on as they are written, as a shell would: `no` is the
word no, and 1e-5 a number. A wheel has the scripts in `hf_dpopt/jobs`; in a repository they are next to the package.
"""

from __future__ import annotations

import difflib
import importlib
import json
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path

import yaml

from hf_dpopt.common.errors import DPConfigError, shown
from hf_dpopt.tuning.space import REFUSED

JOBS = {  # value of the key `job` -> script under recipes/, and flags
    "classification": ["glue"],
    "language_model": ["clm"],
    "chat": ["sft"],
    "preference": ["preferences", "--job=dpo"],
    "reward": ["preferences", "--job=reward"],
    "synthetic": ["synthetic"],
    "last_iterate_head": ["linear_probe"],
}


def train(path: Path, flags: list[str]) -> None:
    """Run the job of a file as its script would be run: in this process, which exits with the script's status.

    Args:
        path: YAML file.
        flags: flags of the script, which override the file.

    Raises:
        DPConfigError: if the file cannot be read, names no job, or has a key that no job, or no tuning, takes.
    """
    sys.path.insert(0, str(recipes_folder().parent))
    job, words = read_settings(path)
    given = {word.partition("=")[0].removeprefix("--") for word in words}
    if "--tuned_runs" in flags and (refused := given.intersection(REFUSED)):  # `hf-dpopt tune` checks flags alone
        raise DPConfigError(f"{', '.join(sorted(refused))} in {path}: not for a run of a tuning. Leave it out.")
    name, *always = JOBS[job]
    run_script(name, [*always, *words, *flags])


def run_script(name: str, flags: list[str]) -> None:
    """Run a script of `recipes/` in this process, which exits with the script's status."""
    sys.argv = [str(recipes_folder() / f"{name}.py"), *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")


def print_example(name: str) -> None:
    """Print one of the files of `recipes/configs`.

    Raises:
        DPConfigError: for a name that is not among them.
    """
    found = {file.stem: file for file in sorted((recipes_folder() / "configs").glob("*.yaml"))}
    if name not in found:
        raise DPConfigError(f"example={shown(name)}: unknown.{_choose(name, found)}")
    sys.stdout.write(found[name].read_text(encoding="utf-8"))


def recipes_folder() -> Path:
    """The folder of the scripts: of the wheel, or of the repository."""
    package = Path(__file__).resolve().parents[1]
    folders = [parent / "recipes" for parent in (package / "jobs", package.parent)]
    return next(folder for folder in folders if (folder / "glue.py").is_file())


def read_settings(path: Path) -> tuple[str, list[str]]:
    """Return the job of a file, and its other keys as flags.

    Raises:
        DPConfigError: with the line of what is wrong.
    """
    try:
        with path.open("rb") as file:
            root = yaml.SafeLoader(file).get_single_node()
    except OSError as error:
        raise DPConfigError(
            f"{path} cannot be read ({error.strerror}). Name a YAML file; `hf-dpopt train --example chat` prints one."
        ) from None
    except yaml.YAMLError as error:
        raise DPConfigError(f"{path} is not YAML: {error}. Write one `key: value` per line.") from None
    if not isinstance(root, yaml.MappingNode):
        raise DPConfigError(f"{path} has no keys. Write one `key: value` per line, the first `job: chat`.")
    values: dict[str, yaml.Node] = {}
    for key, value in root.value:
        name = str(key.value).replace("-", "_")
        if name in values:
            raise _refusal(key, f"{name} is there twice. Keep one of them.")
        _check_key(name, key, value)
        values[name] = value
    job = values.pop("job", None)
    if job is None:
        raise DPConfigError(f"{path} has no key `job`.{_choose('', JOBS)}")
    if job.value not in JOBS:
        raise _refusal(job, f"job={shown(job.value)}: unknown.{_choose(str(job.value), JOBS)}")
    return job.value, [word for name, value in values.items() for word in _as_flag(name, value)]


def _check_key(name: str, key: yaml.Node, value: yaml.Node) -> None:
    """Refuse a key that no job knows, a missing value, and several values for one."""
    flags = importlib.import_module("recipes.flags")
    known = flags.fields() | {"job": "str"}
    if name not in known:
        meant = [f" Did you mean {near}?" for near in flags.nearest(name, known)]
        raise _refusal(key, f"{shown(name)} is not a key.{''.join(meant)} `hf-dpopt train FILE --help` lists all.")
    given = value.value if isinstance(value, yaml.SequenceNode) else [value]
    if any(one.tag == "tag:yaml.org,2002:null" for one in given):
        raise _refusal(key, f"{name} has no value. Write one, or leave the key out.")
    for node, kind, said in ((yaml.SequenceNode, "list", "a list"), (yaml.MappingNode, "dict", "keys of its own")):
        if any(isinstance(one, node) for one in (value, *given)) and kind not in known[name]:
            raise _refusal(key, f"{name} takes one value, and has {said}. Write `{name}: value`.")
    if isinstance(value, yaml.SequenceNode):  # each becomes a word of its own, and some words are flags
        if found := [one for one in given if str(one.value).startswith("--")]:
            raise _refusal(found[0], f"{name} has {shown(found[0].value)}, a flag. Make it a key of its own.")
    if isinstance(value, yaml.MappingNode):
        names = [str(inner.value) for inner, _ in value.value]
        if twice := [one for one in names if names.count(one) > 1]:
            raise _refusal(key, f"{twice[0]} is there twice in {name}. Keep one of them.")


def _as_flag(name: str, value: yaml.Node) -> list[str]:
    """A mapping is passed as JSON, a list as several words."""
    if isinstance(value, yaml.MappingNode):
        return [f"--{name}={json.dumps(yaml.SafeLoader('').construct_object(value, deep=True), default=str)}"]
    if isinstance(value, yaml.SequenceNode):
        return [f"--{name}", *(str(one.value) for one in value.value)]
    return [f"--{name}={value.value}"]


def _refusal(node: yaml.Node, message: str) -> DPConfigError:
    return DPConfigError(f"{node.start_mark.name}, line {node.start_mark.line + 1}: {message}")


def _choose(name: str, names: Iterable[str]) -> str:
    meant = [f" Did you mean {near}?" for near in difflib.get_close_matches(name, [*names], 1)]
    return f"{''.join(meant)} Use one of: {', '.join(names)}."
