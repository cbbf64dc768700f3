"""Figures and tables of "Correlated Noise Provably Beats Independent Noise for Differentially Private Learning".

Choquette-Choo et al. (2023), arXiv:2310.06771. Each module is one command, e.g.

    python -m recipes.paper.correlated_noise.figure1 --output_dir runs/paper

and writes its numbers as JSON and, where there is one, its plot as PNG. Needs the extras `convex` and
`plots`; no data, no network.
The page docs/reproductions.md holds the results beside those of the paper.
"""
