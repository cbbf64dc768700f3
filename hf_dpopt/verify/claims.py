"""Claims of the report of a run, held against its ledger and against itself."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_dpopt.verify.chain import LedgerFile
from hf_dpopt.verify.outcome import Contradiction, Inapplicable, Unknown
from hf_dpopt.verify.plan_events import BINS, Mechanism
from hf_dpopt.verify.reading import Fields

FORMAT = 1
UNITS = ("example", "block", "user")
STREAMS = ("chacha20/1",)  # ciphers of this release
PRECLIPS = (None, "dp2", "adadps", "one_query", "quantile", "subspace", "scale")
SAME = 1e-6  # relative, of sensitivities that were computed in two ways
# What a plan may say otherwise than the one before it, on the same mechanism; or than the report, which another
# release may have computed. The steps and the budget may grow from part to part of a run.
NOT_MECHANISM = (
    "training",
    "epsilon",
    "accountant",
    "dp_accounting",
    "certificate",
    "advised",
    "allow_large_delta",
    "privacy_ledger",
)
OPTIONAL = ("opening_noise", "tuned")  # what changes the event; an earlier run says null where it has none
MAY_GROW = ("num_steps", "noise_steps", "target_epsilon")


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of a run, whose entries are of the right kind, and its ledger.

    Args:
        fields: all of it.
        known_ledger: None if it cannot be relied on.
        path: where the report lies, and the other files of the run beside it.
    """

    fields: Fields
    known_ledger: LedgerFile | None = None
    path: Path = Path("report.json")

    @property
    def ledger(self) -> LedgerFile:
        """The ledger.

        Raises:
            Contradiction: if it cannot be relied on.
        """
        if self.known_ledger is None:
            raise Contradiction("the ledger cannot be relied on, so nothing shows what was charged")
        return self.known_ledger

    @property
    def plan(self) -> Fields:
        """The plan."""
        return self.fields.inner("plan")

    @property
    def mechanism(self) -> Mechanism:
        """The noisy sums, as the plan describes them."""
        return Mechanism(self.plan)

    @property
    def delta(self) -> float:
        """Delta of the claim."""
        return self.fields.positive("delta")

    @property
    def planned_steps(self) -> int:
        """Steps of the plan."""
        return self.plan.count("num_steps")

    @property
    def epsilons(self) -> dict[str, float]:
        """Every epsilon that is claimed under the plan's adjacency."""
        return {
            "the plan": self.plan.number("epsilon", may_be_infinite=True),
            "the steps charged": self.fields.number("epsilon_spent", may_be_infinite=True),
        }

    @property
    def epsilon(self) -> float:
        """The claim: the larger one."""
        return max(self.epsilons.values())

    @property
    def most_steps(self) -> tuple[int, ...]:
        """Steps of each chain, as planned or, where more were charged, by the ledger."""
        charged = () if self.known_ledger is None else self.known_ledger.charged
        return charged if sum(charged) > self.planned_steps else (self.planned_steps,)

    @property
    def earlier(self) -> list[Mechanism]:
        """Earlier runs on the same records, whose cost is included."""
        runs = self.plan.content.get("earlier_runs") or []
        if not isinstance(runs, list):
            raise Contradiction("earlier_runs is no list")
        found = [Fields(run, f"earlier run {number}") for number, run in enumerate(runs, start=1)]
        for run in found:
            for name in OPTIONAL:
                if name not in run.content:
                    raise Contradiction(f"{run.where} has no entry {name!r}, so what it cost is not known")
        return [Mechanism(run) for run in found]

    @property
    def has_bins(self) -> bool:
        """Whether batches have no exact analysis by others."""
        return BINS in (self.mechanism.sampler, *(run.sampler for run in self.earlier))


def check_form(report: Report) -> str:
    """The entries that the claim rests on, and that they are numbers."""
    form = report.fields.count("report_version")
    if form != FORMAT:
        raise Contradiction(f"format {form} is not {FORMAT}: the release that wrote it is newer")
    if report.fields.count("steps_planned") != report.planned_steps:
        raise Contradiction(f"steps_planned is not num_steps={report.planned_steps} of the plan")
    spelt = ", ".join(f"{value:.6g} for {name}" for name, value in report.epsilons.items())
    return f"claims epsilon {spelt}, at delta {report.delta:g}"


def check_is_private(report: Report) -> str:
    """Whether the run may claim anything: noise, and a key that nobody knows."""
    plan, is_said, ledger = report.plan, report.fields.flag("private"), report.known_ledger
    reasons = []
    if report.fields.flag("unsafe") or (ledger is not None and ledger.is_unsafe):
        reasons.append("a noise key was fixed by hand")
    if not plan.number("noise_multiplier") > 0:
        reasons.append("there is no noise")
    if not plan.flag("is_private"):
        reasons.append("the plan says that it is not private")
    if not math.isfinite(report.epsilon):
        reasons.append("epsilon is infinite")
    if reasons and is_said:
        raise Contradiction(f"the report says that the run was private, but {' and '.join(reasons)}")
    if not is_said:
        raise Contradiction(f"NOT PRIVATE, as the report says itself: {'; '.join(reasons) or 'no reason given'}")
    return "noise, and keys that nobody chose"


