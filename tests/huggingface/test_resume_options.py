"""A resumed run compares what its gradients depend on; what the model itself writes into its config is no reason."""

from __future__ import annotations

import pytest

from hf_dpopt import DPConfigError
from tests.helpers import tiny


def _run(folder, steps, model=None, **changes):
    rows = [{**row, "label": [float(i % 2), 1.0, 0.0]} for i, row in enumerate(tiny.records())]
    model = model or tiny.model(dropout=0.0, num_labels=3)
    return tiny.trainer(
        folder / "out", model=model, train_dataset=rows[:48], eval_dataset=rows[48:], private_state_dir=str(folder / "k"),
        max_steps=steps, save_strategy="steps", save_steps=1, eval_data_privacy="public", **changes,
    )  # fmt: skip


def _collated(rows):
    import torch

    batch = tiny.collate([{**row, "label": 0} for row in rows])
    return batch | {"labels": torch.tensor([row["label"] for row in rows])}


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_an_evaluation_that_names_the_kind_of_labels_refuses_no_resume(tmp_path, first):
    """The forward of transformers writes `problem_type` into the config when labels are given; ours gives none."""
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "data_collator": _collated}
    made = _run(tmp_path, 2, **(evaluates if first else {"data_collator": _collated}))
    made.train()
    resumed = _run(tmp_path, 4, **({"data_collator": _collated} if first else evaluates))
    if not first:
        resumed.model.config.problem_type = "multi_label_classification"
    resumed.train(resume_from_checkpoint=True)
    assert resumed.privacy_spent().num_steps == 4


def test_another_kind_of_loss_does(tmp_path):
    _run(tmp_path, 2, data_collator=_collated).train()
    other = _run(tmp_path, 4, data_collator=_collated)
    other.model.config.problem_type = "regression"
    with pytest.raises(DPConfigError, match="loss"):
        other.train(resume_from_checkpoint=True)
