"""Every proof names the code that it is about, and that code is the one it was read against."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import proofs

TOPICS = {
    "sampling", "clipping", "noise", "composition", "correlated_sensitivity", "users", "dp2_scaling", "post_processing",
    "journal_replay", "changing_scales", "best_of_runs", "private_metrics",
}  # fmt: skip
PARTS = ("**Precondition.**", "**Postcondition.**", "**Proof.**")


def test_there_is_a_page_of_every_topic() -> None:
    assert {page.stem for page in proofs.pages()} >= TOPICS
    assert set(proofs.recorded()) == {page.name for page in proofs.pages()}


@pytest.mark.parametrize("page", proofs.pages(), ids=lambda page: page.stem)
def test_the_code_is_what_the_page_was_read_against(page: Path) -> None:
    now = proofs.pins()[page.name]
    assert now, f"{page.name} names no functions under {proofs.SECTION!r}"
    before = proofs.recorded()[page.name]
    changed = sorted(name for name in {*now, *before} if now.get(name) != before.get(name))
    assert not changed, (
        f"{', '.join(changed)} changed since {page.name} was read. Read the page against the code again, correct what "
        "is no longer true, then run `python -m tests.proofs --write`."
    )


@pytest.mark.parametrize("page", proofs.pages(), ids=lambda page: page.stem)
def test_a_page_has_its_parts(page: Path) -> None:
    text = page.read_text()
    assert all(part in text for part in PARTS) and "```text" in text and "arXiv:" in text
    assert f"({page.name})" in (page.parent / "README.md").read_text()


CODE = '''
class A:
    """Old words."""

    def f(self, x):
        """Docstring."""
        return x + 1  # why
'''


def test_what_a_digest_is_of() -> None:
    """Code alone: words may change, and a sign may not."""
    first = proofs.digest_of_source(CODE, ["A", "f"])
    reworded = CODE.replace("Docstring.", "Others.").replace("# why", "# because").replace("Old words", "New")
    assert proofs.digest_of_source(reworded, ["A", "f"]) == first
    assert proofs.digest_of_source(reworded, ["A"]) == proofs.digest_of_source(CODE, ["A"])
    assert proofs.digest_of_source(CODE.replace("x + 1", "x - 1"), ["A", "f"]) != first
    with pytest.raises(LookupError):
        proofs.digest_of_source(CODE, ["A", "g"])
