"""Losses of the whole batch are refused, with the way to one by record."""

from __future__ import annotations

from functools import partial

from torch import nn

from hf_dpopt import DPTrainer
from tests.refusals.base import bert, records


def test_an_overridden_loss(arguments, refused):
    class Own(DPTrainer):
        def compute_loss(self, model, inputs, **_):
            return model(**inputs).loss * 2

    args, model, dataset = arguments(), bert(), records()
    with refused("Own overrides compute_loss.*Pass per_example_loss_func=f"):
        Own(model, args, train_dataset=dataset)
    by_record = partial(nn.functional.cross_entropy, reduction="none")  # and the way out works
    trainer = Own(
        model, args, train_dataset=dataset,
        per_example_loss_func=lambda outputs, labels: 2 * by_record(outputs.logits, labels),
    )  # fmt: skip
    trainer.train()
    assert trainer.privacy_spent().num_steps == trainer.plan.num_steps


def test_a_loss_function_of_the_batch_beside_one_of_records(arguments, refused):
    args, model, dataset = arguments(), bert(), records()

    def of_batch(outputs, labels, num_items_in_batch=None):
        return nn.functional.cross_entropy(outputs["logits"], labels)

    with refused("compute_loss_func returns one number.*Pass per_example_loss_func=f"):
        DPTrainer(model, args, train_dataset=dataset, compute_loss_func=of_batch)
    by_record = partial(nn.functional.cross_entropy, reduction="none")
    trainer = DPTrainer(
        model, args, train_dataset=dataset, compute_loss_func=of_batch,
        per_example_loss_func=lambda outputs, labels: by_record(outputs.logits, labels),
    )  # fmt: skip
    assert trainer.train().global_step == 2
