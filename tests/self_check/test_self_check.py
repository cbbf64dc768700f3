"""The start-up check passes on what is right, as training does it, and goes red, with a name, on what is not.

Models are initialised at random, without a seed: float32 rounding leaves errors near 1e-6 of the clipped sum against a
tolerance of 1e-4, and every defect below moves it by more than 1e-2.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable

import numpy as np
import peft
import pytest
import torch
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
from tests.grads.models import MODELS, batch_for
from tests.self_check.cases import DROPOUT, PAD, PASSES, REFUSED, bert, padded_batch, token_batch, under_autocast

MAX_SECONDS = 20.0  # of a machine that does other things; a tenth of a second alone


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
        check(bert(max_position_embeddings=512), padded_batch(), longest=tokens)
    assert tokens**2 <= largest.elements < heads * tokens**2
    with _Largest() as largest:  # dropout of single scores has to be seen
        check(bert(max_position_embeddings=512, attention_probs_dropout_prob=0.3), padded_batch(), longest=tokens)
    assert largest.elements >= heads * tokens**2


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
    like = token_batch(width=40, labels=torch.full((2,), 1))
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
    model = under_autocast(bert(**DROPOUT).train())
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
