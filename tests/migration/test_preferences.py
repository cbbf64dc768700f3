"""Preferences and rewards: exact against TRL's own losses, pair by pair; losses of the batch are refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig
from transformers import BertForSequenceClassification, GPT2LMHeadModel, LlamaForCausalLM, TrainingArguments

from hf_dpopt import DPConfigError, DPTrainerMixin, DPTrainingArguments
from tests.helpers import tiny
from tests.migration.test_sft import _model
from tests.reference import clipping as reference

trl = pytest.importorskip("trl", reason="TRL is in the test extra: pip install '.[test]'")

from hf_dpopt import (  # noqa: E402  they need TRL
    DPDPOConfig,
    DPDPOTrainer,
    DPRewardConfig,
    DPRewardTrainer,
    DPSFTConfig,
    DPSFTTrainer,
)
from hf_dpopt.huggingface.preferences import PAIR_LOSSES, PreferenceLoss  # noqa: E402


class DPKTOTrainer(DPTrainerMixin, trl.KTOTrainer):
    pass


class DPRLOOTrainer(DPTrainerMixin, trl.RLOOTrainer):
    pass


PAIRS = Dataset.from_list(
    [
        {"prompt": f"what is the capital of {land}", "chosen": f" paris {city}", "rejected": f" the city {city}"}
        for land, city in [("france", "paris"), ("spain", "madrid"), ("italy", "rome")] * 8
    ]
)


def _arguments(tmp_path, cls=DPTrainingArguments, **changes):
    values = dict(
        output_dir=str(tmp_path / "out"), private_state_dir=str(tmp_path / "keys"), use_cpu=True, report_to="none",
        per_device_train_batch_size=4, expected_batch_size=8, max_steps=2, save_strategy="no", noise_multiplier=1.0,
        target_delta=1e-3, disable_tqdm=True, bf16=False,
    )  # fmt: skip
    return cls(**values | changes)


def _rows(num: int = 24) -> Dataset:
    """Pairs of answers of unlike lengths; six people wrote them."""
    lands = [("france", "paris"), ("spain", "madrid"), ("italy", "rome"), ("norway", "oslo")]
    return Dataset.from_list(
        [
            {
                "prompt": f"capital of {land}?", "chosen": f" {city} {i}", "rejected": " no" * (1 + i % 4),
                "who": f"p{i % 6}", "margin": i / num,
            }
            for i, (land, city) in ((i, lands[i % 4]) for i in range(num))
        ]
    )  # fmt: skip


def _preferences(tmp_path, callbacks=(), rows=None, who=False, **changes: Any) -> Any:
    given = {name: changes.pop(name) for name in ("peft_config", "eval_dataset", "ref_model") if name in changes}
    rows = (_rows() if rows is None else rows).remove_columns(["margin", *([] if who else ["who"])])
    args = _arguments(tmp_path, DPDPOConfig, **EXACT | changes)
    return DPDPOTrainer(
        _model(n_positions=512), args=args, train_dataset=rows, processing_class=tiny.byte_tokenizer(),
        callbacks=list(callbacks), **given,
    )  # fmt: skip


def _reward_model() -> Any:
    return tiny.made(BertForSequenceClassification, vocab_size=len(tiny.byte_tokenizer()), num_labels=1)


def _rewards(tmp_path, callbacks=(), has_margin=True, **changes: Any) -> Any:
    tokenizer = tiny.byte_tokenizer()
    rows = _rows().remove_columns(["who", *([] if has_margin else ["margin"])])
    args = _arguments(tmp_path, DPRewardConfig, **EXACT | changes)
    return DPRewardTrainer(
        _reward_model(), args, train_dataset=rows, processing_class=tokenizer, callbacks=list(callbacks)
    )


EXACT = dict(learning_rate=0.0, noise_multiplier=0.0, clipping_norm=0.05, gradient_checkpointing=False)


def _is_exact(trainer: Any, seen: tiny.Gradients, bound: float = 0.05, error: float = 1e-5) -> None:
    """Each step released the sum over the pairs drawn of the clipped gradients of TRL's own loss, pair by pair."""
    trainer.train()
    run, model = trainer._session.run, trainer.model.eval()
    assert seen.steps
    factors = []
    for step, got in enumerate(seen.steps, start=1):
        want = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
        for i in run.plan.sampler.draw(run.chain.sampling_key, step).tolist():
            model.zero_grad()
            batch = trainer.data_collator([trainer.train_dataset[i]])
            trainer.compute_loss(model, batch).backward()
            norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).sqrt()
            factors.append(float(min(1, bound / norm)))
            for name in want:
                want[name] += factors[-1] * model.get_parameter(name).grad / 8
        model.zero_grad()
        assert reference.relative_error(got, want) < error
    assert min(factors) < 1  # some are clipped


