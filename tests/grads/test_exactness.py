"""D1, D2, D3 of the correctness suite on the engine: exact, invariant, bounded. No fixed seed: these hold for any draw."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_dpopt import clipped_gradient_sum
from hf_dpopt.clipping import ENGINES, make_engine
from hf_dpopt.clipping.contributions import Outer
from hf_dpopt.clipping.scaling import Diagonal, Factored, Scale
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.clipping.units import Units
from hf_dpopt.records.losses import RecordLosses
from tests.adversary.scan import table as scan
from tests.grads.models import ADAPTERS_RUN_WHOLE, MODELS, NUM_RECORDS, batch_for
from tests.grads.support_table import TABLE, support_table
from tests.reference import clipping as reference


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to clip.

    Attributes:
        scale: kind of the preconditioner, see `_scale`; empty for none.
        sizes: rows of each user; none where records are the unit.
    """

    clipping: str = "flat"
    engine: str = "auto"
    dtype: torch.dtype = torch.float64
    scale: str = ""
    sizes: tuple[int, ...] = ()

    def sum(self, model, batch, norm, scale=None, weights_B=1.0, sizes=None):
        """The clipped sum, and what the engine saw."""
        made, losses = make_engine(model, make_clipping(self.clipping, norm), self.engine), RecordLosses(model)
        sums = made.empty_sum(scale)
        units = [Units(self.sizes if sizes is None else sizes)] if self.sizes else []
        seen = made.add_clipped_sum(sums, lambda: losses(batch) * weights_B, len(batch["input_ids"]), *units)
        return sums.result(), seen


USERS = (2, 1, 2)
VARIANTS = {
    **{rule: Variant(rule) for rule in ("flat", "per_layer", "automatic")},
    **{f"{rule}, float32": Variant(rule, dtype=torch.float32) for rule in ("flat", "per_layer", "automatic")},
    "two passes": Variant(engine="two_pass"),
    **{f"{kind} scale, {e}": Variant(engine=e, scale=kind) for kind in ("diagonal", "factored", "mixed") for e in ENGINES},
    "mixed scale, per layer": Variant("per_layer", scale="mixed"),
    **{f"users, {e}": Variant(engine=e, sizes=USERS) for e in ENGINES},
    "users of as many rows": Variant(sizes=(1,) * NUM_RECORDS),
    "one user, per layer": Variant("per_layer", sizes=(NUM_RECORDS,)),
    **{f"users, mixed scale, {e}": Variant(engine=e, sizes=USERS, scale="mixed") for e in ENGINES},
}  # fmt: skip
SUBTLE = {name: one for name, one in VARIANTS.items() if one.scale or one.sizes}


def _positive(*shape: int) -> torch.Tensor:
    """Over six orders of magnitude, as second moments are."""
    return 10.0 ** (6 * torch.rand(*shape, dtype=torch.float64) - 3)


def _scale(model, variant: Variant, factor: float = 0.5) -> tuple[Scale | None, dict[str, torch.Tensor] | None]:
    """A scale, and the D it stands for in the shape of each parameter; a mixed one leaves every third as it is."""
    if not variant.scale:
        return None, None
    parts, divisors = {}, {}
    for i, (name, p) in enumerate((name, p) for name, p in model.named_parameters() if p.requires_grad):
        kind = ("diagonal", "factored", "none")[i % 3] if variant.scale == "mixed" else variant.scale
        divisors[name] = torch.ones(p.shape, dtype=torch.float64)
        if kind == "factored" and p.dim() > 1:
            rows, columns = _positive(p.shape[0]), _positive(p[0].numel())
            parts[name] = Factored((1 / rows).to(variant.dtype), (1 / columns).to(variant.dtype))
            divisors[name] = torch.outer(rows, columns).view(p.shape)
        elif kind != "none":
            divisors[name] = _positive(*p.shape)
            parts[name] = Diagonal((1 / divisors[name]).to(variant.dtype))
    return Scale(parts, factor), {name: d / factor for name, d in divisors.items()}


def _median_norm(model, batch, **units) -> float:
    """Half of the units are clipped, half are not."""
    norms = sorted(reference.norm(g).item() for g in reference.unit_gradients(model, batch, **units))
    return norms[len(norms) // 2]


@pytest.mark.slow_but(230)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MODELS)
def test_clipped_sum_equals_a_loop_over_units(name, variant):
    _compare_with_a_loop(MODELS[name](), VARIANTS[variant])


