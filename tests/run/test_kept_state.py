"""Writes of a forward to trained parameters and configurations show, whatever is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import BertConfig

from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.run.kept_state import KeptState

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "one bit": lambda w: w.view(torch.int32)[-1, -1].bitwise_xor_(1),
    "two words change places": lambda w: w[0, :4].copy_(w[0, [2, 3, 0, 1]].clone()),
    "all signs": lambda w: w.neg_(),
    "twice the weights": lambda w: w.mul_(2),  # the same number is added to all words
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_through_data_shows(name):
    layer = nn.Linear(2048, 2048, bias=False)
    kept = KeptState(layer, has_caches=False)
    kept.release_trained()
    with kept.in_step(is_local=False):
        before = kept.content_of_trained()
        kept.check_trained(before)
        WRITES[name](layer.weight.data)
        with pytest.raises(UnsupportedModuleError, match="weight: changed by a forward"):
            kept.check_trained(before)


class OfLayers(BertConfig):
    """As that of Gemma 4, whose layers differ: it refuses to be asked for one size."""

    def __eq__(self, other):
        raise AttributeError("head_dim is a per-layer attribute")


def test_a_configuration_inside_another_is_compared_by_all_its_attributes():
    model = nn.Linear(1, 1)
    model.config = BertConfig()
    model.config.parts = [OfLayers()]
    kept = KeptState(model, has_caches=True)
    assert kept.changed() == []
    model.config.parts[0].seen = 1.0  # not one of those that its class declares
    assert kept.restore() == ["config"] and not hasattr(model.config.parts[0], "seen")
