"""Private softmax regression: projected noisy SGD, of which only the last weights leave, or AdaGrad in a subspace.

Shape legend: B = records of a batch, K = labels, D = features.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_dpopt.accounting.profile import no_protection
from hf_dpopt.common import collectives
from hf_dpopt.common.durable import write_durably
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.convex.adagrad import SubspaceDescent
from hf_dpopt.convex.head_plan import HeadConfig, HeadPlan
from hf_dpopt.convex.softmax_gradients import gradient_sum
from hf_dpopt.convex.subspace_plan import SubspaceHeadPlan
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.randomness.source import NoiseSource
from hf_dpopt.report.facts import collect_versions
from hf_dpopt.report.report import FOLDER, STATEMENT
from hf_dpopt.report.statement import fill, round_up
from hf_dpopt.run.keys import Chain, new_chain, private_dir, private_folder, read_state, write_state
from hf_dpopt.run.ledger import LEDGER
from hf_dpopt.run.run_log import RunLog, find_run
from hf_dpopt.run.step import digest_of

REPORT = "head.json"
NOT_PRIVATE = "NOT PRIVATE, the noise is off"
UNKNOWN = "more than three times as large, by Renyi divergences"  # epsilon of all iterates


def write_statement(
    output_dir: Path,
    plan: HeadPlan | SubspaceHeadPlan,
    num_labels: int,
    digest: str,
    noise: str,
    declared: Mapping[str, str],
) -> None:
    """Write `statement.md` for people, whose first line says what is released, and `head.json` for programs."""
    folder = output_dir / FOLDER
    epsilon, composition = plan.epsilon() if plan.is_private else math.inf, ""
    if isinstance(plan, HeadPlan):
        composition = round_up(plan.spent.composition) if math.isfinite(plan.spent.composition) else UNKNOWN
    text = fill(
        "convex/head.md.j2",
        plan=plan,
        config=plan.config,
        is_subspace=isinstance(plan, SubspaceHeadPlan),
        headline=f"epsilon {round_up(epsilon)} at delta {plan.delta:g}" if plan.is_private else NOT_PRIVATE,
        epsilon=round_up(epsilon),
        composition=composition,
        no_protection=no_protection(epsilon),
        steps=f"{plan.config.num_steps:,}",
        num_labels=num_labels,
        noise=noise,
        declared=declared,
        digest=digest,
        versions=collect_versions(),
    )
    report = {
        **plan.public_dict(), **declared, "num_labels": num_labels, "ledger_digest": digest,
        "statement_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }  # fmt: skip
    write_durably(folder / STATEMENT, text.encode(), mode=0o644)
    write_durably(folder / REPORT, (json.dumps(report, indent=1) + "\n").encode(), mode=0o644)


class HeadState:
    """Iterates of one chain of steps, and whether its final weights have left.

    A step's noise comes from the key and its number alone, so a run that begins anew under its key repeats what it
    did: that reveals nothing while none of it has been seen. Once weights were returned, other features under the same
    noise would let two results be subtracted. So a note says when they are, and a run that has it begins no more.

    Args:
        directory: private folder of the run.
        chain: its chain of steps.
    """

    def __init__(self, directory: Path, chain: Chain):
        self.path = directory / f"head-{chain.chain_id}.pt"
        self._note = directory / f"head-{chain.chain_id}.pt.returned"

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Keep the iterates after a step, in place of earlier ones.

        Args:
            step: steps taken.
            state: state of the descent, what its `state_dict` returns.
        """
        write_state(self.path, {"step": step, **state})

    def load(self, num_steps: int) -> dict[str, Any] | None:
        """State that was saved last, its step under "step"; None if the run begins.

        Args:
            num_steps: steps of the whole run.

        Raises:
            DPBudgetExceeded: if there is none, and the weights of the run were returned before.
        """
        kept = read_state(self.path) if self.path.exists() else None
        if kept is not None and 0 <= kept["step"] <= num_steps and math.isfinite(float(kept["weights"].norm())):
            return kept
        if self._note.exists():
            raise DPBudgetExceeded(
                f"{self.path} is missing or damaged, and the final weights of its run were returned before: other "
                "features under its noise could be subtracted from them. Put the file back if there is a copy; else "
                "use another output_dir, whose epsilon comes on top."
            )
        if self.path.exists():
            logger.warning(
                f"{self.path} is damaged: the run begins at its first step again, under its key. That takes time, and "
                "costs nothing: none of it has been seen."
            )
        return None

    def note_return(self) -> None:
        """Note that the final weights leave now; durable before it returns."""
        if not self._note.exists():
            write_durably(self._note, b"", mode=0o600)


