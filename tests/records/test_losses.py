"""Per-record losses: each equals transformers' own loss of that record alone, whatever the others are.

The reference is always the model itself, run on one record without padding, with labels, in its own words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.records.losses import IGNORED, RecordLosses, num_records, token_mean
from tests.helpers import tiny

NUM_LABELS, LONG = 5, 300
_LONG = {"max_position_embeddings": 320}
_LENGTHS: dict[type, dict[str, int]] = {tf.T5ForConditionalGeneration: {}, tf.GPT2LMHeadModel: {"n_positions": 320}}
LENGTHS = [6, 3, 5, 1, 2]

Records = list[dict[str, torch.Tensor]]


def _sharp(model: nn.Module) -> nn.Module:
    """Far from uniform predictions, so that two losses that should differ do."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.mul_(50 if name.startswith(("classifier", "qa_outputs")) else 5)
    return model.eval()


def _made(cls: type, **config: Any) -> Callable[[], nn.Module]:
    return lambda: _sharp(tiny.made(cls, **_LENGTHS.get(cls, _LONG) | config))


_gpt2 = _made(tf.GPT2LMHeadModel)
_t5 = _made(tf.T5ForConditionalGeneration)


def _llava() -> nn.Module:
    """A decoder-only language model behind a picture encoder, whose class is named ForConditionalGeneration."""
    vision = tf.CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4
    )
    text = tiny.made(tf.LlamaForCausalLM, **_LONG).config
    return _sharp(tf.LlavaForConditionalGeneration(tf.LlavaConfig(text_config=text, vision_config=vision)))


def _lora() -> nn.Module:
    return peft.get_peft_model(_gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))


def _ids(length: int) -> torch.Tensor:
    return torch.randint(3, tiny.VOCABULARY, (length,))


def _class(length: int) -> dict[str, torch.Tensor]:
    return {"labels": torch.randint(0, NUM_LABELS, ())}


def _classes(length: int) -> dict[str, torch.Tensor]:
    return {"labels": torch.randint(0, 2, (NUM_LABELS,)).float()}


def _number(length: int) -> dict[str, torch.Tensor]:
    return {"labels": torch.randn(())}


def _numbers(length: int) -> dict[str, torch.Tensor]:
    return {"labels": torch.randn(NUM_LABELS)}


def _token_classes(length: int) -> dict[str, torch.Tensor]:
    return {"labels": torch.randint(0, NUM_LABELS, (length,))}


def _masked(length: int) -> dict[str, torch.Tensor]:
    """Some tokens are targets, one at least."""
    labels = _ids(length).masked_fill(torch.rand(length) < 0.6, IGNORED)
    labels[length // 2] = 7
    return {"labels": labels}


def _next(length: int) -> dict[str, torch.Tensor]:
    """A prompt that does not count, then targets: one at least, unless the text is a single token."""
    labels = _ids(length)
    labels[: length // 3] = IGNORED
    return {"labels": labels}


def _target(length: int) -> dict[str, torch.Tensor]:
    return {"labels": _ids(1 + int(torch.randint(0, 9, ())))}


def _span(length: int) -> dict[str, torch.Tensor]:
    start, end = torch.randint(0, length, (2,))
    return {"start_positions": start, "end_positions": end}


HEADS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, torch.Tensor]]]] = {
    "single label": (_made(tf.BertForSequenceClassification, num_labels=NUM_LABELS), _class),
    "several labels": (_made(tf.BertForSequenceClassification, num_labels=NUM_LABELS), _classes),
    "regression": (_made(tf.BertForSequenceClassification, num_labels=1), _number),
    "several regressions": (
        _made(tf.BertForSequenceClassification, num_labels=NUM_LABELS, problem_type="regression"),
        _numbers,
    ),
    "token classification": (_made(tf.BertForTokenClassification, num_labels=NUM_LABELS), _token_classes),
    "masked LM": (_made(tf.BertForMaskedLM), _masked),
    "causal LM": (_gpt2, _next),
    "causal LM, rotary": (_made(tf.LlamaForCausalLM), _next),
    "causal LM, named LMHeadModel": (_made(tf.BertLMHeadModel, is_decoder=True), _next),
    "causal LM behind pictures": (_llava, _next),
    "LoRA": (_lora, _next),
    "seq2seq T5": (_t5, _target),
    "seq2seq BART": (_made(tf.BartForConditionalGeneration), _target),
    "question answering": (_made(tf.BertForQuestionAnswering), _span),
}
TOKEN_HEADS = [name for name, (_, target) in HEADS.items() if target in (_token_classes, _masked, _next, _target)]


