"""The way from a dataset to the rows of a step."""
