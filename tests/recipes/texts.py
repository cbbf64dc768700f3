"""Records of each kind for the recipes of language models."""

from __future__ import annotations

NAMES = ["The Mill", "The Eagle", "Cocum", "Zizzi"]
PAIRS = [(f"name[{NAMES[i % 4]}], area[{i // 8}]", f"{NAMES[i % 4]} is number {i}.") for i in range(40)]
DOCUMENTS = [" ".join(["the mill by the river is cheap"] * (1 + i % 3)) for i in range(40)]
POSITIONS = 64


def words(flags: dict[str, str | None]) -> list[str]:
    """Flags as a shell hands them over; None leaves one out."""
    return [word for name, value in flags.items() if value is not None for word in (f"--{name}", value)]
