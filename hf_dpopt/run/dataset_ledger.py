"""The ledger of a dataset: what all trainings and tunings on the same people cost together, and what is left.

One file for all runs, beside the ledgers of the runs themselves. A run is charged with all its planned steps before
its first one; where that is more than what is left, it does not begin. Runs are chosen after others were looked at, so
they go through a Renyi filter (`hf_dpopt.accounting.filter`), not through a composition of runs that were fixed
beforehand. It holds public values only.

Formal guarantee: all runs that were charged to one ledger, together, are (epsilon, delta)-differentially private, with
the budget in its first line, however they were chosen; as long as every run on these people is charged to it, and
nobody changes the file.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dp_accounting import DpEvent

from hf_dpopt.accounting.filter import Charge, RenyiFilter, best_order, charge_of
from hf_dpopt.common.chained import ChainedFile
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.run.ledger import Ledger
from hf_dpopt.run.resume import Resume
from hf_dpopt.run.run_log import RunLog

VERSION = 1
ENTRY = "privacy_ledger"  # of a recorded plan: where the run is charged for the people in its data


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reservation:
    """Cost of a run to the people in a dataset.

    Attributes:
        event: everything that it releases.
        adjacency: relation that it protects.
        unit: unit that it protects as a whole, with the column that tells users apart.
        delta: delta of the run's own statement; that of a ledger that begins with it.
        what: kind of the run, such as "training".
    """

    event: DpEvent
    adjacency: str
    unit: str
    delta: float
    what: str = "training"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A run in the ledger: the cost that was charged to it last."""

    name: str
    what: str
    charge: Charge


class DatasetLedger:
    """Content of a ledger of a dataset; made by `read`."""

    def __init__(self, path: Path, file: ChainedFile):
        """Use `DatasetLedger.read`."""
        self.path, self.digest = path, file.digest
        header, *records = file.records
        if header.get("kind") != "dataset" or header.get("version") != VERSION:
            raise DPConfigError(f"{path} is no ledger of a dataset of format {VERSION}. Name another file.")
        self.header: Mapping[str, Any] = header
        self.filter = RenyiFilter(header["epsilon"], header["delta"], header["order"])
        self.entries: dict[str, Entry] = {}
        for one in records:
            charge = Charge(one["divergence"], one["exposure"])
            self.entries[one["entry"]] = Entry(one["entry"], one["what"], charge)

    @classmethod
    def read(cls, path: str | Path) -> DatasetLedger:
        """Read and verify a ledger; runs may be writing to it.

        Raises:
            DPConfigError: if there is none, or a line was changed.
        """
        path = Path(path)
        if path.is_dir():
            raise DPConfigError(
                f"{path} is a folder. Give the file that runs were given as privacy_ledger. What one run spent is in "
                "privacy/statement.md of its output_dir."
            )
        file = ChainedFile.read(path) if path.exists() else None
        if file is None or not file.records:
            raise DPConfigError(f"There is no ledger of a dataset at {path}. Give the path that the runs were given.")
        return cls(path, file)

    @property
    def name(self) -> str:
        """Its public name, which statements of runs quote."""
        return str(self.header["name"])

    @property
    def spent(self) -> float:
        """Epsilon of everything that was charged, at the ledger's delta."""
        return self.filter.spent(self.charges())

    def charges(self, *, without: str | None = None) -> list[Charge]:
        """Costs of all runs, or of all but one."""
        return [entry.charge for name, entry in self.entries.items() if name != without]

    def share(self, charge: Charge) -> float:
        """Share of the whole budget that a cost takes."""
        return charge.divergence / self.filter.allowance

    @property
    def left(self) -> float:
        """Share of the budget that is left."""
        return max(0.0, 1 - math.fsum(self.share(charge) for charge in self.charges()))

    def check(self, reservation: Reservation, entry: str | None = None, budget: float | None = None) -> Charge:
        """Check that a run is within what is left, and return its cost. Nothing is charged.

        Args:
            reservation: what it will cost.
            entry: its name in the ledger if it was charged before; None for a run that begins.
            budget: budget that the ledger has to have; None for any.

        Raises:
            DPBudgetExceeded: if it costs more than what is left.
            DPConfigError: if it protects something else than the runs before it, or for another budget.
        """
        if budget not in (None, self.filter.epsilon):
            raise DPConfigError(
                f"privacy_ledger_epsilon={budget:g} is not the budget of {self.path}, which is "
                f"{self.filter.epsilon:g} and was promised. Leave it out."
            )
        was, now = (self.header["unit"], self.header["adjacency"]), (reservation.unit, reservation.adjacency)
        if was != now:
            raise DPConfigError(
                f"The ledger {self.path} protects the unit {was[0]} under {was[1]}, this run {now[0]} under {now[1]}: "
                f"their costs do not add up. Use the same unit, and --adjacency {was[1]}; or another ledger."
            )
        charge = charge_of(reservation.event, reservation.adjacency, self.filter.order)
        if entry in self.entries:  # steps that were charged stay charged
            before = self.entries[entry].charge
            charge = Charge(max(charge.divergence, before.divergence), max(charge.exposure, before.exposure))
        others = self.charges(without=entry)
        if not self.filter.admits([*others, charge]):
            raise DPBudgetExceeded(
                f"This run would bring epsilon of all runs in {self.path} to "
                f"{self.filter.spent([*others, charge]):.4g} at delta {self.filter.delta:g}, above the budget of "
                f"{self.filter.epsilon:g} for these people, which cannot be raised; {self.filter.spent(others):.4g} "
                f"were spent before ({len(others)} charged). It was not started. Use a smaller --target_epsilon."
            )
        return charge


