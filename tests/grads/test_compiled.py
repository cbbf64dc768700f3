"""torch.compile: parts of a model may be compiled, the model as a whole is refused."""

from __future__ import annotations

import pytest
import torch

from hf_dpopt import UnsupportedModuleError, clipped_gradient_sum
from hf_dpopt.huggingface.refusals.model import check_model
from tests.grads.models import FAMILIES, batch_for
from tests.reference.clipping import clipped_sum, relative_error


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("finetuning", ["full", "with_lora"])
def test_compiled_parts_give_the_same_sum(finetuning, engine):
    """Frozen under LoRA, trained in full finetuning; `aot_eager` traces forward and backward and needs no compiler."""
    torch._dynamo.reset()
    model = getattr(FAMILIES["llama"], finetuning)()
    want = clipped_sum(model, batch := batch_for(model), 0.05)
    layers = model.get_base_model().model.layers if finetuning == "with_lora" else model.model.layers
    for layer in layers:
        layer.mlp.compile(backend="aot_eager")
    check_model(model)
    for _ in range(2):  # traced, and used again
        assert relative_error(clipped_gradient_sum(model, batch, clipping_norm=0.05, engine=engine), want) <= 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_a_compiled_model_is_refused():
    model = FAMILIES["llama"].full()
    with pytest.raises(UnsupportedModuleError, match="whole model is compiled.*layer.mlp.compile()"):
        check_model(torch.compile(model, backend="aot_eager"))
    model = FAMILIES["llama"].with_lora()
    model.get_base_model().compile(backend="aot_eager")
    with pytest.raises(UnsupportedModuleError, match="whole model is compiled"):
        check_model(model)
