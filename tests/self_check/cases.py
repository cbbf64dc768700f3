"""Models that the start-up check has to pass, and models that it has to refuse, with what it says of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import torch
import transformers as tf
from torch import nn

from tests.grads import models
from tests.grads.models import VOCABULARY, batch_for

PAD = 0
BERT = tf.BertConfig(**models._ENCODER)
DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}


def bert(**changes) -> nn.Module:
    return tf.BertForSequenceClassification(tf.BertConfig(**models._ENCODER | changes))


def token_batch(width: int = 12, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, width))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def padded_batch() -> dict[str, torch.Tensor]:
    batch = token_batch(labels=torch.tensor([0, 1]))
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


def quantising() -> nn.Module:
    """One token is twenty times as large as the others, as outliers of trained models are."""
    model = bert()
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[7] *= 20
    model.bert.embeddings.LayerNorm = Inserted(Int8Activations(), model.bert.embeddings.LayerNorm)
    return model


def under_autocast(model: nn.Module) -> nn.Module:
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
    "token classification": (lambda: tf.BertForTokenClassification(BERT), {"like": lambda m: token_batch(labels=torch.ones(2, 12).long())}),
    "question answering": (lambda: tf.BertForQuestionAnswering(BERT), {"like": lambda m: token_batch(
        start_positions=torch.tensor([1, 2]), end_positions=torch.tensor([3, 4]))}),
    "regression": (_regression, {"like": lambda m: token_batch(labels=torch.rand(2))}),
    "regression, column of labels": (_regression, {"like": lambda m: token_batch(labels=torch.rand(2, 1))}),
    "several labels, written as integers": (
        lambda: bert(num_labels=3, problem_type="multi_label_classification"), {"like": lambda m: token_batch(labels=torch.ones(2, 3).long())}),
    "more labels than tokens": (lambda: bert(num_labels=40), {"like": lambda m: token_batch(labels=torch.ones(2, 40))}),
    "seq2seq": (models.t5, {"like": lambda m: token_batch(labels=torch.ones(2, 5).long())}),
    "seq2seq with decoder inputs": (models.t5, {"like": lambda m: token_batch(
        labels=torch.ones(2, 5).long(), decoder_input_ids=torch.ones(2, 5).long())}),
    "an unknown column, which is repeated": (lambda: WithLanguageForSequenceClassification(BERT), {"like": lambda m: token_batch(
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
    "nothing quantised in float32": (lambda: quantising(), {}),
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
        bert, {"like": lambda m: token_batch(labels=torch.tensor([0, 1]), cu_seq_lens_q=torch.tensor([0, 12, 24]))}, "packed.*padding collator"),
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
    "quantised over the batch in bfloat16": (lambda: quantising().bfloat16(), {}, MOVED),
    "quantised over the batch under autocast": (lambda: under_autocast(quantising()), {}, MOVED),
    **{f"experts with room for {room} tokens of the batch, {dtype}": (
        lambda room=room, dtype=dtype: _mixture(room).to(dtype), {"like": lambda m: batch_for(bert(), width=32)},
        "differs from a loop|another record moves it|change with the padding")
       for room in (10, 40) for dtype in DTYPES},
    "rescaled beside the longest record": (lambda: with_layer(ScalesLongBatches()), {"longest": 60}, LONGEST),
    "rescaled in a long batch": (lambda: with_layer(ScalesLongBatches()), {"like": lambda m: batch_for(bert(), width=60)}, LONGEST),
    "dynamic positions": (_dynamic_positions, {"longest": 70}, "change with the padding to 70 tokens"),
}  # fmt: skip