@pytest.mark.parametrize("loss_type", PAIR_LOSSES)
def test_a_step_is_the_clipped_sum_of_trls_losses_of_pairs(tmp_path, loss_type):
    seen = tiny.Gradients()
    smoothing = 0.1 if loss_type in ("exo_pair", "robust") else 0.0
    _is_exact(_preferences(tmp_path, [seen], loss_type=[loss_type], label_smoothing=smoothing, beta=0.3), seen)


@pytest.mark.parametrize("kind", [DPDPOTrainer, DPRewardTrainer, DPSFTTrainer])
def test_public_records_are_prepared_like_the_training_set_and_compared_with_it(kind, tmp_path):
    tokenizer, rows = tiny.byte_tokenizer(), _rows().remove_columns(["who", "margin"])
    make, config = {
        DPDPOTrainer: (_model, DPDPOConfig), DPRewardTrainer: (_reward_model, DPRewardConfig),
        DPSFTTrainer: (_model, DPSFTConfig),
    }[kind]  # fmt: skip
    if kind is DPSFTTrainer:
        rows = rows.map(lambda row: {"text": row["prompt"] + row["chosen"]}, remove_columns=rows.column_names)
    public = rows.map(lambda row: {name: f"well, {text}" for name, text in row.items()})

    def trainer(**changes: Any) -> Any:
        of_args = {name: changes.pop(name) for name in ("preconditioner",) if name in changes}
        args = _arguments(tmp_path, config, public_batch_size=8, gradient_checkpointing=False, **of_args)
        return kind(make(), args=args, train_dataset=rows, processing_class=tokenizer, **changes)

    prepared = trainer().train_dataset
    only_ids = prepared.remove_columns(rows.column_names) if kind is DPSFTTrainer else prepared
    for private in (rows, prepared, only_ids):
        with pytest.raises(DPConfigError, match="in the training dataset"):
            trainer(preconditioner="adadps", public_dataset=private)
    with pytest.raises(DPConfigError, match="cannot be prepared.*Give a datasets.Dataset with the columns of train_d"):
        trainer(preconditioner="adadps", public_dataset=list(public))
    made = trainer(preconditioner="adadps", public_dataset=public)
    made.train()
    assert made.privacy_spent().num_steps == 2


def test_losses_are_weighed(tmp_path):
    seen = tiny.Gradients()
    _is_exact(_preferences(tmp_path, [seen], loss_type=["sigmoid", "ipo"], loss_weights=[0.7, 0.2]), seen)


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm"])
def test_no_answer_is_counted_from_padding(tmp_path, loss_type):
    """An answer without a prompt, padded on the left: how far decides another pair of the batch."""
    loss = PreferenceLoss(_arguments(tmp_path, DPDPOConfig, loss_type=[loss_type]))
    ids, logits = torch.randint(3, 20, (1, 2, 5)), torch.randn(2, 5, 20)

    def padded(by: int) -> torch.Tensor:
        seen = F.pad(torch.ones(1, 2, 5), (by, 0))
        inputs = dict(input_ids=F.pad(ids, (by, 0)), completion_mask=seen, attention_mask=seen)
        inputs |= {name: torch.zeros(1) for name in ("ref_chosen_logps", "ref_rejected_logps")}
        return loss(SimpleNamespace(logits=torch.cat([torch.randn(2, by, 20), logits], dim=1)), None, inputs)

    assert padded(0).item() == pytest.approx(padded(3).item(), rel=1e-6)


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
def test_adapters_learn_preferences_exactly(tmp_path, engine):
    """The reference is the model without its adapter."""
    seen, lora = (
        tiny.Gradients(),
        LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False),
    )
    _is_exact(_preferences(tmp_path, [seen], peft_config=lora, clipping_engine=engine), seen)


