"""One loss per record: the record's own-token mean, never a mean over the batch.

Hugging Face's losses average over all tokens of a batch, so the gradient of a record depends on the lengths of the
others and a clip no longer bounds what it changes. B = records, T = tokens, V = vocabulary, K = labels.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_dpopt.clipping import kernels
from hf_dpopt.clipping.products import wide
from hf_dpopt.clipping.rules import flattening
from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError, shown

RecordLoss = Callable[..., torch.Tensor]
IGNORED = -100


def base_model(model: nn.Module) -> Any:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


# Operations whose backward does not read their output: a captured head, a frozen one, a scaled or converted copy.
KEEP_NO_OUTPUT = ("_LinearBackward", "UnsafeViewBackward0", "MulBackward0", "ToCopyBackward0")


class _TokenMean(torch.autograd.Function):
    """Cross entropy by record whose gradient overwrites the logits: one tensor of (B, T, V) instead of three.

    The plain formula keeps logits, log-probabilities and gradient at once; with a large vocabulary that is most of the
    memory of a step. Nobody reads the logits of a training step after its loss.
    """

    @staticmethod
    def forward(ctx: Any, logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        # not save_for_backward: the backward writes into it, and two-pass clipping runs the backward twice
        ctx.logits_BTV = logits_BTV.detach()
        ctx.weights_B = None  # of the losses whose gradient the logits have become
        ctx.version = ctx.logits_BTV._version
        ctx.labels_BT, ctx.num_targets_B = labels_BT, (labels_BT != IGNORED).sum(dim=1).clamp(min=1)
        losses_BT, ctx.normalisers = _token_losses(ctx.logits_BTV, ctx.labels_BT)
        return losses_BT.sum(dim=1) / ctx.num_targets_B

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad_B,) = grad_outputs
        if ctx.weights_B is None:
            if ctx.logits_BTV._version != ctx.version:
                raise DPConfigError(
                    "The logits changed between their loss and its gradient: two losses read them. Give token_mean a "
                    "copy (logits.clone()) in each."
                )
            shares_B = grad_B / ctx.num_targets_B.to(grad_B.dtype)
            _gradient_in_place(ctx.logits_BTV, ctx.labels_BT, shares_B, ctx.normalisers)
            ctx.weights_B = grad_B
            return ctx.logits_BTV, None
        if torch.equal(grad_B, ctx.weights_B):
            return ctx.logits_BTV, None
        if ((ctx.weights_B == 0) & (grad_B != 0)).any():
            raise DPConfigError(
                "A second backward wants the gradient of a record that had the weight 0 in the first."
            )  # fmt: skip
        ratio_B = torch.where(grad_B == 0, 0, grad_B / ctx.weights_B)
        return ctx.logits_BTV * ratio_B.view(-1, 1, 1).to(ctx.logits_BTV.dtype), None


def _token_losses(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Cross entropy of every token, (B, T), 0 without a target; and the normalisers for `_gradient_in_place`."""
    if _fused(logits_BTV):
        is_label_BT = (labels_BT >= 0) & (labels_BT < logits_BTV.size(-1))
        torch._assert_async((is_label_BT | (labels_BT == IGNORED)).all(), "a label is outside of the vocabulary")
        return kernels.cross_entropy.losses(logits_BTV, labels_BT)
    losses, normalisers = [], []
    for logits_TV, labels_T in zip(logits_BTV, labels_BT, strict=True):  # a record at a time: what is wide stays small
        logits_TV = wide(logits_TV)
        log_shares_TV = logits_TV.log_softmax(dim=-1)  # fused, unlike logsumexp
        losses_T = -log_shares_TV.gather(1, _index(labels_T)).squeeze(1)
        losses.append(losses_T.masked_fill(labels_T == IGNORED, 0))
        # taken at the largest logit: at one far below, the difference would lose all digits
        normalisers.append(logits_TV.amax(dim=-1) - log_shares_TV.amax(dim=-1))
        del log_shares_TV  # before the next record's
    return torch.stack(losses), normalisers


