"""The start-up check sees what training does: its mode, its random draws, its precision, its lengths.

Models are initialised at random, without a seed. Defects move a gradient by 1e-2 and more, rounding in float32 by 1e-6.
"""

from __future__ import annotations

import random

import numpy as np
import peft
import pytest
import torch
import transformers as tf
from torch import nn

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.huggingface.self_check import SelfCheck, check_influence, longest_record, self_check
from hf_dpopt.huggingface.self_check.draws import HIGH, LOW, MIDDLE, RecordDraws
from hf_dpopt.records.losses import RecordLosses
from tests.grads import models
from tests.grads.models import VOCABULARY, batch_for

PAD = 0
BERT = models._ENCODER
DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}


def bert(**changes) -> nn.Module:
    return tf.BertForSequenceClassification(tf.BertConfig(**BERT | changes))


def check(model: nn.Module, like=None, *, engine="auto", losses=None, padding_id=PAD, **options) -> SelfCheck:
    made = make_engine(model, make_clipping("flat", 0.1), engine)
    like = batch_for(model) if like is None else like
    return self_check(made, losses or RecordLosses(model), like, padding_id=padding_id, **options)


class Inserted(nn.Module):
    """A layer, and something after it."""

    def __init__(self, layer: nn.Module, then: nn.Module):
        super().__init__()
        self.layer, self.then = layer, then

    def forward(self, *args, **kwargs):
        return self.then(self.layer(*args, **kwargs))


def with_layer(then: nn.Module, **changes) -> nn.Module:
    model = bert(**changes).train()
    model.bert.encoder.layer[0].intermediate = Inserted(model.bert.encoder.layer[0].intermediate, then)
    return model


# --- the mode that trains --------------------------------------------------------------------------------------------


class MixesInTraining(nn.Module):
    def forward(self, x):
        return x + x.mean(dim=0, keepdim=True) if self.training else x


def test_a_layer_that_mixes_records_in_training_mode_only():
    with pytest.raises(UnsupportedModuleError, match="differs from a loop over single records"):
        check(with_layer(MixesInTraining()))


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_on_and_compared(engine, checkpointing):
    """Each record sees the same masks alone as in the batch, in every forward, backward and repeated forward."""
    model = bert(**DROPOUT).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    like = batch_for(model)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    done = check(model, like, engine=engine, is_scaled=True, has_units=True)
    assert done.relative_error <= 1e-4 and done.influence <= 1e-5
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_two_backwards_that_draw_other_masks_are_found(monkeypatch):
    """A checkpoint that forgets the generators repeats the forward with what the engine restores, or with new masks."""
    model = bert(**DROPOUT).train()
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    check(model, engine="two_pass")
    monkeypatch.setattr("hf_dpopt.clipping.two_pass.framework.restore", lambda state: None)
    with pytest.raises(UnsupportedModuleError, match="differs from a loop"):
        check(model, engine="two_pass")


def test_compiled_parts_are_checked_too():
    """As written for the comparison with single records, compiled for the influence of others."""
    torch._dynamo.reset()
    model = bert(**DROPOUT).train()
    for layer in model.bert.encoder.layer:
        layer.output.compile(backend="aot_eager")
    assert check(model).relative_error <= 1e-4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("name", ["gpt2", "opt", "t5", "albert", "distilbert", "roberta-mlm"])
def test_families_pass_with_their_dropout(name):
    model = models.FAMILIES[name].full()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
        for attribute in ("dropout", "dropout_prob", "attention_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.2)
    assert check(model.train()).relative_error <= 1e-4


# --- draws ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["per record", "jitter", "time first"])
def test_randomness_of_single_records_is_allowed(kind):
    assert check(with_layer(StochasticDepth(kind))).relative_error <= 1e-4


SHARED = ["torch", "bernoulli", "randint", "one jitter", "normal"]
OTHERS = ["python", "python, integers", "numpy", "numpy, normal"]


@pytest.mark.parametrize("kind", SHARED)
def test_a_draw_for_the_whole_batch_is_refused(kind):
    with pytest.raises(
        UnsupportedModuleError, match=r"intermediate\.then \(\w+\) draws random numbers once for the whole"
    ):
        check(with_layer(StochasticDepth(kind)))


@pytest.mark.parametrize("kind", OTHERS)
def test_so_are_draws_of_other_generators(kind):
    with pytest.raises(UnsupportedModuleError, match=r"numpy\.random\) draws random numbers once for the whole"):
        check(with_layer(StochasticDepth(kind)))


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_a_rare_draw_is_found_and_one_that_never_matters_is_not(kind):
    """With a rate of 1e-4 no seed would show it; with 0, transformers tosses all the same."""
    with pytest.raises(UnsupportedModuleError, match="once for the whole batch"):
        check(with_layer(StochasticDepth(kind, rate=1e-4)))
    check(with_layer(StochasticDepth(kind, rate=0.0)))


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng()

    def forward(self, x):
        return x * float(self.rng.random())


def test_a_generator_of_its_own_is_refused():
    with pytest.raises(UnsupportedModuleError, match="Self-check failed"):
        check(with_layer(OwnGenerator()))


BART = models._BART | {"encoder_layers": 2, "decoder_layers": 2}
DECODER = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, ffn_dim=48)


