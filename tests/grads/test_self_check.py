"""The start-up check passes on what is right and goes red, with a name, on what is not.

Models are initialised at random, without a seed: float32 rounding leaves errors near 1e-6 of the clipped sum against a
tolerance of 1e-4, and every defect below moves it by more than 1e-2.
"""

from __future__ import annotations

import dataclasses

import peft
import pytest
import torch
import transformers as tf
from torch import nn

from hf_dpopt.clipping import BookKeepingEngine, contributions, make_engine
from hf_dpopt.clipping.capture import Capture
from hf_dpopt.clipping.rules import embedding, linear, norms
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.huggingface.self_check import Columns, SelfCheck, self_check
from hf_dpopt.records.losses import RecordLosses
from tests.grads import models
from tests.grads.models import MODELS, VOCABULARY, batch_for

MAX_SECONDS = 20.0  # of a machine that does other things; a tenth of a second alone
PAD = 0
BERT = tf.BertConfig(**models._ENCODER)


def check(model: nn.Module, like=None, *, loss="auto", padding_id=PAD, clipping="flat", **options) -> SelfCheck:
    engine = make_engine(model, make_clipping(clipping, 0.1))
    like = batch_for(model) if like is None else like
    return self_check(engine, RecordLosses(model, loss), like, padding_id=padding_id, **options)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_untouched(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in m.__dict__ and not hasattr(m, "_original_forward") for m in model.modules())


# --- what is right passes --------------------------------------------------------------------------------------------


@pytest.mark.slow_but(28)
@pytest.mark.parametrize("name", MODELS)
def test_passes_and_is_cheap(name):
    model = MODELS[name]().train()
    before = state_of(model)
    done = check(model, padding_id=model.config.pad_token_id)
    assert done.relative_error <= 1e-4 and 0 < done.seconds < MAX_SECONDS
    assert model.training
    assert_untouched(model, before)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize(
    "make, targets", [(models.bert, ["query", "value"]), (models.gpt2, ["c_attn"]), (models.llama, ["q_proj"])]
)
def test_fresh_lora_is_checked_and_left_at_zero(make, targets, clipping):
    model = peft.get_peft_model(make(), peft.LoraConfig(r=4, target_modules=targets))
    before = state_of(model)
    assert any("lora_B" in name and not value.any() for name, value in before.items())
    assert check(model, clipping=clipping).relative_error <= 1e-4
    assert_untouched(model, before)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 5e-2), (torch.float64, 1e-9)])
def test_other_precisions_pass(dtype, tolerance):
    assert check(models.bert().to(dtype)).relative_error <= tolerance


def test_every_module_trains_meanwhile_and_is_put_back():
    """As in a step, which puts all of the model into training mode; tests/grads/test_self_check_training.py has more."""
    config = tf.BertConfig(**models._ENCODER | {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5})
    model = tf.BertForSequenceClassification(config).train()
    model.bert.pooler.eval()  # a frozen part that somebody put into evaluation mode stays there
    assert check(model).relative_error <= 1e-4
    assert model.training and model.classifier.training and not model.bert.pooler.training


def _t5() -> nn.Module:
    return tf.T5ForConditionalGeneration(
        tf.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )  # fmt: skip


def _tokens(width: int = 12, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, width))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


