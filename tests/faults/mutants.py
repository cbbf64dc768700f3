"""Draw small changes of the package and run the tests nearest to each.

    python -m tests.faults.mutants --sample 200 --seed 0     draws the sample and runs it
    python -m tests.faults.mutants --resume                  runs those without a result; results that are there stay
    python -m tests.faults.mutants --resume --survivors      runs once more those that survived and may be killed
    python -m tests.faults.mutants --table                   prints the section of docs/reliability.md

Needs cosmic-ray: pip install -c constraints.txt -e '.[mutants]'. Results are lines of JSON in docs/mutants.jsonl: a
head, then one line a mutant. A mutant is named by the text of its line, so that the sample outlives changes of a file
elsewhere; one whose line is gone is replaced by another of its area. A survivor gets its `verdict` and `reason` there:

same: it behaves as the package does.
harmless: it behaves otherwise, and no promise depends on it.
matters: a promise depends on it; the reason names the test that kills it now, or says why there is none yet.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported, as in tests/conftest.py

from tests.faults.plant import REPO, Copy, copy

Row = dict[str, Any]
RESULTS = REPO / "docs" / "mutants.jsonl"
COMMAND = "python -m tests.faults.mutants"
START, END = f"<!-- mutants: {COMMAND} --table -->", "<!-- end of mutants -->"
NAME = ("file", "function", "text", "operator", "column", "nth")  # what tells a mutant from others
KILLED, OPEN = ("killed", "timed out"), ("survived", "not covered")
PACKAGES = ("hf_dpopt", "cosmic-ray", "torch", "transformers", "pytest")
AREAS: dict[str, tuple[str, ...]] = {  # files and folders
    "step": ("hf_dpopt/run/step.py",),
    "run": ("hf_dpopt/run/run.py",),
    "ledger": ("hf_dpopt/run/ledger.py",),
    "keys": ("hf_dpopt/run/keys.py", "hf_dpopt/run/key_memory.py"),
    **{name: (f"hf_dpopt/{name}",) for name in ("sampling", "clipping", "noise", "accounting", "plan")},
}
FOLDERS = {"noise": ("mechanisms", "noise"), "clipping": ("grads", "clipping"), "plan": ("test_plan",)}  # of tests
FAST = ("-x", "-m", "not slow and not nightly")


def load(path: Path) -> tuple[Row, list[Row]]:
    """The head and the rows of a file of results."""
    head, *rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return head, rows


def save(path: Path, head: Row, rows: list[Row]) -> None:
    """Write all of it, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in [head, *rows]), encoding="utf-8")
    temporary.replace(path)


# --- the sample ---


def drawn(area: str, seed: str) -> Iterator[Row]:
    """Draw places of an area without replacement, and one mutant at each: a place has from 1 to 11 of them."""
    from tests.faults.operators import mutants_of, mutated

    places: dict[tuple[str, int, int], list[Row]] = {}
    for path in (REPO / name for name in AREAS[area]):
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            name = str(file.relative_to(REPO))
            for one in mutants_of(name, file.read_text(encoding="utf-8")):
                places.setdefault((name, one["line"], one["column"]), []).append(one)
    generator, order = random.Random(seed), sorted(places)
    generator.shuffle(order)
    for place in order:
        one = generator.choice(places[place])
        try:  # an operator may take the ``*`` of a list of arguments for a product, and fails at some exceptions' names
            source = mutated((REPO / one["file"]).read_text(encoding="utf-8"), one)
            with warnings.catch_warnings(action="ignore"):
                compile(source, "mutant", "exec", dont_inherit=True)
        except (SyntaxError, AttributeError):
            continue
        yield {"area": area, **one}


def sample(num: int, seed: int) -> list[Row]:
    """Draw mutants, areas taking turns; an area with fewer places than its share leaves the rest to the others."""
    queues = {area: drawn(area, f"{seed} {area}") for area in AREAS}
    chosen: list[Row] = []
    while queues and len(chosen) < num:
        for area, queue in list(queues.items()):
            one = next(queue, None)
            if one is None:
                del queues[area]
            elif len(chosen) < num:
                chosen.append(one)
    return chosen


