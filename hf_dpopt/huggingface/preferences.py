"""TRL's `DPOTrainer` and `RewardTrainer` with differential privacy: a pair of answers is one record.

Shape legend: B = pairs, T = tokens, V = vocabulary. The two answers of a pair are two rows that come one after the
other; their gradients add up before the clip, as those of the choices of a question do.

This module needs the package `trl` (``pip install 'hf-dpopt[chat]'``); nothing else imports it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import TrainingArguments

from hf_dpopt.common import log
from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import DPConfigError, Refusal, refuses
from hf_dpopt.common.extras import missing
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.refusals.data import check_left
from hf_dpopt.huggingface.refusals.trainer_class import OFFLOADING
from hf_dpopt.huggingface.trainer import DPTrainerMixin
from hf_dpopt.records.losses import answer_log_probabilities
from hf_dpopt.self_check.conditions import in_mode

try:
    from datasets import Features
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, extract_prompt
except ImportError as error:
    raise missing("trl", "DPDPOTrainer and DPRewardTrainer", str(error)) from None
log.hide_prompts(DPOTrainer.__module__)


@dataclasses.dataclass(frozen=True)
class Ratios:
    """Log ratios of the trained to the reference model, of the answers of B pairs.

    Args:
        chosen_B, rejected_B: log p(answer | prompt) minus the same of the reference.
        lengths_B2: tokens of the chosen and of the rejected answer.
        beta, smoothing, tau: `beta`, `label_smoothing` and `discopop_tau` of the arguments.
    """

    chosen_B: torch.Tensor
    rejected_B: torch.Tensor
    lengths_B2: torch.Tensor
    beta: float
    smoothing: float
    tau: float

    @property
    def margin_B(self) -> torch.Tensor:
        """beta times the difference of the log ratios."""
        return self.beta * (self.chosen_B - self.rejected_B)

    @property
    def by_token_B(self) -> torch.Tensor:
        """Difference of the log ratios by token."""
        chosen_B, rejected_B = self.lengths_B2.clamp(min=1).unbind(dim=1)
        return self.chosen_B / chosen_B - self.rejected_B / rejected_B


def _exo(r: Ratios) -> torch.Tensor:
    log_win, log_loss, smoothing = F.logsigmoid(r.margin_B), F.logsigmoid(-r.margin_B), torch.tensor(r.smoothing)
    win, loss = torch.sigmoid(r.margin_B), torch.sigmoid(-r.margin_B)
    return win * (log_win - torch.log1p(-smoothing)) + loss * (log_loss - torch.log(smoothing))


def _robust(r: Ratios) -> torch.Tensor:
    clean, flipped = F.logsigmoid(r.margin_B), F.logsigmoid(-r.margin_B)
    return (r.smoothing * flipped - (1 - r.smoothing) * clean) / (1 - 2 * r.smoothing)


def _discopop(r: Ratios) -> torch.Tensor:
    share = torch.sigmoid(r.margin_B / r.tau)
    return -F.logsigmoid(r.margin_B) * (1 - share) + torch.exp(-r.margin_B) * share


def _nca(r: Ratios) -> torch.Tensor:
    chosen_B, rejected_B = r.beta * r.chosen_B, r.beta * r.rejected_B
    return -F.logsigmoid(chosen_B) - 0.5 * F.logsigmoid(-chosen_B) - 0.5 * F.logsigmoid(-rejected_B)


# `loss_type` -> loss of each pair, (B,), as `trl.DPOConfig` describes it. Not here: "aot" and "aot_unpaired" sort the
# batch, and "sft" is a mean over the tokens of the batch.
PAIR_LOSSES: dict[str, Callable[[Ratios], torch.Tensor]] = {
    "sigmoid": lambda r: -F.logsigmoid(r.margin_B),
    "hinge": lambda r: torch.relu(1 - r.margin_B),
    "ipo": lambda r: (r.by_token_B - 1 / (2 * r.beta)) ** 2,
    "exo_pair": _exo,
    "nca_pair": _nca,
    "robust": _robust,
    "bco_pair": lambda r: -F.logsigmoid(r.beta * r.chosen_B) - F.logsigmoid(-r.beta * r.rejected_B),
    "sppo_hard": lambda r: (r.chosen_B - 0.5 / r.beta) ** 2 + (r.rejected_B + 0.5 / r.beta) ** 2,
    "apo_zero": lambda r: 1 - torch.sigmoid(r.beta * r.chosen_B) + torch.sigmoid(r.beta * r.rejected_B),
    "apo_down": lambda r: 1 + torch.sigmoid(r.beta * r.chosen_B) - torch.sigmoid(r.margin_B),
    "discopop": _discopop,
    "sigmoid_norm": lambda r: -F.logsigmoid(r.beta * r.by_token_B),
}


class PreferenceLoss:
    """The loss of `args.loss_type` for each pair: a `per_example_loss_func`.

    Attributes:
        reference: digest of the reference model; None where it is not known.
    """

    def __init__(self, args: Any):
        self.args = args
        self.reference: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options that decide the loss of a pair; a resumed run must have the same."""
        names = ("loss_type", "loss_weights", "beta", "label_smoothing", "discopop_tau")
        return {name: getattr(self.args, name) for name in names} | {"reference": self.reference}

    def __call__(self, outputs: Any, labels: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        args, is_answer = self.args, _is_target(inputs["completion_mask"], inputs["attention_mask"])
        log_p_B2 = answer_log_probabilities(outputs, inputs["input_ids"], is_answer)
        ratios = Ratios(
            log_p_B2[:, 0] - inputs["ref_chosen_logps"],
            log_p_B2[:, 1] - inputs["ref_rejected_logps"],
            is_answer.sum(dim=-1),
            args.beta,
            args.label_smoothing,
            args.discopop_tau,
        )
        weights = args.loss_weights or [1.0] * len(args.loss_type)
        losses = [w * PAIR_LOSSES[kind](ratios) for kind, w in zip(args.loss_type, weights, strict=True)]
        return torch.stack(losses).sum(dim=0)


def _is_target(answer_B2T: torch.Tensor, attended_B2T: torch.Tensor) -> torch.Tensor:
    """Tokens of answers that are predicted from a token of their own row, not from padding on their left. (B, 2, T)"""
    attended_B2T = attended_B2T != 0
    return (answer_B2T != 0) & attended_B2T & F.pad(attended_B2T, (1, 0))[..., :-1]


class RewardLoss:
    """The Bradley-Terry loss of each pair, as `trl.RewardTrainer` has it: a `per_example_loss_func`."""

    def __init__(self, args: Any):
        self.args = args

    @property
    def options(self) -> dict[str, Any]:
        """Options that decide the loss of a pair; a resumed run must have the same."""
        return {"center_rewards_coefficient": self.args.center_rewards_coefficient}

    def __call__(self, outputs: Any, labels: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        chosen_B, rejected_B = outputs.logits.float().view(-1, 2).unbind(dim=1)
        losses_B = -F.logsigmoid(chosen_B - rejected_B - inputs.get("margin", 0.0))
        if self.args.center_rewards_coefficient is not None:
            losses_B = losses_B + self.args.center_rewards_coefficient * (chosen_B + rejected_B) ** 2
        return losses_B


class PairCollator:
    """TRL's batches with the answers of a pair side by side: (2 B, T), all chosen ones first, becomes (B, 2, T)."""

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]]):
        self.wrapped = collate

    def __call__(self, records: list[Any]) -> dict[str, torch.Tensor]:
        found = self.wrapped(records)
        return {k: v.unflatten(0, (2, -1)).transpose(0, 1) if v.dim() == 2 else v for k, v in found.items()}


