"""Events of dp-accounting that the public numbers of a plan stand for, built from nothing else.

Noise is in units of the bound on one record here, as dp-accounting has it. Sources: sampled Gaussians
(arXiv:1908.10530), groups that take turns with banded noise (arXiv:2306.08153, Theorem 4), one Gaussian for any C
under a fixed order (arXiv:2211.06530), users with several records (arXiv:2407.07737).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, TruncatedSubsampledGaussianDpEvent
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from scipy import stats

from hf_dpopt.verify.matrices import ROUNDING, Strategy, Uses, by_formula
from hf_dpopt.verify.outcome import Contradiction, Unknown
from hf_dpopt.verify.reading import Fields

BINS = "balls_in_bins"
Leaves = list[tuple[DpEvent, int]]

MOVES = {"add_or_remove_one": 1.0, "zero_out": 1.0, "replace_one": 2.0}  # of a sum of vectors of norm <= 1
ALLOWED = {
    "poisson": ("add_or_remove_one", "zero_out", "replace_one"),
    "truncated_poisson": ("add_or_remove_one", "zero_out", "replace_one"),
    "capped_poisson": ("add_or_remove_one", "zero_out"),
    "cyclic_poisson": ("add_or_remove_one", "zero_out"),
    "balls_in_bins": ("add_or_remove_one", "zero_out"),
    "fixed_order": ("zero_out", "replace_one"),
}
INDEPENDENT_ONLY = ("poisson", "truncated_poisson", "capped_poisson")
MOST_STEPS = 200_000  # of correlated noise: some seconds
MOST_BINS = 400  # whose inner products are looked at one by one


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """The noisy sums, as a plan or the entry of an earlier run describes them.

    Args:
        fields: the plan.
    """

    fields: Fields

    @property
    def adjacency(self) -> str:
        """Relation between data sets that are neighbours."""
        found = self.fields.text("adjacency")
        if found not in MOVES:
            raise Contradiction(f"adjacency {found!r:.40} is none that has a meaning")
        return found

    @property
    def sampler(self) -> str:
        """Name of the law of the batches, whose numbers were compared with those of the plan."""
        law = self.fields.inner("sampler")
        name = law.text("name")
        if name not in ALLOWED:
            raise Unknown(f"batches of {name!r:.40} have no analysis here")
        if self.adjacency not in ALLOWED[name]:
            raise Contradiction(f"{name} has no proof under {self.adjacency}")
        for entry in ("num_examples", "expected_batch_size"):
            own = self.fields.content.get(entry, law.count(entry))
            if law.count(entry) != own:
                raise Contradiction(f"the sampler has {entry}={law.count(entry)}, the plan {own!r:.40}")
        if self.batch > self.num_examples:
            raise Contradiction(f"batches of {self.batch} of {self.num_examples}")
        if name in INDEPENDENT_ONLY and not self.strategy.is_independent:
            raise Contradiction(f"{self.strategy.name} noise with {name} batches has no proof")
        return name

    @property
    def law(self) -> Fields:
        """Numbers of the sampler."""
        return self.fields.inner("sampler")

    @property
    def num_examples(self) -> int:
        """Number of elements that batches are drawn from."""
        return self.law.count("num_examples")

    @property
    def batch(self) -> int:
        """Elements of a batch, on average."""
        return self.law.count("expected_batch_size")

    @property
    def rate(self) -> float:
        """Share of the elements in a batch."""
        return self.batch / self.num_examples

    @property
    def epoch(self) -> int:
        """Steps until all elements had their turn."""
        return -(-self.num_examples // self.batch)

    @property
    def strategy(self) -> Strategy:
        """Matrix that ties the noise of the steps together."""
        return Strategy(self.fields.inner("noise_strategy"))

    @property
    def stddev(self) -> float:
        """Noise of the draws / bound on one record."""
        return self.fields.positive("draw_stddev") * MOVES[self.adjacency]

    @property
    def made_for(self) -> int:
        """Steps that the noise was made for."""
        return self.fields.count("noise_steps")

    def uses(self, num_steps: int) -> Uses:
        """Steps of one chain in which a record may take part, as far as they are tied together."""
        if self.sampler == "cyclic_poisson":
            return Uses(1, self.law.count("num_groups"))
        return Uses(max(1, -(-num_steps // self.epoch)), self.epoch)

    def sensitivity(self, num_steps: int) -> float:
        """Sensitivity that the noise multiplier is relative to, by our own formula."""
        if self.strategy.is_independent:
            return 1.0
        if num_steps > MOST_STEPS:
            raise Unknown(f"{num_steps} steps of {self.strategy.name} noise are too many to recompute here")
        if self.sampler == "cyclic_poisson":
            self._check_columns(num_steps, self.law.count("num_groups"))
        return by_formula(self.strategy, num_steps, self.uses(num_steps))

    def _check_columns(self, num_steps: int, groups: int) -> None:
        """Refuse bands that tie the turns of a group together."""
        coefs = self.strategy.coefficients(num_steps)
        if coefs is not None:
            is_apart = not coefs[groups:].any()
        else:
            gram = np.abs(np.tril((m := self.strategy.matrix(num_steps)).T @ m, -1))
            is_apart = all(gram[t::groups, t::groups].max() <= ROUNDING for t in range(min(groups, num_steps)))
        if not is_apart:
            raise Contradiction(f"noise of {self.strategy.name} ties steps together that are {groups} groups apart")

    def charged_as(self, num_steps: int) -> int:
        """Steps that a chain costs: its own, or all that its noise was made for."""
        if self.strategy.is_anytime:
            return num_steps
        if num_steps > self.made_for:
            raise Contradiction(f"{num_steps} steps of noise that was made for {self.made_for}")
        return self.made_for

    def leaves(self, chains: tuple[int, ...]) -> Leaves:
        """Mechanisms that the steps of these chains are together, and how often each ran.

        Of balls in bins: one that reveals no less, a record whose bin is known.

        Raises:
            Unknown: for the best of several runs.
        """
        found: Leaves = []
        running = [t for t in chains if t > 0]
        if self.fields.has("opening_noise"):
            asked = GaussianDpEvent(self.fields.positive("opening_noise") * MOVES[self.adjacency])
            found += [(asked, len(running))] if running else []
        for num_steps in running:
            found += self._of_chain(num_steps)
        counts: dict[DpEvent, int] = {}
        for leaf, count in found:
            counts[leaf] = counts.get(leaf, 0) + count
        if self.fields.has("tuned") and running:
            raise Unknown("the best of several runs: what their number costs is not recomputed here")
        return list(counts.items())

    def _of_chain(self, num_steps: int) -> Leaves:
        sampler, stddev, q = self.sampler, self.stddev, self.rate
        if sampler == "poisson":
            return [(on_sample(q, stddev), num_steps)]
        if sampler == "truncated_poisson":
            return [(self._truncated(stddev), num_steps)]
        if sampler == "capped_poisson":
            return [(_users(q, stddev, self.law.count("records_per_user")), num_steps)]
        steps = self.charged_as(num_steps)
        if sampler == "cyclic_poisson":
            groups = self.law.count("num_groups")
            if groups * q > 1:
                raise Contradiction(f"{groups} groups are too small for batches of {self.batch}")
            return [(on_sample(groups * q, stddev / self.sensitivity(steps)), -(-steps // groups))]
        moves = math.sqrt(-(-steps // self.epoch)) if self.strategy.is_independent else self.sensitivity(steps)
        return [(GaussianDpEvent(stddev / moves), 1)]

    def _truncated(self, stddev: float) -> DpEvent:
        cap = self.law.count("cap")
        if cap >= self.num_examples:
            return on_sample(self.rate, stddev)
        if cap < self.batch:
            raise Contradiction(f"batches of {self.batch} are cut at {cap}")
        return TruncatedSubsampledGaussianDpEvent(self.num_examples + 1, self.rate, cap, stddev)

    def grams(self, num_steps: int) -> np.ndarray:
        """Inner products of the sums of columns that the bins of one chain meet, in units of the noise, (bins, bins).

        Raises:
            Unknown: for more bins than are looked at one by one.
        """
        bins, steps = self.epoch, self.charged_as(num_steps)
        if bins > MOST_BINS:
            raise Unknown(f"{bins} bins are too many to look at one by one")
        if self.strategy.is_independent:
            return np.diag([len(range(j, steps, bins)) / self.stddev**2 for j in range(bins)])
        matrix = self.strategy.matrix(steps)
        if (matrix < 0).any() or matrix.shape[0] != steps:
            raise Contradiction(f"{self.strategy.name} noise has no proof with balls in bins")
        met = np.stack([matrix[:, j::bins].sum(axis=1) for j in range(bins)]) / self.stddev
        return met @ met.T


def on_sample(q: float, stddev: float) -> DpEvent:
    """A Gaussian mechanism on a sample of rate q; the plain one if all are in it."""
    return PoissonSampledDpEvent(q, GaussianDpEvent(stddev)) if q < 1 else GaussianDpEvent(stddev)


def _users(q: float, stddev: float, places: int) -> DpEvent:
    """A user with so many places moves a batch by as many clips as are drawn."""
    if places == 1:
        return on_sample(q, stddev)
    drawn = np.arange(places + 1)
    return MixtureOfGaussiansDpEvent(
        stddev, tuple(map(float, drawn)), tuple(map(float, stats.binom.pmf(drawn, places, q)))
    )