@pytest.mark.parametrize("has_margin", [True, False])
def test_a_step_is_the_clipped_sum_of_trls_rewards(tmp_path, has_margin):
    seen = tiny.Gradients()
    trainer = _rewards(tmp_path, [seen], has_margin, center_rewards_coefficient=0.1, clipping_norm=0.001)
    _is_exact(trainer, seen, bound=0.001, error=1e-4)  # two texts alike almost cancel, and float32 loses digits


@pytest.mark.parametrize(
    ("make", "changes", "word"),
    [
        (_preferences, {"beta": 0.5}, "loss_options.beta: 0.1 in the ledger, 0.5 now"),
        (_preferences, {"loss_type": ["ipo"]}, r"loss_options.loss_type: \['sigmoid'\] in the ledger, \['ipo'\] now"),
        (
            _preferences,
            {"ref_model": _model(n_positions=512, n_head=4, initializer_range=0.5)},
            "loss_options.reference",
        ),
        (_preferences, {"max_length": 200}, "collator.max_length: 1024 in the ledger, 200 now"),
        (_rewards, {"center_rewards_coefficient": 0.1}, "center_rewards_coefficient: None in the ledger, 0.1 now"),
    ],
)
def test_a_run_is_resumed_with_the_same_loss(tmp_path, make, changes, word):
    """And goes on with it."""
    kept = dict(noise_multiplier=1.0, save_strategy="steps", save_steps=1)
    make(tmp_path, **kept).train()
    with pytest.raises(DPConfigError, match=f"used another private mechanism.*{word}"):
        make(tmp_path, **kept, **changes).train(str(tmp_path / "out" / "checkpoint-1"))
    make(tmp_path, **kept).train(str(tmp_path / "out" / "checkpoint-1"))


def test_pairs_of_a_person_are_one_unit(tmp_path, capsys):
    """And how many pairs they have is not shown where TRL prepares them."""
    datasets.enable_progress_bars()
    trainer = _preferences(
        tmp_path, who=True, noise_multiplier=1.0, expected_batch_size=3, privacy_unit="user", user_id_column="who",
        target_delta=0.01,
    )  # fmt: skip
    trainer.train()
    assert trainer.plan.num_users == 6 and trainer.privacy_spent().num_steps == 2
    assert "/24 [" not in "".join(capsys.readouterr())


def test_held_out_pairs_are_evaluated_as_trl_does(tmp_path):
    held_out = _rows(30).select(range(24, 30)).remove_columns(["who", "margin"])
    trainer = _preferences(tmp_path, eval_dataset=held_out, noise_multiplier=1.0)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(
        math.log(2), abs=1e-4
    )  # nothing was learned at a rate of 0
    logged = {key for line in trainer.state.log_history for key in line}
    assert "eval_rewards/accuracies" in logged and not any(key.startswith("rewards/") for key in logged)


