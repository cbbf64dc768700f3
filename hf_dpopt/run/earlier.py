"""Earlier private runs, read from the ledgers that they left."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.earlier import EarlierRun, earlier_runs_of
from hf_dpopt.run.ledger import Ledger
from hf_dpopt.run.run import LEDGER


def read_earlier_runs(folders: Iterable[str] | str, output_dir: str) -> tuple[EarlierRun, ...]:
    """Read what earlier runs were charged, with the runs that they were built on; each is counted once.

    Args:
        folders: their output folders, or the only one.
        output_dir: folder of the run that comes after them.

    Raises:
        DPConfigError: for a folder without a ledger, with one that was edited, or with a cost that cannot be composed;
            and for the folder of the run itself.
    """
    found: dict[str, EarlierRun] = {}
    for folder in [folders] if isinstance(folders, str) else folders:
        if Path(folder).resolve() == Path(output_dir).resolve():
            raise DPConfigError(
                f"{folder} is this run's own output_dir, whose ledger is counted in any case. Leave it out of "
                "earlier_runs, or choose another output_dir."
            )
        ledger = Ledger.read(Path(folder) / LEDGER)
        for run in earlier_runs_of(ledger.plan, ledger.charged, ledger.digest(), where=str(folder)):
            found[run.ledger_digest] = run
    return tuple(found.values())
