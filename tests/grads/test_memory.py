"""What a clipped sum keeps, in bytes of tensors, beside the non-private step."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.scaling import Diagonal, Factored, Scale
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.self_check import self_check
from tests.grads.memory import peak_bytes

VOCABULARY = 50_257


def gpt2(num_tokens, finetuning="full"):
    config = tf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=num_tokens, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = tf.GPT2LMHeadModel(config)
    if finetuning == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    return model.train()


def step_of(model, batch, engine):
    losses, num_records = RecordLosses(model), len(batch["input_ids"])

    def private():
        clipped = engine.empty_sum()
        engine.add_clipped_sum(clipped, lambda: losses(batch), num_records)
        clipped.result()

    return private


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("num_tokens", [32, 96])  # norms of the head by Gram matrices, and materialised
@pytest.mark.parametrize("finetuning", ["full", "lora"])
@pytest.mark.parametrize("name", ["book_keeping", "two_pass"])
def test_a_tied_head_of_50257_tokens_takes_less_than_the_stock_loss(name, finetuning, num_tokens):
    model = gpt2(num_tokens, finetuning)
    ids = torch.randint(VOCABULARY, (4, num_tokens))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    stock = peak_bytes(lambda: model(**batch).loss.backward())
    model.zero_grad()
    private = peak_bytes(step_of(model, batch, make_engine(model, make_clipping("flat", 0.1), name)))
    logits = ids.numel() * VOCABULARY * 4
    assert stock > 3 * logits, "the counter misses the tensors of the stock loss"
    assert private < 0.85 * stock
    if finetuning == "lora":
        assert private < 2 * logits


@pytest.mark.parametrize("is_scaled", [False, True])
def test_the_self_check_makes_no_copies_of_the_gradients_of_its_records(is_scaled):
    """There are three records; beside them two tensors of the size of the weights, and a scale of records if there is one."""
    config = tf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = tf.BertForSequenceClassification(config).train()
    ids = torch.randint(5, VOCABULARY, (2, 8))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1])}
    engine, size = make_engine(model, make_clipping("flat", 0.1)), 4 * sum(p.numel() for p in model.parameters())
    peak = peak_bytes(lambda: self_check(engine, RecordLosses(model), batch, is_scaled=is_scaled))
    assert peak < (6.2 if is_scaled else 5.2) * size


def test_no_tensor_grows_with_records_times_parameters():
    """Eight records instead of two may cost eight times two records' activations, not eight more gradients."""
    model = gpt2(8)
    engine = make_engine(model, make_clipping("flat", 0.1))
    peaks = []
    for num_records in (2, 8):
        ids = torch.randint(VOCABULARY, (num_records, 8))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        peaks.append(peak_bytes(step_of(model, batch, engine)))
    gradient = VOCABULARY * 64 * 4
    logits = 8 * VOCABULARY * 4
    assert peaks[1] - peaks[0] < 6 * (2 * logits) < 6 * gradient


@pytest.mark.parametrize("kind", ["full", "factored"])
@pytest.mark.parametrize("name", ["book_keeping", "two_pass"])
def test_preconditioned_norms_form_one_gradient_at_a_time(name, kind):
    """Beside an ordinary clipped sum: a full diagonal forms a gradient of one layer and record, and its product."""
    model = gpt2(16)
    engine = make_engine(model, make_clipping("flat", 0.1), name)
    parts = {}
    for parameter, p in engine.parameters.items():
        if kind == "factored" and p.dim() > 1:
            parts[parameter] = Factored(torch.ones(p.shape[0]), torch.ones(p.shape[1]))
        else:
            parts[parameter] = Diagonal(torch.ones(p.shape))
    ids = torch.randint(VOCABULARY, (8, 16))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    losses = RecordLosses(model)

    def step(scale):
        clipped = engine.empty_sum(scale)
        engine.add_clipped_sum(clipped, lambda: losses(batch), 8)
        clipped.result()

    step(None)  # the two-pass engine learns what is tied
    plain, scaled = peak_bytes(lambda: step(None)), peak_bytes(lambda: step(Scale(parts)))
    largest = max(p.numel() for p in engine.parameters.values()) * 4
    logits = ids.numel() * VOCABULARY * 4
    assert scaled - plain <= (4 * largest if kind == "full" else 2 * logits), (plain, scaled, largest)
