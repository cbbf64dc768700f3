"""The tiers of the suite, chosen by what tests cost (`tests.costs`): fast, suite and all.

`fast` (`make check`) has what is cheap, and of large parametrisations a sample of the day.

`suite` (`make test`) has, in this order, and the last two as far as a budget of processor time goes:

1. what is new: cases without a record;
2. one case of each function that guards privacy directly, see `GUARDS`, and all that `make test` names, see `ALWAYS`;
3. the day's share of everything: all cases are spread over `WEEK` days, so that in a week every case runs;
4. one case of every other function, the cheap ones first;
5. all cases of functions with one parameter, and of those with several a covering array of strength 2: each pair of
   values of two parameters occurs. Then whatever else is cheap.

`all` (`make nightly`) has everything. What is chosen depends on the record and on the day alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from tests.costs import Record, case_of, function_of, recorded

TIERS = ("fast", "suite", "all")
# Files whose functions all run in every `make test`: attacks, planted bugs and audits, contracts, frozen outputs, ranks,
# forgeries.
GUARDS = (
    "tests/adversary/", "tests/contract/", "tests/frozen/", "tests/sharded/", "tests/verify/", "tests/audit/",
    "tests/test_two_nodes.py", "tests/test_two_processes.py", "tests/test_processes.py",
    "tests/mechanisms/test_slices.py", "tests/test_zones.py",
)  # fmt: skip
ALWAYS = ("tests/test_readme.py::test_block_runs[README.md:", "tests/audit/test_audit.py::test_a_fault_is_found[")
SECONDS = {"fast": 80.0, "suite": 1050.0}  # of one core
WEEK = 7  # days
CHEAP = 0.35  # seconds of one case of the fast tier, at most
SAMPLE = 6  # cases of a parametrisation that the fast tier runs in one day
SLOW = 3.0  # seconds after which a case of the fast tier fails


@dataclasses.dataclass(frozen=True)
class Case:
    """What choosing needs to know of a case.

    Args:
        nodeid: without the group that xdist appends.
        factors: name of the value of each parameter; parameters that were given together are one.
        fixtures: fixtures shared with other cases, as `tests.costs` names them.
        bundle: cases of one bundle need each other, and run together or not at all.
    """

    nodeid: str
    factors: tuple[Any, ...] = ()
    fixtures: tuple[str, ...] = ()
    bundle: str = ""

    @property
    def function(self) -> str:
        return function_of(self.nodeid)

    @property
    def guards(self) -> bool:
        """Whether its function has a case in every run of the suite."""
        return self.nodeid.startswith(GUARDS)


class _Choice:
    """Cases chosen so far, and what they cost: a fixture once, however many cases share it."""

    def __init__(self, cases: Sequence[Case], record: Record, day: int):
        self.cases, self.record, self.day = cases, record, day
        self.kept: dict[str, Case] = {}
        self.cost = 0.0
        self._paid: set[str] = set()
        self._bundles = _by(cases, lambda case: case.bundle or case.nodeid)

    def unit(self, case: Case) -> list[Case]:
        """The cases that run with it, itself included."""
        return self._bundles[case.bundle or case.nodeid]

    def own(self, case: Case) -> float:
        """Seconds of a case and those it needs; 0 where it is new."""
        return sum(self.record.of_case(one.nodeid) or 0.0 for one in self.unit(case))

    def order(self, case: Case) -> tuple[float, float]:
        """The cheap first; among those that cost the same, another one every day."""
        return (round(self.own(case), 1), random.Random(f"{case.nodeid} {self.day}").random())

    def price(self, cases: Iterable[Case]) -> float:
        """Seconds that these cases would add."""
        units = {one.nodeid: one for case in cases for one in self.unit(case) if one.nodeid not in self.kept}
        shared = {name for one in units.values() for name in one.fixtures} - self._paid
        own = sum(self.record.of_case(nodeid) or 0.0 for nodeid in units)
        return own + sum(self.record.fixtures.get(name, 0.0) for name in shared)

    def take(self, cases: Iterable[Case], *, budget: float = float("inf")) -> bool:
        """Add cases, unless they cost more than is left of a budget; whether they were added."""
        cases = list(cases)
        price = self.price(cases)
        if self.cost + price > budget:
            return False
        self.cost += price
        for case in cases:
            for one in self.unit(case):
                self.kept[one.nodeid] = one
                self._paid.update(one.fixtures)
        return True


def _by(cases: Iterable[Case], key: Callable[[Case], str]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        found[key(case)].append(case)
    return found


def covering(cases: Sequence[Case]) -> list[Case]:
    """The first cases, in this order, that have every pair of values of two parameters that occurs; greedily few.

    Of cases with one parameter, or none, these are all.
    """

    if len(cases[0].factors) < 2:
        return list(cases)

    def pairs(case: Case) -> set[tuple[tuple[int, Any], ...]]:
        return set(itertools.combinations(enumerate(case.factors), 2))

    open_pairs, found, left = set().union(*map(pairs, cases)), [], list(cases)
    while open_pairs:
        best = max(left, key=lambda case: len(pairs(case) & open_pairs))
        found.append(best)
        left.remove(best)
        open_pairs -= pairs(best)
    return found


def share(cases: Sequence[Case], record: Record, day: int) -> list[Case]:
    """The day's part of all cases; the parts of `WEEK` days cost about the same, and are everything."""
    choice = _Choice(cases, record, day)
    units = {unit[0].nodeid: unit for unit in (choice.unit(case) for case in cases)}
    loads, parts = [0.0] * WEEK, [[] for _ in range(WEEK)]
    for name in sorted(units, key=lambda name: (-choice.own(units[name][0]), name)):
        least = min(range(WEEK), key=lambda i: (loads[i], len(parts[i])))
        loads[least] += choice.own(units[name][0])
        parts[least] += units[name]
    return parts[day % WEEK]


