"""Experiments of "DOPPLER: Differentially Private Optimizers with Low-pass Filter for Privacy Noise Reduction".

Zhang et al. (2024), arXiv:2408.13460, in kind: text in place of images, on one core. One command each:

    python -m recipes.paper.doppler.from_scratch --data FOLDER --output_dir runs/doppler
    python -m recipes.paper.doppler.filters      --data FOLDER --output_dir runs/doppler
    python -m recipes.paper.doppler.steep        --data FOLDER --output_dir runs/doppler
    python -m recipes.paper.doppler.spectra      --data FOLDER --output_dir runs/doppler
    python -m recipes.paper.doppler.finetuning   --data FOLDER --model FOLDER --output_dir runs/doppler

Every finished run is a line of a JSONL file in the output folder; a command that was interrupted goes on behind the
last line. Plots need the extra `plots`. The page docs/reproductions.md holds the results beside those of the paper.
"""