def _records(target: Callable[[int], dict[str, torch.Tensor]], lengths: list[int]) -> Records:
    return [{"input_ids": _ids(n), "attention_mask": torch.ones(n).long(), **target(n)} for n in lengths]


def _case(head: str) -> tuple[nn.Module, Callable[[int], dict[str, torch.Tensor]], Records]:
    make, target = HEADS[head]
    return make(), target, _records(target, LENGTHS)


def _collate(records: Records, *, side: str = "right", labels_fill: int = IGNORED) -> dict[str, torch.Tensor]:
    """As a padding collator does it: every column to the length of its longest."""
    batch: dict[str, torch.Tensor] = {}
    for name in records[0]:
        fill = labels_fill if name == "labels" else 0
        values = [r[name] for r in records]
        width = max((v.size(0) for v in values if v.dim()), default=0)
        pads = [(width - v.size(0), 0) if side == "left" else (0, width - v.size(0)) for v in values if v.dim()]
        if values[0].dim():
            values = [nn.functional.pad(v, pad, value=fill) for v, pad in zip(values, pads, strict=True)]
        batch[name] = torch.stack(values)
    return batch


def _has_target(record: dict[str, torch.Tensor], head: str) -> bool:
    labels = record.get("labels")
    if labels is None or labels.is_floating_point() or labels.dim() == 0:
        return True
    return bool((labels[1:] if HEADS[head][1] is _next else labels).ne(IGNORED).any())


def _alone(model: nn.Module, record: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**{name: value[None] for name, value in record.items()}).loss


def _want(model: nn.Module, records: Records, head: str) -> torch.Tensor:
    zero = torch.zeros(())
    return torch.stack([_alone(model, r) if _has_target(r, head) else zero for r in records]).float()


@pytest.mark.parametrize("head", HEADS)
def test_each_loss_is_the_models_own_of_that_record_alone(head):
    model, _, records = _case(head)
    got = RecordLosses(model)(_collate(records))
    assert got.shape == (len(records),) and got.requires_grad
    torch.testing.assert_close(got, _want(model, records, head), rtol=1e-5, atol=1e-6)
    assert got.detach().std() > 1e-3  # the records differ: a mean over the batch could not pass


