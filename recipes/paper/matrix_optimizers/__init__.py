"""Optimizers that look at a whole released matrix, against tuned DP-AdamW: DP-Muon and spectral denoising."""
