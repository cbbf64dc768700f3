"""The start-up check passes on what is right, as training does it, and goes red, with a name, on what is not.

Models are initialised at random, without a seed: float32 rounding leaves errors near 1e-6 of the clipped sum against a
tolerance of 1e-4, and every defect below moves it by more than 1e-2.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers as tf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dpopt.clipping import BookKeepingEngine, contributions, make_engine, scaling
from hf_dpopt.clipping.capture import Capture
from hf_dpopt.clipping.rules import linear
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.self_check import Columns, check_influence, longest_record, self_check
from hf_dpopt.self_check.draws import HIGH, LOW, MIDDLE, RecordDraws
from tests.grads import models
from tests.grads.models import MODELS, VOCABULARY, batch_for

MAX_SECONDS = 20.0  # of a machine that does other things; a tenth of a second alone
PAD = 0
BERT = tf.BertConfig(**models._ENCODER)
DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}


def bert(**changes) -> nn.Module:
    return tf.BertForSequenceClassification(tf.BertConfig(**models._ENCODER | changes))


def check(model: nn.Module, like=None, *, loss="auto", clipping="flat", engine="auto", **options) -> tuple[str, ...]:
    made = make_engine(model, make_clipping(clipping, 0.1), engine)
    like = batch_for(model) if like is None else like
    return self_check(made, RecordLosses(model, loss), like, **options)


def _own_forwards(model: nn.Module) -> dict[str, object]:
    """Forwards that somebody set on a module itself, as accelerate and X-LoRA do."""
    return {name: module.__dict__["forward"] for name, module in model.named_modules() if "forward" in module.__dict__}


def state_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, _own_forwards(model)


def assert_untouched(model: nn.Module, before: tuple[dict[str, torch.Tensor], dict[str, object]]) -> None:
    values, forwards = before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert _own_forwards(model) == forwards


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for value in out if isinstance(out, (tuple, list)) else [out]:
            self.elements = max(self.elements, value.numel() if isinstance(value, torch.Tensor) else 0)
        return out


def test_a_long_record_is_checked_without_the_scores_of_all_pairs_of_tokens():
    """Where nothing is drawn, attention runs as in training: a mask for tokens x tokens, but none for each head."""
    tokens, heads = 500, models._ENCODER["num_attention_heads"]
    with _Largest() as largest:
        check(bert(max_position_embeddings=512), _padded(), longest=tokens)
    assert tokens**2 <= largest.elements < heads * tokens**2
    with _Largest() as largest:  # dropout of single scores has to be seen
        check(bert(max_position_embeddings=512, attention_probs_dropout_prob=0.3), _padded(), longest=tokens)
    assert largest.elements >= heads * tokens**2


# --- models -----------------------------------------------------------------------------------------------------------


def _tokens(width: int = 12, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, width))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def _padded() -> dict[str, torch.Tensor]:
    batch = _tokens(labels=torch.tensor([0, 1]))
    batch["input_ids"][1, 8:], batch["attention_mask"][1, 8:] = PAD, 0
    return batch


class MixingForSequenceClassification(tf.BertForSequenceClassification):
    """Every record sees the mean of the batch."""

    strength = 0.1

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits + self.strength * outputs.logits.mean(dim=0, keepdim=True)
        return outputs


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


class Inserted(nn.Module):
    """A layer, and something after it."""

    def __init__(self, layer: nn.Module, then: nn.Module):
        super().__init__()
        self.layer, self.then = layer, then

    def forward(self, *args, **kwargs):
        return self.then(self.layer(*args, **kwargs))


def with_layer(then: nn.Module, **changes) -> nn.Module:
    model = bert(**changes)
    model.bert.encoder.layer[0].intermediate = Inserted(model.bert.encoder.layer[0].intermediate, then)
    return model


class MixesInTraining(nn.Module):
    """Adds the mean over the batch in the middle of the model, and nothing in evaluation."""

    def forward(self, x):
        return x + 0.1 * x.mean(dim=0, keepdim=True) if self.training else x


class StochasticDepth(nn.Module):
    """Drops what it is given, record by record or all at once."""

    def __init__(self, kind: str, rate: float = 0.5):
        super().__init__()
        self.kind, self.rate = kind, rate

    def forward(self, x):
        if not self.training:
            return x
        if self.kind == "per record":
            return x * (torch.rand(x.size(0), 1, 1) > self.rate)
        if self.kind == "jitter":
            return x * torch.empty_like(x).uniform_(1 - self.rate, 1 + self.rate)
        if self.kind == "time first":
            return (x.transpose(0, 1) * torch.bernoulli(torch.full_like(x.transpose(0, 1), 0.5))).transpose(0, 1)
        if self.kind == "one jitter":
            return x * torch.empty(x.shape[1:]).uniform_(1 - self.rate, 1 + self.rate)
        if self.kind == "normal":
            return x + self.rate * torch.randn(x.size(-1))
        draw = {
            "torch": lambda: torch.rand([]),
            "bernoulli": lambda: torch.bernoulli(torch.tensor(0.5)),
            "randint": lambda: torch.randint(0, 2, ()).float(),
            "python": random.random,
            "python, integers": lambda: random.randint(0, 1),
            "numpy": np.random.rand,
            "numpy, normal": lambda: np.random.normal(0.5),
        }[self.kind]
        return x if draw() > self.rate else torch.zeros_like(x)


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng()

    def forward(self, x):
        return x * float(self.rng.random())


BART = models._BART | {"encoder_layers": 2, "decoder_layers": 2}
DECODER = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, ffn_dim=48)


def _bart(rate):
    return tf.BartForConditionalGeneration(tf.BartConfig(**BART, encoder_layerdrop=rate, decoder_layerdrop=rate))


def _opt(rate):
    return tf.OPTForCausalLM(tf.OPTConfig(**DECODER, max_position_embeddings=80, dropout=0.0, layerdrop=rate))


def _wav2vec2(rate, **changes):
    config = tf.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_kernel=(4, 4), conv_stride=(4, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, layerdrop=rate, classifier_proj_size=8, feat_extract_norm="layer",
        do_stable_layer_norm=True, mask_time_length=2, **{"apply_spec_augment": False} | changes,
    )  # fmt: skip
    model = tf.Wav2Vec2ForSequenceClassification(config)
    for name, p in model.named_parameters():
        p.requires_grad_("projector" in name or "classifier" in name)
    return model


def _sound() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 400), "labels": torch.tensor([0, 1])}


class Int8Activations(nn.Module):
    """Quantises by the largest value of the whole batch, where the run computes in bfloat16."""

    def forward(self, x):
        if x.dtype != torch.bfloat16 and not torch.is_autocast_enabled("cpu"):
            return x
        scale = x.detach().abs().amax() / 127
        return x + ((x / scale).round() * scale - x).detach()


def _quantising() -> nn.Module:
    """One token is twenty times as large as the others, as outliers of trained models are."""
    model = bert()
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[7] *= 20
    model.bert.embeddings.LayerNorm = Inserted(Int8Activations(), model.bert.embeddings.LayerNorm)
    return model


def _autocast(model: nn.Module) -> nn.Module:
    """As accelerate prepares a model under bf16."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer of this process may have set another precision
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    return accelerator.prepare_model(model, evaluation_mode=True)