def _gradient_in_place(
    logits_BTV: torch.Tensor, labels_BT: torch.Tensor, shares_B: torch.Tensor, normalisers: Any
) -> None:
    """Overwrite the logits with the gradient of ``sum_b shares_b sum_t loss_bt``."""
    if _fused(logits_BTV):
        return kernels.cross_entropy.gradient_(logits_BTV, labels_BT, shares_B, normalisers)
    for b, logits_TV in enumerate(logits_BTV):
        wide_TV = wide(logits_TV)
        wide_TV.sub_(normalisers[b].unsqueeze(1)).exp_().mul_(shares_B[b])
        wide_TV.scatter_add_(1, _index(labels_BT[b]), -shares_B[b].expand(len(wide_TV), 1))
        ignored_T = labels_BT[b] == IGNORED
        # on a CPU, filling by a mask takes as long as the exponentials; on a GPU, places are waited for
        wide_TV[ignored_T if wide_TV.is_cuda else ignored_T.nonzero().squeeze(1)] = 0
        if wide_TV.data_ptr() != logits_TV.data_ptr():
            logits_TV.copy_(wide_TV)
    return None


def _index(labels_T: torch.Tensor) -> torch.Tensor:
    return labels_T.masked_fill(labels_T == IGNORED, 0).unsqueeze(1)


def _fused(logits_BTV: torch.Tensor) -> bool:
    return kernels.takes(logits_BTV) and logits_BTV.stride(-1) == 1


def token_mean(logits_BTV: torch.Tensor, labels_BT: torch.Tensor, *, label_smoothing: float = 0.0) -> torch.Tensor:
    """Mean cross entropy over the record's own target tokens; exactly 0, with zero gradient, if it has none. (B,)

    The logits are overwritten in the backward if what made them does not need them there.
    """
    if labels_BT.shape != logits_BTV.shape[:2]:
        raise DPConfigError(
            f"The labels have shape {tuple(labels_BT.shape)}, the logits {tuple(logits_BTV.shape)}: expected one "
            "label per token. Check the collator, and decoder_input_ids that are not the labels shifted."
        )
    is_transformed = torch._C._are_functorch_transforms_active()  # vmap and grad, which want functions without state
    if label_smoothing == 0 and not is_transformed and type(logits_BTV.grad_fn).__name__ in KEEP_NO_OUTPUT:
        return _TokenMean.apply(logits_BTV, labels_BT)
    losses_BT = F.cross_entropy(
        wide(logits_BTV).flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED, reduction="none",
        label_smoothing=label_smoothing,
    ).view(labels_BT.shape)  # fmt: skip
    num_targets_B = (labels_BT != IGNORED).sum(dim=1)
    return losses_BT.sum(dim=1) / num_targets_B.clamp(min=1)


def without_padding(labels_BT: torch.Tensor, mask_BT: torch.Tensor | None, *, shifted: bool) -> torch.Tensor:
    """Ignore targets that are padding or are predicted from it: they depend on the lengths of other records. (B, T)

    Collators that pad labels with -100 on the right leave none. Copies of the input ids have the first kind; padding
    on the left makes one of the second kind for a causal model.
    """
    if mask_BT is None or mask_BT.shape != labels_BT.shape:
        return labels_BT
    counts_BT = mask_BT != 0
    if shifted:
        counts_BT = counts_BT & F.pad(counts_BT, (1, 0), value=True)[:, :-1]
    return labels_BT.masked_fill(~counts_BT, IGNORED)


