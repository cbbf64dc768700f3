"""`hf-dpopt report` and `scan`: what a run left in its folder; `ledger`: what all runs on the same people spent."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from hf_dpopt.cli.show import print_json, print_table
from hf_dpopt.convex.statement import disagreements, read_head_report, read_statement
from hf_dpopt.report.audits import read_audits
from hf_dpopt.report.facts import RunFacts
from hf_dpopt.report.release_scan import scan_for_secrets
from hf_dpopt.report.report import FOLDER, LEDGER, STATEMENT, is_of_this_release, read_report, statement_in
from hf_dpopt.report.statement import round_up
from hf_dpopt.run.checkpoint import UNPUBLISHED
from hf_dpopt.run.dataset_ledger import DatasetLedger
from hf_dpopt.run.keys import private_dir, secrets_in
from hf_dpopt.run.ledger import Ledger


def show_report(output_dir: Path) -> bool:
    """Print the statement of the run in `output_dir`; return whether the ledger agrees with it."""
    head = read_head_report(output_dir)
    if head is not None:
        text = read_statement(output_dir)
        problems, agreed = disagreements(output_dir, head), f"one run, digest {head['ledger_digest']}"
    else:
        facts = read_report(output_dir)
        read_audits(output_dir / FOLDER)  # of a damaged file the statement would say nothing
        text = statement_in(output_dir / FOLDER, facts)
        problems = _disagreements(output_dir, facts, text)
        agreed = f"{facts.steps_charged} steps, digest {facts.ledger_digest}"
    typer.echo(text)
    for problem in problems:
        sys.stderr.write(f"hf-dpopt: {problem}\n")
    if not problems:
        typer.echo(f"The ledger agrees: {agreed}.")
    return not problems


def show_findings(output_dir: Path, private_state_dir: Path | None) -> int:
    """Print what must not leave the folder; return the number of findings.

    Args:
        output_dir: folder that is about to be copied.
        private_state_dir: where the run kept its keys; None for the default.
    """
    directory = private_dir(private_state_dir, output_dir, is_read=True)
    secrets = secrets_in(directory)
    findings = scan_for_secrets(output_dir, secrets, unpublished=UNPUBLISHED)
    for finding in findings:
        typer.echo(str(finding))
    known = f"{len(secrets)} keys of {directory}" if secrets else f"no keys (there are none left in {directory})"
    typer.echo(f"{len(findings)} finding(s) in {output_dir}; looked for {known}, private files and un-noised results.")
    return len(findings)


def _disagreements(output_dir: Path, facts: RunFacts, text: str) -> list[str]:
    """Contradictions between a run's folder and its report."""
    folder = output_dir / FOLDER
    problems = []
    statement = folder / STATEMENT
    if not statement.is_file():
        problems.append(f"{statement} is missing.")
    elif is_of_this_release(facts) and statement.read_text(encoding="utf-8", errors="replace") != text:
        problems.append(f"{statement} was edited.")
    ledger = Ledger.read(folder / LEDGER)
    if ledger.digest() != facts.ledger_digest:
        went_on = ledger.num_charged > facts.steps_charged and facts.ledger_digest in ledger.path.read_text(
            errors="replace"
        )
        problems.append(
            f"the ledger went on after the report: {ledger.num_charged} steps charged now, {facts.steps_charged} then."
            if went_on
            else f"the ledger's digest is {ledger.digest()}, the report names {facts.ledger_digest}: one was replaced."
        )
    elif ledger.num_charged != facts.steps_charged:
        problems.append(f"the ledger has charged {ledger.num_charged} steps, the report says {facts.steps_charged}.")
    return problems


def show_ledger(path: Path, *, as_json: bool) -> None:
    """Print a ledger of a dataset.

    Args:
        path: the file.
        as_json: whether for programs.

    Raises:
        DPConfigError: if there is none, or a line was changed.
    """
    ledger = DatasetLedger.read(path)
    rule, shares = ledger.filter, [(one, ledger.share(one.charge)) for one in ledger.entries.values()]
    if as_json:
        print_json(
            {
                **ledger.header,
                "digest": ledger.digest,
                "spent": ledger.spent,
                "share_left": ledger.left,
                "runs": [
                    {"entry": one.name, "what": one.what, "num_units": one.num_units, "share": share}
                    for one, share in shares
                ],
            }
        )
        return
    print_table(
        f"Ledger {ledger.name} of a dataset",
        ("run", "what", f"{ledger.header['unit']}s", "alone", "share of the budget"),
        (
            (one.name, one.what, f"{one.num_units:,}", round_up(rule.spent([one.charge]), 4), f"{share:.1%}")
            for one, share in shares
        ),
        width=100,
    )
    typer.echo(
        f"Spent: epsilon {round_up(ledger.spent)} of {rule.epsilon:g} at delta {rule.delta:g} "
        f"({ledger.header['adjacency']}), {ledger.left:.1%} left; Renyi filter of order {rule.order:g}."
    )
    typer.echo(f"Digest: {ledger.digest}")