class Experts(nn.Module):
    """Two experts with room for a few tokens each; what does not fit is passed over. Early tokens come first."""

    def __init__(self, width: int, capacity: int):
        super().__init__()
        self.experts, self.gate, self.capacity = (
            nn.ModuleList([nn.Linear(width, width) for _ in range(2)]),
            nn.Linear(width, 2),
            capacity,
        )

    def forward(self, x_BTD):
        x_ND = x_BTD.flatten(0, 1)
        chosen_N = self.gate(x_ND).argmax(dim=1)
        out_ND = torch.zeros_like(x_ND)
        for e, expert in enumerate(self.experts):
            rows = (chosen_N == e).nonzero().squeeze(1)[: self.capacity]
            out_ND = out_ND.index_add(0, rows, expert(x_ND[rows]).to(out_ND.dtype))
        return (x_ND + out_ND).view_as(x_BTD)


def _mixture(capacity: int) -> nn.Module:
    model = with_layer(Experts(48, capacity))
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["query", "value"]))


class ScalesLongBatches(nn.Module):
    """What rescaled rotary positions do: nothing up to a length, and then something to every record."""

    def forward(self, x):
        return x if x.size(1) <= 40 else x * (40 / x.size(1))


class WithLanguageForSequenceClassification(tf.BertForSequenceClassification):
    def forward(self, input_ids, language=None, **kwargs):
        assert language.shape == input_ids.shape[:1] and set(language.tolist()) <= {7}
        return super().forward(input_ids, **kwargs)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, features):
        return self.layer(features)


