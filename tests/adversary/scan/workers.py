"""Runs the scan: one forked process for each class, so that none can harm the others, hang or eat the memory."""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.metadata
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
import transformers

from tests.adversary.scan import table
from tests.adversary.scan.classes import ModelClass, named_classes
from tests.adversary.scan.measure import first_sentence, measure

MEMORY = 12 << 30  # bytes of address space
LIMIT = 60  # seconds of work for a class
PACKAGES = ("transformers", "torch", "peft", "accelerate")


def scan(only: list[str] | None, is_new: bool, command: str) -> None:
    """Measures the classes that are named, or have no row, or all; writes each row at once."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.environ.setdefault("HF_DPOPT_PRIVATE_DIR", tempfile.mkdtemp(prefix="hf_dpopt_scan_"))
    _warm_up()
    found: dict[str, Any] = {"rows": {}, "without_labels": []} if is_new else table.read()
    found = {"command": command, "versions": versions(), **_body(found)}
    start, todo = time.monotonic(), _chosen(only, found)
    for num, model in enumerate(todo, 1):
        row = _measured(model)
        found["without_labels"] = sorted(set(found["without_labels"]) - {model.name})
        if row is None:
            found["rows"].pop(model.name, None)
            found["without_labels"] = sorted({*found["without_labels"], model.name})
        else:
            found["rows"][model.name] = row | {"date": str(datetime.date.today())}
            told = row["verdict"] + (f", LoRA {row['lora']['verdict']}" if "lora" in row else "")
            print(
                f"{num}/{len(todo)} {time.monotonic() - start:.0f} s {model.name}: {told} {row.get('reason', '')}",
                flush=True,
            )
        table.write(found)


def _warm_up() -> None:
    """Trains once before processes are forked: what the libraries import on the way is then there for all of them."""
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        measure(named_classes()["Qwen3MoeForCausalLM"])
    gc.collect()
    gc.freeze()  # or every collection in a forked process copies the pages of all that was imported


def versions() -> dict[str, str]:
    """The installed versions that decide which classes there are and what they compute."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def _body(found: dict[str, Any]) -> dict[str, Any]:
    known = named_classes()  # classes that left transformers leave the table
    return {
        "without_labels": [name for name in found["without_labels"] if name in known],
        "rows": {name: row for name, row in found["rows"].items() if name in known},
    }


def _chosen(only: list[str] | None, found: dict[str, Any]) -> list[ModelClass]:
    known = named_classes()
    if only:
        if unknown := [name for name in only if name not in known]:
            sys.exit(f"No AutoModelFor* of transformers {transformers.__version__} offers: {', '.join(unknown)}.")
        return [known[name] for name in only]
    seen = {*found["rows"], *found["without_labels"]}
    return [model for model in known.values() if model.name not in seen]


def _measured(model: ModelClass) -> dict[str, Any] | None:
    """The row of a class, of a forked process that measures it."""
    context = multiprocessing.get_context("fork")
    out, into = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model, into))
    process.start()
    into.close()
    try:
        return out.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        is_late = -code in (signal.SIGALRM, signal.SIGXCPU, signal.SIGKILL)
        reason = f"took longer than {LIMIT} s" if is_late else f"the process died ({abs(code)})"
        return {"head": model.head, "verdict": table.NOT_RUNNABLE, "reason": reason}
    finally:
        process.join()


def _child(model: ModelClass, into: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5))  # seconds of work, however busy the machine is
    signal.alarm(20 * LIMIT)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        row = measure(model)
    except BaseException as error:
        row = {"head": model.head, "verdict": table.NOT_RUNNABLE, "reason": f"the scan: {first_sentence(error)}"}
    into.send(row)
    os._exit(0)
