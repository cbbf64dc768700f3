"""Accounted tuning: a random number of private runs with random options, of which only the best is released."""