@pytest.mark.parametrize("kind", [GPT2LMHeadModel, LlamaForCausalLM])
def test_reference_values_of_a_pair_depend_on_that_pair_alone(tmp_path, kind):
    """With dropout in the model, which Llama's attention does not take from an nn.Dropout."""
    dropout = {"attn_pdrop": 0.5} if kind is GPT2LMHeadModel else {"attention_dropout": 0.5, "pad_token_id": 0}
    rows, columns = _rows(9).remove_columns(["who", "margin"]), ["ref_chosen_logps", "ref_rejected_logps"]

    def values(number: int, of: Dataset) -> list[tuple[float, ...]]:
        args = _arguments(tmp_path / str(number), DPDPOConfig, **EXACT, disable_dropout=False)
        model = tiny.made(kind, vocab_size=259, n_positions=512, **dropout).train()
        trainer = DPDPOTrainer(model, args=args, train_dataset=of, processing_class=tiny.byte_tokenizer())
        assert all(module.training for module in trainer.model.modules())
        return list(zip(*(trainer.train_dataset[name] for name in columns), strict=True))

    assert values(1, rows)[1:] == values(2, rows.select(range(1, 9)))


@pytest.mark.parametrize(
    ("changes", "mend"),
    [
        ({"loss_type": ["aot"]}, "loss_type='aot' is not a loss of single pairs. Use one of: sigmoid"),
        ({"loss_type": ["sigmoid", "sft"]}, "loss_type='sft' is not a loss of single pairs"),
        ({"precompute_ref_log_probs": False}, "precompute_ref_log_probs=True"),
        ({"sync_ref_model": True}, "sync_ref_model=False"),
        ({"precompute_ref_batch_size": 4}, "precompute_ref_batch_size=4: .* Leave precompute_ref_batch_size out"),
        ({"ld_alpha": 0.5}, "ld_alpha=0.5 is not implemented for private training. Use ld_alpha=None"),
        ({"f_divergence_type": "forward_kl"}, "Use f_divergence_type='reverse_kl'"),
        ({"use_weighting": True}, "Use use_weighting=False"),
        ({"padding_free": True}, "padding_free=True: .* Set padding_free=False"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1: .* Set label_smoothing_factor=0"),
        ({"beta": 0.0}, "beta=0.0: .* Set beta above 0"),
        ({"beta": math.nan}, "beta=nan: .* Set beta above 0"),
        ({"loss_type": ["robust"], "label_smoothing": 0.5}, r"label_smoothing=0.5: .* label_smoothing in \[0, 0.5\)"),
        ({"loss_type": ["discopop"], "discopop_tau": 0.0}, "discopop_tau=0.0: .* Set discopop_tau above 0"),
        ({"activation_offloading": True}, "activation_offloading=False"),
        ({"eval_data_privacy": "private", "eval_target_epsilon": 2.0}, "eval_data_privacy='public'"),
    ],
)
def test_losses_that_are_not_of_single_pairs_are_refused(tmp_path, changes, mend):
    with pytest.raises(DPConfigError, match=mend):
        _preferences(tmp_path, **changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "args", [DPTrainingArguments, DPSFTConfig, "the other's", trl.DPOConfig, trl.RewardConfig, TrainingArguments, None]
)
@pytest.mark.parametrize(
    ("trainer", "config", "others"),
    [(DPDPOTrainer, DPDPOConfig, DPRewardConfig), (DPRewardTrainer, DPRewardConfig, DPDPOConfig)],
)
def test_other_arguments_are_refused_and_the_right_ones_named(tmp_path, trainer, config, others, args):
    args = others if isinstance(args, str) else args
    is_private = args is not None and issubclass(args, DPTrainingArguments)
    given = _arguments(tmp_path, args) if is_private else args and args(output_dir=str(tmp_path / "out"), use_cpu=True)
    got = args.__name__ if args else "no args"
    with pytest.raises(
        DPConfigError, match=f"{trainer.__name__} got {got}. Use hf_dpopt.{config.__name__}, and set target_epsilon."
    ):
        trainer(_model(), args=given, train_dataset=PAIRS)


def test_arguments_by_place_are_those_of_trl(tmp_path):
    model, tokenizer, rows = _model(n_positions=512), tiny.byte_tokenizer(), _rows().remove_columns(["who", "margin"])
    args = _arguments(tmp_path, DPDPOConfig)
    with pytest.raises(DPConfigError, match="second argument by place is ref_model.*DPDPOTrainer\\(model, args=args"):
        DPDPOTrainer(model, args)
    made: Any = DPDPOTrainer(model, None, args, None, rows, None, tokenizer)
    assert made.plan.num_examples == len(rows) and made.processing_class is tokenizer
    model, args = (
        tiny.made(BertForSequenceClassification, vocab_size=259, num_labels=1),
        _arguments(tmp_path, DPRewardConfig),
    )
    made = DPRewardTrainer(model, args, None, rows, None, tokenizer)
    assert made.plan.num_examples == len(rows) and made.processing_class is tokenizer


@pytest.mark.parametrize("option", ["per_example_loss_func", "model_init"])
@pytest.mark.parametrize(("trainer", "config"), [(DPDPOTrainer, DPDPOConfig), (DPRewardTrainer, DPRewardConfig)])
def test_losses_and_models_that_are_not_taken_are_refused(tmp_path, trainer, config, option):
    with pytest.raises(DPConfigError, match=f"^{option}: {trainer.__name__} "):
        trainer(_model(), args=_arguments(tmp_path, config), train_dataset=PAIRS, **{option: _model})


def _odd(**changes: Any) -> Dataset:
    rows = PAIRS.to_list()
    rows[5].update(changes)
    return Dataset.from_list(rows)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            PAIRS.rename_column("chosen", "winner"),
            "no column 'chosen' .it has: prompt, winner, rejected.*rename_columns",
        ),
        (PAIRS.remove_columns(["chosen", "rejected"]), "no column 'chosen' and no column 'rejected'"),
        (PAIRS.select([]), "it has no rows. Give at least one pair"),
        (_odd(rejected=None), "column 'rejected': rows have a value that is neither a string nor.*dataset.filter"),
        (_odd(prompt=None), "column 'prompt'"),
        (PAIRS.map(lambda row: {"rejected": row["chosen"]}), "`chosen` and `rejected` are the same in every row"),
    ],
)
@pytest.mark.parametrize(("trainer", "config"), [(DPDPOTrainer, DPDPOConfig), (DPRewardTrainer, DPRewardConfig)])
def test_rows_that_are_not_pairs_are_refused(tmp_path, trainer, config, rows, words):
    model = _model() if trainer is DPDPOTrainer else _reward_model()
    given = dict(args=_arguments(tmp_path, config), processing_class=tiny.byte_tokenizer())
    with pytest.raises(DPConfigError, match=f"^train_dataset.*{words}"):
        trainer(model, train_dataset=rows, **given)
    with pytest.raises(DPConfigError, match="^eval dataset: no column 'rejected'"):
        trainer(model, train_dataset=PAIRS, eval_dataset=_rows().remove_columns("rejected"), **given)


