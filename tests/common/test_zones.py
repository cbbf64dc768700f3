"""What is secret and what is released cannot be confused: mypy refuses the steps that do, and one door lets through."""

from __future__ import annotations

import ast
import collections
import typing
from pathlib import Path

import pytest

from hf_dpopt.clipping import UnprivatizedStatistics
from hf_dpopt.common.types import JointSums, Released
from hf_dpopt.run.run import PrivateRun

DOOR = "    released = run.release(joint, step)\n"
FILTER = "from hf_dpopt.postprocess.low_pass import LowPassFilter\n\n\ndef private_step("
# what somebody may get wrong -> replacements in the source of the step, each of a text that is there once
WRONG_STEPS: dict[str, list[tuple[str, str]]] = {
    "noise_forgotten": [(DOOR, ""), ("metrics.receive(released)", "metrics.receive(sums)")],
    "noise_and_maps_forgotten": [
        (DOOR, ""),
        ("    released = run.metrics.receive(released)\n", ""),
        ("    released = run.preclip.receive(released)\n", "    released = sums\n"),
    ],
    "sums_written": [("write_gradients(engine.parameters, released)", "write_gradients(engine.parameters, sums)")],
    "filter_before_the_noise": [
        ("def private_step(", FILTER),
        (DOOR, '    sums = LowPassFilter.preset("momentum")(sums)\n' + DOOR),
    ],
    "map_of_ones_own_before_the_noise": [(DOOR, "    for stage in after_noise:\n        sums = stage(sums)\n" + DOOR)],
    "plain_dict_before_the_noise": [(DOOR, "    sums = {name: total * 2 for name, total in sums.items()}\n" + DOOR)],
    "sums_returned": [("    return seen\n\n\ndef clip", "    return sums\n\n\ndef clip")],
    "ranks_not_summed": [("    joint = reduction.finish(sums)\n", ""), ("release(joint,", "release(sums,")],
    "released_twice": [(DOOR, DOOR + "    released = run.release(released, step)\n")],
}  # fmt: skip

LOOKED_INTO = (
    "common.types", "common.collectives", "common.reduction", "clipping", "clipping.engine", "clipping.contributions", "run.run",
    "run.batches", "preclip", "preclip.preconditioner", "preclip.queries", "postprocess", "postprocess.maps",
    "postprocess.low_pass", "run.metrics",
)  # fmt: skip


@pytest.fixture(scope="module")
def errors(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Module -> mypy's errors, of the step as it is and of the wrong ones, all looked at in one run."""
    import mypy.api

    folder, page = tmp_path_factory.mktemp("zones"), (repo / "hf_dpopt/run/step.py").read_text(encoding="utf-8")
    step, query, below = page.partition("# --- the query before the first step ---")
    assert below
    (folder / "as_it_is.py").write_text(page, encoding="utf-8")
    for name, replacements in WRONG_STEPS.items():
        changed = step
        for old, new in replacements:
            assert changed.count(old) == 1, f"{name}: {old!r} is not there once"
            changed = changed.replace(old, new)
        (folder / f"{name}.py").write_text(changed + query + below, encoding="utf-8")
    options = folder / "mypy.ini"
    # what else is imported is no part of the zones, and would take ten times as long
    looked_into = "".join(f"[mypy-hf_dpopt.{name}]\nfollow_imports = silent\n" for name in LOOKED_INTO)
    options.write_text(
        f"[mypy]\nmypy_path = {repo}\ncache_dir = {folder / 'cache'}\nignore_missing_imports = True\n"
        f"disallow_untyped_defs = True\ncheck_untyped_defs = True\nfollow_imports = skip\n{looked_into}"
    )
    files = [str(folder / f"{name}.py") for name in ("as_it_is", *WRONG_STEPS)]
    printed, failed, _ = mypy.api.run(["--config-file", str(options), *files])
    assert not failed, failed
    found: dict[str, list[str]] = collections.defaultdict(list)
    for line in printed.splitlines():
        path, _, rest = line.partition(":")
        if ": error: " in rest:
            found[Path(path).stem].append(rest)
    return found


@pytest.mark.parametrize("name", ["as_it_is", *WRONG_STEPS])
def test_mypy_lets_the_step_pass_and_no_wrong_one(errors, name):
    """A wrong one fails for what it does with a type, not for a name that is gone."""
    assert bool(errors[name]) == (name != "as_it_is"), errors[name]
    assert all('"ClippedSums"' in error or '"Released"' in error for error in errors[name]), errors[name]


def test_the_door_says_what_comes_in_and_what_goes_out():
    hints = typing.get_type_hints(PrivateRun.release)
    assert hints == {"sums": JointSums, "step": int, "is_opening": bool, "return": Released}


@pytest.fixture(scope="module")
def functions(repo: Path) -> list[tuple[str, ast.FunctionDef]]:
    """Every function of the package, with its module."""
    root = repo / "hf_dpopt"
    return [
        (file.relative_to(root).as_posix(), node)
        for file in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]


def _makes(function: ast.FunctionDef, name: str) -> bool:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(isinstance(call.func, ast.Name) and call.func.id == name for call in calls)


def test_released_values_are_made_of_released_values_or_at_the_door(functions):
    """`Released(...)` takes any dict, so who may say it is looked at: the door, and functions that were given one."""
    makers = [(module, function) for module, function in functions if _makes(function, "Released")]
    # the journal gives back what went through the door, with a checksum
    doors = {("run/run.py", "release"), ("run/journal.py", "read")}
    assert doors <= {(module, function.name) for module, function in makers}
    for module, function in makers:
        given = [
            ast.unparse(arg.annotation)
            for arg in ast.walk(function.args)
            if isinstance(arg, ast.arg) and arg.annotation
        ]
        if (module, function.name) not in doors:
            assert "Released" in given, f"{module}: {function.name} makes a Released of something else"
            assert "ClippedSums" not in given, f"{module}: {function.name} is a second door"


def test_clipped_sums_are_made_where_clipping_ends(functions):
    made = {(module, function.name) for module, function in functions if _makes(function, "ClippedSums")}
    ends = {("clipping/clipped_sum.py", "result"), ("clipping/squared_sum.py", "result")}
    assert made == {*ends, ("preclip/queries.py", "join")}


def test_joint_sums_are_made_where_ranks_meet(functions):
    made = {(module, function.name) for module, function in functions if _makes(function, "JointSums")}
    assert made == {("common/collectives.py", "sum"), ("common/reduction.py", "finish")}


def test_what_a_step_saw_is_not_in_its_text():
    """So neither `print` nor a log line tells it by accident."""
    seen = UnprivatizedStatistics(num_records=12345, loss_sum=67.89)
    assert repr(seen) == str(seen) == f"{seen}" == "<UnprivatizedStatistics: secret>"
