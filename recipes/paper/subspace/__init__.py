"""Public subspaces in private training (arXiv:2008.06570); docs/reproductions.md has the results."""
