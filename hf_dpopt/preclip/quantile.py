r"""A clipping norm that follows a quantile of the units' norms, found privately.

In every step the units (records, users) whose norm is within the clip are counted, and the count is released with
noise of its own: one coordinate more beside the gradient, noised as one vector with it. Then
``C <- C exp(-eta (share - quantile))``. C is a factor before the core and one behind it, so the clip of the core, and
what epsilon is computed from, never change. So correlated noise goes on as well, in units of the clip: it takes back
what it added as far as C stays where it is. A unit without gradient adds nothing to either sum.

Andrew, Thakkar, McMahan and Ramaswamy (2021), arXiv:1905.03871, Algorithm 1 and Theorem 1: with noise of stddev
``sigma_b`` on the sum of ``1[within] - 1/2`` and of ``z_Delta C`` on that of the gradients,
``z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2)``, both together are the Gaussian mechanism of noise multiplier z.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from hf_dpopt.clipping.clipped_sum import COUNT
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.checks import LARGEST_CLIPPING_NORM, SMALLEST_CLIPPING_NORM, check_positive, check_share
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.types import Released
from hf_dpopt.preclip.preconditioner import Preclip, Preconditioning, RunOptions, ScaleChanges, check_keys, multiply_

FARTHEST = 1e6  # that C may get from the first one, either way; it stays among the norms that are allowed, too


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantileClipping(Preclip):
    """The spec; see the module.

    Formal guarantee: a unit more or less moves the sum of the clipped gradients by at most C and the weighted count by
    at most half its weight, together by `sensitivity_ratio` times C.

    Args:
        quantile: share of the norms that are to be within the clip, in (0, 1).
        learning_rate: eta, > 0, per step.
        count_noise: stddev of the noise in the share of units within the clip (unitless), > 0: the paper's
            ``sigma_b / m``, for which it takes 1/20. Of correlated noise, the stddev of its draws.

    Raises:
        DPConfigError: for values out of range.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float = 0.05
    name: ClassVar[str] = "quantile"

    def __post_init__(self) -> None:
        check_positive(learning_rate=self.learning_rate, count_noise=self.count_noise)
        check_share("quantile", self.quantile, "0.5, the median of the norms")

    def check_config(self, config: RunOptions) -> None:
        """Refuse rules of clipping that the count was not proven for."""
        if config.clipping != "flat":
            raise DPConfigError(
                f"clipping={config.clipping!r} has no one norm that units are within. Use clipping='flat'."
            )

    def changes(self, clipping_norm: float) -> ScaleChanges:
        return ScaleChanges((1,), (1.0,))

    def sensitivity_ratio(self, noise_stddev: float, expected_batch_size: int) -> float:
        """Largest change of gradient and weighted count together / that of the gradient.

        Args:
            noise_stddev: stddev of the draws / bound on one unit.
            expected_batch_size: units.

        Raises:
            DPConfigError: if the count alone would take the whole budget.
        """
        share = noise_stddev / (2 * self.count_noise * expected_batch_size)
        if share >= 1:
            least = noise_stddev / (2 * expected_batch_size)
            enough = f"--preconditioner_kwargs '{{\"count_noise\": {1.2 * least:.2g}}}'"
            raise DPConfigError(
                f"count_noise={self.count_noise} is less noise than the budget allows for the count alone. Use more "
                f"than {least:.3g} ({enough}), larger batches, a larger budget, or independent noise."
            )
        return 1 / math.sqrt(1 - share**2)


class ClippingAtQuantile(Preconditioning):
    """`QuantileClipping` at work; C relative to the first one is all it keeps, and was made of released counts."""

    _spec: QuantileClipping

    def __init__(self, *of_run: Any):
        super().__init__(*of_run)
        self._least = max(1 / FARTHEST, SMALLEST_CLIPPING_NORM / self._clipping_norm)
        self._most = min(FARTHEST, LARGEST_CLIPPING_NORM / self._clipping_norm)
        self.ratio = 1.0  # C / the clipping norm of the core

    @property
    def gain(self) -> float | None:
        return self._last

    _last = 1.0  # ratio of the latest release

    @property
    def _weight(self) -> float:
        """Weight of a unit in the count, relative to the expected batch; the same in every step.

        A draw then has the stddev `count_noise` in the share; correlated noise of a step is made of several.
        """
        draw = math.sqrt(self._noise.variance_of_draw())
        return draw / self._spec.count_noise or 1.0  # without noise any weight will do

    def scales(self) -> tuple[Scale | None, ...]:
        return (Scale({}, 1 / self.ratio, count_weight=self._weight),)

    def receive(self, released: Released) -> Released:
        gradients = Released(dict(released))
        share = gradients.pop(COUNT).item() / self._weight + 0.5
        self._last = self.ratio
        multiply_(gradients, self.ratio)
        log_ratio = math.log(self.ratio) - self._spec.learning_rate * (share - self._spec.quantile)
        self.ratio = math.exp(min(max(log_ratio, math.log(self._least)), math.log(self._most)))
        return gradients

    def state_dict(self) -> dict[str, Any]:
        return {"ratio": self.ratio, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_keys(state, {"ratio", "last"})
        self.ratio, self._last = min(max(float(state["ratio"]), self._least), self._most), float(state["last"])


QuantileClipping.at_work = ClippingAtQuantile
