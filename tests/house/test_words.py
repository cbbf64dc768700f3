"""The package keeps the rules of tests/words.py, and each rule finds what it is there for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import words


def test_the_package_keeps_the_rules():
    assert not [str(one) for one in words.violations() if not words.is_excused(one)]


def test_excuses_are_still_needed():
    """What was cleaned leaves the list, and stays clean."""
    found = words.violations()
    assert {place for place in words.NOT_YET if not any(place in (one.package, one.file) for one in found)} == set()


def test_documents_speak_the_field_s_words(repo: Path):
    found = []
    for page in (repo / "README.md", *sorted((repo / "docs").glob("*.md"))):
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{page.name}:{number}: {word}" for word in words.slang(words.CODE.sub("", line))]
    assert not found


BROKEN = {
    "a module": ('"""Where gradients are captured."""', "docstring"),
    "a class": ('class A:\n    """What a step saw."""', "docstring"),
    "a function": ('def f():\n    """Of the plan, or of the steps."""', "docstring"),
    "third person": ('def f():\n    """Refuses a batch."""', "docstring"),
    "a context": ('def f():\n    """Inside, weights may change."""', "docstring"),
    "an argument": ('def f(x):\n    """Sum.\n\n    Args:\n        x: of the model.\n    """', "argument"),
    "the second argument": (
        'def f(x):\n    """Sum.\n\n    Args:\n        x: a size,\n            >= 1.\n        y, z: as for `g`.\n    """',
        "argument",
    ),
    "an attribute": ('class A:\n    """Sum.\n\n    Attributes:\n        x: for `g`.\n    """', "argument"),
    "a name": ("def allowed(x): ...", "name"),
    "a private name": ("class A:\n    def _made(self): ...", "name"),
    "a message": ('raise DPConfigError("no proof is known.")', "message"),
    "a formatted message": ('raise errors.DPBudgetExceeded(f"step {step} would cost more.")', "message"),
    "a refusal": ('def f():\n    yield x.fp16, "fp16 skips updates.", "Use bf16."', "message"),
    "slang": ("x = 1  # tosses a coin", "slang"),
    "slang in a name": ("LOUDEST = 3", "slang"),
    "slang in a message": ('raise DPConfigError(f"Step 3 failed. Mend: {x}")', "slang"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_rule_finds(case: str):
    source, rule = BROKEN[case]
    found = [rule for _, rule, _ in words.check(source)]
    assert rule in found and set(found) == {rule}


KEPT = {
    "noun phrase": 'def f():\n    """Sensitivity of C over the participation patterns."""',
    "imperative": 'def f():\n    """Refuse what has no proof."""',
    "formula": 'def f():\n    """``sum_b g_b``, (B,)."""',
    "arguments": 'def f(x):\n    """Sum.\n\n    Args:\n        x: number of steps,\n            of the run.\n    """',
    "returns": 'def f(x):\n    """Sum.\n\n    Returns:\n        x: of the model.\n    """',
    "verb": "def allow(x): ...",
    "option": 'raise DPConfigError(f"noise_multiplier={x} is negative. Use 1.0.")',
    "value": 'raise DPConfigError(f"{name}={x} is negative. Use 1.0.")',
    "capital": 'raise DPConfigError("There is no proof. Use 1.0.")',
    "backtick": 'raise DPConfigError("`delta` is above 1. Use 1e-6.")',
    "a refusal": 'def f():\n    yield x.fp16, "`fp16` skips updates.", "Use bf16."',
    "variable": "raise DPConfigError(message)",
    "error of others": 'raise AssertionError("no such thing")',
    "like slang": 'x = "recommended: cloud, aloud"  # amends',
    "frozen": 'x = "coins of the sampling are secret"',
}


@pytest.mark.parametrize("case", KEPT)
def test_a_rule_lets_pass(case: str):
    assert not list(words.check(KEPT[case]))
