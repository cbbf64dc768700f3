"""The outlook of a run: what noise leaves of its signal, and how far its steps can carry the weights.

Both are told before training, from public numbers: the plan, the learning rates, and a signal that is declared.
Nothing here is measured on the records, so nothing of it costs privacy, and none of it knows them: it tells runs that
cannot learn from those that can, not how well the latter will do.

The signal is the noise on the mean gradient, in clipping norms, with which a step is worth half of one without noise.
With noise r times as large, ``T`` steps are worth ``T / (1 + r^2)``: the precision of the mean of T gradients, each
with one part of spread of its own and r^2 parts of noise. That this orders runs as their accuracies do was measured
(docs/results.md), not derived.

``1 / useful = 1 / T + r^2 / T``: the first part is how few the steps are, the second how noisy their mean is. A head
that was trained before carries the accuracy from the first step, so of such a run the second part alone decides: few
steps add little to the head, noise can undo it. So it is where adapters are added to a language model that writes
texts, or whose language head scores label words: SmolLM2 had 78.4 % on SST-2 before, 84.3 % after 12 private steps.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from hf_dpopt.plan.compare import predicted_errors, step_stddev
from hf_dpopt.plan.plan import PrivacyPlan

Kind = Literal["full", "lora", "head"]
Objective = Literal["classification", "generation"]
Verdict = Literal["good", "on a trained head", "weak", "poor", "no noise"]

# Noise on the mean, in clipping norms, at which the runs of docs/results.md still learnt about half as fast: LoRA on
# SST-2 at 5.1e-4 (83.6 % of 88.3), full finetuning at 2e-4 (83.4 of 89.5) and at 4.9e-4 (77.1), GPT-2 on E2E at 5.4e-4
# (perplexity 5.76 of 5.56). A head sees as much signal in a hundredth of the coordinates.
SIGNAL: dict[Kind, float] = {"full": 4e-4, "lora": 5e-4, "head": 2e-3}
# Those were models of 5 to 22 million weights. A gradient of the same norm has larger coordinates in a smaller model,
# as 1 / sqrt(weights). A GPT-2 of 0.27 million from scratch (`hf-dpopt demo`; loss 5.4 before, 0.49 without privacy)
# reached 0.58 with the batch that follows (297), 0.84 with 512, and 3.9 with the one that 4e-4 asks for (3,635).
SMALLEST_SIZE = 5_300_000
WEAK = 30.0  # useful steps: runs below lost more than ten points on SST-2
POOR = 8.0  # and runs below stayed near the majority class, or at half of the BLEU
MAX_CORRELATED_STEPS = 4096  # of correlated noise whose error over the run is computed: for some it takes n^2 numbers
TOO_SHORT = 1 / 8  # of the reach that was advised; the Trainer's 5e-5 has a sixteenth


def signal_of(kind: Kind, size: int | None = None) -> float:
    """Return the declared size of a coordinate of the mean clipped gradient, in clipping norms.

    Args:
        kind: what is trained.
        size: weights of the model, frozen ones included; None if not known.
    """
    if kind != "full" or size is None:
        return SIGNAL[kind]
    return SIGNAL[kind] * math.sqrt(max(1.0, SMALLEST_SIZE / size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
    """Noise, signal and reach of a run.

    Attributes:
        num_steps: optimizer steps.
        noise: stddev of the noise on a coordinate of the mean gradient of a step, in clipping norms.
        run_noise: stddev of the mean of the noise over all steps, likewise.
        signal: declared size of a coordinate of the mean clipped gradient.
        is_adaptive: whether the optimizer divides by a second moment, which noise fills that is taken back later.
        has_trained_head: whether the head was trained before this run: in an earlier one, or as a language model's.
        reach: sum of the learning rates; None where it says nothing (SGD, whose steps have the size of the gradient).
        advised_reach: the same with the learning rate that is advised.
    """

    num_steps: int
    noise: float
    run_noise: float
    signal: float
    is_adaptive: bool = True
    has_trained_head: bool = False
    reach: float | None = None
    advised_reach: float | None = None

    @property
    def step_ratio(self) -> float:
        """Noise over signal in one step."""
        return self.noise / self.signal

    @property
    def run_ratio(self) -> float:
        """Noise over signal in the mean over the run."""
        return self.run_noise / self.signal

    @property
    def useful_steps(self) -> float:
        """Steps of a run without noise that this one is worth.

        For an adaptive optimizer the noise that counts is the geometric mean of that of single steps and that which is
        left of it over the run, as in `compare_mechanisms`; for SGD it is the latter. For independent noise they are
        the same.
        """
        return self.num_steps / (1 + self._ratio_that_counts**2)

    @property
    def most_useful_steps(self) -> float:
        """Useful steps that the noise over the run leaves, if the steps were as many as one likes."""
        ratio = self._ratio_that_counts
        return math.inf if ratio == 0 else self.num_steps / ratio**2

    @property
    def _ratio_that_counts(self) -> float:
        left = self.run_noise * math.sqrt(self.num_steps)
        return (math.sqrt(left * self.noise) if self.is_adaptive else left) / self.signal

    @property
    def is_too_short(self) -> bool:
        """Whether the weights cannot move far enough, however clear the gradients are."""
        return (
            self.reach is not None and self.advised_reach is not None and self.reach < TOO_SHORT * self.advised_reach
        )

    @property
    def verdict(self) -> Verdict:
        """Judgement in a word."""
        if self.noise == 0:
            return "no noise"
        counts = self.most_useful_steps if self.has_trained_head else self.useful_steps
        if self.is_too_short or counts < POOR:
            return "poor"
        if self.useful_steps >= WEAK:
            return "good"
        return "weak" if counts < WEAK else "on a trained head"

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"noise over signal {self.step_ratio:.2g} in a step and {self.run_ratio:.2g} over the run; its "
            f"{self.num_steps} steps are worth about {self.useful_steps:.3g} without noise ({self.verdict})"
        )


def outlook_of(
    plan: PrivacyPlan,
    kind: Kind,
    *,
    size: int | None = None,
    is_adaptive: bool = True,
    has_trained_head: bool = False,
    reach: float | None = None,
    advised_reach: float | None = None,
) -> Outlook:
    """Make the outlook of a planned run; `kind` and `size` as for `signal_of`, the others as for `Outlook`."""
    batch = plan.sampler.expected_batch_size
    noise = step_stddev(plan) / batch
    changes = plan.preclip.changes(plan.config.clipping_norm)
    if plan.strategy.is_independent and not (changes is not None and changes.is_seen):
        run_noise = noise / math.sqrt(plan.num_steps)
    else:
        run_noise = float(predicted_errors(plan)[-1]) / (plan.num_steps * batch)
    return Outlook(
        num_steps=plan.num_steps,
        noise=noise,
        run_noise=run_noise,
        signal=signal_of(kind, size),
        is_adaptive=is_adaptive,
        has_trained_head=has_trained_head,
        reach=reach,
        advised_reach=advised_reach,
    )
