"""Projected noisy SGD on softmax regression. Nothing leaves before the last step.

Shape legend: B = records of a batch, K = labels, D = features.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_dpopt.common.durable import write_durably
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.convex.plan import HeadPlan
from hf_dpopt.convex.statement import write_statement
from hf_dpopt.randomness.cipher import make_noise_source
from hf_dpopt.run.keys import Chain, PrivateState, default_private_dir
from hf_dpopt.run.ledger import Ledger
from hf_dpopt.run.run import LEDGER

INTERMEDIATE = ("checkpoint-*", "trainer_state.json", "optimizer.pt", "runs")  # of finetuning runs
SAVE_EVERY = 20.0  # seconds, of the state that a crashed run goes on from


class HeadRun:
    """One private training of a head, from its key to its final weights.

    The whole run is charged, once, before its first record is read. Iterates are kept in memory and in the private
    directory, from which a killed run continues bit for bit; they are written nowhere else. `train` returns the final
    weights, as often as it is called; `finish` writes the statement once they are published, and deletes key and
    state: then the run cannot be continued.

    Formal guarantee: that of `make_head_plan`, for everything that is below `output_dir` or returned.

    Args:
        plan: the plan to execute.
        output_dir: folder of the run; ledger and statement go to its folder `privacy`.
        private_state_dir: folder of key and state, never inside `output_dir`; None for the user's state directory.
        noise_rng: "secure" or "fast"; see `make_noise_source`.
        declared: sentences of the statement, by the names of `RunFacts`: evaluation data, preprocessing.

    Raises:
        DPConfigError: if `output_dir` holds checkpoints: only final weights may be there.
    """

    def __init__(
        self,
        plan: HeadPlan,
        *,
        output_dir: str | Path,
        private_state_dir: str | Path | None = None,
        noise_rng: str = "secure",
        declared: Mapping[str, str] | None = None,
    ):
        left = [p.name for pattern in INTERMEDIATE for p in Path(output_dir).glob(pattern)]
        if left:
            raise DPConfigError(
                f"{output_dir} holds {', '.join(left[:3])}, and a head is published with its final weights only. Use "
                "an output_dir of its own."
            )
        self._declared = dict(declared or {})
        self.plan, self.output_dir = plan, Path(output_dir)
        self._noise_rng = noise_rng
        self.state = PrivateState(private_state_dir or default_private_dir(output_dir), forbidden=output_dir)

    @property
    def private_folder(self) -> Path:
        """Folder for private data other than keys, such as features."""
        return self.state.directory

    def train(
        self, features: torch.Tensor, labels: torch.Tensor, num_labels: int, *, progress: bool = False
    ) -> torch.Tensor:
        """Train from the start, or from where a killed run stopped.

        Args:
            features: float32, (n, D), of norm `feature_norm` at most; see `clip_features`.
            labels: int64, (n,), in [0, num_labels).
            num_labels: K, which is public.
            progress: whether to show a bar, which shows the step and nothing of the data.

        Returns:
            The final weights, float32, (K, D).

        Raises:
            DPConfigError: if the records do not fit the plan, or `output_dir` records another mechanism.
            DPBudgetExceeded: if the run recorded there has ended.
        """
        self._check(features, labels, num_labels)
        with Ledger.open(self.output_dir / LEDGER) as ledger:
            public = {**self.plan.public_dict(), "num_labels": num_labels, "noise_rng": self._noise_rng}
            # whether a large delta was allowed in words is no part of the mechanism, and older ledgers do not say it
            ledger.record_plan(public, must_match=[name for name in public if name != "allow_large_delta"])
            chain = self._chain(ledger)
            with contextlib.closing(self.state.memory(ledger)) as memory:
                memory.lock()  # a copy of this folder that shares the key would train other records with its noise
                step, weights = self._load(chain, (num_labels, features.size(1)))
                weights = self._descend(features, labels, chain, step, weights, progress)
                self._save(chain, self.plan.config.num_steps, weights)
        return weights.float()

    def finish(self, num_labels: int) -> None:
        """Write the statement, then delete key and state; call it when the final weights are published."""
        with Ledger.open(self.output_dir / LEDGER) as ledger:
            last = ledger.last_chain
            assert last is not None, "finish comes after train"
            write_statement(self.output_dir, self.plan, num_labels, ledger, self._noise_rng, self._declared)
            for path in self.state.directory.glob(f"*head-{last.chain_id}.pt*"):  # and what a kill left half-written
                path.unlink()
            self.state.forget([last.chain_id])
            self.state.memory(ledger).remove()

    def _chain(self, ledger: Ledger) -> Chain:
        """The chain of a killed run, or a new one, charged."""
        last = ledger.last_chain
        if last is None:
            chain = self.state.new_chain()
            ledger.start_chain(
                chain_id=chain.chain_id, key_id=chain.key_id, start_step=0, note="convex head, final weights only"
            )
            ledger.charge(chain.chain_id, self.plan.config.num_steps)
            return chain
        kept = self.state.load_chain(last.chain_id)
        if kept is None or kept.key_id != last.key_id:
            again = self.plan.epsilon(2)
            raise DPBudgetExceeded(
                f"{self.output_dir} records a run that has ended, or whose key is gone: it cannot be continued, and a "
                f"second one on the same records would bring epsilon to {again:.4g}. Use another output_dir for a run "
                "with a budget of its own; both come on top of each other."
            )
        if ledger.last_step(last.chain_id) is None:
            ledger.charge(last.chain_id, self.plan.config.num_steps)
        return kept

    def _descend(
        self, features: torch.Tensor, labels: torch.Tensor, chain: Chain, first: int, weights: torch.Tensor, bar: bool
    ) -> torch.Tensor:
        """Run the remaining steps; the weights after the last one, float64, (K, D)."""
        plan, config = self.plan, self.plan.config
        source = make_noise_source(self._noise_rng, chain.noise_key)
        stddev, batch = plan.sgd.noise_multiplier * config.lipschitz, config.expected_batch_size
        steps = range(first + 1, config.num_steps + 1)
        saved = time.monotonic()
        for step in tqdm(steps, initial=first, total=config.num_steps, desc="private steps", disable=not bar):
            rows = torch.from_numpy(plan.sampler.draw(chain.sampling_key, step))
            total = gradient_sum(features[rows], labels[rows], weights)
            # private from here
            total += stddev * source.normal(weights.shape, step=step, tensor=0).double()
            size = config.step_size * step**-config.decay
            weights = projected(weights - size * (total / batch + config.l2 * weights), config.head_radius)
            if time.monotonic() - saved > SAVE_EVERY:
                self._save(chain, step, weights)
                saved = time.monotonic()
        return weights

    # --- what a killed run goes on from; as private as the data ---

    def _file(self, chain: Chain) -> Path:
        return self.state.directory / f"head-{chain.chain_id}.pt"

    def _save(self, chain: Chain, step: int, weights: torch.Tensor) -> None:
        content = io.BytesIO()
        torch.save({"step": step, "weights": weights}, content)
        write_durably(self._file(chain), content.getvalue(), mode=0o600)

    def _load(self, chain: Chain, shape: tuple[int, int]) -> tuple[int, torch.Tensor]:
        path = self._file(chain)
        if not path.exists():
            return 0, torch.zeros(shape, dtype=torch.float64)
        kept = torch.load(path, weights_only=True)
        if kept["weights"].shape != shape:
            raise DPConfigError(
                f"The run of {self.output_dir} was killed with weights of shape {tuple(kept['weights'].shape)}, and "
                f"those of now have {shape}. Go on with the same model and labels, or use another output_dir."
            )
        return kept["step"], kept["weights"]

    def _check(self, features: torch.Tensor, labels: torch.Tensor, num_labels: int) -> None:
        if len(features) != self.plan.num_examples or len(labels) != len(features):
            raise DPConfigError(
                f"The plan is for {self.plan.num_examples} records; there are {len(features)} rows of features and "
                f"{len(labels)} labels. Make the plan for the records that are trained on."
            )
        if features.dtype not in (torch.float32, torch.float64) or labels.dtype != torch.int64:
            raise DPConfigError(
                f"Features are {features.dtype} and labels {labels.dtype}. Use float32, as clip_features returns, and "
                "int64: coarser sums depend on their order."
            )
        if len(labels) and not (0 <= int(labels.min()) and int(labels.max()) < num_labels):
            raise DPConfigError(f"There are labels outside [0, {num_labels}). Give every record a label in it.")
        longest = float(features.double().norm(dim=1).max())
        if not longest <= self.plan.config.feature_norm * (1 + 1e-6):
            raise DPConfigError(
                "Features are longer than feature_norm, or no numbers, so a record is not hidden by the noise. Pass "
                "them through clip_features first."
            )


def recorded_head_plan(output_dir: str | Path) -> dict[str, Any] | None:
    """The plan in the ledger of a head's run, for `make_head_plan`; None if there is no ledger."""
    path = Path(output_dir) / LEDGER
    return Ledger.read(path).plan if path.exists() else None


def gradient_sum(features: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gradient of the summed cross entropies of a batch: ``sum_b (p_b - y_b) x_b^T``.

    In float64: a step has to be a contraction, and the bound leaves each one a room of about ``D / R`` only.

    Args:
        features: features of the records, (B, D); B may be 0.
        labels: labels of the records, (B,).
        weights: weights of the head, float64, (K, D).

    Returns:
        float64, (K, D).
    """
    features_BD = features.double()
    errors_BK = torch.softmax(features_BD @ weights.T, dim=1)
    errors_BK[torch.arange(len(labels)), labels] -= 1
    return errors_BK.T @ features_BD


def projected(weights: torch.Tensor, radius: float) -> torch.Tensor:
    """Project the weights to the closest point of the Frobenius ball."""
    norm = float(weights.norm())
    return weights if norm <= radius else weights * (radius / norm)