@refuses
def _check_pairs(dataset: Any, name: str) -> Iterator[Refusal]:
    """Refusals for rows that are not pairs. What a row holds is not quoted."""
    columns = getattr(dataset, "column_names", None)
    tokens = {"chosen_ids", "rejected_ids"}
    if columns is None or not hasattr(dataset, "__len__") or tokens <= set(columns):  # a stream, or prepared before
        return
    lacking = [column for column in ("chosen", "rejected") if column not in columns]
    yield (
        bool(lacking),
        f"{name}: no column {' and no column '.join(map(repr, lacking))} (it has: {', '.join(columns) or 'none'}). A "
        "row is a pair: `chosen` and `rejected`, and mostly `prompt`. Rename them: dataset.rename_columns({...}).",
    )
    yield not len(dataset), f"{name}: it has no rows. Give at least one pair."
    for column in ("prompt", "chosen", "rejected"):
        texts = dataset[column] if column in columns else ()
        yield (
            any(not isinstance(text, str | list) for text in texts),
            f"{name}, column {column!r}: rows have a value that is neither a string nor a list of messages (None, "
            "perhaps). Leave such pairs out: dataset.filter(lambda row: isinstance(row[column], (str, list))).",
        )
    yield (
        all(chosen == rejected for chosen, rejected in zip(dataset["chosen"], dataset["rejected"], strict=True)),
        f"{name}: `chosen` and `rejected` are the same in every row, so there is nothing to prefer. Put the better "
        "answer into `chosen` and the worse one into `rejected`.",
    )


