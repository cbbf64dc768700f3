"""Advice for a private run: batch, learning rate, clip, schedule and noise, from public numbers alone.

The advisor knows how many records (or users) there are, the budget, what is trained and how many records the user can
afford to process. It never sees a record: signals are declared (`hf_dpopt.plan.outlook.SIGNAL`), so advice costs no
privacy, and two data sets of one size are advised alike.

The rules, and where they are from:

* **Batch**: of all ways to cut the affordable records into steps, the one with the most useful steps (`Outlook`). Few
  large batches have little noise and go nowhere, many small ones drown; the best is where the noise of a step comes
  down to the signal. It reproduces what was found by search: B = 1000 to 6000 in 200 to 1,200 steps on GLUE (Li et al.
  2022, arXiv:2110.05679; Yu et al. 2022, arXiv:2110.06500; Bu et al. 2022, arXiv:2206.07136).
* **Learning rate**: `RATES`, smaller for larger models (but for a head, whose size is that of its features) and for
  longer runs. Where noise is above the signal it falls as epsilon does (learning rate times steps is linear in
  epsilon: Panda et al. 2022, arXiv:2212.04486).
* **Clip**: 1, near the norm of a record's gradient at the start (1.1 to 2.7 were measured). A far smaller one, or
  automatic clipping (arXiv:2206.07136), brings less noise for the signal and makes every record count the same,
  confidently right ones too: on SST-2 the accuracy was no worse and the loss up to twice as high. 0.5 for weights
  that are added to a trained head: the runs that began so had it (docs/results.md).
* **Schedule**: linear to 0 after a warm-up of 6 %, where that is two steps (a single one would have the rate 0). The
  last weights are the result: with a rate that falls to 0 they are an average already.
* **Noise**: independent for adaptive optimizers; correlated noise with SGD, whose map from gradients to weights it is
  tuned for (docs/mechanisms.md).
"""

from __future__ import annotations

import dataclasses
import functools
import math

from hf_dpopt.accounting.calibrate import rough_noise_multiplier
from hf_dpopt.accounting.delta import default_delta
from hf_dpopt.common.checks import check_at_most, check_choice, check_count, check_kind, check_positive, check_real
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.outlook import SIGNAL, Kind, Objective, Outlook, signal_of
from hf_dpopt.plan.size_limits import check_delta, steps_of

# Peak learning rates of AdamW at `REFERENCE_SIZE` weights and `REFERENCE_STEPS` steps: tuned by hand on SST-2 (MiniLM)
# and E2E (a GPT-2 of 5.3 million weights), docs/results.md; and at other sizes near those of arXiv:2110.05679.
RATES: dict[tuple[Kind, Objective], float] = {
    ("full", "classification"): 1e-3,
    ("full", "generation"): 3e-3,
    ("lora", "classification"): 4e-3,
    ("lora", "generation"): 6e-3,
    ("head", "classification"): 0.1,
    ("head", "generation"): 0.1,
}
REFERENCE_SIZE = 22_000_000
REFERENCE_STEPS = 132
CLIP, CLIP_ON_HEAD = 1.0, 0.5
WARMUP = 0.06
LARGEST_BATCH = 8192  # published runs found no gain beyond
LONGEST = 1200  # steps; beyond, only batches that would be larger still are cut
SHORTEST = 8
MOST_PASSES = 100_000
RATIO = 1.3  # of the numbers of steps that are tried


HEAD_PASSES = 24.0  # of a linear head, over features that are computed once
FULL_SHARE = 0.1  # of the weights: who trains more of them, and no adapters, trains the model
GAIN = 1.2  # in useful steps, below which no other setting is advised


