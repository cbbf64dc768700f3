"""`glue.py --start pooled`: what it stands for, what it leaves alone, and what it refuses."""

from __future__ import annotations

import types

import pytest

from hf_dpopt import DPConfigError
from recipes.classifiers import PooledConfig
from recipes.glue import parse
from recipes.warm_start import fill_pooling, fill_start

FLAGS = {"--model_name_or_path": "some/model", "--task_name": "sst2", "--target_epsilon": "8", "--lora_r": "8",
         "--start": "pooled", "--use_cpu": "true", "--report_to": "none"}  # fmt: skip
LABELLED = types.SimpleNamespace(labels=["0", "1"])


def parsed(**changes: str | None):
    flags = FLAGS | {f"--{name}": value for name, value in changes.items()}
    given = parse([part for name, value in flags.items() if value is not None for part in (name, *value.split())])
    fill_start(*given)
    return given


def filled(num_layers: int, cls_token_id: int | None = 101, **changes: str | None):
    model_args, _, training_args = parsed(**changes)
    tokenizer = types.SimpleNamespace(cls_token_id=cls_token_id)
    fill_pooling(
        model_args, types.SimpleNamespace(model_type="bert", num_hidden_layers=num_layers), tokenizer, LABELLED
    )
    return model_args, training_args


@pytest.mark.parametrize(
    "num_layers, cls, ways, layers",
    [
        (6, 101, ["cls", "mean"], [4, 5, 6]), (12, None, ["last", "mean"], [10, 11, 12]), (2, 0, ["cls", "mean"], [1, 2]),
        (1, 1, ["cls", "mean"], [1]),
    ],
)  # fmt: skip
def test_what_is_read_depends_on_the_layers_and_the_tokenizer_alone(num_layers, cls, ways, layers):
    model_args, _ = filled(num_layers, cls)
    assert (model_args.pooling, model_args.pooling_layers) == (ways, layers)


@pytest.mark.parametrize("epsilon, part", [("8", 2.0), ("3", 0.75)])
def test_a_quarter_of_the_budget_and_half_of_the_clip(epsilon, part):
    model_args, training_args = filled(6, target_epsilon=epsilon)
    assert model_args.warm_start_epsilon == part and training_args.target_epsilon == float(epsilon)
    assert training_args.clipping_norm == 0.5 and training_args.clipping == "flat"
    assert training_args.expected_batch_size is None and training_args.learning_rate == 5e-5, (
        "the advisor chooses them"
    )


def test_what_is_given_by_hand_stays():
    by_hand = {"warm_start_epsilon": "1", "pooling": "mean", "pooling_layers": "2", "clipping_norm": "3"}
    model_args, training_args = filled(6, **by_hand)
    assert (model_args.warm_start_epsilon, model_args.pooling, model_args.pooling_layers) == (1.0, ["mean"], [2])
    assert training_args.clipping_norm == 3
    assert filled(6, clipping="automatic")[1].clipping_norm == 1.0


def test_a_head_that_was_saved_with_the_model_is_kept():
    model_args, _, _ = parsed()
    config = PooledConfig(types.SimpleNamespace(hidden_size=8), ["mean"], [3])
    fill_pooling(model_args, config, types.SimpleNamespace(cls_token_id=1), LABELLED)
    assert model_args.pooling is None and model_args.pooling_layers is None


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"prompt": "auto"}, "--prompt"),
        ({"public_file": "a.tsv"}, "--public_file"),
        ({"non_private": "true", "target_epsilon": None}, "--non_private"),
        ({"freeze": "encoder", "lora_r": None}, "--freeze encoder"),
        ({"privacy_unit": "user", "user_id_column": "author"}, "--privacy_unit user"),
        ({"target_epsilon": None, "noise_multiplier": "1"}, "Add --target_epsilon"),
        ({"tuned_runs": "4"}, "--tuned_runs"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, words):
    with pytest.raises(DPConfigError, match=f"start='pooled' .*{words}"):
        parsed(**changes)


def test_scores_have_no_such_head():
    model_args, _, _ = parsed()
    with pytest.raises(DPConfigError, match="is for labels.*Leave --start out"):
        fill_pooling(model_args, types.SimpleNamespace(model_type="bert"), None, types.SimpleNamespace(labels=None))
