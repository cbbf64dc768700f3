"""Linear regression after finitely many steps: the expected excess loss, exact, and bounded in closed form.

The question is that of Section 2.3 and Appendix D of arXiv:2310.06771; **the statements and proofs here are ours** and
were not taken from there: an equality and a bound of expectations, with their constants, for any strategy and at the
noise of the run itself, where no gradient is clipped. Nothing is claimed about clipping.

**Model.** Weights ``d_t`` are counted from the minimum. The mean gradient of m records x ~ N(0, H) with labels of
variance v is ``G_t d_t - xi_t``, ``G_t`` the mean of ``x x^T``; to it comes the noise w = B Z, with draws of stddev s:
``d_{t+1} = d_t - eta (G_t d_t - xi_t + w_t)``. H has the eigenvalues l_j, ``q_j = 1 - eta l_j``. Without sampling
(``m`` infinite) it is gradient descent on a quadratic.

**Theorem 1 (exact).** ``D_j(t) = E d_tj^2 = a_j(t) + V_j(t) + e_j(t)`` with ``a_j(t) = q_j^2t d_0j^2``, ``V_j(t) =
eta^2 s^2 sum_r (sum_{i < t} q_j^(t-1-i) B[i, r])^2``, ``e_j(0) = 0`` and, with S = sum_k l_k D_k,

    e_j(t+1) = q_j^2 e_j(t) + (eta^2 / m) (l_j^2 D_j(t) + l_j S(t) + v l_j).

*Proof.* Write ``d_{t+1} = (I - eta H) d_t - eta w_t - eta M_t``, ``M_t = (G_t - H) d_t - xi_t``. The recursion is
linear: ``d_t`` is the sum of the responses to d_0, to w and to M, whose squares have the means a, V and e. Given
everything but the records of step t, M_t has mean 0, and so have its products with earlier M, and, since the noise is
independent of the records, with d_0 and all of w: the cross terms vanish, though d_t depends on both. For Gaussian x
(Isserlis), ``E[((x x^T - H) d)_j^2] = l_j^2 d_j^2 + l_j sum_k l_k d_k^2``; the mean of m records has a part in m of
it, and ``xi`` adds ``v l_j / m``, uncorrelated with the first. QED

**Theorem 2 (bound).** Let all ``q_j^2 < r <= 1`` and ``K(r) = (eta^2 / m) sum_j l_j^2 / (r - q_j^2)``. If ``2 K(r) <
1``, the excess loss F = S / 2 is

    2 F(t) <= r^t sum_j l_j d_0j^2 / (1 - 2 K(r)) + (max_{u <= t} sum_j l_j V_j(u) + v K(1)) / (1 - 2 K(1)).

*Proof.* Let ``k(i) = (eta^2 / m) sum_j l_j^2 q_j^2i``. In sum_j l_j e_j(t) by Theorem 1 the first term has ``sum_j
l_j^2 q_j^2i (l_j D_j) <= max_j l_j^2 q_j^2i  S <= (m / eta^2) k(i) S``, so ``S(t) <= P(t) + sum_{u < t} k(t-1-u) (2
S(u) + v)``, P = sum_j l_j (a_j + V_j). All terms are >= 0, so S is at most the solution of the equation, which is the
sum of one for the a_j and one for the rest. The latter: with its maximum up to t on the right, and ``sum_i k(i) =
K(1)``. The former: multiplied by r^-t, the same with ``sum_i k(i) r^-(i+1) = K(r)``. QED

With ``r = 1 - eta l_min`` and ``eta l_max <= 1/2``, ``K(r) <= 2 eta Tr H / m`` and ``K(1) <= eta Tr H / m``: the start
is forgotten as ``(1 - eta l_min)^t``, and what remains is the noise of DP, of finitely many steps, and that of the
labels.

n = steps, t = step, D = coordinates.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.signal import lfilter

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.strategy import NoiseStrategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRegression:
    """Problem of the theorems, in the eigenvectors of the covariance of the inputs.

    Args:
        eigenvalues: curvatures l_j, (D,), each > 0.
        start: distances d_0j from the minimum before the first step, (D,).
        learning_rate: eta, > 0.
        batch_size: records of a step, m; infinity for gradients without sampling.
        label_variance: v, of the labels given the inputs, >= 0.
    """

    eigenvalues: np.ndarray
    start: np.ndarray
    learning_rate: float
    batch_size: float = 1
    label_variance: float = 0.0

    def __post_init__(self) -> None:
        for name in ("eigenvalues", "start"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=float))
        is_matched = self.eigenvalues.ndim == 1 and self.eigenvalues.shape == self.start.shape
        if not is_matched or not (self.eigenvalues > 0).all():
            raise DPConfigError("`eigenvalues` and `start` are not of one length, or a curvature is not > 0.")
        if not (self.learning_rate > 0 and self.batch_size >= 1 and self.label_variance >= 0):
            raise DPConfigError(
                f"learning_rate={self.learning_rate}, batch_size={self.batch_size} and label_variance="
                f"{self.label_variance} are out of range. Use > 0, >= 1 and >= 0."
            )

    @property
    def contraction(self) -> np.ndarray:
        """Share of a distance that a step keeps, q_j, (D,)."""
        return 1 - self.learning_rate * self.eigenvalues

    def noise_variances(self, strategy: NoiseStrategy, n: int, noise_stddev: float) -> np.ndarray:
        """V of Theorem 1 after 0, 1, .. n steps, (n + 1, D).

        Args:
            strategy: C and B.
            n: steps.
            noise_stddev: stddev s of a coordinate of the draws in a mean gradient; absolute, in gradient units.
        """
        variances = np.zeros((n + 1, len(self.contraction)))
        if strategy.toeplitz_coefs(n) is not None:
            noising = strategy.noising_rows(n - 1, n, n)[0][::-1]
            for j, kept in enumerate(self.contraction):
                variances[1:, j] = np.cumsum(np.square(lfilter([1.0], [1.0, -kept], noising)))
        else:
            rows = strategy.noising_matrix(n)
            response = np.zeros((len(self.contraction), rows.shape[1]))
            for t, row in enumerate(rows):
                response = self.contraction[:, None] * response + row
                variances[t + 1] = np.square(response).sum(axis=1)
        return (self.learning_rate * noise_stddev) ** 2 * variances

    def excess(self, strategy: NoiseStrategy, n: int, noise_stddev: float) -> np.ndarray:
        """Expected excess loss after 0, 1, .. n steps, (n + 1,): exact, by Theorem 1; arguments as above."""
        noise = self.noise_variances(strategy, n, noise_stddev)
        squares, sampled = self.start**2, np.zeros(len(self.contraction))
        found = np.empty(n + 1)
        for t in range(n + 1):
            moments = squares + noise[t] + sampled
            summed = float(self.eigenvalues @ moments)
            found[t] = summed / 2
            fed = self.eigenvalues**2 * moments + self.eigenvalues * (summed + self.label_variance)
            sampled = self.contraction**2 * sampled + self.learning_rate**2 / self.batch_size * fed
            squares = self.contraction**2 * squares
        return found

    def excess_bound(self, strategy: NoiseStrategy, n: int, noise_stddev: float) -> np.ndarray:
        """Bound of the expected excess loss after 0, 1, .. n steps, (n + 1,), by Theorem 2 with ``r = 1 - eta l_min``.

        Raises:
            DPConfigError: for a learning rate at which it does not hold.
        """
        rate = 1 - self.learning_rate * float(self.eigenvalues.min())
        fed, fed_at_rate = self._feedback(1.0), self._feedback(rate)
        if not (0 < rate and max(fed, fed_at_rate) < 0.5):
            raise DPConfigError(
                f"learning_rate={self.learning_rate} is too large for a bound: what sampled records add feeds back as "
                "much as the steps contract. Use a smaller one, or larger batches."
            )
        noise = np.maximum.accumulate(self.noise_variances(strategy, n, noise_stddev) @ self.eigenvalues)
        began = float(self.eigenvalues @ self.start**2) * rate ** np.arange(n + 1) / (1 - 2 * fed_at_rate)
        return (began + (noise + self.label_variance * fed) / (1 - 2 * fed)) / 2

    def _feedback(self, rate: float) -> float:
        """K(r); infinity where a square of q_j is not below r."""
        left = rate - self.contraction**2
        if (left <= 0).any():
            return math.inf
        return self.learning_rate**2 / self.batch_size * float((self.eigenvalues**2 / left).sum())