def reserve(
    path: str | Path,
    reservation: Reservation,
    *,
    budget: float | None,
    entry: str,
    since: Collection[str] = (),
) -> DatasetLedger:
    """Charge a run to a ledger of its dataset, durably, before it begins; return the ledger as it is now.

    Args:
        path: the ledger, which is begun if there is none.
        reservation: cost of the run, with all its steps.
        budget: epsilon of a ledger that is begun; one that is there has its own, with which this has to agree.
        entry: id of the run, or a name that the runs of a tuning share; a run that was charged under it already pays
            what it costs more.
        since: digests that the ledger had when the run was charged there before.

    Raises:
        DPBudgetExceeded: if it costs more than what is left.
        DPConfigError: for a ledger of other people or another promise, one that was put back, or none without a
            budget.
    """
    path = Path(path)
    with ChainedFile.writing(path) as file:
        if not all(map(file.contains, since)):
            raise DPConfigError(
                f"privacy_ledger={path} lacks a charge of this run: it is another ledger, or was put back to an "
                "earlier state. Give the path of the newest copy of the ledger that the run began with."
            )
        if not file.records:
            file.append(_header(path, reservation, budget))
        ledger = DatasetLedger(path, file)
        charge = ledger.check(reservation, entry, budget)
        if entry not in ledger.entries or ledger.entries[entry].charge != charge:
            record = {"kind": "charge", "entry": entry, "what": reservation.what}
            file.append(record | dataclasses.asdict(charge))
        return DatasetLedger(path, file)


def begin(path: str | Path, reservation: Reservation, budget: float | None) -> None:
    """Begin a ledger whose order suits a run, and charge nothing; one that is there stays as it is.

    Args:
        path: the ledger.
        reservation: cost of the run that the order is chosen for: the costliest of several.
        budget: epsilon of the ledger.

    Raises:
        DPBudgetExceeded: if the budget does not admit the run.
        DPConfigError: without a budget.
    """
    with ChainedFile.writing(Path(path)) as file:
        if not file.records:
            file.append(_header(Path(path), reservation, budget))


@dataclasses.dataclass(frozen=True)
class DatasetBudget:
    """Ledger that a run is charged to: its path, the budget of one that begins, and an entry that runs share."""

    path: str | Path
    epsilon: float | None = None
    entry: str | None = None


