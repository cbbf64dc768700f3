"""Foundations of all parts: errors, checks, the log, durable files, collectives. Imports nothing of the package."""
