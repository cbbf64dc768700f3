"""`hf-dpopt scan`: what must not leave a folder; `ledger`: what all runs on the same people have spent."""

from __future__ import annotations

from pathlib import Path

import typer

from hf_dpopt.cli.show import print_json, print_table
from hf_dpopt.report.release_scan import Finding, scan_for_secrets
from hf_dpopt.report.statement import round_up
from hf_dpopt.run.checkpoint import UNPUBLISHED
from hf_dpopt.run.dataset_ledger import DatasetLedger
from hf_dpopt.run.keys import private_dir, secrets_in
from hf_dpopt.verify.claims import Report
from hf_dpopt.verify.files import FOLDER, check_released
from hf_dpopt.verify.outcome import Contradiction, Unknown
from hf_dpopt.verify.reading import Fields, read_regular, strict_json
from hf_dpopt.verify.verifying import REPORT


def show_findings(output_dir: Path, private_state_dir: Path | None) -> int:
    """Print what must not leave the folder; return the number of findings.

    Args:
        output_dir: folder that is about to be copied.
        private_state_dir: where the run kept its keys; None for the default.
    """
    directory = private_dir(private_state_dir, output_dir, is_read=True)
    secrets = secrets_in(directory)
    findings = scan_for_secrets(output_dir, secrets, unpublished=UNPUBLISHED) + _other_weights(output_dir)
    for finding in findings:
        typer.echo(str(finding))
    known = f"{len(secrets)} keys of {directory}" if secrets else f"no keys (there are none left in {directory})"
    typer.echo(f"{len(findings)} finding(s) in {output_dir}; looked for {known}, private files and un-noised results.")
    return len(findings)


def _other_weights(output_dir: Path) -> list[Finding]:
    """Find weights that the report of the folder does not name, such as those of a training without privacy."""
    path = output_dir / FOLDER / REPORT
    if not path.is_file():
        return []
    try:
        check_released(Report(Fields(strict_json(read_regular(path)), "the report"), path=path))
    except Unknown:
        return []
    except Contradiction as error:
        fix = "save the model of that run there again, or move the statement out of the folder"
        return [Finding(f"{FOLDER}/{REPORT}", f"a statement about other weights: {error}", fix)]
    return []


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
                "runs": [{"entry": one.name, "what": one.what, "share": share} for one, share in shares],
            }
        )
        return
    print_table(
        f"Ledger {ledger.name} of a dataset",
        ("run", "what", "alone", "share of the budget"),
        ((one.name, one.what, round_up(rule.spent([one.charge]), 4), f"{share:.1%}") for one, share in shares),
        width=100,
    )
    typer.echo(
        f"Protected: each {ledger.header['unit']} ({ledger.header['adjacency']}). Spent: epsilon "
        f"{round_up(ledger.spent)} of {rule.epsilon:g} at delta {rule.delta:g}, {ledger.left:.1%} left; Renyi filter "
        f"of order {rule.order:g}."
    )
    typer.echo(f"Digest: {ledger.digest}")
