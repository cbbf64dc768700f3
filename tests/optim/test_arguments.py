"""From Hugging Face's command-line fields to an optimizer."""

from __future__ import annotations

import types

import pytest
import torch

from hf_dpopt.optim import OPTIMIZERS, DPAdaGrad, DPAdamBC, DPAdamW, DPRMSProp
from hf_dpopt.optim.galore import DPGaLore
from hf_dpopt.optim.stock_options import optimizer_from_arguments

ADAM = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6}


def fields(optim_args=None):
    return types.SimpleNamespace(
        learning_rate=0.01, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, optim_args=optim_args
    )


@pytest.mark.parametrize(
    "name, optim_args, cls, kwargs",
    [
        ("dp_adamw", None, DPAdamW, ADAM),
        ("dp_adamw", "", DPAdamW, ADAM),
        ("dp_adam_bc", "variance_floor=1e-9", DPAdamBC, {**ADAM, "variance_floor": 1e-9}),
        ("dp_adam_bc", "variance_floor=None", DPAdamBC, {**ADAM, "variance_floor": None}),
        ("dp_rmsprop", None, DPRMSProp, {"lr": 0.01}),
        ("dp_rmsprop", "alpha=0.9,eps=1e-7", DPRMSProp, {"lr": 0.01, "alpha": 0.9, "eps": 1e-7}),
        ("dp_adagrad", "unbiased=True, eps=1", DPAdaGrad, {"lr": 0.01, "unbiased": True, "eps": 1.0}),
        ("dp_adagrad", "unbiased=false", DPAdaGrad, {"lr": 0.01, "unbiased": False}),
        ("dp_galore", "rank=8,refresh_every=100", DPGaLore, {**ADAM, "rank": 8, "refresh_every": 100}),
        (
            "dp_galore",
            "rank=8,scale=1,inner=adam_bc",
            DPGaLore,
            {**ADAM, "rank": 8, "scale": 1.0, "inner": "adam_bc"},
        ),
    ],
)
def test_values_are_typed_and_make_an_optimizer(name, optim_args, cls, kwargs):
    made, given = optimizer_from_arguments(name, fields(optim_args))
    assert (made, given) == (cls, kwargs)
    assert {key: type(value) for key, value in given.items()} == {key: type(value) for key, value in kwargs.items()}
    group = made([torch.nn.Parameter(torch.zeros(2))], **given).param_groups[0]
    assert {key: group[key] for key in kwargs} == kwargs


@pytest.mark.parametrize(
    "name, optim_args, match",
    [
        ("dp_sgd", None, f"optim='dp_sgd' is unknown. Use one of: {', '.join(map(repr, OPTIMIZERS))}"),
        ("dp_adam_bc", "gamma=1", "dp_adam_bc does not know gamma. It knows: variance_floor"),
        ("dp_adamw", "gamma=1", "dp_adamw does not know gamma. It has no options: leave them out"),
        ("dp_adamw", "lr=1", "lr=1, which dp_adamw takes from learning_rate"),
        ("dp_adamw", "eps=1", "eps=1, which dp_adamw takes from adam_epsilon"),
        ("dp_rmsprop", "weight_decay=1", "weight_decay=1, which dp_rmsprop takes from weight_decay. Set it there"),
        ("dp_adam_bc", "betas=1", "takes from adam_beta1, adam_beta2"),
        ("dp_adam_bc", "noise=1", "takes from the noise mechanism"),
        ("dp_adamw", "filter=none", "takes from the filter options"),
        ("dp_galore", None, "dp_galore needs rank. Give it as --optim_args 'rank=...'"),
        ("dp_galore", "rank=8.5", "rank=8.5, which is not a whole number"),
        ("dp_galore", "rank=8,rank=9", "`optim_args` has rank twice"),
        ("dp_galore", "rank", "'rank', which is no key=value"),
        ("dp_galore", "rank=", "'rank=', which is no key=value"),
        ("dp_galore", "rank=8,scale=big", "scale=big, which is not a number"),
        ("dp_rmsprop", "unbiased=1", "unbiased=1. Use true or false"),
        ("dp_rmsprop", "params=1", "dp_rmsprop does not know params"),
    ],
)
def test_what_it_cannot_read_is_refused_by_name(name, optim_args, match):
    with pytest.raises(ValueError, match=match):
        optimizer_from_arguments(name, fields(optim_args))
