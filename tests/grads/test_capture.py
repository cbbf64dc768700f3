"""What cannot be captured is refused by name, before anything runs."""

from __future__ import annotations

import importlib
import random

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from peft import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_dpopt import UnsupportedModuleError, clipped_gradient_sum
from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.capture import Capture
from hf_dpopt.clipping.rules import COMPOSITES, RULES, broadcast, class_path, conv1d, fallback, linear, rule_for
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.records.losses import RecordLosses
from tests.grads.models import ADAPTERS_RUN_WHOLE, MODELS, batch_for, bert, gpt2, llama
from tests.reference import clipping as reference


def _class(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_classes_that_have_a_rule_exist_under_the_names_they_are_known_by():
    """One that moves would lose its rule: a layer to the fallback, which is slow, a composite to a refusal."""
    assert all(class_path(_class(path)) == path for path in RULES)
    named = [composite for composite in COMPOSITES if composite.class_path is not None]
    assert all(hasattr(_class(composite.class_path), composite.method) for composite in named) and named


def test_a_layer_has_the_rule_of_the_class_whose_forward_it_runs():
    class Same(Conv1D):
        pass

    class Other(Conv1D):
        def forward(self, x):
            return 2 * super().forward(x)

    assert rule_for(Conv1D(3, 4)) is rule_for(Same(3, 4)) is conv1d.forward
    assert rule_for(Other(3, 4)) is fallback.forward


@pytest.mark.parametrize("kind", ["Qwen2Moe", "Qwen3Moe"])
def test_norms_and_attention_of_a_mixture_can_be_trained(kind):
    """Their classes carry the mixture's name; only experts and routers are refused."""
    config = getattr(tf, f"{kind}Config")(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        decoder_sparse_step=1,
    )  # fmt: skip
    model = getattr(tf, f"{kind}ForCausalLM")(config)
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name or "self_attn" in name)
    captured = {name for site in Capture(model).sites for name in site.parameter_names.values()}
    assert captured == {name for name, p in model.named_parameters() if p.requires_grad} and captured


def test_ids_without_a_dimension_for_the_records_are_refused():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, x):
            return x + self.table(torch.arange(x.size(1)))

    engine = make_engine(Positions(), make_clipping("flat", 1.0))
    x = torch.randn(5, 5, 4, requires_grad=True)  # as many tokens as records
    with pytest.raises(UnsupportedModuleError, match="without a dimension for the records"):
        engine.add_clipped_sum(engine.empty_sum(), lambda: engine.model(x).sum(dim=(1, 2)), 5)


def test_trained_parameters_need_not_be_contiguous():
    model = bert()
    weight = model.classifier.weight
    model.classifier.weight = nn.Parameter(weight.detach().T.contiguous().T)
    assert not model.classifier.weight.is_contiguous()
    batch = batch_for(model)
    want = reference.clipped_sum(model, batch, 0.1)
    assert reference.relative_error(clipped_gradient_sum(model, batch, clipping_norm=0.1), want) < 1e-5


class _Scaled(nn.Module):
    """A layer without a rule whose parameters are a matrix and a single number."""

    def __init__(self):
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.randn(2, 32))

    def forward(self, x):
        return self.scale * nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
def test_parameters_without_dimensions(engine):
    model = bert()
    model.classifier = _Scaled()
    model.double()
    batch = batch_for(model)
    got = clipped_gradient_sum(model, batch, clipping_norm=0.1, engine=engine)
    assert got["classifier.scale"].shape == ()
    assert reference.relative_error(got, reference.clipped_sum(model, batch, 0.1)) < 1e-10


def test_a_frozen_prompt_beside_a_trained_head():
    model = MODELS["prompt-classifier"]().double()
    for name, p in model.named_parameters():
        p.requires_grad_("classifier" in name)
    batch = batch_for(model)
    want = reference.clipped_sum(model, batch, 0.1)
    assert reference.relative_error(clipped_gradient_sum(model, batch, clipping_norm=0.1), want) < 1e-10


def test_lora_on_a_relative_bias_is_exact_and_on_embeddings_read_past_it_is_refused():
    t5 = peft.get_peft_model(MODELS["t5"](), peft.LoraConfig(r=2, target_modules=["relative_attention_bias", "q"]))
    for p in t5.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.1)
    t5.double()
    batch = batch_for(t5)
    want = reference.clipped_sum(t5, batch, 0.1)
    assert reference.relative_error(clipped_gradient_sum(t5, batch, clipping_norm=0.1), want) < 1e-10
    deberta = peft.get_peft_model(MODELS["deberta-v2"](), peft.LoraConfig(r=2, target_modules=["rel_embeddings"]))
    with pytest.raises(UnsupportedModuleError, match="without the parameters that are trained there"):
        clipped_gradient_sum(deberta, batch_for(deberta), clipping_norm=0.1)


