"""User-level experiments of "Correlated Noise Provably Beats Independent Noise for Differentially Private Learning".

Choquette-Choo et al. (2023), arXiv:2310.06771, Section 4 and Appendix G.2: next words, private federated averaging,
nu-DP-FTRL and BLT with a min-separation against DP-SGD and tree aggregation, at the size of one core:

    python -m recipes.paper.federated.next_word --data FOLDER --public_file FILE --output_dir runs/federated

Every finished run is a line of a JSONL file in the output folder; a command that was interrupted goes on behind the
last line. The page docs/reproductions.md holds the results.
"""
