"""Earlier private runs, and the earlier part of this one, read from the logs and ledgers that they left."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.plan.record import PlanRecord, earlier_runs_of
from hf_dpopt.plan.release import EarlierRun
from hf_dpopt.run.keys import default_private_dir, private_dir
from hf_dpopt.run.ledger import LEDGER, Ledger
from hf_dpopt.run.run_log import find_run


def earlier_runs_for(
    folders: Iterable[str] | str | None,
    output_dir: str,
    recorded: PlanRecord | None,
    private_state_dir: str | None = None,
) -> tuple[EarlierRun, ...]:
    """Earlier runs of a run that begins, or those that are recorded for one that goes on or is published.

    Args:
        folders: what was asked for now; None for nothing.
        output_dir: folder of the run.
        recorded: the plan in its ledger, or None.
        private_state_dir: private folder of the run; None for the default.

    Raises:
        DPConfigError: if other runs, or further steps of them, are named than were recorded; see `read_earlier_runs`.
    """
    if recorded is None:
        return read_earlier_runs(folders or (), output_dir, private_state_dir)
    known = recorded.earlier_runs
    if folders:
        named = {run.ledger_digest for run in read_earlier_runs(folders, output_dir, private_state_dir)}
        if named != {run.ledger_digest for run in known}:
            raise DPConfigError(
                f"The run of {output_dir} began with {len(known)} earlier runs, and earlier_runs names others now, or "
                "one of them was charged further since. Leave earlier_runs out, which takes those that are recorded; "
                "what was charged since comes on top."
            )
    return known


def read_earlier_runs(
    folders: Iterable[str] | str, output_dir: str, private_state_dir: str | None = None
) -> tuple[EarlierRun, ...]:
    """Read what earlier runs were charged, with the runs that they were built on.

    A run that stopped before its plan ended counts as if it had not. A ledger counts once for each state in which it
    was read: a run that went on after another was built on it counts twice, which is the safe side.

    Args:
        folders: their output folders, or the only one.
        output_dir: folder of the run that comes after them.
        private_state_dir: private folder of that run; None for the default. Logs of the earlier ones are looked for
            in both.

    Raises:
        DPConfigError: for a folder without a ledger, with one that was edited or is in use, or with a cost that cannot
            be composed; and for the folder of the run itself.
    """
    found: dict[str, EarlierRun] = {}
    for folder in [folders] if isinstance(folders, str) else folders:
        if Path(folder).resolve() == Path(output_dir).resolve():
            raise DPConfigError(
                f"{folder} is this run's own output_dir, whose ledger is counted in any case. Leave it out of "
                "earlier_runs, or choose another output_dir."
            )
        path = Path(folder) / LEDGER
        ledger = Ledger.read(path)
        private = {default_private_dir(), Path(private_state_dir or default_private_dir()).expanduser()}
        known = [find_run(Path(folder), directory) for directory in private]
        if Ledger.is_in_use(path) or any(found.is_in_use for found in known):
            raise DPConfigError(
                f"The run of {folder} is still going on, and what it charges from now on would not be counted. Wait "
                "until it has ended."
            )
        if num_unknown := max(found.num_unknown for found in known):
            raise DPConfigError(
                f"earlier_runs={folder}: its keys were used for {num_unknown} steps that its ledger does not know: it "
                "was put back to an earlier state. Resume that run once, which charges them."
            )
        charged = _at_least_planned(ledger.charged, ledger.plan or {})
        for run in earlier_runs_of(ledger.plan, charged, ledger.digest(), where=str(folder)):
            found[run.ledger_digest] = run
    return tuple(found.values())


def _at_least_planned(charged: Sequence[int], plan: Mapping[str, Any]) -> Sequence[int]:
    """Steps charged to each chain, and in the last one those of the plan that were not taken.

    A run may stop because of what its releases show. The steps that it took then bound nothing, and the noise of the
    run that follows would be made for them; with all planned steps it is a part of a run that was chosen beforehand.
    """
    left = int(plan.get("num_steps", 0)) - sum(charged)
    return [*charged[:-1], charged[-1] + left] if any(charged) and left > 0 else charged


# --- the earlier part of a run in its own folder ---


@contextlib.contextmanager
def reading_plan(output_dir: str | Path, *, is_trusted: bool) -> Iterator[None]:
    """Say of a recorded plan that cannot be read that it was edited.

    Args:
        output_dir: folder of the run.
        is_trusted: whether the plan is that of a log, or none: an error is then another one.
    """
    try:
        yield
    except (DPBudgetExceeded, DPConfigError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if is_trusted:
            raise
        raise DPConfigError(
            f"output_dir={output_dir}: the plan in its ledger is that of a run of another kind, or was edited "
            f"({type(error).__name__}). Put the original ledger back, or choose another output_dir."
        ) from error


def recorded_plan(
    output_dir: str | Path,
    private_state_dir: str | Path | None,
    *,
    keeps_budget: bool,
    num_examples: int | None = None,
) -> PlanRecord | None:
    """The plan that an earlier run in this folder was charged under, or None. What rank 0 finds counts.

    From a ledger without its log, no delta is taken over, and no proof of an epsilon.

    Raises:
        DPConfigError: if that run was on another number of records or users, or if a budget is to be kept and it had
            no noise.
    """
    if current_ranks().rank != 0 or not Path(output_dir).is_dir():
        return None
    found = find_run(Path(output_dir), private_dir(private_state_dir, output_dir, is_read=True))
    known = found.known
    if known is None or known.plan is None or (found.log is None and not known.num_charged):
        return None
    with reading_plan(output_dir, is_trusted=False):
        plan = PlanRecord.from_json(known.plan)
    if found.log is None:  # anybody who writes there may have made it
        plan = dataclasses.replace(plan, delta=None, certificate=None)
    if num_examples not in (None, plan.num_examples):
        raise DPConfigError(
            f"output_dir={output_dir}: holds a run on another dataset, of {plan.num_examples} records or users; this "
            f"one has {num_examples}. Continue with that dataset, or choose another output_dir."
        )
    if keeps_budget and plan.noise_multiplier == 0:
        raise DPConfigError(
            f"The run recorded in {known.path} had no noise, so no budget can be kept. Choose another output_dir."
        )
    return plan