def check_digest(report: Report) -> str:
    """Whether the ledger ends where the report says."""
    digest, ledger = report.fields.text("ledger_digest"), report.ledger
    if digest != ledger.digests[-1]:
        found = "records behind the one" if digest in ledger.digests else "no record"
        raise Contradiction(f"the ledger has {found} that the report names: one of them was replaced, cut or is old")
    return f"the ledger ends with {digest[:16]}.., which the report names"


def check_steps(report: Report) -> str:
    """Charged steps, chains and lost steps of the report against those of the ledger."""
    ledger = report.ledger
    charged, said = sum(ledger.charged), report.fields.count("steps_charged", 0)
    if charged != said:
        raise Contradiction(f"the ledger charges {charged} steps, the report says {said}")
    if len(ledger.chains) != report.fields.count("chains", 0):
        raise Contradiction(
            f"the ledger has {len(ledger.chains)} chains, the report {report.fields.content['chains']}"
        )
    lost = report.fields.content.get("steps_lost", 0)
    if lost != ledger.num_lost:
        raise Contradiction(f"the ledger notes {ledger.num_lost} steps as lost, the report {lost!r:.20}")
    for name, chain in ledger.chains.items():
        expected = range(chain.start + 1, chain.start + 1 + len(chain.steps))
        if chain.steps != list(expected):
            raise Contradiction(f"chain {name:.16} leaves out a step between {expected.start} and {chain.steps[-1]}")
    planned = report.planned_steps
    more = f"; {charged - planned} more than the {planned} planned" if charged > planned else f" of {planned} planned"
    return f"{charged} charged in {len(ledger.chains)} chains{more}"


def check_plan(report: Report) -> str:
    """The plan of the report against every plan of the ledger."""
    return compare_plans(report.plan.content, report.ledger, NOT_MECHANISM, may_grow=MAY_GROW)


def compare_plans(
    own: Mapping[str, Any], ledger: LedgerFile, free: Iterable[str], *, may_grow: Iterable[str] = ()
) -> str:
    """Compare the plan of a report with those of its ledger.

    Args:
        own: the report's.
        ledger: its ledger.
        free: entries that may differ.
        may_grow: entries that may differ in all plans but the last one, which then may lack some, too.
    """
    if not ledger.plans:
        raise Contradiction("the ledger has no plan")
    for number, plan in enumerate(ledger.plans, start=1):
        names = {*own, *plan} - {*free}
        if may_grow and number < len(ledger.plans):
            names = {*own} & {*plan} - {*free, *may_grow}
        differing = [name for name in sorted(names) if _text(own.get(name)) != _text(plan.get(name))]
        if differing:
            name = differing[0]
            others = f" (and {', '.join(differing[1:])})" if differing[1:] else ""
            raise Contradiction(
                f"{name} is {_text(own.get(name)):.60} in the report and {_text(plan.get(name)):.60} in plan {number} "
                f"of the ledger{others}"
            )
    return f"the same mechanism in the report and in {len(ledger.plans)} record{'s' * (len(ledger.plans) > 1)}"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def check_unit(report: Report) -> str:
    """The unit, the adjacency, and whether the sampler knows users where they are protected."""
    plan, mechanism = report.plan, report.mechanism
    unit, sampler = plan.text("privacy_unit"), mechanism.sampler
    if unit not in UNITS:
        raise Contradiction(f"unit {unit!r:.40} is unknown")
    if plan.has("users") != (unit == "user"):
        raise Contradiction(f"the unit is {unit!r}, and users are {plan.content.get('users')!r:.60}")
    if unit == "user":
        users = plan.inner("users")
        by_record = users.text("sampled") == "records"
        if by_record != (sampler == "capped_poisson"):
            raise Contradiction(f"{users.text('sampled')} are sampled, by {sampler}")
        if by_record and users.count("records_per_user") != mechanism.law.count("records_per_user"):
            raise Contradiction("the sampler gives users another number of places than the plan")
    elif sampler == "capped_poisson":
        raise Contradiction(f"{sampler} protects users, and the unit is {unit!r}")
    return f"{unit}, under {mechanism.adjacency}"