def suite(cases: Sequence[Case], record: Record, *, day: int, seconds: float = SECONDS["suite"]) -> _Choice:
    """The cases of `make test`, see above."""
    choice = _Choice(cases, record, day)
    functions = _by(sorted(cases, key=choice.order), lambda case: case.function)
    choice.take(case for case in cases if record.of_case(case.nodeid) is None)
    choice.take(some[0] for some in functions.values() if some[0].guards)
    choice.take(case for case in cases if case.nodeid.startswith(ALWAYS))
    choice.take(share(cases, record, day))
    firsts = [some[0] for some in functions.values()]
    for case in sorted(firsts, key=choice.order):
        choice.take([case], budget=seconds)
    covers = [covering(some) for some in functions.values()]
    for cover in sorted(covers, key=choice.price):
        choice.take(cover, budget=seconds)
    for case in sorted(cases, key=choice.order):
        choice.take([case], budget=seconds)
    return choice


def fast(cases: Sequence[Case], record: Record, *, day: int, seconds: float = SECONDS["fast"]) -> _Choice:
    """The cases of `make check`: of each function whose cases are cheap, `SAMPLE` of the day."""
    choice = _Choice(cases, record, day)
    functions, most = _by(cases, lambda case: case.function), record.functions()
    for name in sorted(functions, key=lambda name: (most.get(name, 0.0), name)):
        some = functions[name]
        if most.get(name, 0.0) > CHEAP or any(record.fixtures.get(f, 0.0) > SLOW for f in some[0].fixtures):
            continue
        if len(some) > SAMPLE:
            some = random.Random(f"{name} {day}").sample(some, SAMPLE)
        choice.take(some, budget=seconds)
    return choice


def is_too_slow(nodeid: str, seconds: float, record: Record) -> str:
    """Why a case of the fast tier fails, or an empty text.

    Args:
        seconds: of processor time, of the test itself.
    """
    if seconds <= SLOW:
        return ""
    known = record.of_case(nodeid)
    text = "nothing is" if known is None else f"{known:.2f} s are"
    return (
        f"{seconds:.1f} s, and {text} recorded in tests/costs.json. Make it cheaper, or record the suite: make costs."
    )


def cases_of(items: Sequence[pytest.Item]) -> list[Case]:
    """What pytest collected, in its order."""
    found = []
    for item in items:
        groups = [str(mark.args[0]) for mark in item.iter_markers("xdist_group")]
        bundle = groups[0] if groups and item.get_closest_marker("in_order") else ""
        found.append(Case(case_of(item.nodeid), _factors(item), tuple(shared_by(item)), bundle))
    return found


def _factors(item: pytest.Item) -> tuple[str, ...]:
    """What the case is called in each `parametrize` of its function."""
    return tuple(item.callspec._idlist) if hasattr(item, "callspec") else ()


def shared_by(item: pytest.Item) -> list[str]:
    """Names of the fixtures that a case shares with others."""
    info = getattr(item, "_fixtureinfo", None)
    used = {} if info is None else {name: info.name2fixturedefs.get(name) for name in info.names_closure}
    indices = item.callspec.indices if hasattr(item, "callspec") else {}
    return sorted(
        fixture_name(found[-1].baseid, name, indices.get(name))
        for name, found in used.items()
        if found and found[-1].scope != "function"
    )


def fixture_name(file: str, name: str, index: int | None) -> str:
    """The name of a fixture in the record: that of its file, its own, and the number of its parameter."""
    return f"{file}::{name}" + ("" if index is None else f"[{index}]")


@dataclasses.dataclass(frozen=True)
class Selected:
    """What was chosen among what pytest collected; seconds are of one core, by the record."""

    tier: str
    day: int
    num_cases: int
    seconds: float
    num_all: int
    seconds_of_all: float

    def __str__(self) -> str:
        return (
            f"tier {self.tier}, day {self.day}: {self.num_cases} of {self.num_all} cases, "
            f"{self.seconds:.0f} of {self.seconds_of_all:.0f} seconds of one core by tests/costs.json"
        )


def select(items: list[pytest.Item], tier: str, day: int) -> tuple[list[pytest.Item], Selected]:
    """Keeps the cases of a tier in the list; returns those that were left out."""
    cases, record = cases_of(items), recorded()
    choice = {"fast": fast, "suite": suite}[tier](cases, record, day=day)
    everything = _Choice(cases, record, day).price(cases)
    left_out = [item for item in items if case_of(item.nodeid) not in choice.kept]
    items[:] = [item for item in items if case_of(item.nodeid) in choice.kept]
    return left_out, Selected(tier, day, len(items), choice.cost, len(cases), everything)