def _of_logits(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


def _mixing_loss(outputs, labels):
    losses = _of_logits(outputs.logits, labels)
    return losses - losses.detach().mean() * losses


def _with_dropout(name: str) -> nn.Module:
    model = models.FAMILIES[name].full()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
        for attribute in ("dropout", "dropout_prob", "attention_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.2)
    return model


def _deberta(shared: float) -> nn.Module:
    """DeBERTa drops out its relative positions once for the batch."""
    model = models.FAMILIES["deberta-v2"].full()
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.p = shared if name.endswith("pos_dropout") else 0.1
    return model


def _dynamic_positions() -> nn.Module:
    rope = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(**models._DECODER | {"max_position_embeddings": 40}, rope_parameters=rope)
    )


def _fresh_lora(model: nn.Module, *targets: str) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(targets)))


def _fnet() -> nn.Module:
    return tf.FNetForSequenceClassification(
        tf.FNetConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    )


def _xlm() -> nn.Module:
    """Its labels are aligned with its logits, which no name tells; training it shifted would be silent nonsense."""
    model = tf.XLMWithLMHeadModel(tf.XLMConfig(vocab_size=VOCABULARY, emb_dim=16, n_layers=1, n_heads=2, dropout=0.0))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(100)  # a head that is sure of itself: the two losses are far apart
    return model


def _left(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.flip(1) for name, value in batch_for(model).items()}


def _regression() -> nn.Module:
    return bert(num_labels=1)