# --- a run ---


def nearest_tests(file: str, reason: str) -> list[str]:
    """Files of tests, those first that a verdict names, then those of the module, then those of its package."""
    module = ".".join(Path(file).with_suffix("").parts)
    package, _, stem = module.rpartition(".")
    imports = re.compile(rf"^from {module} import|^from {package} import .*\b{stem}\b", re.MULTILINE)
    named = re.findall(r"(\w+\.py)::", reason)
    folders = [word for part in package.split(".")[1:] for word in FOLDERS.get(part, (part,))]

    def rank(path: Path) -> tuple[int, int]:
        text, where = path.read_text(encoding="utf-8"), str(path)
        near = [
            path.name in named,
            bool(imports.search(text)) or stem in where,
            any(word in where for word in folders),
        ]
        return near.index(True) if any(near) else len(near), len(text)

    tests = sorted((REPO / "tests").rglob("test_*.py"), key=rank)
    return [str(path.relative_to(REPO)) for path in tests if rank(path)[0] < 3 and "faults" not in path.parts]


@functools.cache
def sound(within: Copy, file: str) -> tuple[float, list[str]]:
    """Seconds that a file of tests takes without a mutant, and options that leave out what is red then."""
    start = time.monotonic()
    red = within.red([file], *FAST[1:])
    return time.monotonic() - start, [f"--deselect={test}" for test in red]


def result(row: Row, within: Copy, seconds: float) -> Row:
    """Run the tests nearest to a mutant until one is red, or that many seconds are over; its row, with what came of it."""
    from tests.faults.operators import mutated

    source = (REPO / row["file"]).read_text(encoding="utf-8")
    changed = mutated(source, row)
    start, kind, by, num_files = time.monotonic(), "not covered", "", 0
    for file in nearest_tests(row["file"], row.get("reason", "")):
        expected, without = sound(within, file)
        if time.monotonic() - start > seconds:
            break
        with within.holding(row["file"], changed):
            try:
                red = within.red([file], *FAST, *without, seconds=20 + 5 * expected)
            except TimeoutError:
                kind, by = "timed out", file
                break
            except RuntimeError:  # pytest itself cannot start
                red = [f"collection of {file}"]
        kind, num_files = "survived", num_files + 1
        if red:
            kind, by = "killed", red[0]
            break
    pairs = zip(source.splitlines(), changed.splitlines(), strict=False)
    before = {"was": row["kind"]} if row.get("kind") in OPEN else {}
    kept = {name: row[name] for name in ("area", *NAME, "line", "verdict", "reason") if name in row}
    return kept | before | {
        "after": next((new.strip() for old, new in pairs if old != new), ""), "kind": kind, "by": by,
        "num_files": num_files, "seconds": round(time.monotonic() - start, 1), "date": str(datetime.date.today()),
    }  # fmt: skip


def current(rows: list[Row], i: int, seed: str) -> Row:
    """The row with its mutant as it is in the file now, or another mutant of its area where its line is gone."""
    from tests.faults.operators import mutants_of

    names = [tuple(row[name] for name in NAME) for row in rows]
    found = mutants_of(rows[i]["file"], (REPO / rows[i]["file"]).read_text(encoding="utf-8"))
    for one in found:
        if tuple(one[name] for name in NAME) == names[i]:
            return rows[i] | one
    free = (one for one in drawn(rows[i]["area"], f"{seed} {i}") if tuple(one[name] for name in NAME) not in names)
    return next(free)