def check_delta(report: Report) -> str:
    """Delta in the report and in the plan, and below 1/n."""
    delta, plan = report.delta, report.plan
    if delta != plan.number("delta") or not delta < 1:
        raise Contradiction(f"delta is {delta:g} in the report and {plan.number('delta'):g} in its plan")
    n = report.mechanism.num_examples
    if report.mechanism.sampler == "capped_poisson":
        n = max(1, n // report.mechanism.law.count("records_per_user"))
    return compare_delta(delta, n, plan)


def compare_delta(delta: float, n: int, plan: Fields) -> str:
    """Delta against the number of units."""
    if delta < 1 / n:
        return f"{delta:g}, below 1/n = {1 / n:.3g}"
    if plan.content.get("allow_large_delta") is True:
        return f"{delta:g}, NOT below 1/n = {1 / n:.3g}, as was asked for: the claim is worth little"
    raise Contradiction(f"{delta:g} is not below 1/n = {1 / n:.3g}: publishing a record outright would keep the claim")


def check_sampler(report: Report) -> str:
    """Whether the law that is named can give the event that is charged."""
    mechanism = report.mechanism
    name = mechanism.sampler
    for run in report.earlier:
        if run.adjacency != mechanism.adjacency:
            raise Contradiction(
                f"an earlier run was charged under {run.adjacency}, this one under {mechanism.adjacency}"
            )
        was, now = run.fields.text("privacy_unit"), report.plan.text("privacy_unit")
        if was != now:
            raise Contradiction(f"an earlier run protected the unit {was!r:.20}, this one {now!r}")
        if "balls_in_bins" in (run.sampler, name) and {run.sampler, name} - {"balls_in_bins", "fixed_order"}:
            raise Contradiction(f"batches of {run.sampler} and of {name} have no common analysis")
    leaves = mechanism.leaves((report.planned_steps,))
    events = " and ".join(f"{count} x {type(leaf).__name__.removesuffix('DpEvent')}" for leaf, count in leaves)
    also = f", after {len(report.earlier)} earlier runs" if report.earlier else ""
    return f"{name}, q = {mechanism.rate:.6g}, {mechanism.strategy.name} noise: {events}{also}"


def check_sensitivity(report: Report) -> str:
    """The sensitivity that the noise was calibrated to, against our own formula at full scale."""
    plan, mechanism = report.plan, report.mechanism
    draws, multiplier = plan.positive("draw_stddev"), plan.positive("noise_multiplier")
    if mechanism.made_for < report.planned_steps and not mechanism.strategy.is_anytime:
        raise Contradiction(f"{report.planned_steps} steps of noise that was made for {mechanism.made_for}")
    own = mechanism.sensitivity(mechanism.made_for)
    used = draws / multiplier
    if used < own * (1 - SAME):
        raise Contradiction(f"draws have {used:.9g} times the noise multiplier, and a record moves them by {own:.9g}")
    more = f", {used / own - 1:.1%} more than needed" if used > own * (1 + 1e-3) else ""
    return f"{own:.9g} over {mechanism.made_for} steps; the draws have {used:.9g}{more}"


def check_preconditioner(report: Report) -> str:
    """The preconditioner before the clip, and whether it is one that leaves the event as it is."""
    plan = report.plan
    name = plan.inner("preclip").text("name") if plan.has("preclip") else None
    if name not in PRECLIPS:
        raise Unknown(f"{name!r:.40} is the user's own: that it uses released and public values alone is declared")
    if (name == "one_query") != plan.has("opening_noise"):
        raise Contradiction("the query before the first step is missing in the plan, or is one of no preconditioner")
    if name is None:
        return "none"
    if name == "one_query":
        return "one_query: its query is charged, once for every chain"
    if name == "quantile":
        return f"quantile: the count takes {_share_of_count(report):.3%} of each step's budget"
    return f"{name}: made of released and public values, so it costs nothing"


def _share_of_count(report: Report) -> float:
    """Share of each step's budget that the count of a quantile takes."""
    options = report.plan.inner("preclip")
    share = report.mechanism.stddev / (2 * options.positive("count_noise") * report.mechanism.batch)
    if share >= 1:
        raise Contradiction("the noise of the count alone costs more than the budget (arXiv:1905.03871, Theorem 1)")
    return share**2


def check_private_metrics(report: Report) -> str:
    """Numbers that are released with the gradients, and whether anything of a step's budget is left to those."""
    plan = report.plan
    if not plan.has("private_metrics"):
        raise Inapplicable("gradients alone are released")
    metrics = plan.inner("private_metrics")
    share, bound = metrics.positive("share"), metrics.positive("loss_bound")
    by_quantile = plan.has("preclip") and plan.inner("preclip").text("name") == "quantile"
    taken = share + (_share_of_count(report) if by_quantile else 0.0)
    if taken >= 1:
        raise Contradiction(f"the numbers and what is counted take {taken:.1%} of each step's budget")
    return f"losses cut to {bound:g}, counts of norms: {share:.3%} of each step's budget, in the same release"


def check_earlier(report: Report) -> str:
    """Earlier runs, which the report describes."""
    if not report.earlier:
        raise Inapplicable("there is none")
    raise Unknown(f"{len(report.earlier)} are included as the report describes them; verify the folder of each")


def check_versions(report: Report) -> str:
    """Whether the software that is named can have written this report."""
    versions = report.fields.inner("versions")
    own, accounting = versions.text("hf_dpopt"), versions.text("dp-accounting")
    if report.plan.has("dp_accounting") and report.plan.text("dp_accounting") != accounting:
        raise Contradiction(
            f"the plan names dp-accounting {report.plan.text('dp_accounting'):.20}, the report {accounting}"
        )
    for fields in (report.plan, *(run.fields for run in report.earlier)):
        if (stream := fields.content.get("noise_rng")) not in STREAMS:
            raise Unknown(f"the stream {stream!r:.40} of the noise is not known to this release")
    return f"hf_dpopt {own}, dp-accounting {accounting}, noise from {report.plan.text('noise_rng')}"