LAYERDROP = {
    "bart": (_bart, None, r"model\.(en|de)coder.*config\.(en|de)coder_layerdrop = 0\.0"),
    "opt": (_opt, None, r"model\.decoder.*config\.layerdrop = 0\.0"),
    "wav2vec2": (_wav2vec2, _sound, r"wav2vec2\.encoder.*config\.layerdrop = 0\.0"),
}
DTYPES = (torch.float32, torch.bfloat16)
Case = tuple[Callable[[], nn.Module], dict[str, Any]]
# name -> the model and the options of the check; `like` is made of the model
PASSES: dict[str, Case] = {
    **{f"fresh LoRA, {rule}, {one.__name__}": (lambda one=one, t=targets: _fresh_lora(one(), *t), {"clipping": rule})
       for rule in ("flat", "per_layer", "automatic")
       for one, targets in ((models.bert, ["query", "value"]), (models.gpt2, ["c_attn"]), (models.llama, ["q_proj"]))},
    "float64": (lambda: bert().double(), {}),
    "token classification": (lambda: tf.BertForTokenClassification(BERT), {"like": lambda m: _tokens(labels=torch.ones(2, 12).long())}),
    "question answering": (lambda: tf.BertForQuestionAnswering(BERT), {"like": lambda m: _tokens(
        start_positions=torch.tensor([1, 2]), end_positions=torch.tensor([3, 4]))}),
    "regression": (_regression, {"like": lambda m: _tokens(labels=torch.rand(2))}),
    "regression, column of labels": (_regression, {"like": lambda m: _tokens(labels=torch.rand(2, 1))}),
    "several labels, written as integers": (
        lambda: bert(num_labels=3, problem_type="multi_label_classification"), {"like": lambda m: _tokens(labels=torch.ones(2, 3).long())}),
    "more labels than tokens": (lambda: bert(num_labels=40), {"like": lambda m: _tokens(labels=torch.ones(2, 40))}),
    "seq2seq": (models.t5, {"like": lambda m: _tokens(labels=torch.ones(2, 5).long())}),
    "seq2seq with decoder inputs": (models.t5, {"like": lambda m: _tokens(
        labels=torch.ones(2, 5).long(), decoder_input_ids=torch.ones(2, 5).long())}),
    "an unknown column, which is repeated": (lambda: WithLanguageForSequenceClassification(BERT), {"like": lambda m: _tokens(
        labels=torch.tensor([0, 1]), language=torch.tensor([7, 8]))}),
    "no config": (Plain, {"like": lambda m: {"features": torch.randn(2, 6), "labels": torch.tensor([0, 1])}, "loss": _of_logits}),
    "rotary positions, padded on the left": (models.llama, {"like": _left}),
    "absolute positions, padded on the right": (models.gpt2, {}),
    # without a mask, records of unlike lengths share no batch
    "knows no mask": (_fnet, {"like": lambda m: {"input_ids": torch.randint(4, VOCABULARY, (2, 12)), "labels": torch.tensor([0, 1])}}),
    **{f"dropout in {name}": (lambda name=name: _with_dropout(name), {})
       for name in ("gpt2", "opt", "t5", "albert", "distilbert", "roberta-mlm")},
    **{f"draws {kind}": (lambda kind=kind: with_layer(StochasticDepth(kind)), {}) for kind in ("per record", "jitter", "time first")},
    **{f"a draw of {kind} that never matters": (lambda kind=kind: with_layer(StochasticDepth(kind, rate=0.0)), {})
       for kind in ("torch", "python", "numpy")},  # transformers tosses all the same
    **{f"layerdrop 0 in {name}": (lambda make=make: make(0.0), {"like": like and (lambda m, like=like: like())})
       for name, (make, like, _) in LAYERDROP.items()},
    "dropout of DeBERTa, without that of positions": (lambda: _deberta(0.0), {}),
    "nothing quantised in float32": (lambda: _quantising(), {}),
    **{f"experts that take every token, {dtype}": (lambda dtype=dtype: _mixture(10_000).to(dtype), {"like": lambda m: batch_for(bert(), width=32)})
       for dtype in DTYPES},
    "nothing rescaled in short batches": (lambda: with_layer(ScalesLongBatches()), {}),
    "a long record": (lambda: bert(**DROPOUT), {"longest": 60}),
}  # fmt: skip
DIFFERS = r"differs from a loop over single records\. Worst tensor: [\w.]+, relative error"
PADDING = r"change with the padding.*Worst tensor: [\w.]+, relative error"
MOVED = "another record moves it by .* clipping norms"
LONGEST = "change with the padding to 60 tokens"
ONE_DRAW = "draws random numbers once for the whole"
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    **{f"{what} mixed, {rule}": (make, {"clipping": rule}, DIFFERS + ".*Freeze that layer, train with LoRA")
       for what, make in (("logits", lambda: MixingForSequenceClassification(BERT)), ("hidden states", lambda: with_layer(MixesInTraining())))
       for rule in ("flat", "per_layer", "automatic")},
    # compared in float32, so that weak mixing is seen, too: the tolerance of bfloat16 is 500 times wider
    "logits mixed in bfloat16": (lambda: MixingForSequenceClassification(BERT).bfloat16(), {}, DIFFERS),
    "logits mixed under a fresh LoRA": (lambda: _fresh_lora(MixingForSequenceClassification(BERT), "query"), {}, DIFFERS),
    "a loss that mixes records": (bert, {"loss": _mixing_loss}, DIFFERS),
    "a loss of the whole batch": (
        bert, {"loss": lambda o, y: nn.functional.cross_entropy(o.logits, y)}, "shape .*return the per-record losses"),
    "attends to padding": (lambda: BlindForSequenceClassification(BERT), {}, PADDING + ".*Pass attention_mask"),
    # GPT-2 counts positions from the first column, padded or not
    "absolute positions, padded on the left": (models.gpt2, {"like": _left}, PADDING),
    "buffers that change": (
        lambda: CountingForSequenceClassification(BERT), {}, r"changes buffers \(num_seen\).*Replace these layers"),
    "a packed batch": (
        bert, {"like": lambda m: _tokens(labels=torch.tensor([0, 1]), cu_seq_lens_q=torch.tensor([0, 12, 24]))}, "packed.*padding collator"),
    "another loss of the head's own": (
        _xlm, {}, "XLMWithLMHeadModel computes another loss.*Pass per_example_loss_func=f"),
    **{f"a draw of {kind} for the batch": (
        lambda kind=kind: with_layer(StochasticDepth(kind)), {}, rf"intermediate\.then \(\w+\) {ONE_DRAW}")
       for kind in ("torch", "bernoulli", "randint", "one jitter", "normal")},
    **{f"a draw of {kind} for the batch": (lambda kind=kind: with_layer(StochasticDepth(kind)), {}, rf"numpy\.random\) {ONE_DRAW}")
       for kind in ("python", "python, integers", "numpy", "numpy, normal")},
    # with a rate of 1e-4 no seed would show it
    **{f"a rare draw of {kind}": (lambda kind=kind: with_layer(StochasticDepth(kind, rate=1e-4)), {}, ONE_DRAW)
       for kind in ("torch", "python", "numpy")},
    "a generator of its own": (lambda: with_layer(OwnGenerator()), {}, "Self-check failed"),
    **{f"layerdrop in {name}": (
        lambda make=make: make(0.2), {"like": like and (lambda m, like=like: like())}, words)
       for name, (make, like, words) in LAYERDROP.items()},
    "masks drawn by numpy for the batch": (
        lambda: _wav2vec2(0.0, apply_spec_augment=True, mask_time_prob=0.5), {"like": lambda m: _sound()},
        r"config\.apply_spec_augment = False"),
    "dropout of a table that records share": (lambda: _deberta(0.1), {}, r"^(?!.*config\.).*pos_dropout.*Set p = 0 there"),
    "quantised over the batch in bfloat16": (lambda: _quantising().bfloat16(), {}, MOVED),
    "quantised over the batch under autocast": (lambda: _autocast(_quantising()), {}, MOVED),
    **{f"experts with room for {room} tokens of the batch, {dtype}": (
        lambda room=room, dtype=dtype: _mixture(room).to(dtype), {"like": lambda m: batch_for(bert(), width=32)},
        "differs from a loop|another record moves it|change with the padding")
       for room in (10, 40) for dtype in DTYPES},
    "rescaled beside the longest record": (lambda: with_layer(ScalesLongBatches()), {"longest": 60}, LONGEST),
    "rescaled in a long batch": (lambda: with_layer(ScalesLongBatches()), {"like": lambda m: batch_for(bert(), width=60)}, LONGEST),
    "dynamic positions": (_dynamic_positions, {"longest": 70}, "change with the padding to 70 tokens"),
}  # fmt: skip


