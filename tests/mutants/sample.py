"""The sample: as many mutants of each area, at places that are drawn evenly from it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.operators import Found, mutants_of, mutated
from tests.mutants.places import AREAS


def files_of(repo: Path, area: str) -> list[str]:
    """The files of an area, relative to the repository."""
    found: list[Path] = []
    for name in AREAS[area]:
        path = repo / name
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [str(path.relative_to(repo)) for path in found]


def drawn(repo: Path, found: list[Found], seed: str) -> Iterator[Found]:
    """Places drawn without replacement, and one mutant at each: a place has from 1 to 11 of them."""
    places: dict[tuple[str, int, int], list[Found]] = {}
    for one in found:
        places.setdefault((one.mutant.file, one.line, one.mutant.column), []).append(one)
    generator, order = random.Random(seed), sorted(places)
    generator.shuffle(order)
    for place in order:
        one = generator.choice(places[place])
        if _can_be_made(repo, one):
            yield one


def _can_be_made(repo: Path, one: Found) -> bool:
    """An operator may take the ``*`` of a list of arguments for a product, and fails at some exceptions' names."""
    try:
        source = mutated((repo / one.mutant.file).read_text(encoding="utf-8"), one)
        with warnings.catch_warnings(action="ignore"):
            compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, AttributeError):
        return False
    return True


def sample(repo: Path, num: int, seed: int) -> list[tuple[str, Found]]:
    """``num`` mutants with their areas, areas taking turns, so that whatever is run of it first is even, too.

    An area with fewer places than its share leaves the rest to the others.
    """
    queues = {}
    for area in AREAS:
        found = [one for file in files_of(repo, area) for one in mutants_of(repo, file)]
        queues[area] = drawn(repo, found, f"{seed} {area}")
    chosen: list[tuple[str, Found]] = []
    while queues and len(chosen) < num:
        for area, queue in list(queues.items()):
            one = next(queue, None)
            if one is None:
                del queues[area]
            elif len(chosen) < num:
                chosen.append((area, one))
    return chosen