def _bart(rate):
    return tf.BartForConditionalGeneration(tf.BartConfig(**BART, encoder_layerdrop=rate, decoder_layerdrop=rate))


def _opt(rate):
    return tf.OPTForCausalLM(tf.OPTConfig(**DECODER, max_position_embeddings=80, dropout=0.0, layerdrop=rate))


def _whisper(rate):
    config = tf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=8, max_source_positions=10,
        max_target_positions=40, decoder_layerdrop=rate, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    model = tf.WhisperForConditionalGeneration(config)
    for name, p in model.named_parameters():
        p.requires_grad_("layers" in name)
    return model


def _speech() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (2, 6))
    return {"input_features": torch.randn(2, 8, 20), "labels": tokens, "decoder_input_ids": tokens}


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


LAYERDROP = {
    "bart": (_bart, lambda: None, r"model\.(en|de)coder.*config\.(en|de)coder_layerdrop = 0\.0"),
    "opt": (_opt, lambda: None, r"model\.decoder.*config\.layerdrop = 0\.0"),
    "whisper": (_whisper, _speech, r"model\.decoder.*config\.decoder_layerdrop = 0\.0"),
    "wav2vec2": (_wav2vec2, _sound, r"wav2vec2\.encoder.*config\.layerdrop = 0\.0"),
}


@pytest.mark.parametrize("name", LAYERDROP)
def test_layerdrop_is_refused_with_its_option(name):
    make, like, words = LAYERDROP[name]
    padding_id = PAD if name in ("bart", "opt") else None
    with pytest.raises(UnsupportedModuleError, match=words):
        check(make(0.2), like() or batch_for(make(0.0)), padding_id=padding_id)
    check(make(0.0), like() or batch_for(make(0.0)), padding_id=padding_id)


def test_spec_augment_is_refused_with_its_option():
    """Masks drawn by numpy, with one number for the whole batch."""
    with pytest.raises(UnsupportedModuleError, match=r"config\.apply_spec_augment = False"):
        check(_wav2vec2(0.0, apply_spec_augment=True, mask_time_prob=0.5), _sound(), padding_id=None)


def test_dropout_of_a_table_that_records_share_is_refused_by_name():
    """DeBERTa drops out its relative positions once for the batch."""
    model = models.deberta()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    with pytest.raises(UnsupportedModuleError, match=r"pos_dropout.*Set p = 0 there") as caught:
        check(model)
    assert "config." not in str(caught.value)
    for name, module in model.named_modules():
        if name.endswith("pos_dropout"):
            module.p = 0.0
    assert check(model).relative_error <= 1e-4


def test_a_record_draws_alone_what_it_draws_in_a_batch():
    draws = RecordDraws(nn.Module())

    def shapes_of(records):
        drawn(records)
        return draws.shapes()

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

    draws.learn(3, shapes_of([5, 2, 9]), 2, shapes_of([5, 2]))
    together = drawn([5, 2, 9])
    for b, record in enumerate([5, 2, 9]):
        for whole, alone in zip(together, drawn([record]), strict=True):
            rows = len(whole) // 3 if whole.dim() and whole.shape != alone.shape else 0
            assert torch.equal(whole[b * rows : (b + 1) * rows] if rows else whole, alone)
    assert not torch.equal(together[1][0], together[1][1])
    assert {d.operation for d in draws.shared} == {"rand", "randperm"}
    low, high = drawn([5, 2, 9], shared=LOW), drawn([5, 2, 9], shared=HIGH)
    assert low[8] == LOW and high[8] > 0.99 and torch.equal(low[1], together[1])
    assert not torch.equal(drawn([5, 2, 9], shared=3)[8], together[8])
    kept = drawn([5, 2, 9], per_record=MIDDLE)
    assert (kept[0] == 2).all() and (kept[1] == 0.5).all() and (kept[7] == 1).all()


# --- precision --------------------------------------------------------------------------------------------------------


