"""What tests cost, recorded: seconds of processor time of cases, and of the fixtures that cases share.

    python -m tests.costs --anew junit.xml   writes tests/costs.json from a report of everything (`make costs`)
    python -m tests.costs junit.xml ...      brings it up to date from reports of some tests

Processor time, that of started processes included, is the same on a machine that is busy; wall time is not. What a
report covers is written anew, function by function; what it does not cover stays as it is. `tests.tiers` chooses by it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

FILE = Path(__file__).with_name("costs.json")
APART = 1.0  # seconds; a case has a record of its own if it is that far and half as much from the mean of its function
OWN, SHARED = "cpu", "cpu of "  # names of the properties of a case in a report


def case_of(nodeid: str) -> str:
    """The name of a case without the group that xdist appends."""
    end = nodeid.rindex("]") + 1 if "]" in nodeid else len(nodeid.partition("@")[0])
    return nodeid[:end]


def function_of(nodeid: str) -> str:
    """The name of a test without its parameters, and without the group that xdist appends."""
    return nodeid.partition("[")[0].partition("@")[0]


@dataclasses.dataclass
class Record:
    """Seconds of processor time.

    Args:
        cases: test function -> mean of its cases, without what `fixtures` has; of some cases their own seconds.
        fixtures: fixture that several tests share -> what it cost in the whole suite.
    """

    cases: dict[str, float] = dataclasses.field(default_factory=dict)
    fixtures: dict[str, float] = dataclasses.field(default_factory=dict)

    def of_case(self, nodeid: str) -> float | None:
        """Seconds of a case, or None: it is new."""
        return self.cases.get(case_of(nodeid), self.cases.get(function_of(nodeid)))

    def functions(self) -> dict[str, float]:
        """Test function -> seconds of its most expensive case."""
        most: dict[str, float] = {}
        for name, seconds in self.cases.items():
            most[function_of(name)] = max(most.get(function_of(name), 0.0), seconds)
        return most

    def updated(self, other: Record) -> Record:
        """Both; of test functions that the other one covers, what it says."""
        covered = set(map(function_of, other.cases))
        old = {name: seconds for name, seconds in self.cases.items() if function_of(name) not in covered}
        return Record(
            dict(sorted((old | other.cases).items())), dict(sorted((self.fixtures | other.fixtures).items()))
        )


def recorded(file: Path | None = None) -> Record:
    """The record of the suite, or of another file."""
    file = file or FILE
    return Record(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else Record()


def write(record: Record, file: Path | None = None) -> None:
    (file or FILE).write_text(json.dumps(dataclasses.asdict(record), indent=0) + "\n", encoding="utf-8")


def _nodeid(classname: str, name: str) -> str:
    """The name that pytest gives a case, from the two parts that a report has."""
    parts = classname.split(".")
    classes = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts))
    return "::".join(["/".join(parts[:classes]) + ".py", *parts[classes:], name])


def _summary(seconds: dict[str, float]) -> dict[str, float]:
    """Means of functions, and the cases that are far from theirs."""
    functions: dict[str, list[float]] = defaultdict(list)
    for case, cost in seconds.items():
        functions[function_of(case)].append(cost)
    means = {name: sum(costs) / len(costs) for name, costs in functions.items()}
    far = {
        case: cost
        for case, cost in seconds.items()
        if abs(cost - means[function_of(case)]) > max(APART, means[function_of(case)] / 2)
    }
    return {name: round(cost, 3) for name, cost in sorted((means | far).items())}


def from_junit(report: Path) -> Record:
    """The record of a report of pytest's `--junitxml`; wall time where it has no processor time."""
    cases, fixtures = {}, defaultdict(float)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is not None or case.find("error") is not None:
            continue
        properties = {
            one.get("name", ""): float(one.get("value", "")) for one in case.iter("property") if _is_ours(one)
        }
        name = case_of(_nodeid(case.get("classname", ""), case.get("name", "")))
        cases[name] = properties.get(OWN, float(case.get("time", 0.0)))
        for of, seconds in properties.items():
            if of.startswith(SHARED):
                fixtures[of.removeprefix(SHARED)] += seconds
    return Record(_summary(cases), {name: round(cost, 3) for name, cost in sorted(fixtures.items())})


def _is_ours(one: ElementTree.Element) -> bool:
    return one.get("name", "") == OWN or one.get("name", "").startswith(SHARED)


def main(arguments: Sequence[str]) -> None:
    reports = [argument for argument in arguments if argument != "--anew"]
    if not reports:
        sys.exit("usage: python -m tests.costs [--anew] <report of pytest --junitxml> ...")
    record = recorded() if reports == list(arguments) else Record()
    for report in reports:
        record = record.updated(from_junit(Path(report)))
    write(record)


if __name__ == "__main__":
    main(sys.argv[1:])
