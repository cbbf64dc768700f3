"""Experiments of "DOPPLER: Differentially Private Optimizers with Low-pass Filter for Privacy Noise Reduction".

Zhang et al. (2024), arXiv:2408.13460, on text instead of images, on one core. One command:

    python -m recipes.paper.doppler.from_scratch --data FOLDER --output_dir runs/doppler

Every finished run is a line of a JSONL file in the output folder; an interrupted command resumes after the last line.
Plots need the extra `plots`. docs/reproductions.md compares the results with those of the paper.
"""