class Int8Activations(nn.Module):
    """Quantises by the largest value of the whole batch, where the run computes in bfloat16."""

    def forward(self, x):
        if x.dtype != torch.bfloat16 and not torch.is_autocast_enabled("cpu"):
            return x
        scale = x.detach().abs().amax() / 127
        return x + ((x / scale).round() * scale - x).detach()


def _quantising() -> nn.Module:
    """One token is twenty times as large as the others, as outliers of trained models are."""
    model = bert().train()
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[7] *= 20
    model.bert.embeddings.LayerNorm = Inserted(Int8Activations(), model.bert.embeddings.LayerNorm)
    return model


def test_activations_quantised_over_the_batch_in_bfloat16():
    with pytest.raises(UnsupportedModuleError, match="another record moves it by .* clipping norms"):
        check(_quantising().bfloat16())
    check(_quantising())  # in float32, it does nothing


def test_a_model_in_bfloat16_is_checked_in_float32_and_given_back_bit_for_bit():
    model = bert(**DROPOUT).bfloat16().train()
    before = {n: (p, p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()}
    done = check(model)
    assert done.relative_error <= 1e-4 and done.influence <= 1e-3 and not done.notes
    for name, p in model.named_parameters():
        same, address, value = before[name]
        assert p is same and p.data_ptr() == address and p.dtype == torch.bfloat16 and torch.equal(p, value)


def test_without_room_for_copies_it_says_so(monkeypatch):
    from hf_dpopt.huggingface.self_check import conditions

    monkeypatch.setattr(conditions, "free_bytes", lambda device: 1000)
    done = check(bert().bfloat16())
    assert len(done.notes) == 1 and "no room for a float32 copy" in done.notes[0]


def _autocast(model: nn.Module) -> nn.Module:
    """As accelerate prepares a model under bf16."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer of this process may have set another precision
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    return accelerator.prepare_model(model, evaluation_mode=True)


def test_autocast_is_off_and_back_afterwards():
    model = _autocast(bert(**DROPOUT).train())
    forward = model.__dict__["forward"]
    assert check(model).relative_error <= 1e-4
    assert model.__dict__["forward"] is forward
    with pytest.raises(UnsupportedModuleError, match="another record moves it by .* clipping norms"):
        check(_autocast(_quantising()))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capacity", [10, 40])
def test_experts_with_a_capacity_of_the_batch(dtype, capacity):
    with pytest.raises(
        UnsupportedModuleError, match="differs from a loop|another record moves it|change with the padding"
    ):
        check(_mixture(capacity).to(dtype), batch_for(bert(), width=32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_take_every_token_pass(dtype):
    check(_mixture(10_000).to(dtype), batch_for(bert(), width=32))


# --- lengths ----------------------------------------------------------------------------------------------------------


class ScalesLongBatches(nn.Module):
    """What rescaled rotary positions do: nothing up to a length, and then something to every record."""

    def forward(self, x):
        return x if x.size(1) <= 40 else x * (40 / x.size(1))


def test_what_depends_on_the_longest_record_is_met():
    make = lambda: with_layer(ScalesLongBatches())  # noqa: E731
    check(make())
    with pytest.raises(UnsupportedModuleError, match="beside one of 60, the longest of the dataset"):
        check(make(), longest=60)
    with pytest.raises(UnsupportedModuleError, match="beside one of 60, the longest of the dataset"):
        check(make(), batch_for(bert(), width=60))
    assert check(bert(**DROPOUT), longest=60).num_tokens == 60


def test_dynamic_positions_are_met_at_the_longest_length():
    rope = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(**models._DECODER | {"max_position_embeddings": 40}, rope_parameters=rope)
    )
    with pytest.raises(UnsupportedModuleError, match="the longest of the dataset"):
        check(model, longest=70)
    assert model.model.rotary_emb.inv_freq is not None


def test_the_longest_record_is_looked_for_where_records_are_stored():
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [1] * n} for n in (3, 70, 5)]
    stored = datasets.Dataset.from_list(rows)
    assert longest_record(rows) == longest_record(stored) == 70 == longest_record(stored.with_format("torch"))
    assert longest_record(stored.select([0, 2])) == 5
    assert longest_record(stored.with_transform(lambda batch: batch)) is None
    assert longest_record(datasets.Dataset.from_dict({"input_ids": [1, 2]})) is None
    assert longest_record([{"pixels": 1}]) is None and longest_record([]) is None


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
    assert check_influence(made, RecordLosses(model), together, alone) <= 1e-4
    pair = {k: v[:2] for k, v in together.items()}
    assert check_influence(made, RecordLosses(model), together, [pair, alone[2]]) <= 1e-4


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