@refuses
def _check_given(trainer: type, config: type, given: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refusals for arguments of a trainer of pairs, before anything else looks at them."""
    args, model, name = given.get("args"), given.get("model"), trainer.__name__
    got = "no args" if args is None else type(args).__name__
    yield (
        isinstance(given.get("ref_model"), TrainingArguments),
        f"{name}: the second argument by place is ref_model, as in TRL. Give args by name: {name}(model, args=args).",
    )
    yield not isinstance(args, config), f"{name} got {got}. Use hf_dpopt.{config.__name__}, and set target_epsilon."
    yield (
        "per_example_loss_func" in given,
        f"per_example_loss_func: {name} has a loss of its own, which its arguments choose. Leave "
        "per_example_loss_func out, or use DPTrainer.",
    )
    yield (
        "model_init" in given,
        f"model_init: {name} takes a model, as TRL's trainers do. Pass model=.",
    )
    is_found = isinstance(model, str) or getattr(getattr(model, "config", None), "_name_or_path", None) != ""
    yield (
        given.get("processing_class") is None and not is_found,
        "processing_class: the model does not say which tokenizer is its own. Pass processing_class=tokenizer.",
    )
    _check_pairs(given.get("train_dataset"), "train_dataset")


@refuses
def check_pair_options(inputs: TrainerInputs) -> Iterator[Refusal]:
    """Refusals for losses of pairs: what mixes records, and what is not implemented for pairs."""
    args: Any = inputs.args
    yield args.activation_offloading, OFFLOADING
    yield (
        args.eval_data_privacy == "private",
        "eval_data_privacy='private' measures losses of single texts, and the records are pairs. Evaluate on public "
        "pairs: eval_data_privacy='public'.",
    )
    yield (
        args.label_smoothing_factor != 0,
        f"label_smoothing_factor={args.label_smoothing_factor}: pairs have no labels. Set label_smoothing_factor=0.",
    )
    if not isinstance(args, DPDPOConfig):
        return
    unknown = [kind for kind in args.loss_type if kind not in PAIR_LOSSES]
    yield (
        bool(unknown),
        f"loss_type={unknown[0] if unknown else ''!r} is not a loss of single pairs. Use one of: "
        f"{', '.join(PAIR_LOSSES)}.",
    )
    yield (
        not args.precompute_ref_log_probs or args.sync_ref_model,
        "The reference is fixed, and its log-probabilities are computed once, before training. Leave "
        "precompute_ref_log_probs=True and sync_ref_model=False.",
    )
    yield (
        args.padding_free,
        "padding_free=True: several texts in one row would be clipped as one. Set padding_free=False.",
    )
    yield (
        not args.beta > 0,
        f"beta={args.beta}: it scales the preference against the reference. Set beta above 0, as 0.1.",
    )
    yield (
        "robust" in args.loss_type and not 0 <= args.label_smoothing < 0.5,
        f"label_smoothing={args.label_smoothing}: loss_type='robust' divides by 1 - 2 label_smoothing. Set "
        "label_smoothing in [0, 0.5).",
    )
    yield (
        "discopop" in args.loss_type and not args.discopop_tau > 0,
        f"discopop_tau={args.discopop_tau}: loss_type='discopop' divides by it. Set discopop_tau above 0, as 0.05.",
    )
    yield (
        args.precompute_ref_batch_size is not None,
        f"precompute_ref_batch_size={args.precompute_ref_batch_size}: the reference takes pairs one by one, so that "
        "the value of a pair depends on that pair alone. Leave precompute_ref_batch_size out.",
    )
    for name, plain in (("f_divergence_type", "reverse_kl"), ("ld_alpha", None), ("use_weighting", False)):
        value = getattr(args, name)
        yield value != plain, f"{name}={value!r} is not implemented for private training. Use {name}={plain!r}."


@dataclass(repr=False)  # that of TrainingArguments hides tokens
class DPDPOConfig(DPTrainingArguments, DPOConfig):
    """`trl.DPOConfig` with the fields of `DPTrainingArguments`.

    The log-probabilities of the reference model are computed once, before training
    (`precompute_ref_log_probs=True`), in evaluation mode and pair by pair. Refused, because they mix pairs: the losses
    "aot", "aot_unpaired" and "sft".
    """

    precompute_ref_log_probs: bool = True


@dataclass(repr=False)
class DPRewardConfig(DPTrainingArguments, RewardConfig):
    """`trl.RewardConfig` with the fields of `DPTrainingArguments`."""


class _PairTrainer(DPTrainerMixin):
    """A trainer whose records are pairs. Evaluation is TRL's; training collates and takes losses by pair."""

    refuse_losses = staticmethod(check_pair_options)

    def _as_made(self) -> TrainerInputs:
        made = super()._as_made()
        return dataclasses.replace(made, data_collator=PairCollator(made.data_collator))

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        if dataset_name != "train":  # looked at before the model was made
            _check_pairs(dataset, f"{dataset_name} dataset")
        found = super()._prepare_dataset(dataset, processing_class, args, dataset_name)  # type: ignore[misc]
        check_left(dataset, found, args, dataset_name)
        return found


class DPDPOTrainer(_PairTrainer, DPOTrainer):
    """`trl.DPOTrainer` with differential privacy; use it with `DPDPOConfig`.

    One row is one record: a prompt with a chosen and a rejected answer. To protect all pairs of a person together,
    use `privacy_unit="user"` and `user_id_column`.

    A resumed run must have the loss and the reference of the first one. Where the reference is the model without its
    adapter, it is not compared: resume with the same base model.

    Formal guarantee: that of `DPTrainerMixin`.
    """

    def __init__(self, model: Any = None, ref_model: Any = None, args: Any = None, *positional: Any, **options: Any):
        by_name = inspect.signature(DPOTrainer).bind_partial(model, ref_model, args, *positional).arguments
        _check_given(type(self), DPDPOConfig, by_name | options)
        loss = PreferenceLoss(args)
        super().__init__(**by_name, per_example_loss_func=loss, **options)
        # without a reference of its own the hash is that of the model with its adapter, which starts at random
        if not (ref_model is None and hasattr(self.model, "peft_config")):
            loss.reference = self._precompute_model_hash

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        given = getattr(dataset, "features", None) or {}
        if "prompt" not in given and {"chosen", "rejected"} <= given.keys():
            # as stored: TRL lets one type fit all prompts, and a number or a key of one of them changes others
            dataset = dataset.map(extract_prompt, features=Features({**given, "prompt": given["chosen"]}))
        return super()._prepare_dataset(dataset, processing_class, args, dataset_name)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_new = eval_dataset is not None and not isinstance(eval_dataset, str)
        if is_new and self.ref_model is None and not hasattr(self.model, "peft_config") and self.state.global_step > 0:
            raise DPConfigError(
                "`evaluate(eval_dataset)`: the reference is the model before training, and it was not kept. Give "
                "these pairs as eval_dataset= when the trainer is made, pass ref_model=, or train an adapter."
            )
        return super().evaluate(eval_dataset, *args, **kwargs)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Reference log-probabilities of each pair by itself: no dropout, whose masks other pairs move, no batch."""
        model_hash = self._precompute_model_hash
        # TRL finds stored values by this: not those that it, or this class with another max_length, computed before
        how = ("evaluation mode, pair by pair", self.args.max_length, self.args.truncation_mode, self.args.bf16)
        self._precompute_model_hash = f"{model_hash}, {how}"
        # rank 0 writes the file that all read, and rows in memory have a folder of their own in each process
        own_place, ranks = dataset._get_cache_file_path, current_ranks()
        dataset._get_cache_file_path = lambda fingerprint: ranks.same(lambda: own_place(fingerprint))
        try:
            with contextlib.ExitStack() as modes:
                for model in filter(None, (self.model, self.ref_model)):
                    modes.enter_context(in_mode(model, training=False))
                return super()._precompute_ref_logps(dataset, name, 1)
        finally:
            self._precompute_model_hash = model_hash
            del dataset._get_cache_file_path

    def _prepare_public(self, dataset: Any) -> Any:
        found = super()._prepare_public(dataset)
        if "ref_chosen_logps" in found.column_names:  # of another trainer, perhaps of another reference
            found = found.remove_columns(["ref_chosen_logps", "ref_rejected_logps"])
        return self._precompute_ref_logps(found, "public", 1)


class DPRewardTrainer(_PairTrainer, RewardTrainer):
    """`trl.RewardTrainer` with differential privacy; use it with `DPRewardConfig`.

    One row is one record: a chosen and a rejected text, of which the first gets the larger reward.

    Formal guarantee: that of `DPTrainerMixin`.
    """

    def __init__(self, model: Any = None, args: Any = None, *positional: Any, **options: Any):
        by_name = inspect.signature(RewardTrainer).bind_partial(model, args, *positional).arguments
        _check_given(type(self), DPRewardConfig, by_name | options)
        super().__init__(**by_name, per_example_loss_func=RewardLoss(args), **options)
