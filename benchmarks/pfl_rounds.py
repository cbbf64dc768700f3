"""Rounds of pfl-research (Granqvist et al. 2024, arXiv:2404.06430) for `stackoverflow.py --rounds_in_turns`.

    pip install --target build/pfl --no-deps pfl==0.6.0 prv-accountant && export PYTHONPATH=build/pfl

Its simulated backend in one process with torch: federated averaging, each user's move clipped, Gaussian noise on the sum.
It is no dependency of the package, and `--no-deps` leaves the others as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism


class _Losses(torch.nn.Module):
    """What pfl asks of a model: a loss of the columns of a batch, and metrics."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def loss(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model(**batch).loss

    def metrics(self, **batch: torch.Tensor) -> dict[str, Any]:
        return {}


class PflRounds:
    """Rounds of users, one call each.

    Args:
        model: model that the rounds train.
        batch_of: makes the batch of a user, which is one local step.
        rate: learning rate of the local step.
        clipping_norm: bound on the norm of a user's move.
        noise_multiplier: noise stddev / clipping norm; None for neither clip nor noise.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch_of: Callable[[Any], dict[str, torch.Tensor]],
        rate: float,
        *,
        clipping_norm: float = 1.0,
        noise_multiplier: float | None = 1.0,
    ):
        self._users: Iterator[Any] = iter(())
        self._rate, self._num_done, self._averaging = rate, 0, FederatedAveraging()
        server = torch.optim.SGD(model.parameters(), lr=1.0)
        self._model = PyTorchModel(_Losses(model), torch.optim.SGD, server)
        data = FederatedDataset(lambda user: PyTorchTensorDataset(batch_of(user)), lambda: next(self._users))
        privacy = []
        if noise_multiplier is not None:
            privacy = [CentrallyAppliedPrivacyMechanism(GaussianMechanism(clipping_norm, noise_multiplier))]
        self._backend = SimulatedBackend(data, data, privacy)

    def take(self, users: list[Any]) -> None:
        """One round of these users."""
        self._users, self._num_done = iter(users), self._num_done + 1
        options = NNAlgorithmParams(  # an evaluation in the first round, which warms up, and in no other
            central_num_iterations=self._num_done, evaluation_frequency=10**6, train_cohort_size=len(users),
            val_cohort_size=None,
        )  # fmt: skip
        local = NNTrainHyperParams(local_batch_size=None, local_num_epochs=1, local_learning_rate=self._rate)
        self._averaging.run(options, self._backend, self._model, local)
