"""Bounds of "Privacy of Noisy Stochastic Gradient Descent: More Iterations without More Privacy Loss".

Altschuler and Talwar (2022), arXiv:2205.13710, for linear heads: the paper's Figure 1 with real constants, and a lower
bound beside the upper one. docs/reproductions.md and docs/convex.md have the results.

    python -m recipes.paper.convergent.figure1 --output_dir runs/convergent
    python -m recipes.paper.convergent.lower_bound --output_dir runs/convergent
"""