def charge_run(dataset: DatasetBudget | None, plan: PrivacyPlan, log: RunLog, resume: Resume) -> dict[str, Any]:
    """Charge all steps of a run to the ledger of its dataset, before the first of them; see `reserve`.

    Steps that were taken in from elsewhere count, too, also where the run that took them was charged under an id of
    its own: only a file in `output_dir` says which one that was.

    Args:
        dataset: the ledger that was named; None for none.
        plan: plan of the run.
        log: log of the run, which notes the charge.
        resume: how it goes on.

    Returns:
        Entry for the recorded plan; nothing without a ledger.

    Raises:
        DPConfigError: if the run was charged to a ledger and none is named now; see `reserve`.
    """
    _check_named(dataset, (log.state.plan or {}).get(ENTRY))
    if dataset is None:
        return {}
    reservation, entry = reservation_of(plan, resume.in_the_end(plan.num_steps)), dataset.entry or log.state.run
    charged = reserve(
        dataset.path, reservation, budget=dataset.epsilon, entry=entry, since=log.state.datasets.values()
    )
    log.note_dataset(charged.name, charged.digest)
    return {ENTRY: {"name": charged.name, "entry": entry}}


def charged_to(ledger: Ledger | None, dataset: DatasetBudget | None) -> dict[str, Any]:
    """Entry for the plan of a report: where a run was charged, and what all runs there have spent by now.

    Args:
        ledger: ledger of the run.
        dataset: that of its dataset, as it is named now.
    """
    recorded = (ledger.plan or {}).get(ENTRY) if ledger is not None else None
    if recorded is None or dataset is None or not Path(dataset.path).exists():
        return {} if recorded is None else {ENTRY: recorded}
    now = DatasetLedger.read(dataset.path)
    rule = now.filter
    return {
        ENTRY: {
            **recorded, "epsilon": rule.epsilon, "delta": rule.delta, "order": rule.order, "spent": now.spent,
            "runs": len(now.entries), "digest": now.digest,
        }
    }  # fmt: skip


def reservation_of(plan: PrivacyPlan, chains: Sequence[int]) -> Reservation:
    """Cost of a run with these chains to the people in its data; earlier runs are charged for themselves."""
    column = plan.users["column"] if plan.users else None
    return Reservation(
        event=plan.release.alone.event(plan.secret_noise_multiplier, tuple(chains)),
        adjacency=plan.adjacency,
        unit=plan.unit + (f" by {column}" if column else ""),
        delta=plan.delta,
        what="tuning" if plan.config.tuned is not None else "training",
    )


def _check_named(dataset: DatasetBudget | None, before: Any) -> None:
    """Refuse to go on without the ledger that a run was charged to, or under another shared entry."""
    before = before or {}
    if not isinstance(before, dict) or (before and not {"name", "entry"} <= before.keys()):
        raise DPConfigError(
            f"The plan of this run names a ledger of its dataset that no run names: {before!r}. Put the ledger of the "
            "run back."
        )
    if before and dataset is None:
        raise DPConfigError(
            f"This run is charged to the ledger {before['name']} of its dataset, and no privacy_ledger is named. Give "
            "its path, so that what is charged from now on is seen there."
        )
    shared = dataset.entry if dataset is not None else None
    if before and shared not in (None, before["entry"]):
        raise DPConfigError(
            f"privacy_ledger_entry={shared}: this run is charged to the entry {before['entry']} of its ledger. Leave "
            "privacy_ledger_entry out."
        )


def _header(path: Path, reservation: Reservation, budget: float | None) -> dict[str, Any]:
    """First record of a ledger; its order is the one at which the budget admits the first run most often."""
    if budget is None:
        raise DPConfigError(
            f"privacy_ledger={path} is not there yet, and a ledger begins with a budget for everything that these "
            "people will ever be used for. Add --privacy_ledger_epsilon 16, or correct the path."
        )
    if not 0 < budget < math.inf:
        raise DPConfigError(f"privacy_ledger_epsilon={budget:g} is no budget. Use a finite number > 0, such as 16.")
    order = best_order(reservation.event, reservation.adjacency, budget, reservation.delta)
    rule = RenyiFilter(budget, reservation.delta, order)
    charges = [charge_of(reservation.event, reservation.adjacency, order)]
    if not rule.admits(charges):
        raise DPBudgetExceeded(
            f"privacy_ledger_epsilon={budget:g} does not even admit this run, which costs {rule.spent(charges):.4g} "
            "by Renyi divergences. It was not started. Use a larger budget, or a smaller --target_epsilon."
        )
    return {
        "kind": "dataset", "version": VERSION, "name": secrets.token_hex(8), "epsilon": float(budget),
        "delta": reservation.delta, "order": float(order), "adjacency": reservation.adjacency,
        "unit": reservation.unit,
    }  # fmt: skip