def run(options: argparse.Namespace) -> None:
    """Draw a sample, or take the one that is there, and run what has no result yet."""
    if options.resume:
        head, rows = load(RESULTS)
    else:
        if RESULTS.exists() and any("kind" in row for row in load(RESULTS)[1]):
            sys.exit(f"{RESULTS} has results. Use --resume, or delete it.")
        head, rows = (
            {"command": f"{COMMAND} --sample {options.sample} --seed {options.seed}"},
            sample(options.sample, options.seed),
        )
    head["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES}
    import transformers  # noqa: F401  (for the processes that are forked)

    todo = [i for i, row in enumerate(rows) if "kind" not in row or (options.survivors and may_be_killed(row))]
    with copy() as within:
        for i in todo[: options.at_most]:
            rows[i] = row = result(current(rows, i, head["command"]), within, options.seconds)
            save(RESULTS, head, rows)
            where = f"{row['file']}:{row['line']} {row['operator']}: {row['after']}"
            print(f"{i:3} {row['kind']:11} {row['seconds']:6.1f} s  {where}  [{row['by']}]", flush=True)


def may_be_killed(row: Row) -> bool:
    """Whether it survived, and no verdict says why it may."""
    has_reason = row.get("verdict") in ("same", "harmless") and "::" not in row["reason"]
    return row["kind"] in OPEN and not has_reason


# --- the page ---


def section(path: Path) -> str:
    """The table of the areas and the table of the survivors, as Markdown."""
    head, rows = load(path)
    ran = [row for row in rows if "kind" in row]
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    dates = sorted({row["date"] for row in ran})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else "not yet"
    lines = [START, "", f"`{head['command']}`, {when}; {versions}.", "", _share(rows, ran), ""]
    lines += ["| area | sampled | run | killed | survived, same behaviour | survived, harmless | survived, matters |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|", *(_area(area, rows) for area in (*AREAS, "all"))]
    lines += ["", "Survivors:", "", "| place | mutant | verdict | why |", "|---|---|---|---|"]
    lines += [_survivor(row) for row in ran if row["kind"] not in KILLED or "verdict" in row]
    return "\n".join([*lines, "", END]) + "\n"


def _share(rows: list[Row], ran: list[Row]) -> str:
    killed = sum(row["kind"] in KILLED for row in ran)
    first = sum(row["kind"] in KILLED and "was" not in row for row in ran)
    same = sum(row["kind"] not in KILLED and row.get("verdict") == "same" for row in ran)
    share, real = (f"{100 * killed / max(1, num):.1f} %" for num in (len(ran), len(ran) - same))
    return (
        f"**{len(ran)} of the {len(rows)} sampled mutants were run. {first} were killed in the first run, {killed} are "
        f"killed now: {share}, or {real} of those that behave otherwise than the package.**"
    )


def _area(area: str, rows: list[Row]) -> str:
    own = [row for row in rows if area in ("all", row["area"])]
    ran = [row for row in own if "kind" in row]
    killed = sum(row["kind"] in KILLED for row in ran)
    left = Counter(row.get("verdict", "open") for row in ran if row["kind"] not in KILLED)
    matters = left["matters"] + left["open"]
    return f"| {area} | {len(own)} | {len(ran)} | {killed} | {left['same']} | {left['harmless']} | {matters} |"


def _survivor(row: Row) -> str:
    verdict, why = row.get("verdict", "open"), row.get("reason", "not looked at yet")
    verdict += "; killed now" if row["kind"] in KILLED else ""
    before, after = (" ".join(code.split()).replace("|", "\\|") for code in (row["text"], row["after"]))
    place = f"`{row['file'].removeprefix('hf_dpopt/')}`, `{row['function'] or 'module'}`"
    return f"| {place} | `{before}` → `{after or f'without `{before}`'}` | {verdict} | {why} |"


def main() -> None:
    parser = argparse.ArgumentParser(COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sample", type=int, default=200, help="mutants of all areas together")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--resume", action="store_true", help="keep the sample and the results that are there")
    parser.add_argument(
        "--survivors", action="store_true", help="with --resume: also run survivors that may be killed"
    )
    parser.add_argument("--at_most", type=int, help="mutants to run now")
    parser.add_argument("--seconds", type=float, default=300.0, help="of tests for a mutant")
    parser.add_argument("--table", action="store_true", help="print the section of docs/reliability.md, run nothing")
    options = parser.parse_args()
    print(section(RESULTS), end="") if options.table else run(options)


if __name__ == "__main__":
    main()
