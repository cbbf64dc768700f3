"""The tiers: what is cheap, what guards privacy, a share of everything every day, pairs of parameters; and no more time."""

from __future__ import annotations

import itertools

import pytest

from tests import tiers
from tests.costs import Record
from tests.tiers import Case

MANY = [Case(f"tests/t.py::many[{i}]", (i,)) for i in range(50)]
RECORD = Record({"tests/t.py::cheap": 0.01, "tests/t.py::many": 0.02, "tests/t.py::dear": 9.0}, {})
CASES = [*MANY, *(Case(f"tests/t.py::{name}") for name in ("cheap", "dear", "new"))]
PRODUCT = [
    Case(f"tests/t.py::product[{'-'.join(map(str, one))}]", one)
    for one in itertools.product(*map(range, (4, 3, 3, 4)))
]


def _names(choice: tiers._Choice) -> set[str]:
    return {nodeid.partition("::")[2] for nodeid in choice.kept}


# --- fast ---------------------------------------------------------------------------------------------------------------


def test_what_is_dear_waits():
    found = _names(tiers.fast(CASES, RECORD, day=1))
    assert {"cheap", "new"} <= found and "dear" not in found


def test_every_case_of_a_large_parametrisation_has_its_day():
    days = [_names(tiers.fast(CASES, RECORD, day=day)) for day in range(200)]
    assert all(sum("many" in case for case in found) == tiers.SAMPLE for found in days)
    assert set().union(*days) == {case.nodeid.partition("::")[2] for case in CASES} - {"dear"}


def test_what_shares_a_dear_fixture_waits():
    record = Record({"tests/t.py::one": 0.01}, {"tests/t.py::made": 20.0})
    assert not tiers.fast([Case("tests/t.py::one", fixtures=("tests/t.py::made",))], record, day=1).kept


def test_the_fast_tier_fits_its_time():
    record = Record({f"tests/t.py::t{i}": 0.3 for i in range(5000)}, {})
    found = tiers.fast([Case(name) for name in record.cases], record, day=1)
    assert tiers.SECONDS["fast"] - 0.3 <= found.cost <= tiers.SECONDS["fast"]


@pytest.mark.parametrize("name", ["tests/t.py::many[3]", "tests/t.py::unknown"])
def test_a_slow_test_fails_with_or_without_a_record(name):
    assert not tiers.is_too_slow(name, 2.9, RECORD)
    assert "make costs" in tiers.is_too_slow(name, 3.1, RECORD)


# --- suite --------------------------------------------------------------------------------------------------------------


def _suite(cases, record, day=1, seconds=10.0):
    return tiers.suite(cases, record, day=day, seconds=seconds)


def test_what_is_new_runs_whatever_the_rest_costs():
    assert "new" in _names(_suite(CASES, RECORD, seconds=0.0))


def test_what_guards_privacy_runs_every_day_with_one_case_at_least():
    cases = [Case(f"{guard}test_x.py::test_it[{i}]", (i,)) for guard in tiers.GUARDS for i in range(20)]
    record = Record({case.function: 100.0 for case in cases}, {})
    for day in range(9):
        found = _suite(cases, record, day=day, seconds=0.0).kept.values()
        assert {case.function for case in found} == {case.function for case in cases}
        assert len(found) < len(cases) / 3


def test_all_blocks_of_the_readme_run_every_day():
    cases = [
        Case(f"tests/test_readme.py::test_block_runs[{p}.md:{i}]", bundle=p) for p in ("README", "x") for i in "12"
    ]
    record = Record({cases[0].function: 9.0}, {})
    days = [set(_suite(cases, record, day, seconds=0.0).kept) for day in range(tiers.WEEK)]
    assert set.intersection(*days) == {case.nodeid for case in cases[:2]} and set.union(*days) == {
        c.nodeid for c in cases
    }


def test_the_guards_are_there(repo):
    assert all(list(repo.glob(f"{guard}*" if guard.endswith("/") else guard)) for guard in tiers.GUARDS)


