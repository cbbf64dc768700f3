"""User-level experiments of "Correlated Noise Provably Beats Independent Noise for Differentially Private Learning".

Choquette-Choo et al. (2023), arXiv:2310.06771, Section 4 and Appendix G.2, at the size of one core: next words by
private federated averaging. docs/reproductions.md has the results.
"""
