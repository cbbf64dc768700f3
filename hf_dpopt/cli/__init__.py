"""The command line `hf-dpopt`; nothing heavy is imported before a command is asked for."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from hf_dpopt.cli.app import main as run

    run()
