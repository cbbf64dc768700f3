"""The life of a private run: what was charged, under which key, and what is left of the budget."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_dpopt.clipping import ClippingEngine
from hf_dpopt.clipping.clipped_sum import COUNT, ClippedSum
from hf_dpopt.clipping.measures import MEASURES
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.common.reduction import Layout, Reduction
from hf_dpopt.common.sharding import any_sharded, local_of, whole_of
from hf_dpopt.common.types import JointSums, Released
from hf_dpopt.noise.mechanism import MechanismLevel
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.plan.record import PlanRecord
from hf_dpopt.postprocess import Postprocess
from hf_dpopt.preclip import Preconditioning, PublicSource
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.randomness.sharded import ShardedSource
from hf_dpopt.run.checkpoint import Manifest, clean, examine, refuse
from hf_dpopt.run.dataset_ledger import DatasetBudget, charge_run
from hf_dpopt.run.journal import JOURNAL, OPENING, STEP, Journal
from hf_dpopt.run.keys import Chain, Keys, fixed_chain, new_chain, opening_key, private_dir
from hf_dpopt.run.ledger import LEDGER, Ledger
from hf_dpopt.run.metrics import metrics_of
from hf_dpopt.run.resume import Resume, decide
from hf_dpopt.run.run_log import RunLog
from hf_dpopt.sampling.check import ParticipationCheck

TRAINING = "training"  # entry of the recorded plan


@dataclasses.dataclass(frozen=True)
class PrivacySpent:
    """Budget that a run has spent; `epsilon` is for `num_steps` charged steps, over all resumes and branches."""

    epsilon: float
    delta: float
    adjacency: str
    unit: str
    num_steps: int
    planned_epsilon: float
    planned_steps: int
    noise_multiplier: float
    sampling: str
    accountant: str


class _Door(enum.Enum):
    """State of the one way out of a step."""

    IDLE = enum.auto()  # the next step may be charged
    ASKING = enum.auto()  # a step is charged, and the query before it is asked
    OPENED = enum.auto()  # that query was answered
    BEGUN = enum.auto()  # a step is charged, and its sums may be released
    CLOSED = enum.auto()  # no step may be charged


class PrivateRun:
    """Keys, log and noise of one call to `train`, on every rank.

    Rank 0 alone touches the log and the key files; the others get the key in memory.

    Formal guarantee: `charge` returns only after the step is on the disk, in the log beside the key and then in the
    ledger, never lets (key, step) be used twice, also where ``output_dir`` was put back to an earlier state or copied,
    and never lets the charged steps exceed `target_epsilon`. It fails if the private folder is put back together with
    the ledger. `release` is the one way from the secret sums of a step to what may be stored; with a journal it
    returns only after what it released is on the disk.

    Args:
        plan: what is executed.
        output_dir: the ledger lives in its `privacy` folder.
        private_state_dir: log and secret keys; never inside `output_dir`. None takes the user's state directory.
        resume_step: optimizer step of the checkpoint that training continues from, 0 for the initial weights of a run
            that was killed before its first; None for a fresh call to `train`.
        checkpoint: its folder; None if the caller restored the model some other way and answers for its origin.
        data_mark: digest of the records in their order, see `hf_dpopt.records.data_mark`; kept in the log,
            and a chain goes on with the same one only. None: the caller answers for it.
        training: public options that a record's gradient depends on, see `hf_dpopt.records.gradient_options`; a
            resumed run has to share them with the run that it goes on with. None: the caller answers for it.
        journal_limit: bytes that the journal of releases may fill, see `hf_dpopt.run.journal`; 0 keeps none. Steps
            that come from it (`recovery`) are taken with `hf_dpopt.run.step.replay_step`, without a batch.
        initial_weights: gives the digest of the weights that a chain from step 0 begins with, see
            `hf_dpopt.run.step.digest_of`. None: the caller answers for them.
        dataset: ledger of the people in the data, which the run is charged to before its first step; None for none.
        parameters: trained parameters, name -> parameter; needed where they lie in shards on the ranks (FSDP2), of
            which each rank then draws, keeps and adds the noise of its own.

    Attributes:
        chain: key of the steps.
        charged: steps of each chain; the last entry is this run's.
        first_step: steps that were done before this chain began.
        keys: keys of the run, and their folder.
        log: log of the run, on rank 0; None on others, and when the run is closed.
        recovery: steps that were charged after the checkpoint and are taken again; None for none.
        metrics: noisy numbers that are released with the gradients.

    Raises:
        DPConfigError: if the ledger was written for another plan, was edited, or does not know the checkpoint; for a
            journal that is not the run's own, see `hf_dpopt.run.resume.decide`.
        DPBudgetExceeded: if the steps still to run would spend more than `target_epsilon`.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        *,
        output_dir: str | Path,
        private_state_dir: str | Path | None = None,
        resume_step: int | None = None,
        checkpoint: str | Path | None = None,
        data_mark: str | None = None,
        training: Mapping[str, Any] | None = None,
        journal_limit: float = 0.0,
        initial_weights: Callable[[], str] | None = None,
        parameters: Mapping[str, torch.Tensor] | None = None,
        dataset: DatasetBudget | None = None,
    ):
        self.plan, self.output_dir, self.ranks = plan, Path(output_dir), current_ranks()
        self._dataset = dataset
        is_sharded = any_sharded((parameters or {}).values())
        self._journal_limit = journal_limit if plan.is_private else 0.0
        self.log: RunLog | None = None
        self._journal: Journal | None = None
        self._door, self._step = _Door.IDLE, 0
        with contextlib.ExitStack() as undo:
            undo.callback(self._let_go)
            self.chain, resume, folder = self.ranks.same(
                lambda: self._open(private_state_dir, resume_step, checkpoint, data_mark, training, initial_weights)
            )
            self.charged, self.first_step, self.recovery = list(resume.charged), resume.start, resume.recovery
            self.keys = Keys(folder)
            done = self.charged[-1] if self.recovery is None else self.recovery.first - 1 - self.first_step
            self._taken = done  # steps of this chain that the model has taken
            drawn_from = ChaCha20Gaussian(self.chain.noise_key)
            self._shards = ShardedSource(drawn_from, self.ranks) if is_sharded else None
            source, first = self._shards or drawn_from, self.first_step + 1
            num_steps = max(1, plan.num_steps - self.first_step)
            self.noise = plan.mechanism.stream(source, plan.sensitivity, first_step=first, num_steps=num_steps)
            self.noise.continue_at(self.charged[-1])
            if not is_sharded:  # else each rank has its own sums
                self.noise.share_over(self.ranks)
            undo.pop_all()
        self._participations = (
            ParticipationCheck(plan.sampler, self.chain.sampling_key, first)
            if ParticipationCheck.is_needed(plan.sampler, num_steps)
            else None
        )
        self.metrics = metrics_of(plan)
        self._preclip = None if plan.preclip.needs_start else self._started({})

    def _open(
        self,
        private_state_dir: str | Path | None,
        resume_step: int | None,
        checkpoint: str | Path | None,
        data_mark: str | None,
        training: Mapping[str, Any] | None,
        initial_weights: Callable[[], str] | None,
    ) -> tuple[Chain, Resume, Path]:
        """Decide how the run goes on, refuse what is not affordable, and charge the dataset. On rank 0."""
        self.log = RunLog.open(self.output_dir, private_dir(private_state_dir, self.output_dir))
        state, manifest = self.log.state, None
        if resume_step and checkpoint is not None:
            found = examine(Path(checkpoint), state, step=resume_step)
            if not found.is_whole:
                raise refuse(found)
            manifest = found.manifest
        resume = decide(
            state,
            self.log.keys,
            self.output_dir,
            step=resume_step,
            manifest=manifest,
            initial_weights=initial_weights,
            has_opening=self.plan.preclip.opening is not None,
            is_private=self.plan.is_private,
        )
        clean(self.output_dir, state)
        self._check_budget(resume)
        public = self._check_plan(training, resume, manifest)
        public |= charge_run(self._dataset, self.plan, self.log, resume)
        self.log.record_plan(public, must_match=PlanRecord.mechanism_fields())
        chain = self._chain(resume)
        if data_mark is not None and state.chain(chain.chain_id) is not None and not chain.unsafe:
            self.log.check_data(chain.chain_id, data_mark)
        self._journal = self._take_up(chain, resume, initial_weights)
        return chain, resume, self.log.keys.folder

    def _check_plan(
        self, training: Mapping[str, Any] | None, resume: Resume, manifest: Manifest | None
    ) -> dict[str, Any]:
        """Check that what is executed is what the run was charged for; return its public values."""
        assert self.log is not None
        state = self.log.state
        public = self.plan.record.to_json() | ({} if training is None else {TRAINING: dict(training)})
        origin = resume.chain if manifest is None or resume.chain is not None else state.chain(manifest.chain)
        before = state.plan_of(origin) or {}
        # trained anew, a run may be another one; a loop of one's own need not say its options
        compared = resume.step is not None and training is not None and TRAINING in before
        keys = (*PlanRecord.mechanism_fields(), *([TRAINING] if compared else []))
        state.check_plan(public, must_match=keys, since=origin)
        return public

    def _chain(self, resume: Resume) -> Chain:
        """The chain that goes on, or a new one; a run that has no step left begins none."""
        assert self.log is not None
        if resume.chain is not None:
            kept = self.log.keys.load(resume.chain.chain_id, resume.chain.key_id)
            assert kept is not None, "a chain goes on where its key is"
            return kept
        fixed = self.plan.config.unsafe_fixed_noise_key
        chain = new_chain() if fixed is None else fixed_chain(fixed)
        if resume.reached < self.plan.num_steps:
            note = resume.note if fixed is None else "NOT PRIVATE: unsafe_fixed_noise_key"
            self.log.start_chain(chain, resume.reached, note)
        return chain

    def _take_up(self, chain: Chain, resume: Resume, initial_weights: Callable[[], str] | None) -> Journal:
        """Go on with the journal that was found, or begin one for what comes after the checkpoint."""
        assert self.log is not None
        is_kept = not chain.unsafe and self.log.state.chain(chain.chain_id) is not None
        journal = Journal(self.output_dir, chain.chain_id, limit=self._journal_limit if is_kept else 0.0)
        if resume.recovery is not None and resume.chain is not None:
            for step in sorted(resume.recovery.lost - resume.chain.lost):
                self.log.lose(chain.chain_id, step)
            resume.recovery.announce()
        elif not is_kept or not self._journal_limit:
            journal.remove()
        else:
            weights = "" if initial_weights is None or resume.reached else initial_weights()
            journal.begin(resume.reached, resume.base or weights)
        return journal

    @property
    def ledger(self) -> Ledger | None:
        """Record of the run, on rank 0; None on others, and when the run is closed."""
        return None if self.log is None else self.log.state

    def _let_go(self) -> None:
        if self.log is not None:
            self.log.close()

    def stand(self) -> tuple[str, str, int]:
        """Say on every rank what the checkpoints of now stand at; all ranks together.

        Returns:
            Run, chain and step, as `hf_dpopt.run.checkpoint.write_manifest` takes them.

        Raises:
            DPConfigError: if log or ledger were taken from under the run.
        """
        return self.ranks.same(self._stand)

    def _stand(self) -> tuple[str, str, int]:
        assert self.log is not None
        self.log.check_intact()
        state, step = self.log.state, self.first_step + self.charged[-1]
        reached = (one for one in state.chains if one.start_step <= step <= one.reached)
        # where no step was left, the weights are those of a chain before
        return state.run, (state.chain(self.chain.chain_id) or next(reached)).chain_id, step

    def secrets(self) -> list[bytes]:
        """Secrets that no release may contain: keys of the run."""
        return [*self.keys.secrets(), *self.chain.secrets()]

    def checkpoint_written(self, step: int) -> None:
        """Drop what the journal holds up to a step: a whole checkpoint that training can continue from has it."""
        if self._journal is not None:
            self._journal.begin(step, f"{self.chain.chain_id}:{step}")

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the journal has reached its limit; on rank 0."""
        return self._journal is not None and self._journal.is_full

    def _check_budget(self, resume: Resume) -> None:
        """Refuse a call whose steps are not all affordable, before anything runs."""
        target, num_steps = self.plan.config.target_epsilon, self.plan.num_steps
        needed = num_steps - resume.reached
        if target is None or needed <= 0 or not self.plan.is_private:  # a fixed key in a test has no budget to keep
            return
        spent = self.plan.epsilon(resume.in_the_end(num_steps))
        if spent <= target:
            return
        continues = (
            "To continue that run, add --resume_from_checkpoint True: steps that were charged are not charged again "
            f"(`hf-dpopt doctor {self.output_dir}` shows where it continues). "
            "Another dataset needs another output_dir. "
            if resume.step is None
            else ""
        )
        raise DPBudgetExceeded(
            f"{sum(resume.charged)} steps of this run are already charged in {self.output_dir / LEDGER}; the {needed} "
            f"steps still to run would bring epsilon to {spent:.4g}, above target_epsilon={target:g}. "
            f"{continues}Raise --target_epsilon to accept the higher value (the noise stays as it is), lower "
            "--max_steps, or start over in another output_dir (what was spent here stays spent)."
        )

    def charge(self, step: int) -> None:
        """Write the step to the log, on disk, before any record of its batch is looked at.

        Raises:
            DPConfigError: for a step beyond the plan, whose steps alone were found affordable, and after `close`.
        """
        if self._door is _Door.CLOSED:
            raise DPConfigError(f"Step {step} cannot run: the run was closed, and its ledger takes no more steps.")
        if self.charged[-1] >= self.plan.num_steps - self.first_step:  # all of them were affordable at the start
            raise DPConfigError(
                f"Step {step} cannot run: all {self.plan.num_steps} steps of the plan are done. Plan more steps."
            )
        if self.log is not None:
            self.log.charge(self.chain.chain_id, step)
        self.charged[-1] += 1
        self._taken = self.charged[-1]

    def begin_opening(self, step: int, engine: ClippingEngine) -> ClippedSum:
        """Charge the first step of a chain with the query that comes before it, before any record is looked at.

        Args:
            step: the first step of this chain.
            engine: that will clip the units.

        Returns:
            The sum to add every unit of the data to, once.

        Raises:
            DPConfigError: for another step, another clip, or a query that is not awaited. Nothing is charged.
        """
        opening = self.plan.preclip.opening
        if opening is None or not self.preclip.awaits_opening or self.charged[-1] or step != self.first_step + 1:
            raise DPConfigError(
                f"The opening query cannot be asked before step {step}: it is asked once, before the first step of a "
                "run, and was paid for there. Resume from a whole checkpoint, which keeps its answer."
            )
        self._check_clip(engine)
        self.charge(step)
        self._door, self._step = _Door.ASKING, step
        return opening.empty_sum(engine.parameters)

    def begin(self, step: int, engine: ClippingEngine) -> tuple[Scale | None, ...]:
        """Charge a step that the noise was made for, before any record of its batch is looked at.

        Args:
            step: optimizer step, 1-based.
            engine: that will clip it.

        Returns:
            What records are multiplied by before the clip, for each query that the noise was calibrated to.

        Raises:
            DPConfigError: for a step out of order or beyond the plan; for a preconditioner that was not started, asks
                for other queries or counts more than its sensitivity_ratio says; for another clip: one record would
                move the sums by more. Nothing is charged then.
        """
        is_charged = self._door is _Door.OPENED
        following = self.first_step + self.charged[-1] + (not is_charged)
        if step != following:
            raise DPConfigError(
                f"Step {step} is not the one after those charged: {following} is next. A step left out would show "
                "records more often than was paid for. Take every step once, in order; one without a batch, too."
            )
        if any_sharded(engine.parameters.values()) and self._shards is None:
            raise DPConfigError(
                "The model's parameters lie in shards, and the run was not told: every rank would add the noise of "
                "other elements. Pass them: PrivateRun(.., parameters=engine.parameters)."
            )
        if self.preclip.awaits_opening:
            raise DPConfigError(
                "The preconditioner is made of a query over all records, which was not asked yet. Pass them: "
                "private_step(.., everything=batches of all records)."
            )
        scales = self.preclip.scales()
        if len(scales) != self.plan.preclip.num_queries:
            raise DPConfigError(
                f"The preconditioner asks for {len(scales)} clipped sums in a step, and the noise was calibrated to "
                f"{self.plan.preclip.num_queries}. Let num_queries of its spec say how many there are."
            )
        self._check_clip(engine)
        # what one unit moves: a clipped sum for each query, and the counts beside them
        counts = [0.0 if scale is None else scale.count_weight / 2 for scale in scales]
        sums = [self.plan.clipper.clipping_norm] * len(scales)
        measures = self.metrics.measures()
        numbers = 0.0 if measures is None else measures.norm
        moved = SENSITIVITY_FACTOR[self.plan.adjacency] * math.hypot(*sums, *counts, numbers)
        if self.plan.noise_multiplier > 0 and moved > self.plan.sensitivity * (1 + 1e-9):
            raise DPConfigError(
                f"One unit moves the sums of a step by up to {moved:.6g}, and the noise was calibrated to "
                f"{self.plan.sensitivity:.6g}: sensitivity_ratio of the preconditioner leaves a query or a count out."
            )
        if not is_charged:
            self.charge(step)
        self._door, self._step = _Door.BEGUN, step
        return scales

    def reduction(self, engine: ClippingEngine, scales: Sequence[Scale | None]) -> Reduction:
        """The sum over the ranks of the step that has begun; every rank makes it with the same arguments.

        Args:
            engine: clips, and knows in which order sums become final.
            scales: those of `begin`; several queries are summed when all of them are final.
        """
        layout = None
        order = engine.order_of_sums
        if self.ranks.size > 1 and not engine.is_collective and len(scales) == 1 and order:
            sizes = {name: engine.parameters[name].numel() for name in order}
            counts = {COUNT: 1} if scales[0] is not None and scales[0].count_weight else {}
            measures = self.metrics.measures()
            if measures is not None:
                counts[MEASURES] = len(measures.nothing())
            layout = Layout.of([*order, *counts], sizes | counts)
        first = next(iter(engine.parameters.values()))
        in_pieces = layout is not None and self.noise.takes_pieces(first.device)
        self.noise.share_over(self.ranks, layout if in_pieces else None)
        return Reduction(self.ranks, layout, in_pieces=in_pieces)

    def _check_clip(self, engine: ClippingEngine) -> None:
        if engine.clipping != self.plan.clipper:
            raise DPConfigError(
                f"The engine clips by {engine.clipping}, and the noise was calibrated to {self.plan.clipper}. Make it "
                "with the plan's: make_engine(model, plan.clipper)."
            )

    def release(self, sums: JointSums, step: int, *, is_opening: bool = False) -> Released:
        """The mean gradient with the noise of a step: the only door from what is secret to what is public.

        It is divided by the public expected size: the realised size of a logical batch is data.

        Args:
            sums: clipped sums over all ranks, of all queries; float32. Changed in place, and not to be used again.
            step: the one that has begun.
            is_opening: these are the sums of the query before it, over all units, of which the mean is released.

        Raises:
            DPConfigError: for a step that was not charged, or has been released.
        """
        if is_opening:
            self._answer_opening(sums, step)
            return self._write_down(OPENING, Released(sums), step)
        if self._door is not _Door.BEGUN or step != self._step:
            raise DPConfigError(
                f"Step {step} was not begun, so nobody paid for its release. Call run.begin(step, engine) first."
            )
        self._door = _Door.IDLE
        if self._shards is not None:
            self._shards.place(sums)
        # in place: they are the sums, or shards of them
        mine = {name: local_of(total) for name, total in sums.items()}
        self.noise.add_(mine, step)
        torch._foreach_div_(list(mine.values()), self.plan.config.expected_batch_size)
        return self._write_down(STEP, Released(sums), step)

    def _write_down(self, kind: str, released: Released, step: int) -> Released:
        """Make what was released durable, where a journal is kept: the optimizer sees it after that."""
        written = released
        if self._shards is not None and self.ranks.same(
            lambda: self._journal is not None and self._journal.takes(released)
        ):
            # rank 0 writes all of it, one file for any number of ranks; the others only take part
            whole = {name: whole_of(value) for name, value in released.items()}
            written = Released({name: value.cpu() for name, value in whole.items()} if self.ranks.rank == 0 else {})
        if self._journal is not None:
            self._journal.write(kind, step, written)
        return released

    def take_again(self, step: int, *, is_opening: bool = False) -> Released | None:
        """Read what a step released before the run was killed, on the CPU; None if its release was lost.

        Args:
            step: one that `recovery` covers; every one of them, in order.
            is_opening: the answer to the query before it is asked for.
        """
        assert self.recovery is not None and self.recovery.covers(step) and step > self.first_step, step
        recovery, journal = self.recovery, self._journal

        def read() -> Released | None:
            entry = recovery.opening if is_opening else recovery.entries.get(step)
            return None if entry is None or journal is None else journal.read(entry)

        self._taken = step - self.first_step
        return self.ranks.same(read)

    def _answer_opening(self, sums: JointSums, step: int) -> None:
        """Make the noised mean over all units of the sums of the query, in place."""
        opening = self.plan.preclip.opening
        if opening is None or self._door is not _Door.ASKING or step != self._step:
            raise DPConfigError(f"No query was opened before step {step}. Call run.begin_opening(step, engine) first.")
        if any(total.dtype != torch.float64 for total in sums.values()):
            raise DPConfigError(
                "The sums of an opening query are float64: in float32, rounding over so many units would move them by "
                "more than one unit may. Let empty_sum of the query keep float64 totals."
            )
        self._door = _Door.OPENED
        units = opening.sensitivity(self.plan.clipper.clipping_norm) * SENSITIVITY_FACTOR[self.plan.adjacency]
        source = ChaCha20Gaussian(opening_key(self.chain.noise_key))
        for tensor, name in enumerate(sorted(sums)):
            total = sums[name]
            if self.plan.noise_multiplier > 0:
                noise = source.normal(total.shape, step=0, tensor=tensor, device=total.device)
                total.add_(noise.double(), alpha=opening.noise_multiplier * units)
            sums[name] = total.div_(self.plan.num_examples).float()

    def start_preclip(self, engine: ClippingEngine, *, public: PublicSource | None = None) -> Preconditioning:
        """The plan's preconditioner for this run, made once, before its first step.

        Args:
            engine: clipping engine of the model.
            public: gradients of public records, for preconditioners that need them.

        Raises:
            DPConfigError: if it does not fit the model, or public gradients are missing.
        """
        self._preclip = self._started(engine.parameters, public)
        return self._preclip

    def _started(self, parameters: Mapping[str, torch.Tensor], public: PublicSource | None = None) -> Preconditioning:
        norm = self.plan.config.clipping_norm
        return self.plan.preclip.start(parameters, clipping_norm=norm, noise=self.noise_level(), public=public)

    @property
    def preclip(self) -> Preconditioning:
        """The preconditioner that this run started; that of another run has no way in.

        Raises:
            DPConfigError: if there is none yet, and the plan has one.
        """
        if self._preclip is None:
            raise DPConfigError(
                "The plan's noise is calibrated to its preconditioner, which has not been started. Do so once, before "
                "the first step: preclip = run.start_preclip(engine)."
            )
        return self._preclip

    def noise_level(self, *stages: Preconditioning | Postprocess) -> MechanismLevel:
        """Level of the noise in what `private_step` leaves in `p.grad`; for optimizers and filters that know it.

        Args:
            *stages: the preconditioner of the run and maps that multiply what was released; those that say no
                ``gain`` leave a level that is not known.
        """
        plan = self.plan

        def gain() -> float | None:
            gains = [gain for stage in stages if (gain := stage.gain) is not None]
            return math.prod(gains) if len(gains) == len(stages) else None

        return MechanismLevel(
            plan.mechanism,
            stddev=self.noise.draw_stddev / plan.config.expected_batch_size,
            num_steps=plan.noise_steps,
            steps_done=lambda: self._taken,
            gain=gain,
        )

    def draw(self, step: int) -> np.ndarray:
        """Indices of the logical batch of a step, over all ranks; int64, possibly empty. A function of (key, step)."""
        drawn = self.plan.sampler.draw(self.chain.sampling_key, step)
        if self._participations is not None and step > self.first_step:
            self._participations.observe(step, drawn)
        return drawn

    def spent(self) -> PrivacySpent:
        """Budget that was charged so far."""
        return spent_for(self.plan, self.charged)

    def close(self, *, is_finished: bool = True) -> None:
        """Close the log.

        Keys and journal of a run that reached its last step are deleted: nothing can need them again.

        Args:
            is_finished: False if an error ended the run, perhaps before its last weights were saved.
        """
        last = self.first_step + self.charged[-1]
        is_over = is_finished and last >= self.plan.num_steps
        if self.log is not None:
            if is_over:
                self.keys.secrets()  # still known to the scan of what is released
                self.keys.destroy()
            self._let_go()
            if is_over and self._journal is not None:
                self._journal.remove()
            elif is_finished and last > self.first_step:
                logger.info(
                    f"Training ended after step {last} of {self.plan.num_steps}. Keys, and the journal in "
                    f"{self.output_dir / JOURNAL}, stay, so that it can go on; delete the journal if it will not."
                )
        self.log, self._door = None, _Door.CLOSED


def spent_for(plan: PrivacyPlan, charged: Sequence[int]) -> PrivacySpent:
    """The statement in numbers after the charged steps of each chain."""
    return PrivacySpent(
        epsilon=plan.epsilon(tuple(charged)),
        delta=plan.delta,
        adjacency=plan.adjacency,
        unit=plan.unit,
        num_steps=sum(charged),
        planned_epsilon=plan.epsilon(),
        planned_steps=plan.num_steps,
        noise_multiplier=plan.noise_multiplier,
        sampling=plan.sampler.name,
        accountant=plan.spent.accountant,
    )