HEADS = {
    "token classification": (
        lambda: tf.BertForTokenClassification(BERT),
        lambda: {"labels": torch.ones(2, 12).long()},
    ),
    "question answering": (
        lambda: tf.BertForQuestionAnswering(BERT),
        lambda: {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
    ),
    "regression": (
        lambda: tf.BertForSequenceClassification(tf.BertConfig(**models._ENCODER, num_labels=1)),
        lambda: {"labels": torch.rand(2)},
    ),
    "regression, column of labels": (
        lambda: tf.BertForSequenceClassification(tf.BertConfig(**models._ENCODER, num_labels=1)),
        lambda: {"labels": torch.rand(2, 1)},
    ),
    "more labels than tokens": (
        lambda: tf.BertForSequenceClassification(tf.BertConfig(**models._ENCODER, num_labels=40)),
        lambda: {"labels": torch.ones(2, 40)},
    ),
    "seq2seq": (_t5, lambda: {"labels": torch.ones(2, 5).long()}),
    "seq2seq with decoder inputs": (
        _t5,
        lambda: {"labels": torch.ones(2, 5).long(), "decoder_input_ids": torch.ones(2, 5).long()},
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_every_head_passes(head):
    make, labels = HEADS[head]
    assert check(make(), _tokens(**labels())).relative_error <= 1e-4


def test_columns_it_does_not_know_are_repeated():
    class WithLanguageForSequenceClassification(tf.BertForSequenceClassification):
        def forward(self, input_ids, language=None, **kwargs):
            assert language.shape == input_ids.shape[:1] and set(language.tolist()) <= {7}
            return super().forward(input_ids, **kwargs)

    like = _tokens(labels=torch.tensor([0, 1]), language=torch.tensor([7, 8]))
    assert check(WithLanguageForSequenceClassification(BERT), like).relative_error <= 1e-4


def test_a_module_without_config_passes_with_a_loss_of_its_own():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, features):
            return self.layer(features)

    def loss(outputs, labels):
        return nn.functional.cross_entropy(outputs, labels, reduction="none")

    like = {"features": torch.randn(2, 6), "labels": torch.tensor([0, 1])}
    assert check(Plain(), like, loss=loss, padding_id=None).relative_error <= 1e-4


def test_made_up_records_hold_nothing_of_the_data():
    like = _tokens(width=40, labels=torch.full((2,), 1))
    like["input_ids"].fill_(59)
    batch = Columns(like, PAD, "right").batch(models.bert())
    assert batch.keys() == like.keys() and all(batch[k].dtype == like[k].dtype for k in like)
    assert (batch["input_ids"] == 59).float().mean() < 0.5  # by chance one in 60
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    assert len(set(lengths)) == len(lengths) == 3  # uneven lengths, so that padding is there to leak
    assert torch.equal(batch["input_ids"] == PAD, batch["attention_mask"] == 0)
    left = Columns(like, PAD, "left").batch(models.bert())
    assert torch.equal(left["attention_mask"], batch["attention_mask"].flip(1))


# --- what is not goes red --------------------------------------------------------------------------------------------


class MixingForSequenceClassification(tf.BertForSequenceClassification):
    """Every record sees the mean of the batch."""

    strength = 0.1

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits + self.strength * outputs.logits.mean(dim=0, keepdim=True)
        return outputs


class MixingHiddenStates(nn.Module):
    """A parameter-free layer in the middle that adds the mean over the batch."""

    def forward(self, x):
        return x + 0.1 * x.mean(dim=0, keepdim=True)


class BlindForSequenceClassification(tf.BertForSequenceClassification):
    """Attends to padding."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        return super().forward(input_ids, **kwargs)


class CountingForSequenceClassification(tf.BertForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, input_ids, **kwargs):
        if self.training:
            self.num_seen += input_ids.size(0)
        return super().forward(input_ids, **kwargs)


DIFFERS = r"differs from a loop over single records\. Worst tensor: [\w.]+, relative error"
PADDING = r"change with the padding.*Worst tensor: [\w.]+, relative error"


def _mixing_inside() -> nn.Module:
    model = models.bert()
    model.bert.encoder.layer[0].output = nn.Sequential()  # replaced below; keeps the block's other parts
    output = models.bert().bert.encoder.layer[0].output

    class Output(nn.Module):
        def __init__(self):
            super().__init__()
            self.output, self.mix = output, MixingHiddenStates()

        def forward(self, hidden, residual):
            return self.mix(self.output(hidden, residual))

    model.bert.encoder.layer[0].output = Output()
    return model


@pytest.mark.parametrize(
    "make", [lambda: MixingForSequenceClassification(BERT), _mixing_inside], ids=["logits", "hidden states"]
)
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_a_model_that_mixes_records(make, clipping):
    model = make().train()
    before = state_of(model)
    with pytest.raises(UnsupportedModuleError, match=DIFFERS + ".*Freeze that layer, train with LoRA"):
        check(model, clipping=clipping)
    assert model.training
    assert_untouched(model, before)


def test_a_mixing_model_in_bfloat16():
    """Compared in float32, so that weak mixing is seen, too: the tolerance of bfloat16 is 500 times wider."""
    model = MixingForSequenceClassification(BERT)
    with pytest.raises(UnsupportedModuleError, match=DIFFERS):
        check(model.bfloat16())


def test_a_mixing_model_under_a_fresh_lora_is_left_as_it_was():
    model = peft.get_peft_model(MixingForSequenceClassification(BERT), peft.LoraConfig(r=4, target_modules=["query"]))
    before = state_of(model)
    with pytest.raises(UnsupportedModuleError, match=DIFFERS):
        check(model)
    assert_untouched(model, before)


def test_a_loss_that_mixes_records():
    def loss(outputs, labels):
        losses = nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        return losses - losses.detach().mean() * losses

    with pytest.raises(UnsupportedModuleError, match=DIFFERS):
        check(models.bert(), loss=loss)


def test_a_loss_of_the_whole_batch():
    with pytest.raises(UnsupportedModuleError, match="shape .*return the per-record losses"):
        check(models.bert(), loss=lambda outputs, labels: nn.functional.cross_entropy(outputs.logits, labels))


def test_a_model_that_attends_to_padding():
    with pytest.raises(UnsupportedModuleError, match=PADDING + ".*Pass attention_mask"):
        check(BlindForSequenceClassification(BERT))


def test_a_model_that_attends_to_padding_without_a_tokenizer():
    """A collator of the user's own pads just as well: the mask in its batches tells."""
    with pytest.raises(UnsupportedModuleError, match=PADDING):
        check(BlindForSequenceClassification(BERT), padding_id=None)


def test_a_model_that_knows_no_mask():
    model = tf.FNetForSequenceClassification(
        tf.FNetConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    )
    like = {"input_ids": torch.randint(4, VOCABULARY, (2, 12)), "labels": torch.tensor([0, 1])}
    with pytest.raises(UnsupportedModuleError, match=PADDING + ".*knows no mask needs records of one length"):
        check(model, like, padding_id=3)


@pytest.mark.parametrize("told", [True, False], ids=["side given", "side seen in the mask"])
def test_padding_on_the_left_shifts_absolute_positions(told):
    """GPT-2 counts positions from the first column, padded or not; rotary positions (Llama) are relative."""
    for make, refused in ((models.llama, False), (models.gpt2, True)):
        model = make()
        like = batch_for(model)
        if not told:
            like = {name: value.flip(1) for name, value in like.items()}
        if not refused:
            check(model, like, padding_side="left" if told else None)
            continue
        with pytest.raises(UnsupportedModuleError, match=PADDING):
            check(model, like, padding_side="left" if told else None)
        check(model, like, padding_side="right")


def test_buffers_that_change():
    model = CountingForSequenceClassification(BERT).train()
    before = state_of(model)
    with pytest.raises(UnsupportedModuleError, match=r"changes buffers \(num_seen\).*Replace these layers"):
        check(model)
    assert_untouched(model, before)


def test_a_packed_batch():
    like = _tokens(labels=torch.tensor([0, 1]), cu_seq_lens_q=torch.tensor([0, 12, 24]))
    with pytest.raises(DPConfigError, match="packed.*padding collator"):
        check(models.bert(), like)


def test_a_head_whose_own_loss_is_another_one():
    """XLM's labels are aligned with its logits, which no name tells; training it shifted would be silent nonsense."""
    model = tf.XLMWithLMHeadModel(tf.XLMConfig(vocab_size=VOCABULARY, emb_dim=16, n_layers=1, n_heads=2, dropout=0.0))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(100)  # a head that is sure of itself: the two losses are far apart
    with pytest.raises(DPConfigError, match="XLMWithLMHeadModel computes another loss.*Pass per_example_loss_func=f"):
        check(model, padding_id=model.config.pad_token_id)


# --- an engine that is wrong -----------------------------------------------------------------------------------------


def _scaled(contribution: contributions.Contribution) -> contributions.Contribution:
    """A tenth too much: what a wrong factor (the batch size, the scale of an adapter) does, or less."""
    field = "left_BTP" if isinstance(contribution, contributions.Outer) else "grad_B"
    return dataclasses.replace(contribution, **{field: getattr(contribution, field) * 1.1})


def _break_linear(monkeypatch) -> None:
    right = linear.matmul_contribution
    monkeypatch.setattr(linear, "matmul_contribution", lambda left, x: _scaled(right(left, x)))


def _break_layer_norm(monkeypatch) -> None:
    monkeypatch.setattr(norms, "Dense", lambda grad: contributions.Dense(grad * 1.1))


def _break_embedding(monkeypatch) -> None:
    class Shifted(contributions.Rows):
        def add_weighted_sum_(self, total, factors_B, **kwargs):
            contributions.Rows(self.ids_BT.roll(1, dims=1), self.grad_BTD, self.num_rows).add_weighted_sum_(
                total, factors_B, **kwargs
            )

    monkeypatch.setattr(embedding, "Rows", Shifted)


def _break_norms(monkeypatch) -> None:
    """Sums are right and norms are not: the bug that no clip bounds anything. It shows only where something clips."""
    right = contributions.Dense.squares
    monkeypatch.setattr(contributions.Dense, "squares", lambda self, grams=None: [0.5 * x for x in right(self)])


def _forget_a_tensor(monkeypatch) -> None:
    right = BookKeepingEngine._add_weighted_sums

    def without_the_classifier(self, sums, uses, packs, factors, keep_B):
        uses.pop("classifier.weight")
        right(self, sums, uses, packs, factors, keep_B)

    monkeypatch.setattr(BookKeepingEngine, "_add_weighted_sums", without_the_classifier)


DEFECTS = {
    "linear": (_break_linear, r"[\w.]*weight"),
    "layer norm": (_break_layer_norm, r"[\w.]*LayerNorm[\w.]*"),
    "embedding": (_break_embedding, r"bert\.embeddings\.[\w.]*weight"),
    "norms": (_break_norms, r"[\w.]+"),
    "a tensor left out": (_forget_a_tensor, r"classifier\.weight"),
}


def test_a_fresh_lora_hides_nothing(monkeypatch):
    """While B is 0, the gradient of A is 0 as well, and would match any wrong one."""
    right = Capture.add

    def add(self, site, name, contribution):
        right(self, site, name, _scaled(contribution) if "lora_A" in name else contribution)

    monkeypatch.setattr(Capture, "add", add)
    model = peft.get_peft_model(models.bert(), peft.LoraConfig(r=4, target_modules=["query"]))
    before = state_of(model)
    with pytest.raises(
        UnsupportedModuleError, match=r"differs from a loop.*Worst tensor: [\w.]*lora_A[\w.]*, relative"
    ):
        check(model)
    assert_untouched(model, before)


@pytest.mark.parametrize("clipping_norm", [1e-3, 0.1, 1e3], ids=["all clipped", "some", "none clipped"])
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_broken_engine(defect, clipping_norm, monkeypatch):
    break_it, tensor = DEFECTS[defect]
    model = models.bert()
    break_it(monkeypatch)
    engine = make_engine(model, make_clipping("flat", clipping_norm))
    with pytest.raises(UnsupportedModuleError, match=rf"differs from a loop.*Worst tensor: {tensor}, relative error"):
        self_check(engine, RecordLosses(model), batch_for(model), padding_id=PAD)


# --- preconditioned gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama"])
def test_scaled_gradients_pass(name):
    model = MODELS[name]().train()
    before = state_of(model)
    assert check(model, padding_id=model.config.pad_token_id, is_scaled=True).relative_error <= 1e-4
    assert_untouched(model, before)


@pytest.mark.parametrize("part", ["Divided", "Factored"])
def test_a_wrong_norm_of_scaled_gradients_is_found(part, monkeypatch):
    from hf_dpopt.clipping import scaling

    if part == "Divided":
        monkeypatch.setattr(scaling.Divided, "squares", lambda self, grams=None: (torch.ones(3), torch.ones(3)))
    else:
        monkeypatch.setattr(scaling.Factored, "of", lambda self, uses: list(uses))
    model = MODELS["bert"]().train()
    check(model)
    with pytest.raises(UnsupportedModuleError, match="preconditioned gradients differs"):
        check(model, is_scaled=True)
