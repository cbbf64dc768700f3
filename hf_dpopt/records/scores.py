"""Scores of single records of an evaluation set as vectors of bounded norm, and metrics of their noisy sum.

Shape legend: B = records, K = coordinates of the vector, L = labels of a classifier.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import nn

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.records.losses import RecordLosses, base_model, problem_type

TOKENS = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")


@dataclasses.dataclass(frozen=True)
class Scores:
    """Vectors that single records add to the sum of an evaluation.

    One coordinate is its loss, cut to [0, loss_bound], as its distance from the middle, at most ``sqrt(1/2)``. The
    others are 0 but for one of ``sqrt(1/2)``: for two labels the cell of the confusion matrix (label, prediction), for
    more whether the prediction is right, and for other models a count of records.

    Formal guarantee: the vector of a record has L2 norm at most 1, whatever its loss and its logits are; one that is
    not scored adds nothing. It depends on that record and on the weights alone.

    Args:
        loss_bound: losses above count as this; > 0, declared.
        num_labels: L of a classifier with one label a record; None for other models, whose loss alone is scored.
    """

    loss_bound: float
    num_labels: int | None

    @property
    def num_cells(self) -> int:
        """Coordinates beside the loss."""
        return 1 if self.num_labels is None else 4 if self.num_labels == 2 else 2

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that are released."""
        return ("loss", *(("accuracy",) if self.num_labels else ()), *(("f1",) if self.num_labels == 2 else ()))

    def nothing(self) -> torch.Tensor:
        """The sum over no records, (K,), float64."""
        return torch.zeros(1 + self.num_cells, dtype=torch.float64)

    def total_of(
        self, losses_B: torch.Tensor, logits_BL: torch.Tensor | None, labels_B: torch.Tensor | None
    ) -> torch.Tensor:
        """Sum over records, (K,), float64, on the CPU.

        Args:
            losses_B: what is no number counts as ``loss_bound``.
            logits_BL: outputs of a classifier.
            labels_B: its labels.

        Raises:
            ValueError: for other than one label and one row of outputs for each record: it would add several counts.
        """
        losses_B = losses_B.detach().double().cpu()
        losses_B = losses_B.nan_to_num(nan=self.loss_bound, posinf=self.loss_bound).clamp(0.0, self.loss_bound)
        of_loss = (losses_B * 2 / self.loss_bound - 1).sum().view(1)
        if self.num_labels is None or logits_BL is None or labels_B is None:
            cells_B = torch.zeros(len(losses_B), dtype=torch.long)
        else:
            labels_B, predictions_B = labels_B.detach().view(-1).cpu(), logits_BL.detach().cpu().argmax(dim=-1)
            if not labels_B.shape == predictions_B.shape == losses_B.shape:
                raise ValueError("not one label and one prediction for each record")
            cells_B = (labels_B == predictions_B).long()
            if self.num_labels == 2:
                cells_B = 2 * labels_B.clamp(0, 1) + predictions_B.clamp(0, 1)
        counts = torch.bincount(cells_B, minlength=self.num_cells).double()
        return torch.cat([of_loss, counts]) * math.sqrt(1 / 2)

    def read(self, released: torch.Tensor, num_records: int | None) -> dict[str, float]:
        """Metrics of a noisy sum: post-processing, kept in their ranges.

        Args:
            released: the sum with its noise, (K,).
            num_records: size of the set where it is public; None where the noisy count stands for it.
        """
        values = [value * math.sqrt(2) for value in released.tolist()]
        cells = [max(value, 0.0) for value in values[1:]]
        size = max(float(num_records) if num_records is not None else sum(values[1:]), 1.0)
        found = {"loss": self.loss_bound / 2 * (1 + min(max(values[0] / size, -1.0), 1.0))}
        if self.num_labels is not None:
            right = values[1] + values[4] if self.num_labels == 2 else values[2]
            found["accuracy"] = min(max(right / size, 0.0), 1.0)
        if self.num_labels == 2:
            true_positive, wrong = cells[3], cells[1] + cells[2]
            found["f1"] = 2 * true_positive / max(2 * true_positive + wrong, 1.0)
        return found

    def noise_of_accuracy(self, noise_stddev: float, num_records: int) -> float:
        """Stddev of the noise in the accuracy, where the number of records is known."""
        cells = 2 if self.num_labels == 2 else 1
        return noise_stddev * math.sqrt(2 * cells) / max(num_records, 1)


def usual_bound(model: Any, per_example_loss_func: Any, asked: str, declare: str) -> float:
    """Bound on losses that most records keep, from the size of the model's output.

    Five times the loss of a guess for classification, that of a guess for language models. To three digits.

    Args:
        model: the model; one that is not loaded yet has no usual bound.
        per_example_loss_func: the loss, which has none either; None for the model's own.
        asked: the option that needs a bound.
        declare: how another bound is declared.

    Raises:
        DPConfigError: if there is no usual bound.
    """
    is_own = isinstance(model, nn.Module) and per_example_loss_func is None
    size = _output_size(model) if is_own else 0
    if size > 1:
        return round(math.log(size), 3)
    raise DPConfigError(
        f"{asked} needs a bound on the loss of a record, and this loss has no usual one. Declare it: {declare}; "
        "losses above count as that."
    )


def _output_size(model: nn.Module) -> int:
    """Classes, or entries of the vocabulary; of a classification to the fifth power, 0 where they say nothing."""
    kind, config = RecordLosses(model).kind, base_model(model).config
    if kind in TOKENS:
        return getattr(config, "vocab_size", 0) or getattr(config.get_text_config(), "vocab_size", 0)
    is_single = kind == "ForSequenceClassification" and problem_type(model) == "single_label_classification"
    return config.num_labels**5 if is_single or kind == "ForTokenClassification" else 0