@pytest.mark.parametrize("head", HEADS)
def test_a_long_record_in_the_batch_changes_no_other_loss(head):
    model, target, records = _case(head)
    losses = RecordLosses(model)
    want = losses(_collate(records)).detach()
    joined = losses(_collate([*records, *_records(target, [LONG])])).detach()
    torch.testing.assert_close(joined[:-1], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", ["causal LM, rotary", "causal LM behind pictures"])
def test_padding_on_the_left_changes_nothing_either(head):
    """The first token of a padded record would otherwise be predicted from padding: a target more."""
    model, _, records = _case(head)
    got = RecordLosses(model)(_collate(records, side="left"))
    torch.testing.assert_close(got, _want(model, records, head), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", ["masked LM", "causal LM", "token classification"])
def test_labels_at_padding_do_not_count(head):
    """Collators that copy the input ids make targets of padding, as many as the longest record has more tokens."""
    model, _, records = _case(head)
    got = RecordLosses(model)(_collate(records, labels_fill=0))
    torch.testing.assert_close(got, _want(model, records, head), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", TOKEN_HEADS)
def test_a_record_without_targets_has_loss_and_gradient_exactly_zero(head):
    model, _, records = _case(head)
    records[2]["labels"].fill_(IGNORED)
    losses = RecordLosses(model)(_collate(records))
    assert losses[2] == 0
    grads = torch.autograd.grad(losses[2], [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    assert all(g is None or not g.any() for g in grads)  # NaN counts as any
    assert losses[0] > 0


def test_a_classified_record_without_label_has_loss_zero():
    model = HEADS["single label"][0]()
    records = _records(_class, LENGTHS)
    records[1]["labels"].fill_(IGNORED)
    losses = RecordLosses(model)(_collate(records))
    assert losses[1] == 0 and losses[0] > 0


@pytest.mark.parametrize("beyond", [0, 1, 100])
@pytest.mark.parametrize("record", [0, 1], ids=["the longest", "a padded one"])
def test_an_answer_outside_the_text_is_no_target(record, beyond):
    """Truncation leaves such records; with one that is padded, transformers would take the padding for the answer."""
    model = HEADS["question answering"][0]()
    records = _records(_span, LENGTHS)
    for name in ("start_positions", "end_positions"):
        records[record][name] = torch.tensor(LENGTHS[record] + beyond)
    losses = RecordLosses(model)(_collate(records))
    assert losses[record] == 0 and losses[2] > 0 and losses.isfinite().all()
    assert all(not g.any() for g in torch.autograd.grad(losses[record], list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("head", ["single label", "token classification", "masked LM", "causal LM", "seq2seq T5"])
@pytest.mark.parametrize("smoothing", [0.1, 0.7])
def test_label_smoothing_is_the_trainers_within_one_record(head, smoothing):
    model, target, records = _case(head)
    smoother = LabelSmoother(epsilon=smoothing)
    want = []
    for r in records:
        inputs = {name: value[None] for name, value in r.items() if name != "labels"}
        if target is _target:
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(r["labels"][None])
        value = smoother(model(**inputs), r["labels"][None], shift_labels=target is _next)
        want.append(value if _has_target(r, head) else torch.zeros(()))
    got = RecordLosses(model, label_smoothing=smoothing)(_collate(records))
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-5, atol=1e-6)
    assert (got - _want(model, records, head)).abs().max() > 1e-3  # it does something


@pytest.mark.parametrize("head", ["several labels", "regression", "question answering"])
def test_label_smoothing_leaves_the_other_heads_alone(head):
    """As in the Trainer, whose smoother is off for them."""
    model, _, records = _case(head)
    got = RecordLosses(model, label_smoothing=0.3)(_collate(records))
    torch.testing.assert_close(got, _want(model, records, head), rtol=1e-5, atol=1e-6)


def test_decoder_inputs_of_the_collator_are_used():
    model, records = _t5(), _records(_target, LENGTHS)
    batch = _collate(records)
    made = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    want = RecordLosses(model)(batch)
    torch.testing.assert_close(RecordLosses(model)({**batch, "decoder_input_ids": made}), want)
    other = RecordLosses(model)({**batch, "decoder_input_ids": made.flip(1)})
    assert not torch.allclose(other, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_losses_are_never_narrower_than_float32(dtype):
    model, records = _gpt2().to(dtype), _records(_next, LENGTHS)
    losses = RecordLosses(model)(_collate(records))
    assert losses.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny.made(tf.BertForNextSentencePrediction),
        lambda: tiny.made(tf.BertModel),
        lambda: tiny.made(tf.BertForPreTraining),
        lambda: nn.Linear(2, 2),
    ],
)
def test_an_unknown_head_is_refused(make):
    model = make()
    with pytest.raises(
        DPConfigError, match=f"for {type(model).__name__}.*Pass per_example_loss_func=f with f.outputs"
    ):
        RecordLosses(model)
    RecordLosses(model, lambda outputs, labels: outputs)  # and the mend works


def test_an_unknown_name_is_refused():
    with pytest.raises(DPConfigError, match="loss='mean'.*Use 'auto' or a function"):
        RecordLosses(_gpt2(), "mean")


def test_a_batch_without_labels_is_refused():
    with pytest.raises(DPConfigError, match=r"no 'labels' \(it has: input_ids, target\).*Name the label column"):
        RecordLosses(_gpt2())({"input_ids": torch.ones(2, 3).long(), "target": torch.ones(2)})


# --- how many records ------------------------------------------------------------------------------------------------


def test_records_are_rows():
    batch = _collate(_records(_next, LENGTHS))
    assert num_records(batch) == len(LENGTHS)
    assert num_records({**batch, "temperature": torch.tensor(1.0), "names": ["a"]}) == len(LENGTHS)
    assert num_records(tf.BatchEncoding(batch)) == len(LENGTHS)


@pytest.mark.parametrize("key", ["cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "max_length_q", "seq_idx"])
def test_a_packed_batch_is_refused(key):
    batch = {"input_ids": torch.ones(1, 9).long(), key: torch.tensor([0, 4, 9])}
    with pytest.raises(DPConfigError, match=f"packed .{key}.*Use a padding collator"):
        num_records(batch)


def test_disagreeing_first_dimensions_are_refused():
    with pytest.raises(DPConfigError, match="disagree.*'input_ids': 3, 'labels': 2.*one row per record"):
        num_records({"input_ids": torch.ones(3, 4), "labels": torch.ones(2)})
    with pytest.raises(DPConfigError, match="no tensor with a row per record .it has: texts"):
        num_records({"texts": ["no", "tensor"]})


def test_seq2seq_labels_padded_with_the_padding_token_are_no_targets():
    """Collators with label_pad_token_id=pad: one long record would dilute the loss of the short ones (3.6 C measured)."""
    model = tiny.made(tf.T5ForConditionalGeneration)
    ids = torch.randint(3, 40, (2, 6))
    ignored = torch.tensor([[5, 6, 7, -100, -100], [8, 9, 4, 5, 6]])
    padded = ignored.masked_fill(ignored == -100, 0)
    losses = RecordLosses(model)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    want, got = losses({**batch, "labels": ignored}), losses({**batch, "labels": padded})
    torch.testing.assert_close(got, want)


# --- logits that become their gradient ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_in_place_of_the_logits_is_that_of_the_plain_formula(dtype):
    hidden = torch.randn(3, 5, 8, dtype=dtype, requires_grad=True)
    head = torch.randn(11, 8, dtype=dtype)
    labels = torch.randint(0, 11, (3, 5))
    labels[0, 2:], labels[1] = -100, -100
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=dtype if dtype != torch.bfloat16 else torch.float32)

    def gradient(logits: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        losses = token_mean(logits, labels)
        once = torch.autograd.grad((losses * weights).sum(), hidden, retain_graph=True)[0]
        again = torch.autograd.grad((losses * weights).sum(), hidden)[0]
        assert torch.equal(once, again)  # two-pass clipping runs the backward twice
        return [losses, once]

    for scale in (torch.ones_like(weights), weights):
        plain = gradient(torch.nn.functional.linear(hidden, head).clone(), scale)
        in_place = gradient(torch.nn.functional.linear(hidden, head), scale)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
        for got, want in zip(in_place, plain, strict=True):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("extreme", [-3e38, -1e30, -1e5, 1e5, 1e30, 3e38])
def test_extreme_logits_keep_their_digits(extreme):
    """At the target and beside it: what is subtracted must not be larger than what is left."""
    values = torch.randn(2, 3, 9)
    values[0, 1, 4] = values[1, 0, 2] = extreme
    labels = torch.tensor([[4, 4, 4], [1, 2, 3]])
    plain = values.clone().requires_grad_()
    want = torch.autograd.grad(token_mean(plain, labels).sum(), plain)[0]
    leaf = values.clone().requires_grad_()
    got = torch.autograd.grad(token_mean(torch.nn.functional.linear(leaf, torch.eye(9)), labels).sum(), leaf)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_two_losses_on_the_same_logits_are_refused():
    logits = torch.nn.functional.linear(torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4))
    targets = torch.randint(0, 5, (2, 3))
    with pytest.raises(DPConfigError, match="two losses read them"):
        (token_mean(logits, targets) + token_mean(logits, targets)).sum().backward()


def test_logits_that_their_own_backward_reads_are_left_alone():
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    logits = torch.tanh(hidden)
    before = logits.detach().clone()
    token_mean(logits, torch.randint(0, 4, (2, 3))).sum().backward()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num_labels", [4, 8])
def test_labels_of_another_length_are_refused(num_labels):
    logits = F.linear(torch.randn(3, 6, 5), torch.randn(10, 5, requires_grad=True))
    with pytest.raises(DPConfigError, match="one label per token"):
        token_mean(logits, torch.zeros(3, num_labels, dtype=torch.long))


def test_a_second_backward_with_other_weights():
    weight = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    x, labels = torch.randn(3, 6, 5, dtype=torch.float64), torch.randint(0, 10, (3, 6))
    plain = F.cross_entropy((x @ weight.T).flatten(0, 1), labels.flatten(), reduction="none").view(3, 6).mean(1)
    in_place = token_mean(F.linear(x, weight).mul(1.0), labels)
    for weights in ([1.0, 0.0, 1.0], [2.0, 0.0, 0.5]):
        (want,) = torch.autograd.grad((plain * torch.tensor(weights)).sum(), weight, retain_graph=True)
        (got,) = torch.autograd.grad((in_place * torch.tensor(weights)).sum(), weight, retain_graph=True)
        torch.testing.assert_close(got, want)
    with pytest.raises(DPConfigError, match="weight 0 in the first"):
        torch.autograd.grad(in_place.sum(), weight)


class _PassesOn(tf.BertForSequenceClassification):
    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        others.pop("weight", None)
        return super().forward(input_ids=input_ids, **others)


def test_a_forward_that_passes_inputs_on_gets_all_of_them():
    def by_record(outputs: Any, labels: torch.Tensor, inputs: Any) -> torch.Tensor:
        return F.cross_entropy(outputs.logits, labels, reduction="none") * inputs["weight"]

    model = _sharp(tiny.made(_PassesOn, num_labels=NUM_LABELS, **_LONG))
    records = [one | {"weight": torch.tensor(2.0)} for one in _records(_class, LENGTHS)]
    found = RecordLosses(model, by_record)(_collate(records))
    alone = [RecordLosses(model, by_record)(_collate([record])) for record in records]
    assert torch.allclose(found, torch.cat(alone), atol=1e-5)
