"""Faults of disks, of killed processes and of people, and what a user sees of them."""
