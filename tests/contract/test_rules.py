"""Every registered clipping rule keeps the contract; a new one needs a case here, or the suite says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_dpopt.clipping.rules import RULES
from tests.contract.rules import NUM_RECORDS, Case, check_rule


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(NUM_RECORDS, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _embedding() -> Case:
    tokens = torch.randint(0, 7, (NUM_RECORDS, 5), generator=torch.Generator().manual_seed(1))
    return Case(nn.Embedding(7, 6), tokens, into=nn.Identity())


CASES: dict[str, Callable[[], Case]] = {
    "Linear": lambda: Case(nn.Linear(6, 3), _floats(5, 6)),
    "Conv1D": lambda: Case(Conv1D(3, 6), _floats(5, 6)),
    "Embedding": _embedding,
    "LayerNorm": lambda: Case(nn.LayerNorm(6), _floats(5, 6)),
}


@pytest.mark.parametrize("name", CASES)
def test_rule(name):
    check_rule(CASES[name])


def test_every_rule_has_a_case():
    assert {path.rpartition(".")[2] for path in RULES} == set(CASES)
