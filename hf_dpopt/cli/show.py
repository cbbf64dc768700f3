"""Printing: JSON for programs, tables and warnings for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import typer
from rich.console import Console
from rich.table import Table


def print_json(facts: Mapping[str, Any]) -> None:
    """Print plain values with sorted names."""
    typer.echo(json.dumps(facts, indent=2, sort_keys=True))


def print_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Print names and values in two columns."""
    table = Table(title=title, show_header=False)
    for name, value in facts.items():
        table.add_row(name, str(value))
    Console().print(table)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Iterable[Any]],
    *,
    justify: Literal["left", "right"] = "right",
    width: int = 0,
    caption: str | None = None,
) -> None:
    """Print a table, at least so wide: what does not fit into the 80 columns of a pipe is cut."""
    table = Table(title=title, caption=caption)
    for name in columns:
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row))
    Console(width=max(Console().width, width)).print(table)


def warn(message: str) -> None:
    """Print a warning, on stderr."""
    sys.stderr.write(f"hf-dpopt: warning: {message}\n")
