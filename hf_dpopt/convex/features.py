"""Features within a public norm, which bounds what one record can change.

Shape legend: N = records, H = hidden size, D = H and the constant feature of the bias.
"""

from __future__ import annotations

import torch


def clip_features(features: torch.Tensor, feature_norm: float, bias_feature: float = 0.0) -> torch.Tensor:
    """Shorten features, with the constant one, to a norm of at most `feature_norm`, each record by itself.

    Args:
        features: features of the records, (N, H).
        feature_norm: R, > 0.
        bias_feature: value of the constant feature, < R; 0 for none.

    Returns:
        float32, (N, D). A record with a feature that is not finite is all zero but for the constant.
    """
    assert 0 <= bias_feature < feature_norm
    room = (feature_norm**2 - bias_feature**2) ** 0.5 * (1 - 1e-6)  # rounding must not lead beyond R
    features_ND = features.double()
    is_fine_N1 = features_ND.isfinite().all(dim=1, keepdim=True)
    features_ND = torch.where(is_fine_N1, features_ND, torch.zeros_like(features_ND))
    norms_N1 = features_ND.norm(dim=1, keepdim=True)
    clipped_ND = (features_ND * (room / norms_N1.clamp(min=room))).float()
    if not bias_feature:
        return clipped_ND
    return torch.cat([clipped_ND, torch.full_like(clipped_ND[:, :1], bias_feature)], dim=1)
