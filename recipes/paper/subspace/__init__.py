"""Public data in private training: arXiv:2008.06570, 2007.03813, 2112.00193 (docs/reproductions.md)."""