def kind_of(num_trained: int, size: int) -> Kind:
    """Tell the kind of finetuning from how much is trained: "full", or "lora" for a small part of every layer.

    Args:
        num_trained: trained weights.
        size: weights of the model, frozen ones included.
    """
    return "full" if num_trained >= FULL_SHARE * size else "lora"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Size of a finetuning run and its budget. Public numbers only.

    Args:
        num_units: records, or users if they are protected as a whole; >= 1.
        target_epsilon: budget, > 0.
        target_delta: None for the default of that number of units.
        passes: how often every record may be processed, on average; > 0.
        kind: "full", "lora" (any adapter) or "head" (a layer on a frozen model).
        objective: "classification" (and regression), or "generation" (a loss on tokens).
        model_size: weights of the model, frozen ones included; >= 1.
        has_trained_head: whether the head was trained before, which the verdict and the clip take into account;
            batch and learning rate stay. The head of a language model with adapters always was.
    """

    num_units: int
    target_epsilon: float
    target_delta: float | None = None
    passes: float = 3.0
    kind: Kind = "lora"
    objective: Objective = "classification"
    model_size: int = REFERENCE_SIZE
    has_trained_head: bool = False

    def __post_init__(self) -> None:
        check_count("num_units", self.num_units)
        check_count("model_size", self.model_size)
        check_real("target_epsilon", self.target_epsilon, "a finite number > 0; 1 to 8 is usual for finetuning")
        check_real("passes", self.passes, "a finite number > 0, such as 3")
        check_positive(target_epsilon=self.target_epsilon, passes=self.passes)
        check_at_most("passes", self.passes, MOST_PASSES, "no model is finetuned so often. Use 3.")
        check_delta(self.target_delta)
        check_choice("kind", self.kind, tuple(SIGNAL))
        check_choice("objective", self.objective, ("classification", "generation"))
        check_kind("has_trained_head", self.has_trained_head, bool)

    @property
    def starts_trained(self) -> bool:
        """Whether the predictions of the first step are those of a head that was trained before."""
        return self.has_trained_head or (self.kind, self.objective) == ("lora", "generation")

    def steps_of(self, batch: int) -> int:
        """Optimizer steps of the passes in batches of this size, counted as the Trainer does."""
        return steps_of(self.passes, self.num_units, batch)

    def outlook(self, batch: int, *, noise_multiplier: float | None = None) -> Outlook:
        """Outlook of the run in batches of this size with independent noise, a rough one where none is given."""
        steps = self.steps_of(batch)
        noise = (self.noise_multiplier(batch) if noise_multiplier is None else noise_multiplier) / batch
        return Outlook(
            num_steps=steps, noise=noise, run_noise=noise / math.sqrt(steps),
            signal=signal_of(self.kind, self.model_size), has_trained_head=self.starts_trained,
        )  # fmt: skip

    def noise_multiplier(self, batch: int) -> float:
        """Rough noise of Poisson-sampled batches; what a plan calibrates is a few percent less."""
        delta = default_delta(self.num_units) if self.target_delta is None else self.target_delta
        rate = batch / self.num_units
        return rough_noise_multiplier(rate, self.steps_of(batch), self.target_epsilon, delta)

    def learning_rate(self, outlook: Outlook) -> float:
        """Peak learning rate of AdamW, to two digits."""
        rate = RATES[self.kind, self.objective]
        size = 1.0 if self.kind == "head" else (REFERENCE_SIZE / self.model_size) ** 0.25
        length = min(max((REFERENCE_STEPS / outlook.num_steps) ** (1 / 3), 0.3), 1.5)
        noise = min(1.0, max(0.2, math.sqrt(2 / (1 + outlook.step_ratio**2))))
        return float(f"{rate * size * length * noise:.1e}")


@dataclasses.dataclass(frozen=True)
class Advice:
    """Options that are advised for a job.

    Attributes:
        job: what was asked.
        batch: expected records (or users) of a step.
        learning_rate: peak rate of AdamW.
        outlook: noise, signal and reach of the run with these.
    """

    job: TrainingJob
    batch: int
    learning_rate: float
    outlook: Outlook

    @property
    def values(self) -> dict[str, int | float]:
        """Options by their names in `DPTrainingArguments`; all others are best left at their defaults."""
        return {
            "expected_batch_size": self.batch,
            "learning_rate": self.learning_rate,
            "warmup_steps": WARMUP if WARMUP * self.outlook.num_steps >= 2 else 0,
            "clipping_norm": CLIP_ON_HEAD if self.job.has_trained_head else CLIP,
        }

    @property
    def reasons(self) -> dict[str, str]:
        """Option -> why it is so, in words with numbers."""
        job, outlook = self.job, self.outlook
        passes = "1 pass" if job.passes == 1 else f"{job.passes:g} passes"
        batch = (
            f"{passes} over {job.num_units:,} are {outlook.num_steps} steps; the noise of their mean is "
            f"{outlook.noise:.2g} clips, {outlook.step_ratio:.2g} of the signal, and they are worth "
            f"{outlook.useful_steps:.3g} steps without noise"
        )
        if outlook.step_ratio > 0.5:
            smaller = max(1, self.batch // 4)
            batch += f" (batch {smaller}: {job.outlook(smaller).useful_steps:.3g})"
        if job.kind == "head":
            reference, size = "a head on features of norm 4", ""
        else:
            reference = f"{job.kind} {job.objective} with {REFERENCE_SIZE / 1e6:.0f} million weights"
            size = f"{job.model_size / 1e6:.3g} million and "
        rate = (
            f"{RATES[job.kind, job.objective]:g} for {reference} and {REFERENCE_STEPS} steps, here {size}"
            f"{outlook.num_steps}"
        )
        if outlook.step_ratio > 1:
            rate += f", and less as noise is {outlook.step_ratio:.2g} of the signal"
        return {
            "expected_batch_size": batch,
            "learning_rate": rate,
            "warmup_steps": "the first steps of Adam know no second moment yet",
            "clipping_norm": (
                "less noise for the signal than 1; the runs on a trained head had it, and a higher loss"
                if job.has_trained_head
                else "near the norm of a record's gradient; far below it the loss doubles, accuracy does not fall"
            ),
        }

    def is_better_than(self, outlook: Outlook) -> bool:
        """Whether it is worth to change the settings of a run with this outlook."""
        return self.outlook.useful_steps > GAIN * outlook.useful_steps


@functools.lru_cache(maxsize=256)
def advise(job: TrainingJob) -> Advice:
    """Choose batch and learning rate, and say why.

    Args:
        job: size and budget of the run; see `TrainingJob`.

    Raises:
        DPConfigError: for a budget that no noise keeps.
    """
    tried: dict[int, Outlook] = {}
    refused: DPConfigError | None = None
    for size in _batches(job):
        try:
            tried[size] = job.outlook(size)
        except DPConfigError as error:  # of too many steps for so small a budget
            refused = error
    if not tried:
        assert refused is not None
        raise refused
    batch = max(tried, key=lambda size: (tried[size].useful_steps, size))
    return Advice(job, batch, job.learning_rate(tried[batch]), tried[batch])


def head_instead(job: TrainingJob) -> Advice | None:
    """Advice for a linear head on the frozen model, where training the model is expected to learn little.

    Args:
        job: what would be trained; the head makes at least `HEAD_PASSES` passes, over features computed once.

    Returns:
        None where training the model is expected to go well, where a head would not do better, and for language
        models, whose head is their embeddings.
    """
    if job.objective != "classification" or job.kind == "head":
        return None
    outlook = advise(job).outlook
    if outlook.verdict not in ("weak", "poor"):
        return None
    passes = max(job.passes, HEAD_PASSES)
    head = advise(dataclasses.replace(job, kind="head", passes=passes, has_trained_head=False))
    return head if head.outlook.useful_steps > outlook.useful_steps else None


def _batches(job: TrainingJob) -> list[int]:
    """Batch sizes to try: records that can be processed, cut into more and more steps."""
    records = job.passes * job.num_units
    most = max(LONGEST, math.ceil(records / LARGEST_BATCH))
    fewest = min(max(SHORTEST, records / job.num_units, records / LARGEST_BATCH), most)
    count = max(1, math.ceil(math.log(most / fewest, RATIO)))
    steps = [fewest * (most / fewest) ** (i / count) for i in range(count + 1)]
    return sorted({min(max(1, round(records / step)), job.num_units) for step in steps})