@pytest.mark.parametrize(("trainer", "config"), [(DPDPOTrainer, DPDPOConfig), (DPRewardTrainer, DPRewardConfig)])
def test_a_model_without_a_name_needs_its_tokenizer(tmp_path, trainer, config):
    with pytest.raises(DPConfigError, match="^processing_class: .*Pass processing_class=tokenizer"):
        trainer(_model(), args=_arguments(tmp_path, config), train_dataset=PAIRS)


def test_pairs_that_come_after_training_need_a_reference(tmp_path):
    trainer, new = _preferences(tmp_path, noise_multiplier=1.0), _rows(30).select(range(24, 30))
    trainer.train()
    with pytest.raises(DPConfigError, match="as eval_dataset= when the trainer is made, pass ref_model=, or train"):
        trainer.evaluate(new)
    trainer = _preferences(tmp_path / "2", noise_multiplier=1.0, ref_model=_model(n_positions=512))
    trainer.train()
    assert math.isfinite(trainer.evaluate(new)["eval_loss"])


@pytest.mark.parametrize("kind", [DPDPOTrainer, DPSFTTrainer])
def test_the_end_of_a_private_prompt_is_not_printed(tmp_path, kind, caplog):
    """TRL quotes a prompt whose last token merges with the answer."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens(["SECRET yes"])
    rows = PAIRS.map(lambda row: {**row, "prompt": f"{row['prompt']} SECRET", "chosen": " yes", "rejected": " no"})
    config = DPDPOConfig
    if kind is DPSFTTrainer:
        rows, config = rows.remove_columns("rejected").rename_column("chosen", "completion"), DPSFTConfig
    model = _model(n_positions=512)
    model.resize_token_embeddings(len(tokenizer))
    kind(model, args=_arguments(tmp_path, config), train_dataset=rows, processing_class=tokenizer)
    assert "is not a prefix" in caplog.text and "not shown" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(("make", "limit"), [(_preferences, 18), (_rewards, 28)])
def test_texts_that_do_not_fit_are_named(tmp_path, make, limit):
    with pytest.raises(DPConfigError, match=f"^max_length={limit}: .* records of 24.*Set a larger max_length"):
        make(tmp_path, max_length=limit)


@pytest.mark.parametrize("limit", [1, 2, 60])
@pytest.mark.parametrize(("trainer", "config"), [(DPDPOTrainer, DPDPOConfig), (DPRewardTrainer, DPRewardConfig)])
def test_datasets_of_which_nothing_fits_are_refused(tmp_path, trainer, config, limit):
    """DPO computes the values of its reference then, of no pair."""
    long = _rows(6).map(lambda row: {name: f"other {row[name]}" * 5 for name in ("prompt", "chosen", "rejected")})
    model, words = _reward_model() if trainer is DPRewardTrainer else _model(n_positions=512), "no record of the "
    words += "eval dataset is left.* Set a larger max_length" if limit == 60 else "train dataset is left"
    args = _arguments(tmp_path, config, max_length=limit, eval_data_privacy="public")
    with pytest.raises(
        DPConfigError, match=f"^max_length={limit}" + (" is out of range" if limit == 1 else f": {words}")
    ):
        trainer(model, args=args, train_dataset=_rows(), eval_dataset=long, processing_class=tiny.byte_tokenizer())
    assert not (tmp_path / "out" / "privacy").exists()


class MixedDPO(DPTrainerMixin, trl.DPOTrainer):
    pass


class MixedReward(DPTrainerMixin, trl.RewardTrainer):
    pass


@pytest.mark.parametrize("given", [None, lambda outputs, labels: outputs.logits.mean((1, 2))])
@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        (MixedDPO, "DPOTrainer compares two answers.*Use hf_dpopt.DPDPOTrainer with hf_dpopt.DPDPOConfig"),
        (MixedReward, "RewardTrainer compares two answers.*Use hf_dpopt.DPRewardTrainer with hf_dpopt.DPRewardConfig"),
        (DPKTOTrainer, "KTOTrainer estimates a divergence from the other records.*desirable completions"),
        (DPRLOOTrainer, "RLOOTrainer computes a loss of the whole batch.*three can be private"),
    ],
)
def test_what_is_the_case_is_said(trainer, words, given, tmp_path):
    """The same with a loss of records, which is no way out here."""
    with pytest.raises(DPConfigError, match=words):
        trainer(
            model=_model(),
            args=_arguments(tmp_path),
            train_dataset=PAIRS,
            per_example_loss_func=given,
        )


def test_chosen_answers_can_be_learned(tmp_path):
    """The way out of KTO."""
    chosen = PAIRS.remove_columns("rejected").rename_column("chosen", "completion")
    args = _arguments(tmp_path, DPSFTConfig, completion_only_loss=True, gradient_checkpointing=False)
    trainer = DPSFTTrainer(model=_model(), args=args, train_dataset=chosen, processing_class=tiny.byte_tokenizer())
    trainer.train()
    assert trainer.privacy_spent().num_steps == 2
