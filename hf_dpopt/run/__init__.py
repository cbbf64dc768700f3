"""Runs of a plan: the private step on one page, batches, keys, the ledger, the stages."""