INTERMEDIATE = ("checkpoint-*", "trainer_state.json", "optimizer.pt", "runs")  # of finetuning runs
SAVE_EVERY = 20.0  # seconds, of the state that a crashed run goes on from


class HeadRun:
    """One private training of a head, from its key to its final weights.

    The whole run is charged, once, before its first record is read. Iterates are kept in memory and in the private
    directory, from which a killed run continues bit for bit; they are written nowhere else. `train` returns the final
    weights, as often as it is called; `finish` writes the statement once they are published, and deletes key and
    state: then the run cannot be continued.

    Formal guarantee: that of `make_head_plan` or `make_subspace_plan`, for everything that is below `output_dir` or
    returned.

    Args:
        plan: the plan to execute.
        output_dir: folder of the run; ledger and statement go to its folder `privacy`.
        private_state_dir: folder of key and state, never inside `output_dir`; None for the user's state directory.
        declared: sentences of the statement, by the names of `RunFacts`: evaluation data, preprocessing.

    Raises:
        DPConfigError: if `output_dir` holds checkpoints: only final weights may be there; in one of several processes.
    """

    def __init__(
        self,
        plan: HeadPlan | SubspaceHeadPlan,
        *,
        output_dir: str | Path,
        private_state_dir: str | Path | None = None,
        declared: Mapping[str, str] | None = None,
    ):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 or collectives.world_size() > 1:
            raise DPConfigError(
                "A head is trained by one process, and this is one of several: each would train and release a head of "
                "its own, under its own key. Start the script with python, not with torchrun or accelerate launch."
            )
        left = [p.name for pattern in INTERMEDIATE for p in Path(output_dir).glob(pattern)]
        if left:
            raise DPConfigError(
                f"{output_dir} holds {', '.join(left[:3])}, and a head is published with its final weights only. Use "
                "an output_dir of its own."
            )
        self._declared = dict(declared or {})
        self.plan, self.output_dir = plan, Path(output_dir)
        self._run: str | None = None
        self._private_state_dir = private_state_dir
        self._directory = private_dir(private_state_dir, output_dir)

    @property
    def private_folder(self) -> Path:
        """Folder for private data other than keys, such as features."""
        return private_folder(self._private_state_dir, self.output_dir)

    def train(
        self,
        features: torch.Tensor,
        labels: torch.Tensor,
        num_labels: int,
        *,
        public: tuple[torch.Tensor, torch.Tensor] | None = None,
        progress: bool = False,
    ) -> torch.Tensor:
        """Train from the start, or from where a killed run stopped.

        Args:
            features: float32, (n, D), of norm `feature_norm` at most; see `clip_features`.
            labels: int64, (n,), in [0, num_labels).
            num_labels: K, which is public.
            public: features, (m, D), and labels, (m,), of records that need no protection and are none of the private
                ones; for a `SubspaceHeadPlan` alone. The features are shortened like the private ones. A few hundred
                are enough: every refresh takes memory of m^2 and time of m^3.
            progress: whether to show a bar, which shows the step and nothing of the data.

        Returns:
            The final weights, float32, (K, D); of a `SubspaceHeadPlan` the mean of all iterates.

        Raises:
            DPConfigError: if the records or the public ones do not fit the plan, or `output_dir` records another
                mechanism.
            DPBudgetExceeded: if the run recorded there has ended.
        """
        self._check_values(features, labels, num_labels)
        if len(features) != self.plan.num_examples:
            raise DPConfigError(
                f"The plan is for {self.plan.num_examples} records; there are {len(features)} rows of features and "
                f"{len(labels)} labels. Make the plan for the records that are trained on."
            )
        descent = self._start(num_labels, features, public)
        # a copy of this folder that shares the key would train other records with its noise: one process at a time
        with self._log() as log:
            known = {**self.plan.public_dict(), "num_labels": num_labels, "noise_rng": ChaCha20Gaussian.stream}
            known["num_features"] = features.size(1)  # a killed run goes on with weights of the same shape
            if public is not None:
                known["public_records"] = digest_of({"features": public[0], "labels": public[1]})
                known["num_public_records"] = len(public[0])
            # whether a large delta was allowed in words is no part of the mechanism
            log.record_plan(known, must_match=[name for name in known if name != "allow_large_delta"])
            chain = self._chain(log)
            state = HeadState(log.keys.folder, chain)
            kept = state.load(self.plan.config.num_steps)
            if kept is not None:
                descent.load_state_dict(kept)
            first = 0 if kept is None else kept["step"]
            source = ChaCha20Gaussian(chain.noise_key)
            self._descend(features, labels, chain, source, first, descent, state, progress)
            state.save(self.plan.config.num_steps, descent.state_dict())
            state.note_return()
        return descent.result.float()

    def finish(self, num_labels: int) -> None:
        """Write the statement, then delete key and state; call it when the final weights are published."""
        with self._log() as log:
            if log.state.last_chain is None:
                raise DPConfigError(
                    f"{self.output_dir} records no training of a head, so there is nothing to state. Train it first."
                )
            noise = ChaCha20Gaussian.description
            write_statement(self.output_dir, self.plan, num_labels, log.digest(), noise, self._declared)
            for path in log.keys.folder.glob("*head-*.pt*"):  # and what a kill left half-written
                path.unlink()
            log.keys.destroy()

    @contextlib.contextmanager
    def _log(self) -> Iterator[RunLog]:
        """The log of the run, open for writing; the same one every time."""
        with RunLog.open(self.output_dir, self._directory) as log:
            if self._run not in (None, log.state.run):
                raise DPConfigError(
                    f"{self.output_dir / LEDGER} was deleted or replaced after a head was trained here: it is that of "
                    "another run now. Put it back."
                )
            self._run = log.state.run
            yield log

    def _chain(self, log: RunLog) -> Chain:
        """The chain of a killed run, or a new one, charged."""
        last = log.state.last_chain
        if last is None:
            chain = new_chain()
            log.start_chain(chain, 0, self.plan.note)
            log.charge(chain.chain_id, self.plan.config.num_steps)
            return chain
        kept = log.keys.load(last.chain_id, last.key_id) if last.is_own else None
        if kept is None:
            again = self.plan.epsilon(2)
            raise DPBudgetExceeded(
                f"{self.output_dir} records a run that has ended, or whose key is gone. A second one would bring "
                f"epsilon to {again:.4g}: use another output_dir, with a budget of its own; both add up."
            )
        if not last.steps:
            log.charge(last.chain_id, self.plan.config.num_steps)
        return kept

    def _start(
        self, num_labels: int, features: torch.Tensor, public: tuple[torch.Tensor, torch.Tensor] | None
    ) -> ProjectedDescent | SubspaceDescent:
        """Weights and what else a run has at its beginning; refuses public records that do not fit the plan."""
        num_features = features.size(1)
        if isinstance(self.plan, HeadPlan):
            if public is not None:
                raise DPConfigError(
                    "This head is trained by plain projected SGD, which takes nothing from public records. Leave "
                    "public out, or use make_subspace_plan."
                )
            return ProjectedDescent(self.plan.config, num_labels, num_features)
        if public is None:
            raise DPConfigError(
                "There are no public records, and the subspace is one of their gradients. Pass public=(features, "
                "labels) of records that need no protection, or use make_head_plan, which needs none."
            )
        self._check_values(*public, num_labels, "public ")
        _refuse_private(public[0], features)
        if public[0].size(1) != num_features:
            raise DPConfigError(
                f"Public features have shape {tuple(public[0].shape)}. Use (m, {num_features}), with the same "
                "features as the private records."
            )
        return SubspaceDescent(self.plan.config, num_labels, public, noise_multiplier=self.plan.noise_multiplier)

    def _descend(
        self,
        features: torch.Tensor,
        labels: torch.Tensor,
        chain: Chain,
        source: NoiseSource,
        first: int,
        descent: ProjectedDescent | SubspaceDescent,
        state: HeadState,
        bar: bool,
    ) -> None:
        """Run the steps that are left."""
        plan, config = self.plan, self.plan.config
        stddev = plan.noise_multiplier * config.lipschitz
        steps = range(first + 1, config.num_steps + 1)
        saved = time.monotonic()
        for step in tqdm(steps, initial=first, total=config.num_steps, desc="private steps", disable=not bar):
            rows = torch.from_numpy(plan.sampler.draw(chain.sampling_key, step))
            query = descent.query(features[rows], labels[rows], step)
            # private from here
            query += stddev * source.normal(query.shape, step=step, tensor=0).double()
            descent.move(query, step)
            if time.monotonic() - saved > SAVE_EVERY:
                state.save(step, descent.state_dict())
                saved = time.monotonic()

    def _check_values(self, features: torch.Tensor, labels: torch.Tensor, num_labels: int, whose: str = "") -> None:
        for name, value in (("features", features), ("labels", labels)):
            if not isinstance(value, torch.Tensor):
                raise DPConfigError(
                    f"The {whose}{name} are a {type(value).__name__}. Use a tensor: torch.from_numpy(array)."
                )
        if features.dim() != 2 or labels.shape != features.shape[:1]:
            # labels of (n, 1) would be indexed as n x n, and one record would move the sum by its whole batch
            raise DPConfigError(
                f"The {whose}features have shape {tuple(features.shape)} and the {whose}labels {tuple(labels.shape)}. "
                f"Use (n, D) and (n,); labels.flatten() takes a column of labels apart."
            )
        if features.dtype not in (torch.float32, torch.float64) or labels.dtype != torch.int64:
            raise DPConfigError(
                f"The {whose}features are {features.dtype} and the labels {labels.dtype}. Use float32, as "
                "clip_features returns, and int64: coarser sums depend on their order."
            )
        if len(labels) and not (0 <= int(labels.min()) and int(labels.max()) < num_labels):
            raise DPConfigError(f"There are {whose}labels outside [0, {num_labels}). Give every record a label in it.")
        longest = float(features.double().norm(dim=1).max()) if len(features) else 0.0
        if not longest <= self.plan.config.feature_norm * (1 + 1e-6):
            raise DPConfigError(
                f"The {whose}features are longer than feature_norm, or no numbers, so a record is not hidden by the "
                "noise. Pass them through clip_features first."
            )