@pytest.mark.slow_but(20)
@pytest.mark.parametrize("variant", ["flat", *(f"users, mixed scale, {engine}" for engine in ENGINES)])
@pytest.mark.parametrize("name", ADAPTERS_RUN_WHOLE)
def test_an_adapter_run_whole_equals_a_loop_over_units(name, variant):
    _compare_with_a_loop(ADAPTERS_RUN_WHOLE[name].make(), VARIANTS[variant])


def _compare_with_a_loop(model, of: Variant) -> None:
    model = model.to(of.dtype)
    for layer in model.modules():
        if isinstance(vars(layer).get("dtype"), torch.dtype):  # AdaMSS computes in the dtype that it was made in
            layer.dtype = of.dtype
    batch, (scale, divisors) = batch_for(model), _scale(model, of)
    # powers of 2: some norms round to float32 on their way back, and the loop multiplies behind them
    weights_B = (
        2.0 ** -torch.arange(NUM_RECORDS, dtype=of.dtype) if of.sizes else torch.ones(NUM_RECORDS, dtype=of.dtype)
    )
    units = {"divisors": divisors, "sizes": of.sizes, "weights_B": weights_B}
    norm = _median_norm(model, batch, **units)
    want = reference.clipped_sum(model, batch, norm, of.clipping, **units)
    got, _ = of.sum(model, batch, norm, scale, weights_B)
    # automatic clipping divides by the norm of every record, however small: 3e-6 in the middle, once 1.4e-5
    rounding = 5e-5 if of.clipping == "automatic" else 1e-5
    assert reference.relative_error(got, want) <= (1e-10 if of.dtype == torch.float64 else rounding)


@pytest.mark.slow_but(12)
@pytest.mark.parametrize("variant", SUBTLE)
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_one_unit_more_moves_the_sum_by_the_clipping_norm_at_most(name, variant):
    """Leave-one-out of users and in preconditioned coordinates, in float32, with a clip that every unit meets."""
    of = dataclasses.replace(VARIANTS[variant], dtype=torch.float32, clipping="flat")
    model = MODELS[name]()
    batch, (scale, divisors) = batch_for(model), _scale(model, of)
    norms = [
        reference.norm(g).item() for g in reference.unit_gradients(model, batch, divisors=divisors, sizes=of.sizes)
    ]
    norm, first = 0.1 * min(norms), 0
    whole, _ = of.sum(model, batch, norm, scale)
    for u, size in enumerate(of.sizes or (1,) * NUM_RECORDS):
        rest = {k: torch.cat([v[:first], v[first + size :]]) for k, v in batch.items()}
        sizes = of.sizes[:u] + of.sizes[u + 1 :]
        if len(rest["labels"]):
            less, _ = of.sum(model, rest, norm, scale, sizes=sizes)
            moved = reference.norm({n: whole[n].double() - g.double() for n, g in less.items()}).item()
            assert 0.9 * norm < moved <= norm * (1 + (1e-4 if of.scale else 1e-5))
        first += size