def _checked(make: Callable[[], nn.Module], like=None, **options) -> tuple[str, ...]:
    """The check of a model that trains; whatever it says, the model is left as it was."""
    model = make().train()
    before = state_of(model)
    try:
        return check(model, None if like is None else like(model), **options)
    finally:
        assert model.training
        assert_untouched(model, before)


@pytest.mark.slow_but(28)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_passes_and_it_is_cheap(name):
    is_scaled = name in ("bert", "gpt2", "t5", "llama")
    begin = time.perf_counter()
    _checked(MODELS[name], is_scaled=is_scaled)
    assert time.perf_counter() - begin < MAX_SECONDS


@pytest.mark.parametrize("name", PASSES)
def test_what_is_right_passes(name):
    make, options = PASSES[name]
    assert _checked(make, **options) == ()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_is_refused_by_name(name):
    make, options, words = REFUSED[name]
    with pytest.raises((UnsupportedModuleError, DPConfigError), match=words):
        _checked(make, **options)


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


def test_the_longest_record_is_looked_for_where_records_are_stored():
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [1] * n} for n in (3, 70, 5)]
    stored = datasets.Dataset.from_list(rows)
    assert longest_record(rows) == longest_record(stored) == 70 == longest_record(stored.with_format("torch"))
    assert longest_record(stored.select([0, 2])) == 5
    assert longest_record(stored.with_transform(lambda batch: batch)) is None
    assert longest_record(datasets.Dataset.from_dict({"input_ids": [1, 2]})) is None
    assert longest_record([{"pixels": 1}]) is None and longest_record([]) is None
    choices = [{"input_ids": [[1] * n, [1] * 2]} for n in (3, 9)]
    stored = datasets.Dataset.from_list(choices)
    large = datasets.Features({"input_ids": datasets.LargeList(datasets.LargeList(datasets.Value("int64")))})
    assert longest_record(choices) == longest_record(stored) == longest_record(stored.cast(large)) == 9


