"""AdaGrad in the subspace of public gradients: what becomes of a head's releases, all of it public.

Shape legend: K = labels, D = features, p = K D weights, k = rank, f <= k = directions that were found.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_dpopt.convex.norm_ball import project_in_norm
from hf_dpopt.convex.softmax_gradients import record_gradients
from hf_dpopt.convex.subspace_plan import SubspaceHeadConfig
from hf_dpopt.public.subspace import PublicSubspace

HEAD = "head"  # name of the one parameter that the subspace is one of


class SubspaceDescent:
    """Iterates of `SubspaceHeadConfig`, from the released coordinates of each step.

    Formal guarantee: `query` is linear in the sum of gradients and lengthens no vector (rounding of float64 aside), so
    one record moves it by at most what it moves the sum, and it depends otherwise on public records and earlier
    releases alone. `move` sees releases alone.

    Args:
        config: the settings.
        num_labels: K.
        public: features of public records, (m, D), m >= `rank`, and their labels, (m,).

    Raises:
        DPConfigError: for fewer public records than directions, or public gradients that are all zero.
    """

    def __init__(self, config: SubspaceHeadConfig, num_labels: int, public: tuple[torch.Tensor, torch.Tensor]):
        self._config, self._public = config, public
        self.weights = torch.zeros(num_labels, public[0].size(1), dtype=torch.float64)
        self._mean = torch.zeros_like(self.weights)
        self._subspace = PublicSubspace(config.rank)
        self._second_moment = torch.zeros(config.rank, config.rank, dtype=torch.float64)  # S
        self._refresh()

    @property
    def result(self) -> torch.Tensor:
        """Mean of the iterates after each step, float64, (K, D); `weights` is the latest one."""
        return self._mean

    def query(self, gradient_sum: torch.Tensor, step: int) -> torch.Tensor:
        """``V^T g``, float64, (f,), of the sum of a step's gradients, (K, D); refreshes V where it is due."""
        if step > 1 and (step - 1) % self._config.refresh_every == 0:
            self._refresh()
            self._second_moment = self._subspace.transition @ self._second_moment @ self._subspace.transition.T
        return self._directions() @ gradient_sum.flatten()

    def move(self, released: torch.Tensor, step: int) -> None:
        """Take the step that the released coordinates of its sum, (f,), ask for."""
        u_f = released / self._config.expected_batch_size
        num_found = len(u_f)
        moment_ff = self._second_moment[:num_found, :num_found]  # the other entries are zero
        moment_ff += torch.outer(u_f, u_f)
        values_f, vectors_ff = torch.linalg.eigh(moment_ff)
        roots_f = (values_f.clamp(min=0) + self._config.eps).sqrt()
        directions_fp = vectors_ff.T @ self._directions()
        change_p = ((vectors_ff.T @ u_f) / roots_f) @ directions_fp
        self.weights = project_in_norm(
            self.weights.flatten() - self._config.step_size * change_p,
            self._config.head_radius,
            eigenvalues=roots_f,
            directions=directions_fp,
            rest=self._config.eps**0.5,
        ).view_as(self.weights)
        self._mean += (self.weights - self._mean) / step

    def _refresh(self) -> None:
        """Compute V from the public records at the weights of now, which are released."""
        self._subspace.refresh({HEAD: record_gradients(*self._public, self.weights)})

    def _directions(self) -> torch.Tensor:
        """Rows of ``V^T`` that were found, (f, p)."""
        return self._subspace.basis[HEAD].flatten(1)[: self._subspace.num_directions]

    def state_dict(self) -> dict[str, Any]:
        """State that a killed run goes on from."""
        return {
            "weights": self.weights,
            "mean": self._mean,
            "second_moment": self._second_moment,
            "subspace": self._subspace.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self._mean = state["weights"], state["mean"]
        self._second_moment = state["second_moment"]
        self._subspace.load_state_dict(state["subspace"])
