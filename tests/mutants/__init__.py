"""Mutants: small changes of the package, each of which some test has to notice. See `python -m tests.mutants --help`."""
