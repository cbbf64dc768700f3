"""LoRA in the top layer: the layer is that of the whole model, and the tangent space does not depend on factors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertForSequenceClassification

from recipes.paper import lora
from tests.helpers import tiny

pytestmark = pytest.mark.slow


class MadeUpTask(lora.Task):
    """Random states of unlike lengths, whose label is the sign of their first coordinate."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 9, (lora.NUM_TRAIN + lora.NUM_TEST + 20 + lora.NUM_PUBLIC,), generator=generator)
        self.states = [torch.randn(int(n), 16, generator=generator) for n in lengths]
        self.labels = torch.tensor([int(state_TD[0, 0] > 0) for state_TD in self.states])
        self._ids = self.states
        self.public = np.arange(len(self.states) - lora.NUM_PUBLIC, len(self.states))

    def model(self) -> nn.Module:
        return tiny.made(BertForSequenceClassification)


@pytest.fixture
def few(monkeypatch):
    for name, num in (("NUM_TRAIN", 200), ("NUM_TEST", 100), ("RANK", 2), ("NUM_PUBLIC", 300), ("NUM_CHOSEN", 128)):
        monkeypatch.setattr(lora, name, num)


@pytest.mark.parametrize("variant", ["LoRA", "tangent"])
def test_the_top_layer_is_that_of_the_whole_model(variant):
    model = tiny.made(BertForSequenceClassification, num_hidden_layers=2).eval()
    ids, mask_BT = torch.randint(3, 40, (4, 6)), torch.arange(6) < torch.tensor([[6], [3], [1], [5]])
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask_BT.long(), output_hidden_states=True)
        logits = lora.TopLayer(model, variant)(whole.hidden_states[-2], mask_BT)
    torch.testing.assert_close(logits, whole.logits)


def test_a_step_in_the_tangent_space_ends_at_the_nearest_matrix_of_its_rank():
    torch.manual_seed(0)
    adapted = lora.Adapted(nn.Linear(20, 30), "tangent")
    adapted.columns.weight.data = torch.linalg.qr(torch.randn(30, lora.RANK))[0]
    nn.init.normal_(adapted.up.weight)
    nn.init.normal_(adapted.rows.weight)
    with torch.no_grad():
        whole = adapted.up.weight @ adapted.down.weight + adapted.columns.weight @ adapted.rows.weight
        adapted.to_rank()
        u, s, v = torch.linalg.svd(whole)
        nearest = u[:, : lora.RANK] * s[: lora.RANK] @ v[: lora.RANK]
        torch.testing.assert_close(adapted.up.weight @ adapted.down.weight, nearest, rtol=1e-4, atol=1e-4)
        for basis in (adapted.down.weight.T, adapted.columns.weight):
            torch.testing.assert_close(basis.T @ basis, torch.eye(lora.RANK))
    assert not adapted.rows.weight.any()


@pytest.mark.parametrize("variant", list(lora.AGAINST))
def test_every_variant_learns_without_much_noise(few, variant):
    task = MadeUpTask()
    run = lora.Run(variant=variant, epsilon=500.0, batch=100, num_steps=30, rate=0.03)
    result = lora.train(run, task)
    assert {**lora.train(run, task), "seconds": 0} == {**result, "seconds": 0}  # seeds say all
    assert result["accuracy"] > task.labels.double().mean().item() + 0.1


def test_a_private_classifier_chooses_public_rows_that_are_alike(few):
    """Private rows and a fifth of the public ones lie in one direction: without much noise those come first."""
    task = MadeUpTask()
    alike = set(task.public[::5].tolist())
    for i in [*range(lora.NUM_TRAIN), *alike]:
        task.states[i] = task.states[i] + 3.0
    plan = lora.Run(variant="chosen public text", epsilon=500.0, batch=100, num_steps=30, rate=0.03).plan()
    chosen = lora.most_alike(task, plan, bytes(32), seed=0)
    assert len(alike & set(chosen[: len(alike)].tolist())) > 0.6 * len(alike)  # chance: 0.2