class _DropsInside(nn.Module):
    """A layer without a rule that draws random numbers of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return nn.functional.linear(nn.functional.dropout(x, 0.5, self.training), self.weight)


class _DropsByPythonsCoins(_DropsInside):
    def forward(self, x):
        mask = torch.tensor([random.random() < 0.5 for _ in range(x.size(-1))], dtype=x.dtype)
        return nn.functional.linear(x * mask, self.weight)


def _checkpointed_with_fresh_masks() -> nn.Module:
    model = bert()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return model


def _with(layer: type[nn.Module]) -> nn.Module:
    model = bert()
    model.bert.pooler.dense = layer()
    return model


def _with_a_layer_that_drops() -> nn.Module:
    return _with(_DropsInside)


def _with_a_layer_that_tosses_pythons_coins() -> nn.Module:
    return _with(_DropsByPythonsCoins)


@pytest.mark.parametrize(
    "make", [_checkpointed_with_fresh_masks, _with_a_layer_that_drops, _with_a_layer_that_tosses_pythons_coins]
)
@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
def test_norm_and_sum_see_the_same_dropout(make, engine):
    """What is recomputed in a backward draws again; the bound holds only if both backwards draw the same."""
    for _ in range(8):
        model = make().train()
        got = clipped_gradient_sum(model, batch_for(model, [9]), clipping_norm=1e-3, engine=engine)
        assert reference.norm(got).item() <= 1e-3 * (1 + 1e-5)


@pytest.mark.parametrize(
    "config",
    [
        lambda: peft.LoHaConfig(r=2, target_modules=["query"], module_dropout=0.1),
        lambda: peft.RandLoraConfig(r=2, target_modules=["query"], randlora_dropout=0.1),
        lambda: peft.BOFTConfig(boft_block_size=4, target_modules=["query"], boft_dropout=0.1),
        lambda: PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType.PVERA](r=2, target_modules=["query"]),
        lambda: PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType.POLY](r=2, target_modules=["query"], n_tasks=2),
    ],
)
def test_adapters_run_record_by_record_may_not_draw(config):
    """Each record would be run again with another draw than the one the loss saw."""
    with pytest.raises(UnsupportedModuleError, match="Set its dropout to 0|Use LoRA or VeRA"):
        Capture(peft.get_peft_model(bert(), config()))


@pytest.mark.parametrize("kind", ["glora", "peanut", "beft", "deft", "frod", "unilora", "supertuning", "cartridge"])
def test_adapters_far_from_their_start_are_exact_with_as_many_records_as_rows(kind):
    """Fresh ones hide what they do; and where layers see 32 rows of a weight, these are not 32 records."""
    model = ADAPTERS_RUN_WHOLE[kind].make().double()
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.1)
    batch = batch_for(model, [5] * 32)
    want = reference.clipped_sum(model, batch, 0.1)
    assert reference.relative_error(clipped_gradient_sum(model, batch, clipping_norm=0.1), want) < 1e-10


def test_lily_is_refused_because_its_router_averages_over_the_batch():
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType.LILY](r=2, target_modules=["query"], task_type="SEQ_CLS")
    with pytest.raises(UnsupportedModuleError, match="averages the choice of its experts.*Use LoRA, DoRA or VeRA"):
        Capture(peft.get_peft_model(bert(), config))


def test_an_adapter_that_projects_its_gradients_is_refused_by_its_hooks():
    """Autograd tells no hook of a record's own gradient, so the sum would be of gradients that are not projected."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType.OSF](target_modules=["query"], task_type="SEQ_CLS")
    model = peft.get_peft_model(bert(), config)
    with pytest.raises(UnsupportedModuleError, match="gradient hook.*U_low.*use LoRA, DoRA or VeRA"):
        clipped_gradient_sum(model, batch_for(model), clipping_norm=1.0)


def test_tensors_inside_of_objects_are_refused():
    """Shadow hands its layers the states of the whole batch in one, which a record that is run again would see."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType.SHADOW](task_type="CAUSAL_LM", shadow_dropout=0.0)
    model = peft.get_peft_model(llama(), config)
    with pytest.raises(UnsupportedModuleError, match="inside of a ShadowCarrier.*use LoRA, DoRA or VeRA"):
        clipped_gradient_sum(model, batch_for(model), clipping_norm=1.0)


def test_dora_on_an_embedding_is_refused_by_name():
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, target_modules=["wte"], use_dora=True))
    ids = torch.randint(3, 60, (2, 4))
    with pytest.raises(UnsupportedModuleError, match="wte.*DoRA"):
        clipped_gradient_sum(model, {"input_ids": ids, "labels": ids}, clipping_norm=1.0)


class _MovesTokens(nn.Module):
    """Not a broadcast: the weight of one token reaches its neighbour."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (x * self.weight).roll(1, dims=0)


