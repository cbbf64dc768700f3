"""The other files of a folder: what was released, and what people read."""

from __future__ import annotations

import hashlib
import math
import os
import re
from pathlib import Path

from hf_dpopt.verify.claims import Report
from hf_dpopt.verify.outcome import Contradiction, Inapplicable, Unknown
from hf_dpopt.verify.reading import Fields, read_regular, strict_json

FOLDER, STATEMENT, AUDIT = "privacy", "statement.md", "audit.json"
PROMISE = re.compile(r"\*\*epsilon = (?P<epsilon>[^,*]+), delta = (?P<delta>[^*]+)\*\*")
SECTION = "<!-- hf_dpopt privacy statement: start"
# What transformers and peft load from a folder, in place of the files that a run saved.
WEIGHTS = re.compile(r"(adapter_)?model.*\.(safetensors|bin|gguf)\Z|pytorch_model.*\.bin\Z|(tf|flax)_model\.")
PLAIN_NAME = re.compile(r"[\w.-]+\Z")
QUOTED = {"installation": "independent", "canaries": "one_run"}  # kind of audit -> its bound in the statement
SLACK = 2e-5  # relative, of an epsilon that was rounded up to five digits


def check_released(report: Report) -> str:
    """The files that the report names against those that lie in its `output_dir`."""
    if not report.fields.content.get("released_files"):
        raise Unknown("the report names no released files, so nothing ties the weights to it")
    named = report.fields.inner("released_files")
    folder = report.path.parent.parent
    if report.path.parent.name != FOLDER:
        raise Unknown(f"{len(named.content)} files are named, and the folder that they were saved to was not given")
    missing = []
    for name in sorted(named.content):
        if not PLAIN_NAME.match(name):
            raise Contradiction(f"{name!r:.60} is no name of a file of the folder")
        path = folder / name
        if not path.is_file():
            missing.append(name)
            continue
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != named.text(name):
                raise Contradiction(f"{name} is not the file that was saved: another digest")
    if len(missing) == len(named.content):
        raise Unknown(f"none of the {len(missing)} files that are named is in {folder}")
    if missing:
        raise Contradiction(f"{missing[0]} is missing, and others of the run are there")
    found = sorted(path.name for path in folder.iterdir() if WEIGHTS.match(path.name))
    others = [name for name in found if name not in named.content]
    if others:
        raise Contradiction(f"{others[0]} holds weights that the report does not name, and may be loaded instead")
    return f"{len(named.content)} files have the digests that the report names: {', '.join(sorted(named.content))}"


def check_statement(report: Report) -> str:
    """The promise of the statement against the claim."""
    path = report.path.with_name(STATEMENT)
    if not os.path.lexists(path):
        raise Unknown(f"there is no {path.name}")
    return _check_promise(path.name, _text_of(path), report)


def check_card(report: Report) -> str:
    """The promise of the model card against the claim, if there is one."""
    path = report.path.parent.parent / "README.md"
    if report.path.parent.name != FOLDER or not path.is_file():
        raise Inapplicable("there is no model card")
    text = _text_of(path)
    if SECTION not in text:
        raise Unknown(f"{path.name} says nothing of this run")
    return _check_promise(path.name, text, report)


def _text_of(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except UnicodeDecodeError:
        raise Contradiction(f"{path.name} is not a text") from None


def _check_promise(name: str, text: str, report: Report) -> str:
    """Every promise in a text; an upper end to which the claim was rounded is no contradiction."""
    epsilon, delta = report.epsilon, report.delta
    if PROMISE.search(text) is None:
        raise Contradiction(f"{name} has no promise where the report makes one")
    for promise in PROMISE.finditer(text):
        said, at = float(promise["epsilon"]), float(promise["delta"])
        if not epsilon * (1 - SLACK) <= said <= epsilon * (1 + 10 * SLACK) + 1e-12 or not _is_same(at, delta):
            raise Contradiction(
                f"{name} promises epsilon {said:g} at delta {at:g}, the report {epsilon:.6g} at {delta:g}"
            )
    return f"{name} promises the same epsilon and delta"


def check_audits(report: Report) -> str:
    """The audits beside a report: of this state of the ledger, passed, below the claim, and told in the statement."""
    path, statement = report.path.with_name(AUDIT), report.path.with_name(STATEMENT)
    if not os.path.lexists(path):
        raise Inapplicable("there was no audit")
    audits = Fields(strict_json(read_regular(path)), path.name)
    text = read_regular(statement).decode(errors="replace") if statement.is_file() else ""
    said = []
    for kind in sorted(audits.content):
        if kind not in QUOTED:
            raise Contradiction(f"{path.name}: audits of kind {kind!r:.40} are unknown here")
        audit, method = audits.inner(kind), QUOTED[kind]
        if audit.text("ledger_digest") != report.fields.text("ledger_digest"):
            raise Unknown(f"the audit of the {kind} is of another state of the ledger: the statement leaves it out")
        bounds, claimed = audit.inner("lower_bounds"), audit.number("claimed_epsilon")
        if not _is_same(audit.number("delta"), report.delta):
            raise Contradiction(f"the audit of the {kind} is at another delta than the claim")
        if kind == "canaries" and not _is_same(claimed, report.epsilon):
            raise Contradiction(f"the audit by canaries is beside a claim of {claimed:.6g}, which the report is not")
        if not audit.flag("passed") or bounds.number("one_run") > claimed:
            verdict = audit.content.get("verdict", "refuted")
            raise Contradiction(f"the audit of the {kind} found a fault: {verdict!s:.200}")
        if f"at least {bounds.number(method):.2f} ({method}," not in text:
            raise Contradiction(f"the statement does not tell the bound {bounds.number(method):.2f} of the {kind}")
        said.append(f"epsilon >= {bounds.number(method):.2f} by {method}, on the {kind}")
    return f"{'; '.join(said)}: below the claim. That they were made is not shown"


def _is_same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4)