@pytest.mark.parametrize("variant", SUBTLE)
def test_a_unit_whose_loss_is_not_finite_adds_nothing_and_is_counted(variant):
    of, model = VARIANTS[variant], MODELS["bert"]().double()
    batch, (scale, divisors) = batch_for(model), _scale(model, of)
    weights_B = torch.ones(NUM_RECORDS, dtype=torch.float64)
    norm = _median_norm(model, batch, divisors=divisors, sizes=of.sizes)
    weights_B[1] = float("nan")
    got, seen = of.sum(model, batch, norm, scale, weights_B)
    assert (seen.num_records, seen.num_dropped) == (len(of.sizes) or NUM_RECORDS, 1)
    if len(of.sizes) == 1:
        assert not any(total.any() for total in got.values())
        return
    want = reference.clipped_sum(
        model, batch, norm, of.clipping, divisors=divisors, sizes=of.sizes, weights_B=weights_B
    )
    assert reference.relative_error(got, want) <= 1e-10


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_user_summed_in_parts_is_clipped_as_one(name, clipping):
    of, model = Variant(clipping, sizes=(NUM_RECORDS,)), MODELS[name]().double()
    batch = batch_for(model)
    (user,) = reference.unit_gradients(model, batch, sizes=of.sizes)
    norm = 0.3 * reference.norm(user).item()
    engine = make_engine(model, make_clipping(clipping, norm))
    for factor, num_dropped in ((1.0, 0), (float("nan"), 1)):
        sums = engine.empty_sum()
        seen = engine.add_clipped(sums, {n: factor * g.unsqueeze(0) for n, g in user.items()})
        assert (seen.num_records, seen.num_clipped, seen.num_dropped) == (1, 1 - num_dropped, num_dropped)
        if num_dropped:
            assert not any(total.any() for total in sums.result().values())
        else:
            assert reference.relative_error(sums.result(), of.sum(model, batch, norm)[0]) <= 1e-10


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("finetuning", ["full", "lora"])
def test_a_real_pretrained_encoder_is_exact(minilm_path, finetuning, dtype):
    """The encoder of docs/results.md, its own tokenizer and real sentences, in evaluation mode (no dropout)."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_path)
    model = AutoModelForSequenceClassification.from_pretrained(minilm_path, num_labels=2)
    if finetuning == "lora":
        targets = ["query", "key", "value", "dense"]
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8, target_modules=targets))
        for name, p in model.named_parameters():  # a fresh B is 0, and A would get no gradient
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.02)
    model.to(dtype).eval()
    texts = ["a gorgeous, witty, seductive movie .", "dull", "it 's a charming and often affecting journey", "no ."]
    batch = {**tokenizer(texts, padding=True, return_tensors="pt"), "labels": torch.tensor([1, 0, 1, 0])}
    norm = _median_norm(model, batch)
    got = clipped_gradient_sum(model, batch, clipping_norm=norm)
    want = reference.clipped_sum(model, batch, norm)
    assert reference.relative_error(got, want) <= (1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta-lora", "gpt2", "llama", "t5", "gemma", "dora", "ia3"])
def test_bfloat16_autocast_stays_near_its_own_loop(name):
    model = MODELS[name]()
    batch = batch_for(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        norm = _median_norm(model, batch)
        want = reference.clipped_sum(model, batch, norm)
        got = clipped_gradient_sum(model, batch, clipping_norm=norm)
    assert all(g.dtype == torch.float32 for g in got.values())
    assert reference.relative_error(got, want) <= 2e-2


@pytest.mark.parametrize("name", ["bert", "roberta-mlm", "gpt2", "albert", "t5", "deberta-v2", "opt", "prompt"])
def test_sum_does_not_depend_on_padding_order_or_physical_batch(name):
    model = MODELS[name]().double()
    batch = batch_for(model)
    norm = _median_norm(model, batch)
    whole = clipped_gradient_sum(model, batch, clipping_norm=norm)
    order = torch.randperm(5)
    parts = [order[:1], order[1:3], order[3:]]
    total = None
    for part in parts:
        piece = clipped_gradient_sum(model, {k: v[part] for k, v in batch.items()}, clipping_norm=norm)
        total = piece if total is None else {n: total[n] + piece[n] for n in total}
    assert reference.relative_error(total, whole) < 1e-10
    pad = {"input_ids": model.config.pad_token_id or 0, "attention_mask": 0, "labels": -100}
    padded = {
        k: torch.nn.functional.pad(v, (0, 9), value=pad[k]) if v.dim() == 2 else v for k, v in batch.items()
    }  # fmt: skip
    longer = clipped_gradient_sum(model, padded, clipping_norm=norm)
    assert reference.relative_error(longer, whole) < 1e-5


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["bert", "roberta-lora", "gpt2", "llama", "t5", "deberta-v2", "dora", "prompt"])
def test_gradient_checkpointing_changes_nothing(name, reentrant, engine):
    if reentrant and name == "deberta-v2":
        pytest.skip("DeBERTa's relative embeddings make stock reentrant checkpointing fail too")
    model = MODELS[name]().double()
    batch = batch_for(model)
    norm = _median_norm(model, batch)
    model.train()
    want = clipped_gradient_sum(model, batch, clipping_norm=norm)
    (model.get_base_model() if hasattr(model, "get_base_model") else model).gradient_checkpointing_enable(
        {"use_reentrant": reentrant}
    )
    got = clipped_gradient_sum(model, batch, clipping_norm=norm, engine=engine)
    assert reference.relative_error(got, want) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16-autocast"])
@pytest.mark.parametrize("adversary", ["long", "huge", "cancelling"])
@pytest.mark.parametrize("name", ["bert", "roberta", "bert-lora", "roberta-mlm", "gpt2", "t5", "llama"])
def test_one_more_record_moves_the_sum_by_at_most_c(name, adversary, dtype):
    """The bound of the guarantee, on records made to break it; it is reached, so the clip is not merely loose."""
    model = MODELS[name]()
    width = 72
    batch = batch_for(model, [3, 2, 4, 1, 72 if adversary == "long" else 5], width)
    if adversary == "huge":  # a record with a gradient 1e4 times larger than the others
        with torch.no_grad():
            model.get_input_embeddings().weight[3].mul_(1e4)
        batch["input_ids"][4, :5] = 3
        batch["input_ids"][:4][batch["input_ids"][:4] == 3] = 4
    if adversary == "cancelling":  # the same token everywhere: output gradients nearly cancel over the record
        batch["input_ids"][4, :5] = 7
    norm = 1e-3
    without = {k: v[:4] for k, v in batch.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        with_it = clipped_gradient_sum(model, batch, clipping_norm=norm)
        base = clipped_gradient_sum(model, without, clipping_norm=norm)
    moved = reference.norm({n: with_it[n].double() - base[n].double() for n in base}).item()
    # the four others run in batches of different shape, so their own rounding (bfloat16: 2^-8) is in the difference
    slack = 1e-5 if dtype == torch.float32 else 4 * 2**-8
    assert moved <= norm * (1 + slack)
    assert moved >= norm * 0.9


def test_the_norm_of_one_record_is_exactly_c():
    """One record alone has no others to blame: its clipped gradient has norm C, in every precision."""
    for name in ("bert", "bert-lora", "roberta-mlm", "gpt2", "t5", "bart", "deberta-v2", "dora", "ia3"):
        model = MODELS[name]()
        batch = batch_for(model, [9])
        for enabled in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                got = clipped_gradient_sum(model, batch, clipping_norm=1e-3)
            assert 0.999 * 1e-3 < reference.norm(got).item() <= 1e-3 * (1 + 1e-5), (name, enabled)


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("poison", ["nan", "inf"])
@pytest.mark.parametrize("name", ["bert", "bert-lora", "gpt2"])
def test_a_record_without_finite_gradient_adds_exactly_nothing(name, poison, engine):
    model = MODELS[name]()
    batch = batch_for(model)
    batch["input_ids"][batch["input_ids"] == 5] = 6
    batch["input_ids"][2, 0] = 5
    if (batch["labels"] == 5).any():
        batch["labels"][batch["labels"] == 5] = 6
    embedding = model.get_input_embeddings().weight
    head_is_tied = name == "gpt2"
    with torch.no_grad():
        embedding[5] = float(poison)
    if head_is_tied:  # every record's logits see the poisoned row: all of them are dropped
        got = clipped_gradient_sum(model, batch, clipping_norm=0.5, engine=engine)
        assert all(not g.any() for g in got.values())
        return
    others = {k: v[[0, 1, 3, 4]] for k, v in batch.items()}
    got = clipped_gradient_sum(model, batch, clipping_norm=0.5, engine=engine)
    want = clipped_gradient_sum(model, others, clipping_norm=0.5)
    assert reference.relative_error(got, want) < 1e-5


def test_a_record_without_targets_adds_exactly_nothing():
    model = MODELS["roberta-mlm"]()
    batch = batch_for(model)
    batch["labels"][1] = -100
    others = {k: v[[0, 2, 3, 4]] for k, v in batch.items()}
    got = clipped_gradient_sum(model, batch, clipping_norm=0.5)
    assert reference.relative_error(got, clipped_gradient_sum(model, others, clipping_norm=0.5)) < 1e-5
    alone = clipped_gradient_sum(model, {k: v[1:2] for k, v in batch.items()}, clipping_norm=0.5)
    assert all(not g.any() for g in alone.values())


def test_the_model_is_left_as_it_was():
    model = MODELS["bert"]().train()
    forwards = {name: "forward" in m.__dict__ for name, m in model.named_modules()}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    clipped_gradient_sum(model, batch_for(model), clipping_norm=1.0)
    assert model.training
    assert forwards == {name: "forward" in m.__dict__ for name, m in model.named_modules()}
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_the_support_table_is_that_of_these_tests():
    page = scan.with_section(TABLE.read_text(encoding="utf-8"), None)  # the scan's section has a test of its own
    assert page == support_table(), "run: python -m tests.grads.support_table"


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "roberta-mlm"])
def test_norms_that_may_have_lost_digits_are_taken_again(name, engine, monkeypatch):
    model = MODELS[name]().double()
    batch = batch_for(model)
    norm = _median_norm(model, batch)
    want = reference.clipped_sum(model, batch, norm)
    materialised = []
    right = Outer.of_record
    monkeypatch.setattr(Outer, "of_record", lambda self, b: materialised.append(b) or right(self, b))
    monkeypatch.setattr("hf_dpopt.clipping.record_norms.CANCELLATION", 1e9)  # every norm is in doubt
    got = clipped_gradient_sum(model, batch, clipping_norm=norm, engine=engine)
    assert materialised
    assert reference.relative_error(got, want) <= 1e-10