def recorded_head_plan(output_dir: str | Path, private_state_dir: str | Path | None = None) -> dict[str, Any] | None:
    """The plan in the log of a head's run, for `make_head_plan`; None if there is no log.

    Args:
        output_dir: folder of the run.
        private_state_dir: where its log lies; None for the default.
    """
    found = find_run(Path(output_dir), private_dir(private_state_dir, output_dir, is_read=True))
    return None if found.log is None else found.log.plan


class ProjectedDescent:
    """Iterates of projected noisy SGD, from the noisy sums of gradients; as private as the data but for the last.

    Args:
        config: the settings.
        num_labels: K.
        num_features: D.
    """

    def __init__(self, config: HeadConfig, num_labels: int, num_features: int):
        self._config = config
        self.weights = torch.zeros(num_labels, num_features, dtype=torch.float64)

    @property
    def result(self) -> torch.Tensor:
        """Weights after the latest step, float64, (K, D)."""
        return self.weights

    def query(self, features: torch.Tensor, labels: torch.Tensor, step: int) -> torch.Tensor:
        """Sum of the gradients of a step's records, (K, D)."""
        return gradient_sum(features, labels, self.weights)

    def move(self, released: torch.Tensor, step: int) -> None:
        """Take the step that the noisy sum, (K, D), asks for, and go back to the ball."""
        config = self._config
        size = config.step_size * step**-config.decay
        gradient = released / config.expected_batch_size + config.l2 * self.weights
        moved = self.weights - size * gradient
        self.weights = moved if config.head_radius is None else projected(moved, config.head_radius)

    def state_dict(self) -> dict[str, Any]:
        """State that a killed run goes on from."""
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def projected(weights: torch.Tensor, radius: float) -> torch.Tensor:
    """Project the weights to the closest point of the Frobenius ball."""
    norm = float(weights.norm())
    return weights if norm <= radius else weights * (radius / norm)


def _refuse_private(public: torch.Tensor, private: torch.Tensor) -> None:
    """Refuse public features that are private ones: the same memory, or a copy of all of them.

    Copies of some rows are not looked for: what is public is for the user to say.
    """
    (first, end), (other_first, other_end) = _memory(public), _memory(private)
    is_shared = first < other_end and other_first < end
    if is_shared or (public.shape == private.shape and torch.equal(public.to(private), private)):
        raise DPConfigError(
            "The public features are the private ones, so directions made of them would be free of noise. Pass "
            "records that need no protection; clone those that only lie between private ones in memory."
        )


def _memory(values: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor, and the one behind its last."""
    if values.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    return values.data_ptr(), values.data_ptr() + (last + 1) * values.element_size()
