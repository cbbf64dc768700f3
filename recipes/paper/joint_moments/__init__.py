"""Joint moment estimation (arXiv:2502.06597): Adam with a private second moment of records."""
