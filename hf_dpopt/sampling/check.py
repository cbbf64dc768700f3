"""Check of what a sampler promises about participations, on the batches that are really drawn."""

from __future__ import annotations

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.sampling.sampler import Sampler

MOST_COUNTED = 2**24


class ParticipationCheck:
    """Count of the steps of a chain in which each record (or user) takes part.

    The sensitivity of correlated noise, and of a fixed order, rests on how often and how far apart that is. Memory: 12
    bytes a record, from the first draw on, of at most `MOST_COUNTED` records: of more, those at equal distances are
    counted, which sees what goes wrong with many. After a resume the earlier steps of the chain are drawn again and
    counted.

    Args:
        sampler: draws.
        key: sampling key of the chain.
        first_step: first step of the chain, 1-based.
    """

    def __init__(self, sampler: Sampler, key: bytes, first_step: int):
        self._sampler, self._key, self._first_step = sampler, key, first_step
        self._seen_upto = first_step - 1
        self._every = 1
        self._count_N = np.zeros(0, np.int32)
        self._last_N = np.zeros(0, np.int64)

    @staticmethod
    def is_needed(sampler: Sampler, num_steps: int) -> bool:
        """Whether the sampler promises anything: under Poisson sampling every step is possible."""
        promised = sampler.participation(num_steps)
        return promised.min_sep > 1 or promised.max_participations < num_steps

    def observe(self, step: int, drawn: np.ndarray) -> None:
        """Count the batch of a step; one that was counted already is not counted again.

        Raises:
            DPConfigError: if a record takes part too often, or again too soon. Nothing of the step has run then.
        """
        if step <= self._seen_upto:
            return
        if not len(self._count_N):
            self._every = -(-self._sampler.num_examples // MOST_COUNTED)
            num_counted = -(-self._sampler.num_examples // self._every)
            self._count_N = np.zeros(num_counted, np.int32)
            self._last_N = np.full(num_counted, -(2**62), np.int64)
        for earlier in range(self._seen_upto + 1, step):
            self._count(earlier, self._sampler.draw(self._key, earlier))
        self._count(step, drawn)

    def _count(self, step: int, drawn: np.ndarray) -> None:
        promised = self._sampler.participation(step - self._first_step + 1)
        counted = drawn if self._every == 1 else drawn[drawn % self._every == 0] // self._every
        self._count_N[counted] += 1
        too_soon = step - self._last_N[counted] < promised.min_sep
        too_often = self._count_N[counted] > promised.max_participations
        if too_soon.any() or too_often.any() or len(np.unique(drawn)) < len(drawn):
            raise DPConfigError(
                f"Step {step} was not run: the batch breaks what the noise relies on, at most "
                f"{promised.max_participations} participations in so many steps, at least {promised.min_sep} apart. "
                f"The sampler {self._sampler.name!r} is at fault, or it was changed in mid-run; report it."
            )
        self._last_N[counted] = step
        self._seen_upto = step