class _Reduces(nn.Module):
    """Fools a probe that only moves weights up: a minimum, or the largest magnitude of negative weights."""

    def __init__(self, reduce):
        super().__init__()
        self.weight, self.reduce = nn.Parameter(-torch.rand(8)), reduce

    def forward(self, x):
        return x * self.weight + self.reduce(self.weight)


class _Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("module", "is_one"),
    [
        (llama().model.norm, True),
        (tf.models.gemma.modeling_gemma.GemmaRMSNorm(8), True),
        (tf.models.t5.modeling_t5.T5LayerNorm(8), True),
        (nn.LayerNorm(8), False),
        (nn.BatchNorm1d(8), False),
        (nn.GroupNorm(2, 8), False),
        (nn.PReLU(8), False),
        (nn.Linear(8, 8), False),
        (_MovesTokens(), False),
        (_Unused(), False),
        (_Reduces(torch.min), False),
        (_Reduces(lambda w: w.abs().max()), False),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else None,
)
def test_layers_that_broadcast_are_found_by_trying(module, is_one):
    assert broadcast.broadcasts(module) is is_one


def test_flattened_tokens_that_are_not_in_order_are_refused():
    model = llama()
    inner = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: inner(x.flatten(0, 1)).view(x.shape)
    ids = torch.randint(3, 60, (3, 4))
    with pytest.raises(UnsupportedModuleError, match="first dimension 12, but the batch has 3 records"):
        clipped_gradient_sum(model, {"input_ids": ids, "labels": ids}, clipping_norm=1.0)


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama-untied", "roberta-mlm"])
def test_a_head_with_padded_rows(name, in_place, engine, monkeypatch):
    """As on a GPU, where the outputs are no multiple of 8; also when the loss changes the logits in place."""
    model = MODELS[name]().double()
    batch = batch_for(model)

    def of_logits(outputs, labels):
        logits = outputs.logits.mul_(0.7) if in_place else outputs.logits * 0.7
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)

    norm = 0.1
    want = [clipped_gradient_sum(model, batch, clipping_norm=norm, engine=engine, loss=f) for f in ("auto", of_logits)]
    monkeypatch.setattr(linear, "wants_alignment", lambda x, num_features: num_features % linear.ALIGNED != 0)
    assert model.config.vocab_size % linear.ALIGNED
    got = [clipped_gradient_sum(model, batch, clipping_norm=norm, engine=engine, loss=f) for f in ("auto", of_logits)]
    for a, b in zip(got, want, strict=True):
        assert reference.relative_error(a, b) < 1e-12


def test_sums_are_tensors_of_their_own():
    model = MODELS["bert"]()
    result = clipped_gradient_sum(model, batch_for(model), clipping_norm=0.1)
    places = [total.untyped_storage().data_ptr() for total in result.values()]
    assert len(set(places)) == len(places)
    for name, p in model.named_parameters():
        p.grad = result[name]
        p.grad.add_(p.detach(), alpha=0.1)  # weight decay, as an optimizer of one's own may write it
        assert p.grad.untyped_storage().nbytes() == p.grad.nbytes


def test_a_loss_in_float64_leaves_the_bound_of_a_float32_model():
    model = MODELS["bert"]()
    for seed in range(12):
        torch.manual_seed(seed)
        batch = batch_for(model, [9])
        got = clipped_gradient_sum(
            model, batch, clipping_norm=1e-3, loss=lambda o, y: F.cross_entropy(o.logits.double(), y, reduction="none")
        )
        assert reference.norm(got).item() <= 1e-3


def test_a_model_in_two_precisions_keeps_the_safety_of_the_narrower():
    model = MODELS["bert"]()
    model.classifier.double()
    model.classifier.register_forward_pre_hook(lambda module, inputs: inputs[0].double())
    batch, engine = batch_for(model, [9]), make_engine(model, make_clipping("flat", 1e-3), "book_keeping")
    seen = []
    engine.clipping = _Spy(engine.clipping, seen)
    sums = engine.empty_sum()
    for _ in range(2):  # the second adds to what is there
        engine.add_clipped_sum(sums, lambda: RecordLosses(model)(batch), 1)
    assert {squares.dtype for squares in seen} == {torch.float32}
    assert sums.result()["classifier.weight"].dtype == torch.float64
    assert reference.norm(sums.result()).item() <= 2e-3


class _Spy:
    """A clipping rule that notes the squares it is given."""

    def __init__(self, rule, seen):
        self._rule, self._seen = rule, seen

    def __getattr__(self, name):
        return getattr(self._rule, name)

    def factors(self, squares):
        self._seen.extend(squares.values())
        return self._rule.factors(squares)
