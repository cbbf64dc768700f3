"""Releases of gradients together with their squares, and the Adam that is made of both.

Shape legend: B = records of a batch, W = features, K = outputs; weights are (W, K).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from hf_dpopt.noise import make_noise_source
from hf_dpopt.plan.plan import PrivacyPlan
from recipes.paper.joint_moments.sensitivity import joint_sensitivity
from recipes.paper.linear import WEIGHTS, Records, clipped_residuals

SQUARES = WEIGHTS + " (squares)"
BETAS = (0.9, 0.999)


class JointReleases:
    """Mean gradients and mean squares of clipped gradients, step after step, with noise that covers both.

    Formal guarantee: a step is the Gaussian mechanism of the plan on contributions ``(g, scale g^2)``, whose noise is
    that of the plan times `joint_sensitivity`; see `recipes.paper.joint_moments.sensitivity`. With `is_private` false
    the squares are exact, and nothing is promised.

    Args:
        records: training records.
        weights_WK: weights of the run, which its optimizer changes in place.
        plan: made for a clipping norm of 1.
        clip: bound on the norm of a record's gradient.
        scale: of the squares, in 1 / clip.
        keys: of the sampling and of the noise; 32 bytes each.
        is_private: whether squares are released with noise, which the gradient pays for.
    """

    def __init__(
        self,
        records: Records,
        weights_WK: np.ndarray,
        plan: PrivacyPlan,
        *,
        clip: float,
        scale: float,
        keys: tuple[bytes, bytes],
        is_private: bool = True,
    ):
        assert plan.config.adjacency == "add_or_remove_one"
        self._records, self._weights_WK, self._plan = records, weights_WK, plan
        self._clip, self._scale, self._is_private = clip, scale / clip, is_private
        self._sampling_key, noise_key = keys
        moved = joint_sensitivity(clip, self._scale, "add_or_remove_one") if is_private else clip
        self._noise = plan.mechanism.stream(
            make_noise_source("fast", noise_key), moved * plan.sensitivity, first_step=1
        )
        self._batch, self._step = plan.config.expected_batch_size, 0
        self.stddev = self._noise.draw_stddev / self._batch  # of a draw in a coordinate of the mean gradient
        self.stddev_of_squares = self.stddev / self._scale if is_private else 0.0

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean gradient and mean square of the next step, (W, K) each."""
        self._step += 1
        batch = self._records[self._plan.sampler.draw(self._sampling_key, self._step)]
        gradient_WK, squares_WK = joint_sums(batch, self._weights_WK, self._clip)
        sums = {WEIGHTS: torch.tensor(gradient_WK, dtype=torch.float32)}
        if self._is_private:
            sums[SQUARES] = torch.tensor(self._scale * squares_WK, dtype=torch.float32)
        self._noise.add_(sums, self._step)
        if self._is_private:
            squares_WK = sums[SQUARES].double().numpy() / self._scale
        return sums[WEIGHTS].double().numpy() / self._batch, squares_WK / self._batch


def joint_sums(batch: Records, weights_WK: np.ndarray, clip: float) -> tuple[np.ndarray, np.ndarray]:
    """Sums of clipped gradients and of their squares, (W, K) each: a record's gradient is features times residuals."""
    residuals_BK, _ = clipped_residuals(batch, weights_WK, None, clip)
    return batch.x_NW.T @ residuals_BK, batch.squares_NW.T @ residuals_BK**2


class MomentAdam:
    """Adam of released means and released mean squares, with bias corrections.

    A step is ``(1 + floor) m / (sqrt(max(v, 0)) + floor r)``: r is the root mean square of a coordinate, over all d of
    them, which has d^(1/2) times less noise than one. So `floor` is Adam's eps in units that need no knowledge of the
    task, and a large one is momentum. All of it is made of released values.

    Args:
        shape: of the weights.
        floor: unitless, > 0.
        stddev_of_squares: of the noise in a mean square of one step, gradient units squared.
    """

    def __init__(self, shape: tuple[int, ...], *, floor: float, stddev_of_squares: float):
        self._mean_WK, self._squares_WK, self._t = np.zeros(shape), np.zeros(shape), 0
        self._floor, self._stddev = floor, stddev_of_squares

    def __call__(self, mean_WK: np.ndarray, squares_WK: np.ndarray) -> np.ndarray:
        """What the learning rate multiplies, (W, K)."""
        self._t += 1
        beta1, beta2 = BETAS
        self._mean_WK = beta1 * self._mean_WK + (1 - beta1) * mean_WK
        self._squares_WK = beta2 * self._squares_WK + (1 - beta2) * squares_WK
        mean_WK, moment_WK = self._mean_WK / (1 - beta1**self._t), self._squares_WK / (1 - beta2**self._t)
        least = self._stddev * averaged(self._t) / math.sqrt(moment_WK.size)  # one stddev of the noise in r^2
        root = math.sqrt(max(float(moment_WK.mean()), least)) or 1.0  # all gradients are zero
        return (1 + self._floor) * mean_WK / (np.sqrt(np.maximum(moment_WK, 0)) + self._floor * root)


def averaged(num_steps: int, beta2: float = BETAS[1]) -> float:
    """Stddev of Adam's corrected average of independent noise of stddev 1."""
    return math.sqrt((1 - beta2) / (1 + beta2) * (1 + beta2**num_steps) / (1 - beta2**num_steps))
