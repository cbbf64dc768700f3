"""What only training shows, or what changes between the trainer's constructor and its steps."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import nn

from hf_dpopt import DPConfigError, DPTrainer, UnsupportedModuleError
from tests.helpers import tiny
from tests.refusals.base import NUM_RECORDS, bert, records, small


@pytest.mark.parametrize("between", [False, True])
def test_accumulation_that_is_changed_after_the_trainer_was_made(between, arguments):
    trainer = DPTrainer(bert(), arguments(), train_dataset=records())
    if between:
        trainer.train()
    trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(DPConfigError, match="gradient_accumulation_steps=2 was set after.*make a new trainer"):
        trainer.train()


class LeakingForSequenceClassification(tf.BertForSequenceClassification):
    """Uses a weight outside the layer that owns it."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * (1 + self.bert.pooler.dense.weight.mean())
        return outputs


@pytest.mark.parametrize("skip_self_check", [False, True])
def test_a_parameter_used_outside_its_layer(skip_self_check, arguments, refused_in_training):
    model = small(LeakingForSequenceClassification)
    args = arguments(skip_self_check=skip_self_check, expected_batch_size=NUM_RECORDS)
    trainer = DPTrainer(model, args, train_dataset=records())
    mend = "outside the layers that own them.*bert.pooler.dense.weight.*Freeze them"
    with refused_in_training(mend, model, charged=int(skip_self_check), error=UnsupportedModuleError):
        trainer.train()


def test_an_optimizer_of_other_tensors(arguments, refused_in_training):
    model = bert()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)
    trainer = DPTrainer(model, arguments(), train_dataset=records(), optimizers=(optimizer, None))
    with refused_in_training("updates 1 tensors.*model.parameters", model):
        trainer.train()


@pytest.mark.parametrize("unfreeze", [False, True])
def test_parameters_that_are_frozen_or_unfrozen_on_the_way(unfreeze, arguments):
    toggle = tiny.At("step_end", lambda state, model: model.bert.embeddings.requires_grad_(unfreeze))
    model = bert()
    model.bert.embeddings.requires_grad_(not unfreeze)
    trainer = DPTrainer(model, arguments(max_steps=3), train_dataset=records(), callbacks=[toggle])
    with pytest.raises(DPConfigError, match="changed during training.*Decide what to train before"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("inside", [".", "keys", "a/b"])
def test_keys_where_the_model_is_published(inside, arguments, tmp_path, refused_in_training):
    model = bert()
    args = arguments(private_state_dir=str(tmp_path / "out" / inside))
    trainer = DPTrainer(model, args, train_dataset=records())
    with refused_in_training("overlap.*Use two folders side by side", model):
        trainer.train()
    assert not list(tmp_path.rglob("*.key"))


def test_arguments_that_change_after_the_plan_was_made(arguments, refused_in_training):
    model = bert()
    trainer = DPTrainer(model, arguments(), train_dataset=records())
    trainer.args.max_steps = 20
    with refused_in_training("20 steps, but the plan was made for 2.*Make a new trainer", model):
        trainer.train()


def test_a_search_is_refused(tmp_path):
    with pytest.raises(DPConfigError, match="hf-dpopt tune"):
        tiny.trainer(tmp_path / "out").hyperparameter_search({"learning_rate": [0.1]}, n_trials=3)