def test_everything_runs_in_any_week():
    """Also what is dearer than the whole budget, and what runs only beside its bundle."""
    record = Record(RECORD.cases | {"tests/t.py::product": 3.0, "tests/t.py::page": 2.0}, {})
    pages = [Case(f"tests/t.py::page[{i}]", (i,), bundle="README.md") for i in range(3)]
    cases = [*CASES, *PRODUCT, *pages]
    days = [_suite(cases, record, day, seconds=0.0) for day in range(100, 100 + tiers.WEEK)]
    assert set().union(*(day.kept for day in days)) == {case.nodeid for case in cases}
    assert max(day.cost for day in days) - min(day.cost for day in days) <= 9.0  # the dearest unit


def test_cases_that_need_each_other_run_together():
    cases = [Case(f"tests/t.py::page[{i}]", (i,), bundle="README.md") for i in range(30)]
    record = Record({"tests/t.py::page": 1.0}, {})
    assert {len(_suite(cases, record, day).kept) for day in range(tiers.WEEK)} == {0, 30}


@pytest.mark.parametrize("seconds", [60.0, 200.0, 450.0])
def test_the_suite_fills_its_budget_and_keeps_it(seconds):
    record = Record({f"tests/t.py::t{i}": 0.01 * (i % 100) for i in range(1000)}, {})  # 495 s
    found = _suite([Case(name) for name in record.cases], record, seconds=seconds)
    least = 495 / tiers.WEEK + 1  # the share of the day runs in any case
    assert found.cost <= max(seconds, least) and found.cost >= seconds - 1


def test_a_fixture_is_paid_for_once():
    cases = [Case(f"tests/t.py::one[{i}]", (i,), ("tests/t.py::made",)) for i in range(10)]
    record = Record({"tests/t.py::one": 0.5}, {"tests/t.py::made": 4.0})
    found = _suite(cases, record, seconds=9.0)
    assert len(found.kept) == 10 and found.cost == pytest.approx(9.0)


def test_a_product_becomes_a_covering_array_of_strength_two():
    record = Record({"tests/t.py::product": 1.0}, {})
    share = len(PRODUCT) / tiers.WEEK
    found = list(_suite(PRODUCT, record, seconds=share + 25).kept.values())
    for i, j in itertools.combinations(range(4), 2):
        values = {(case.factors[i], case.factors[j]) for case in found}
        assert values == set(itertools.product(range((4, 3, 3, 4)[i]), range((4, 3, 3, 4)[j])))
    assert len(tiers.covering(PRODUCT)) <= 20  # of 144; 16 at least


def test_pairs_that_do_not_occur_are_not_asked_for():
    cases = [Case(f"tests/t.py::t[{i}-{j}]", (i, j)) for i in range(3) for j in range(3) if i != j]
    assert sorted(case.nodeid for case in tiers.covering(cases)) == sorted(case.nodeid for case in cases)


# --- what pytest collects -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared():
    return 1


@pytest.mark.parametrize(("a", "b"), [(1, 2), (3, 4)])
@pytest.mark.parametrize("c", "xyz")
def test_parameters_that_are_given_together_are_one_factor(request, shared, a, b, c):
    (me,) = tiers.cases_of([request.node])
    assert me.factors == (c, f"{a}-{b}")
    assert "tests/test_tiers.py::shared" in me.fixtures and not any("request" in name for name in me.fixtures)


@pytest.fixture(scope="module", params=["one", "two"])
def given(request):
    return request.param


def test_a_fixture_with_parameters_is_one_fixture_for_each(request, given):
    (me,) = tiers.cases_of([request.node])
    assert f"tests/test_tiers.py::given[{('one', 'two').index(given)}]" in me.fixtures


def test_the_suite_keeps_its_budget(request):
    """By the record. Where it does not: make tests cheaper, or see that a fixture is shared."""
    from tests.conftest import SELECTED

    selected = request.config.stash.get(SELECTED, None)
    if selected is None or selected.tier == "all":
        pytest.skip("everything was asked for")
    assert selected.seconds <= tiers.SECONDS[selected.tier]


@pytest.mark.xdist_group("together")
def test_groups_of_tests_reach_the_workers(request):
    """A pytest that hides them from pytest-xdist (9.2.0 does) spreads blocks of a page and shared ranks over workers."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("no worker: without -n 2 --dist loadgroup")
    assert request.node.nodeid.endswith("@together")
