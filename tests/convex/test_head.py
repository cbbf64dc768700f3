"""Features of real architectures, the head that is put back, and what has no theorem."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.convex import (
    HeadTrainingArguments,
    SubspaceHeadConfig,
    attach_head,
    check_convex_arguments,
    clip_features,
    compute_features,
    find_head,
)
from hf_dpopt.convex.features import head_takes_bias
from tests.helpers import tiny

SMALL = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=40)
FAMILIES = {
    "bert": (SMALL, "classifier", True),
    "roberta": (SMALL, "classifier.out_proj", True),
    "distilbert": (dict(dim=16, n_layers=1, n_heads=2, hidden_dim=16, vocab_size=40), "classifier", True),
    "electra": ({**SMALL, "embedding_size": 16}, "classifier.out_proj", True),
    "gpt2": (dict(n_embd=16, n_layer=1, n_head=2, vocab_size=40), "score", False),
    "llama": ({**SMALL, "num_key_value_heads": 2}, "score", False),
}


def model_of(family, num_labels=3):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family][0], num_labels=num_labels, pad_token_id=0)
    return AutoModelForSequenceClassification.from_config(config)


def records(num=9):
    rng = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 9, (num,), generator=rng).tolist()
    return [{"input_ids": torch.randint(1, 40, (n,), generator=rng).tolist()} for n in lengths]


def collate(rows):
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_on_features_is_what_the_saved_model_says(family, tmp_path):
    """One record at a time, through the model that was saved and loaded again."""
    model = model_of(family)
    _, name, has_bias = FAMILIES[family]
    assert find_head(model) == name and head_takes_bias(model) == has_bias
    before = {k: v.clone() for k, v in model.state_dict().items()}
    features = compute_features(model, records(), collate, batch_size=4)
    assert features.shape == (9, 16) and all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    bias_feature = 0.25 if has_bias else 0.0
    clipped = clip_features(features, 1e3, bias_feature)
    weights = torch.randn(3, clipped.size(1))
    attach_head(model, weights, bias_feature)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    for record, feature in zip(records(), clipped, strict=True):
        logits = loaded(**collate([record])).logits[0]
        torch.testing.assert_close(logits, weights @ feature, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, "convbert", "fnet"])
def test_features_of_a_record_do_not_depend_on_the_others(family):
    """Alone, among others, and with longer ones: also where padding changes what a model says."""
    if family in FAMILIES:
        model = model_of(family)
    else:
        torch.manual_seed(0)
        size = {**SMALL, "embedding_size": 16, "max_position_embeddings": 64, "num_labels": 3, "pad_token_id": 0}
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **size))
    rows = [*records(), *({"input_ids": list(range(1, 30))} for _ in range(3))]
    together = compute_features(model, rows, without_mask if family == "fnet" else collate, batch_size=4)
    for i, row in enumerate(rows):
        alone = compute_features(model, [row], without_mask if family == "fnet" else collate)
        torch.testing.assert_close(together[i], alone[0], rtol=1e-5, atol=1e-6)


def without_mask(rows):
    return {"input_ids": collate(rows)["input_ids"]}


def test_models_whose_features_depend_on_others_by_rounding_or_state_are_refused():
    with pytest.raises(DPConfigError, match="Load it in float32"):
        compute_features(model_of("bert").bfloat16(), records(), collate)
    model = model_of("bert")
    model.config.model_type = "big_bird"
    with pytest.raises(DPConfigError, match="Use another model"):
        compute_features(model, records(), collate)


def test_features_are_kept_for_this_model_and_these_records_only(tmp_path, monkeypatch):
    model, rows = model_of("bert"), records()
    first = compute_features(model, rows, collate, cache=tmp_path)
    (kept,) = tmp_path.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(type(model), "forward", None)  # nothing is computed again
    assert torch.equal(compute_features(model, rows, collate, cache=tmp_path), first)
    monkeypatch.undo()
    changed = [*rows[:-1], {"input_ids": [*rows[-1]["input_ids"][:-1], 39 - rows[-1]["input_ids"][-1] + 1]}]
    assert not torch.equal(compute_features(model, changed, collate, cache=tmp_path), first)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight.add_(torch.randn(40, 16))
    assert not torch.equal(compute_features(model, rows, collate, cache=tmp_path), first)
    assert len(list(tmp_path.iterdir())) == 3


def test_features_are_shortened_each_by_itself():
    features = torch.cat([torch.randn(50, 8) * 10, torch.randn(50, 8) * 0.01, torch.zeros(1, 8)])
    features = torch.cat([features, torch.tensor([[float("nan")] * 8, [float("inf"), *[0.0] * 7]])])
    for bias in (0.0, 0.5):
        clipped = clip_features(features, 2.0, bias)
        assert clipped.double().norm(dim=1).max() <= 2.0 and clipped.isfinite().all()
        torch.testing.assert_close(clipped[50:100, :8], features[50:100])
        assert torch.equal(clip_features(features[3:4], 2.0, bias), clipped[3:4])
        assert clipped.size(1) == 8 + bool(bias)
    assert not clip_features(torch.tensor([[1e30, float("nan"), 2.0, 0.0]]), 2.0).any()
    enormous = clip_features(torch.full((1, 8), 3e38), 1e-4)
    assert 0.99e-4 < enormous.double().norm() <= 1e-4
    direction = torch.nn.functional.cosine_similarity(clipped[:50, :8], features[:50])
    assert direction.min() > 1 - 1e-5


def test_models_without_a_last_linear_layer_are_refused():
    with pytest.raises(DPConfigError, match="two labels or more"):
        find_head(model_of("bert", num_labels=1))
    model = model_of("bert")
    model.classifier = torch.nn.Sequential(torch.nn.Linear(16, 3), torch.nn.Linear(3, 5))
    with pytest.raises(UnsupportedModuleError, match="convex in no layer"):
        find_head(model)
    model.bert, model.classifier = torch.nn.Embedding(3, 3), torch.nn.Identity()
    with pytest.raises(UnsupportedModuleError, match="none"):
        find_head(model)
    head_with_bias = torch.randn(3, 17)
    with pytest.raises(DPConfigError, match="has_bias=False"):
        attach_head(
            GPT2ForSequenceClassification(GPT2Config(**FAMILIES["gpt2"][0], num_labels=3)), head_with_bias, 1.0
        )


# --- arguments ---


def arguments(folder, **changes):
    values = dict(output_dir=str(folder), target_epsilon=2.0, head_radius=1.0, feature_norm=2.0, max_steps=10)
    return HeadTrainingArguments(**{**values, "use_cpu": True, "report_to": "none", **changes})


REFUSED = [
    ({"optim": "adamw_torch"}, "Use --optim sgd"),
    ({"optim": "dp_adam_bc"}, "Use --optim sgd"),
    ({"optim_args": "momentum=0.9"}, "momentum"),
    ({"filter": "first_order_v1"}, "mixes gradients of several steps"),
    ({"noise_mechanism": "nu_dpftrl"}, "correlated noise"),
    ({"noise_restart_every": 5}, "correlated noise"),
    ({"preconditioner": "delayed"}, "one convex loss"),
    ({"preconditioner": "quantile"}, "one convex loss"),
    ({"average_iterate": "tail"}, "returns its final weights"),
    ({"public_mirror_descent": "cosine"}, "no other gradients"),
    ({"privacy_unit": "user", "user_id_column": "u"}, "single records are protected"),
    ({"sampling": "balls_in_bins"}, "Use --sampling poisson"),
    ({"adjacency": "replace_one"}, "add_or_remove_one only"),
    ({"lr_scheduler_type": "linear"}, "--decay 0.5"),
    ({"warmup_steps": 5}, "without warmup"),
    ({"weight_decay": 0.1}, "--l2"),
    ({"max_grad_norm": 1.0}, "Leave it out"),
    ({"save_strategy": "steps", "save_steps": 5}, "Use --save_strategy no"),
    ({"eval_strategy": "steps", "eval_steps": 5}, "Use --eval_strategy no"),
    ({"logging_strategy": "steps"}, "Use --logging_strategy no"),
    ({"log_unprivatized": True}, "prints values"),
    ({"unsafe_fixed_noise_key": "00" * 32}, "nothing private"),
    ({"head_radius": None}, "Give --head_radius"),
    ({"feature_norm": None}, "Give --feature_norm"),
]


IN_SUBSPACE = [
    ({"optim": "adamw_torch"}, "makes its steps itself.*Use --optim sgd"),
    ({"optim_args": "momentum=0.9"}, "with momentum"),
    ({"filter": "first_order_v1"}, "gradients of several steps"),
    ({"average_iterate": "tail"}, "the mean of all iterates"),
    ({"noise_mechanism": "nu_dpftrl"}, "Use --noise_mechanism gaussian"),
    ({"noise_restart_every": 5}, "is independent"),
    ({"weight_decay": 0.1}, "Leave it out"),
    ({"max_grad_norm": 1.0}, "Leave it out"),
    ({"lr_scheduler_type": "linear"}, "constant, without warmup"),
    ({"warmup_steps": 5}, "without warmup"),
    ({"l2": 0.1}, "Leave both at 0"),
    ({"decay": 0.5}, "Leave both at 0"),
    ({"earlier_runs": ["a"]}, "add up epsilon"),
    ({"sampling": "fixed_order"}, "full, or Poisson"),
    ({"adjacency": "replace_one"}, "add_or_remove_one only"),
    ({"save_strategy": "steps", "save_steps": 5}, "nothing is seen of a head.*Use --save_strategy no"),
    ({"log_unprivatized": True}, "never covered"),
    (
        {"preconditioner_kwargs": {"rank": 4, "project": "after_noise"}},
        "does not know project.*It knows: rank, refresh_every, eps, adagrad",
    ),
    ({"preconditioner_kwargs": {"rank": 0}}, "rank=0"),
]


@pytest.mark.parametrize(
    "changes, match", REFUSED, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_what_no_theorem_covers_is_refused_with_its_mend(tmp_path, changes, match):
    with pytest.raises(DPConfigError, match=match):
        arguments(tmp_path / "out", **changes).head_config(1000)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, match", IN_SUBSPACE, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_what_is_no_part_of_adagrad_in_a_public_subspace_is_refused(tmp_path, changes, match):
    """And nothing that is said of it speaks of a bound on the last iterate, which it does not have."""
    with pytest.raises(DPConfigError, match=match) as error:
        arguments(tmp_path / "out", **{"preconditioner": "subspace", **changes}).head_config(1000)
    assert "last iterate" not in str(error.value) and "Only the final weights" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_preconditioner_subspace_asks_for_its_config(tmp_path):
    """Full batches, unless a size is given; no kwarg reaches a head without it."""
    given = arguments(
        tmp_path,
        preconditioner="subspace",
        preconditioner_kwargs='{"rank": 4, "refresh_every": 3, "adagrad": "clean"}',
    )
    asked = given.head_config(1000, has_bias=False)
    assert isinstance(asked, SubspaceHeadConfig) and not asked.has_bias
    assert (asked.rank, asked.refresh_every, asked.expected_batch_size, asked.num_steps) == (4, 3, 1000, 10)
    assert asked.adagrad == "clean"
    assert asked.step_size == asked.head_radius / 4
    some = arguments(tmp_path, preconditioner="subspace", expected_batch_size=50, max_steps=-1, num_train_epochs=2)
    assert some.head_config(1000).num_steps == 40 and some.head_config(1000).expected_batch_size == 50
    assert not isinstance(arguments(tmp_path).head_config(1000), SubspaceHeadConfig)


def test_adapters_are_refused(tmp_path):
    with pytest.raises(DPConfigError, match="not convex in an adapter"):
        check_convex_arguments(arguments(tmp_path), lora_r=8)
    with pytest.raises(DPConfigError, match="not convex in an adapter"):
        check_convex_arguments(arguments(tmp_path, preconditioner="subspace"), lora_r=8)


def test_the_best_of_several_iterates_is_refused(tmp_path):
    args = arguments(tmp_path)
    args.load_best_model_at_end = True
    with pytest.raises(DPConfigError, match="chooses among iterates"):
        check_convex_arguments(args)


def test_a_finetuning_run_never_takes_this_bound(tmp_path):
    """Its epsilon is that of all iterates, whatever it trains: even one linear layer."""
    trainer = tiny.trainer(tmp_path / "out", max_steps=5)
    for name, p in trainer.model.named_parameters():
        p.requires_grad_(name.startswith("classifier"))
    assert "last" not in str(trainer.plan.record.to_json()).lower()