# --- an engine that is wrong -----------------------------------------------------------------------------------------


def _scaled(contribution: contributions.Contribution) -> contributions.Contribution:
    """A tenth too much: what a wrong factor (the batch size, the scale of an adapter) does, or less."""
    field = "left_BTP" if isinstance(contribution, contributions.Outer) else "grad_B"
    return dataclasses.replace(contribution, **{field: getattr(contribution, field) * 1.1})


def _break_linear(monkeypatch) -> None:
    right = linear.matmul_contribution
    monkeypatch.setattr(linear, "matmul_contribution", lambda left, x: _scaled(right(left, x)))


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


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_broken_engine(defect, monkeypatch):
    break_it, tensor = DEFECTS[defect]
    model = models.bert()
    break_it(monkeypatch)
    with pytest.raises(UnsupportedModuleError, match=rf"differs from a loop.*Worst tensor: {tensor}, relative error"):
        check(model)


@pytest.mark.parametrize("part", ["Divided", "Factored"])
def test_a_wrong_norm_of_scaled_gradients_is_found(part, monkeypatch):
    if part == "Divided":
        monkeypatch.setattr(scaling.Divided, "squares", lambda self, grams=None: (torch.ones(3), torch.ones(3)))
    else:
        monkeypatch.setattr(scaling.Factored, "of", lambda self, uses: list(uses))
    model = MODELS["bert"]().train()
    check(model)
    with pytest.raises(UnsupportedModuleError, match="preconditioned gradients differs"):
        check(model, is_scaled=True)


# --- the mode, the draws and the precision of training ---------------------------------------------------------------


def test_a_frozen_part_stays_in_evaluation_mode():
    """As in a step, which puts the rest of the model into training mode."""
    model = bert(**DROPOUT).train()
    model.bert.pooler.eval()
    check(model)
    assert model.training and model.classifier.training and not model.bert.pooler.training


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_on_and_compared(engine, checkpointing):
    """Each record sees the same masks alone as in the batch, in every forward, backward and repeated forward."""
    model = bert(**DROPOUT).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    like = batch_for(model)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert check(model, like, engine=engine, is_scaled=True, has_units=True) == ()
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_two_backwards_that_draw_other_masks_are_found(monkeypatch):
    """A checkpoint that forgets the generators repeats the forward with what the engine restores, or with new masks."""
    model = bert(**DROPOUT).train()
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    check(model, engine="two_pass")
    monkeypatch.setattr("hf_dpopt.clipping.two_pass.snapshot", lambda device: lambda: None)
    with pytest.raises(UnsupportedModuleError, match="differs from a loop"):
        check(model, engine="two_pass")


