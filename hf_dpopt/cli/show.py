"""Printing of plans: as JSON for programs, as a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer
from rich.table import Table


def print_json(facts: Mapping[str, Any]) -> None:
    """Print plain values with sorted names."""
    typer.echo(json.dumps(facts, indent=2, sort_keys=True))


def table_of(title: str, facts: Mapping[str, Any]) -> Table:
    """Names and values in two columns."""
    table = Table(title=title, show_header=False)
    for name, value in facts.items():
        table.add_row(name, str(value))
    return table
