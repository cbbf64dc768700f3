"""`hf-dpopt ledger`: what all runs on the same people have spent together, and what is left."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from hf_dpopt.cli.show import print_json
from hf_dpopt.report.statement import round_up
from hf_dpopt.run.dataset_ledger import DatasetLedger


def show_ledger(path: Path, *, as_json: bool) -> None:
    """Print a ledger of a dataset.

    Args:
        path: the file.
        as_json: whether for programs.

    Raises:
        DPConfigError: if there is none, or a line was changed.
    """
    ledger = DatasetLedger.read(path)
    rule = ledger.filter
    if as_json:
        print_json(
            {
                **ledger.header,
                "digest": ledger.digest,
                "spent": ledger.spent,
                "share_left": ledger.left,
                "runs": [
                    {
                        "entry": one.name,
                        "what": one.what,
                        "num_units": one.num_units,
                        "share": ledger.share(one.charge),
                    }
                    for one in ledger.entries.values()
                ],
            }
        )
        return
    table = Table(title=f"Ledger {ledger.name} of a dataset")
    for name in ("run", "what", f"{ledger.header['unit']}s", "alone", "share of the budget"):
        table.add_column(name, justify="right")
    for one in ledger.entries.values():
        alone = round_up(rule.spent([one.charge]), 4)
        table.add_row(one.name, one.what, f"{one.num_units:,}", alone, f"{ledger.share(one.charge):.1%}")
    Console(width=max(Console().width, 100)).print(table)
    typer.echo(
        f"Spent: epsilon {round_up(ledger.spent)} of {rule.epsilon:g} at delta {rule.delta:g} "
        f"({ledger.header['adjacency']}), {ledger.left:.1%} left; Renyi filter of order {rule.order:g}."
    )
    typer.echo(f"Digest: {ledger.digest}")
