"""Experiments of "Privacy of Noisy Stochastic Gradient Descent: More Iterations without More Privacy Loss".

Altschuler and Talwar (2022), arXiv:2205.13710, on linear heads of a sentence encoder:

    python -m recipes.paper.convergent.figure1 --output_dir runs/convergent
    python -m recipes.paper.convergent.utility --data FOLDER --model FOLDER --output_dir runs/convergent

The page docs/reproductions.md holds the results.
"""
