r"""A filter for mechanisms that are chosen as one goes, after what earlier ones released was seen.

Privacy losses of mechanisms that were fixed beforehand can be convolved; those of mechanisms that were chosen
adaptively, and as many as one likes, cannot. Their Renyi divergences of one order, fixed beforehand, do add up.

Formal guarantee: let a mechanism be admitted only while the sum of the divergences of order ``order`` of all that were
admitted, its own included, stays at most ``allowance``, and the probabilities of exposure by caps on batches at most
``CAPS * delta`` in sum. All together are then (epsilon, delta)-differentially private, however each was chosen.

References:
    Feldman and Zrnic (2021), arXiv:2008.11193 (Renyi filter with fully adaptive budgets).
    Lecuyer (2021), arXiv:2103.01379 (filters and odometers with Renyi divergences).
    Canonne, Kamath and Steinke (2020), arXiv:2004.00010, Prop. 12 (from one order to epsilon and delta).
"""

from __future__ import annotations

import dataclasses
import math

from dp_accounting import DpEvent
from dp_accounting.rdp import RdpAccountant

from hf_dpopt.accounting import accountants, events
from hf_dpopt.common.errors import DPConfigError

CAPS = 0.01  # share of delta for caps on batches
ORDERS = tuple(order for order in accountants.SELECTION_ORDERS if order >= 1.5)


@dataclasses.dataclass(frozen=True)
class Charge:
    """Cost of a mechanism: its divergence at the order of a filter, and how likely a cap exposes a record."""

    divergence: float
    exposure: float


@dataclasses.dataclass(frozen=True)
class RenyiFilter:
    """Budget of mechanisms that are chosen adaptively.

    Args:
        epsilon, delta: what all of them together may spend.
        order: order of the divergences, > 1; fixed before the first mechanism.
    """

    epsilon: float
    delta: float
    order: float

    @property
    def allowance(self) -> float:
        """Largest sum of divergences."""
        return self.epsilon - _more_than_divergence(self.order, self.delta * (1 - CAPS))

    def spent(self, charges: list[Charge]) -> float:
        """Epsilon of what was charged, at the filter's delta; 0 for nothing."""
        total = math.fsum(charge.divergence for charge in charges)
        if total == 0:
            return 0.0
        return max(0.0, total + _more_than_divergence(self.order, self.delta * (1 - CAPS)))

    def admits(self, charges: list[Charge]) -> bool:
        """Whether all of these are within the budget."""
        exposure = math.fsum(charge.exposure for charge in charges)
        total = math.fsum(charge.divergence for charge in charges)
        return total <= self.allowance and exposure <= CAPS * self.delta


def charge_of(event: DpEvent, adjacency: str, order: float) -> Charge:
    """Cost of an event under a filter of this order.

    Raises:
        DPConfigError: for an event, or an adjacency, whose Renyi divergences are not known here.
    """
    if adjacency == "replace_one":
        raise DPConfigError(
            "adjacency='replace_one' has no Renyi analysis here, by which a ledger of the dataset adds runs up. Use "
            "'add_or_remove_one' or 'zero_out'."
        )
    composition, exposure = events.split_truncation(events.flatten(event))
    supports = RdpAccountant().supports
    if any(events.noise_of(leaf) == 0 for leaf, _ in composition) or not all(
        supports(leaf) for leaf, _ in composition
    ):
        raise DPConfigError(
            "What this run releases has no Renyi analysis, by which a ledger of the dataset adds runs up. Use "
            "sampling='poisson', 'truncated_poisson', 'cyclic_poisson' or 'fixed_order', and noise."
        )
    with accountants.quiet_absl():
        total = math.fsum(count * float(accountants.divergences(leaf, (order,))[0]) for leaf, count in composition)
    return Charge(total, exposure)


def best_order(event: DpEvent, adjacency: str, epsilon: float, delta: float) -> float:
    """The order at which the budget admits the event most often."""

    def times(order: float) -> float:
        divergence = charge_of(event, adjacency, order).divergence
        return RenyiFilter(epsilon, delta, order).allowance / divergence if divergence > 0 else math.inf

    return max(ORDERS, key=times)


def _more_than_divergence(order: float, delta: float) -> float:
    """Epsilon - divergence, of a mechanism of which the divergence of one order is known."""
    return math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
