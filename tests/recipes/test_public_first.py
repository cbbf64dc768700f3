"""Public records first: what the ordinary training leaves of the model for the private run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from datasets import Dataset

from hf_dpopt import DPConfigError
from recipes.public_first import check_public, learn_public
from tests.recipes.test_warm_start import arguments, classifier, collate, records


@pytest.mark.parametrize("bf16", [False, True])
def test_the_model_keeps_its_own_forward(tmp_path, bf16):
    model, data = classifier(), Dataset.from_list([dict(row) for row in records().select(range(32))])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = SimpleNamespace(public_epochs=1.0, public_learning_rate=1e-2)
    learn_public(model, data, collate, arguments(tmp_path / "run", bf16=bf16), options)
    assert "forward" not in vars(model) and "_original_forward" not in vars(model), "autocast would be there twice"
    assert any(not value.equal(before[name]) for name, value in model.state_dict().items())


def test_too_few_records_for_a_stage_are_refused_before_any_training(tmp_path):
    model, data = classifier(), Dataset.from_list([dict(row) for row in records().select(range(8))])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    args = arguments(tmp_path / "run", preconditioner="adadps", public_batch_size=9)
    with pytest.raises(DPConfigError, match="public_dataset has 8. Lower public_batch_size"):
        learn_public(model, data, collate, args, SimpleNamespace(public_epochs=1.0, public_learning_rate=None))
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("public_file", "words"),
    [(None, "^public_epochs: there are no.*Add --public_file"), ("p.csv", "nothing would learn from public_file")],
)
def test_no_passes_alone_are_refused_by_name(tmp_path, public_file, words):
    options = SimpleNamespace(
        public_file=public_file, public_epochs=0.0, public_learning_rate=None, non_private=False, embedded=False,
        files={"train": "t.csv"},
    )  # fmt: skip
    with pytest.raises(DPConfigError, match=words):
        check_public(options, arguments(tmp_path / "run"))
