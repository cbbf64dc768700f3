"""Public records first: what the ordinary training leaves of the model for the private run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from datasets import Dataset

from recipes.public_first import learn_public
from tests.recipes.test_warm_start import arguments, classifier, collate, records


@pytest.mark.parametrize("bf16", [False, True])
def test_the_model_keeps_its_own_forward(tmp_path, bf16):
    model, data = classifier(), Dataset.from_list([dict(row) for row in records().select(range(32))])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = SimpleNamespace(public_epochs=1.0, public_learning_rate=1e-2)
    learn_public(model, data, collate, arguments(tmp_path / "run", bf16=bf16), options)
    assert "forward" not in vars(model) and "_original_forward" not in vars(model), "autocast would be there twice"
    assert any(not value.equal(before[name]) for name, value in model.state_dict().items())