def test_compiled_parts_are_checked_too():
    """As written for the comparison with single records, compiled for the influence of others."""
    torch._dynamo.reset()
    model = bert(**DROPOUT).train()
    for layer in model.bert.encoder.layer:
        layer.output.compile(backend="aot_eager")
    check(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_a_record_draws_alone_what_it_draws_in_a_batch():
    draws = RecordDraws(nn.Module())

    def shapes_of(records):
        drawn(records)
        return draws.shapes

    def drawn(records, **how):
        draws.start(records, **how)
        num = len(records)
        x = torch.ones(num, 4, 5)
        with draws:
            return [
                nn.functional.dropout(x, 0.5), torch.rand(num, 3), torch.randn_like(x), torch.randint(0, 99, (num, 7)),
                torch.empty(2 * num, 3).exponential_(), torch.multinomial(torch.ones(num, 6), 2),
                torch.bernoulli(x / 2), torch.empty(num, 3).normal_(1.0, 2.0), torch.rand([]), torch.rand(9),
                torch.randperm(11), torch.empty(num, 5).random_(), nn.functional.dropout1d(x, 0.5),
                torch.normal(x, 2 * x), torch.empty(4, num, 5).uniform_(2, 3).transpose(0, 1),
            ]  # fmt: skip

    draws.learn(shapes_of([5, 2, 9]), 3, shapes_of([5]))
    together = drawn([5, 2, 9])
    for b, record in enumerate([5, 2, 9]):
        for whole, alone in zip(together, drawn([record]), strict=True):
            rows = len(whole) // 3 if whole.dim() and whole.shape != alone.shape else 0
            assert torch.equal(whole[b * rows : (b + 1) * rows] if rows else whole, alone)
    assert not torch.equal(together[1][0], together[1][1])
    assert draws.shared.keys() == {""}  # of torch.rand([]), torch.rand(9) and torch.randperm(11): no module draws them
    low, high = drawn([5, 2, 9], shared=LOW), drawn([5, 2, 9], shared=HIGH)
    assert low[8] == LOW and high[8] > 0.99 and torch.equal(low[1], together[1])
    assert not torch.equal(drawn([5, 2, 9], shared=3)[8], together[8])
    kept = drawn([5, 2, 9], per_record=MIDDLE)
    assert (kept[0] == 2).all() and (kept[1] == 0.5).all() and (kept[7] == 1).all()


def test_a_model_in_bfloat16_is_checked_in_float32_and_given_back_bit_for_bit():
    model = bert(**DROPOUT).bfloat16().train()
    before = {n: (p, p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()}
    assert check(model) == ()
    for name, p in model.named_parameters():
        same, address, value = before[name]
        assert p is same and p.data_ptr() == address and p.dtype == torch.bfloat16 and torch.equal(p, value)


def test_without_room_for_copies_it_says_so(monkeypatch):
    monkeypatch.setattr("hf_dpopt.self_check.conditions.free_bytes", lambda device: 1000)
    (note,) = check(bert().bfloat16())
    assert "no room for a float32 copy" in note


def test_autocast_is_off_and_back_afterwards():
    model = _autocast(bert(**DROPOUT).train())
    forward = model.__dict__["forward"]
    check(model)
    assert model.__dict__["forward"] is forward


# --- records of the dataset -------------------------------------------------------------------------------------------


def _three() -> tuple[dict, list[dict]]:
    together = batch_for(bert(), lengths=[12, 5, 3])
    alone = [
        {k: v[b : b + 1, :n] if v.dim() > 1 else v[b : b + 1] for k, v in together.items()}
        for b, n in enumerate([12, 5, 3])
    ]
    return together, alone


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
def test_records_of_the_dataset_are_compared_with_themselves_alone(engine):
    model = bert(**DROPOUT)
    made = make_engine(model, make_clipping("flat", 0.1), engine)
    together, alone = _three()
    check_influence(made, RecordLosses(model), together, alone)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda batch: batch | {"labels": 1 - batch["labels"]},
        lambda batch: batch | {"attention_mask": torch.ones_like(batch["attention_mask"])},
        lambda batch: batch | {"input_ids": batch["input_ids"].roll(1, 0)},
    ],
    ids=["labels", "mask", "rows"],
)
def test_a_collator_that_does_something_else_to_a_batch_is_found(spoil):
    model = bert()
    made = make_engine(model, make_clipping("flat", 0.1))
    together, alone = _three()
    with pytest.raises(
        UnsupportedModuleError, match="not the sum of what each gives alone.*collator or the model mixes"
    ):
        check_influence(made, RecordLosses(model), spoil(together), alone)
