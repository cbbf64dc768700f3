"""The package keeps the rules of tests/house/words.py, and each rule finds what it is there for."""

from __future__ import annotations

from pathlib import Path

from tests.house import words


def test_the_package_keeps_the_rules():
    assert not [str(one) for one in words.violations()]


def test_documents_speak_the_field_s_words(repo: Path):
    found = []
    for page in (repo / "README.md", *sorted((repo / "docs").glob("*.md"))):
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{page.name}:{number}: {word}" for word in words.slang(words.CODE.sub("", line))]
    assert not found
