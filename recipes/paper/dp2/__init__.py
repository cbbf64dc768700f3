"""Delayed preconditioners (Li et al. 2022, arXiv:2212.00309): its IMDB experiment, and posts of Stack Exchange."""
