"""SGD on the records of one user: what is asked for, checked."""

from __future__ import annotations

import dataclasses

import numpy as np

from hf_dpopt.common.checks import check_count, check_known, check_positive, check_real
from hf_dpopt.common.errors import DPConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """SGD on the records of one user.

    Args:
        learning_rate: > 0.
        batch_size: records of a local step, at most.
        epochs: passes over the records that take part, >= 1.
        steps: local steps at most, through as many epochs as they take; None for `epochs`.

    Raises:
        DPConfigError: for values out of range.
    """

    learning_rate: float
    batch_size: int = 16
    epochs: int = 1
    steps: int | None = None

    def __post_init__(self) -> None:
        check_real("learning_rate of local_training", self.learning_rate, "a number > 0; 0.1 to 1 is usual")
        check_positive(**{"learning_rate of local_training": self.learning_rate})
        check_count("batch_size of local_training", self.batch_size)
        check_count("epochs of local_training", self.epochs)
        if self.steps is not None:
            check_count("steps of local_training", self.steps)

    @classmethod
    def of(cls, options: dict) -> LocalTraining:
        """Make it from names and values.

        Raises:
            DPConfigError: for a name that is not known, or no learning rate.
        """
        check_known("local_training", options, (field.name for field in dataclasses.fields(cls)))
        if "learning_rate" not in options:
            raise DPConfigError("`local_training` has no learning_rate. Use a number > 0; 0.1 to 1 is usual.")
        return cls(**options)

    def batches(self, num_records: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Indices of the records in each local step of a user, shuffled in every epoch."""
        size, found = min(self.batch_size, num_records), list[np.ndarray]()
        per_epoch = -(-num_records // size)
        num_epochs = self.epochs if self.steps is None else -(-self.steps // per_epoch)
        for _ in range(num_epochs):
            order = rng.permutation(num_records)
            found += [order[first : first + size] for first in range(0, num_records, size)]
        return found if self.steps is None else found[: self.steps]