def _causal(outputs: Any, labels_BT: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    # virtual tokens (prompt tuning) come first; the last of them predicts the first token of the record
    num_virtual = outputs.logits.size(1) - labels_BT.size(1)
    targets_BT = F.pad(labels_BT, (num_virtual, 1), value=IGNORED)[:, 1:]
    return token_mean(outputs.logits, targets_BT, label_smoothing=label_smoothing)


def answer_log_probabilities(outputs: Any, ids_BCT: torch.Tensor, is_answer_BCT: torch.Tensor) -> torch.Tensor:
    """Log-probabilities that a causal model gives the marked tokens of each row, added up. (B, C)"""
    labels_RT = ids_BCT.masked_fill(~is_answer_BCT, IGNORED).flatten(0, 1)
    labels_RT[:, 0] = IGNORED  # nothing comes before it
    num_targets_R = (labels_RT != IGNORED).sum(dim=1)
    return -(_causal(outputs, labels_RT, 0.0) * num_targets_R).unflatten(0, ids_BCT.shape[:2])


def _tokens(outputs: Any, labels_BT: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    return token_mean(outputs.logits, labels_BT, label_smoothing=label_smoothing)


def _one_label(outputs: Any, labels_B: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    logits_BK = wide(outputs.logits)
    return F.cross_entropy(logits_BK, labels_B.view(-1), reduction="none", label_smoothing=label_smoothing)


def _regression(outputs: Any, labels_B: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    logits_BK = wide(outputs.logits)
    return (logits_BK - labels_B.view(logits_BK.shape).to(logits_BK.dtype)).square().mean(dim=1)


def _several_labels(outputs: Any, labels_BK: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    logits_BK = wide(outputs.logits)
    return F.binary_cross_entropy_with_logits(logits_BK, labels_BK.to(logits_BK.dtype), reduction="none").mean(1)


_BY_PROBLEM = {
    "regression": _regression,
    "single_label_classification": _one_label,
    "multi_label_classification": _several_labels,
}


def problem_type(model: nn.Module, labels: torch.Tensor | None = None) -> str:
    """`config.problem_type`, or as transformers infers it from labels; from whole ones if there are none."""
    config = base_model(model).config
    if config is None:
        raise DPConfigError("model.config=None does not say what its labels are. Keep the model's configuration.")
    if getattr(config, "problem_type", None):
        return config.problem_type
    if config.num_labels == 1:
        return "regression"
    is_real = labels is not None and labels.is_floating_point()
    return "multi_label_classification" if is_real else "single_label_classification"


def _question_answering(outputs: Any, labels: Mapping[str, torch.Tensor], label_smoothing: float) -> torch.Tensor:
    ends = []
    for logits_BT, positions_B in (
        (outputs.start_logits, labels["start_positions"]),
        (outputs.end_logits, labels["end_positions"]),
    ):
        ignored = logits_BT.size(1)  # positions behind the truncated text carry no target, as in transformers
        logits_BT, positions_B = wide(logits_BT), positions_B.view(-1).clamp(0, ignored)
        if labels["attention_mask"] is not None:  # padding is no answer: how much of it there is depends on the others
            padding_BT = labels["attention_mask"] == 0
            logits_BT = logits_BT.masked_fill(padding_BT, torch.finfo(logits_BT.dtype).min)
            at_padding_B = F.pad(padding_BT, (0, 1)).gather(1, positions_B.unsqueeze(1)).squeeze(1)
            positions_B = positions_B.masked_fill(at_padding_B, ignored)
        ends.append(F.cross_entropy(logits_BT, positions_B, ignore_index=ignored, reduction="none"))
    return (ends[0] + ends[1]) / 2


_BY_LOSS_TYPE: dict[str, Callable[[Any, Any, float], torch.Tensor]] = {
    "ForCausalLM": _causal,
    "ForMaskedLM": _tokens,
    "ForTokenClassification": _tokens,
    "ForConditionalGeneration": _tokens,
    "ForQuestionAnswering": _question_answering,
    "ForMultipleChoice": _one_label,
}
LABEL_NAMES = ("labels", "start_positions", "end_positions")


def _loss_type(model: nn.Module) -> str:
    """The kind of head: transformers' `loss_type`, which follows the class name."""
    base = base_model(model)
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False) and hasattr(base, "lm_head"):
        return "ForConditionalGeneration"  # their labels are aligned with the logits: no shift
    name = type(base).__name__
    if name.endswith(("ForImageClassification", "ForAudioClassification", "ForVideoClassification")):
        return "ForSequenceClassification"  # the same loss
    known = ("ForSequenceClassification", *_BY_LOSS_TYPE)
    kind = next((k for k in known if name.endswith(k)), None) or getattr(base, "loss_type", None)
    if name.endswith("LMHeadModel") or (kind == "ForConditionalGeneration" and not base.config.is_encoder_decoder):
        kind = "ForCausalLM"  # the second: a language model behind a picture or sound encoder
    if kind not in known:
        raise DPConfigError(
            f"No per-record loss is known for {name}. Known heads: {', '.join(known)}. Pass per_example_loss_func=f "
            "with f(outputs, labels) or f(outputs, labels, inputs) -> losses of the records, (batch,)."
        )
    return kind


def decoder_inputs(model: Any, labels_BT: torch.Tensor) -> torch.Tensor:
    """The labels shifted one place to the right, as the model shifts them to feed its decoder. (B, T)

    Raises:
        DPConfigError: if the model does not say how it shifts them.
    """
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels_BT)
    # NLLB, M2M100, Blenderbot, SeamlessM4T call a function of their module inside the forward
    shift = getattr(sys.modules.get(type(model).__module__), "shift_tokens_right", None)
    known = {name: getattr(model.config, name, None) for name in ("pad_token_id", "decoder_start_token_id")}
    parameters = list(inspect.signature(shift).parameters)[1:] if callable(shift) else []
    if shift is None or not set(parameters) <= {name for name, value in known.items() if value is not None}:
        raise DPConfigError(
            f"{type(model).__name__} does not say what its decoder reads for given labels (it has no "
            "prepare_decoder_input_ids_from_labels). Let the collator add decoder_input_ids: the labels one place to "
            "the right, behind config.decoder_start_token_id, with the padding token instead of -100."
        )
    return shift(labels_BT, **{name: known[name] for name in parameters})


def _takes_inputs(loss: RecordLoss) -> bool:
    """Whether the third parameter of a function is called `inputs` or has no default."""
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):  # built in
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 2 and (positional[2].name == "inputs" or positional[2].default is inspect.Parameter.empty)


class RecordLosses:
    """Losses of the records of a collated batch, one each, from a run of the model.

    Args:
        model: a transformers model or a PEFT wrapper of one.
        loss: "auto", or a function (outputs, labels) or (outputs, labels, inputs) -> (B,); `inputs` is the collated
            batch, with columns that the model does not read.
        label_smoothing: weight of the uniform distribution in the targets, in [0, 1); applied within each record.
    """

    def __init__(self, model: nn.Module, loss: str | RecordLoss = "auto", *, label_smoothing: float = 0.0):
        if isinstance(loss, str) and loss != "auto":
            raise DPConfigError(
                f"loss={loss!r} is not known. Use 'auto' or a function (outputs, labels[, inputs]) -> (batch,)."
            )
        self.model, self.loss, self.label_smoothing = model, loss, label_smoothing
        self.kind = _loss_type(model) if loss == "auto" else "custom"
        self._takes_inputs = callable(loss) and _takes_inputs(loss)

    @property
    def function(self) -> str:
        """The user's function, for messages; empty if the model's own loss is used."""
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        return f"per_example_loss_func={name}" if self.kind == "custom" else ""

    @contextlib.contextmanager
    def named_first(self) -> Iterator[None]:
        """Name the user's function first when a check of the model fails inside the context."""
        try:
            yield
        except UnsupportedModuleError as error:
            if not self.function:
                raise
            raise UnsupportedModuleError(
                f"{self.function}: the self-check failed with this function. Return one loss per record, of its own "
                f"outputs, labels and inputs: no mean over the batch, and no padding counted. {error}"
            ) from error

    def __call__(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """The losses of the records of `batch`, (B,), float32 or wider, attached to the graph."""
        inputs = {k: v for k, v in batch.items() if k not in LABEL_NAMES}
        labels = self._labels(batch)
        if self.kind in ("ForCausalLM", "ForMaskedLM", "ForTokenClassification"):
            labels = without_padding(labels, batch.get("attention_mask"), shifted=self.kind == "ForCausalLM")
        if self.kind == "ForConditionalGeneration" and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = decoder_inputs(base_model(self.model), labels)
        if self.kind == "ForConditionalGeneration":  # some collators pad labels with the pad token, which is no target
            padding = getattr(base_model(self.model).config, "pad_token_id", None)
            labels = labels if padding is None else labels.masked_fill(labels == padding, IGNORED)
            labels = without_padding(labels, batch.get("decoder_attention_mask"), shifted=False)
        if not callable(self.loss):
            inputs.setdefault("return_dict", True)
        elif self._takes_inputs:
            inputs = {k: v for k, v in inputs.items() if self._reads(k)}
        is_of_rows = self.kind == "custom" and flattening.num_choices(batch) is not None
        with flattening.flattened(self.model) if is_of_rows else contextlib.nullcontext():
            outputs = self.model(**inputs)
        if callable(self.loss):
            return self.loss(outputs, labels, dict(batch)) if self._takes_inputs else self.loss(outputs, labels)
        is_classifier = self.kind == "ForSequenceClassification"
        loss = _BY_PROBLEM[problem_type(self.model, labels)] if is_classifier else _BY_LOSS_TYPE[self.kind]
        return loss(outputs, labels, self.label_smoothing)

    def _reads(self, name: str) -> bool:
        """Whether the model's forward takes an input of the name.

        One that passes `**kwargs` on may read any; those of transformers name what they read, and refuse the others.
        """
        kind = type(base_model(self.model))
        parameters = inspect.signature(kind.forward).parameters
        passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return name in parameters or passes_on and not kind.__module__.startswith("transformers.")

    def _labels(self, batch: Mapping[str, Any]) -> Any:
        if self.kind == "ForQuestionAnswering":
            return {**{name: batch[name] for name in LABEL_NAMES[1:]}, "attention_mask": batch.get("attention_mask")}
        if "labels" not in batch and self.kind != "custom":
            raise DPConfigError(
                f"The batch has no 'labels' (it has: {', '.join(batch)}), so there is no loss to privatise. Name the "
                "label column 'label' or 'labels', or use a data collator that adds it."
            )
        return batch.get("labels")


def num_records(batch: Mapping[str, Any]) -> int:
    """Records of a collated batch: the common first dimension of its tensors.

    Raises:
        DPConfigError: if the tensors disagree, or if the batch is packed (several records in one row).
    """
    if odd := [key for key in batch if not isinstance(key, str)]:
        raise DPConfigError(
            f"The batch has {shown(odd[0])} for a name. Let the data collator return tensors by the names of the "
            "model's inputs (DataCollatorWithPadding does)."
        )
    packed = [k for k in batch if k.startswith(("cu_seq_lens", "cu_seqlens", "max_length_", "seq_idx"))]
    if packed:
        raise DPConfigError(
            f"The batch is packed ({', '.join(packed)}): several records share one row, so they would be clipped as "
            "one. Use a padding collator (DataCollatorWithPadding, DataCollatorForLanguageModeling)."
        )
    sizes = {k: v.size(0) for k, v in batch.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
    if not sizes:
        raise DPConfigError(
            f"The batch has no tensor with a row per record (it has: {', '.join(map(str, batch)) or 'nothing'}). Let "
            "the data collator return tensors by the names of the model's inputs (DataCollatorWithPadding does)."
        )
    if len(set(sizes.values())) != 1:
        raise DPConfigError(
            f"The first dimensions of the batch disagree: {sizes}. Every tensor must have one row per record."
        )
    return next(iter(sizes.values()))
