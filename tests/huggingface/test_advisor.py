"""What the trainer chooses where nothing was said, what it leaves alone, and what the log says of a run."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import transformers
from peft import LoraConfig

from hf_dpopt import DPConfigError, DPTrainer, DPTrainingArguments
from hf_dpopt.huggingface import advice_log as module
from hf_dpopt.huggingface.advisor import Trained, read_advised
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.plan import advice
from recipes.classifiers import PromptConfig, PromptForSequenceClassification
from tests.helpers.tiny import arguments, collate, model, records, trainer

pytestmark = pytest.mark.slow

OPEN = dict(
    noise_multiplier=None, target_epsilon=8.0, expected_batch_size=None, max_steps=-1, num_train_epochs=3.0,
    learning_rate=5e-5, lr_scheduler_type="linear",
)  # fmt: skip


@pytest.fixture
def log(caplog):
    """Lines of a trainer's log."""
    caplog.set_level(logging.INFO, logger="hf_dpopt")
    logging.getLogger("hf_dpopt").addHandler(caplog.handler)
    yield lambda: list(dict.fromkeys(record.getMessage() for record in caplog.records))
    logging.getLogger("hf_dpopt").removeHandler(caplog.handler)


def big(**changes):
    return {"train_dataset": records(400), **OPEN, **changes}


def test_what_was_left_open_is_chosen_and_written_down(tmp_path, log):
    made = trainer(tmp_path, **big())
    advised = advice.advise(
        advice.TrainingJob(
            num_units=400, target_epsilon=8.0, target_delta=1e-3, kind="full",
            model_size=sum(p.numel() for p in made.model.parameters()),
        )
    )  # fmt: skip
    assert made.plan.sampler.expected_batch_size == made.args.expected_batch_size == advised.batch > 4
    assert made.args.per_device_train_batch_size == 4, "the physical batch is the user's"
    assert made.args.learning_rate == advised.learning_rate
    assert made.plan.num_steps == advised.outlook.num_steps
    made.train()
    ledger = [json.loads(line) for line in (tmp_path / "privacy" / "ledger.jsonl").read_text().splitlines()]
    noted = next(r["plan"]["advised"] for r in ledger if "plan" in r)
    assert noted == {
        "expected_batch_size": advised.batch, "learning_rate": advised.learning_rate, "warmup_steps": 0,
    }  # fmt: skip
    statement = (tmp_path / "privacy" / "statement.md").read_text()
    assert f"`learning_rate` {advised.learning_rate:g}" in statement and "chosen by `advisor`" in statement
    (line,) = [line for line in log() if line.startswith("Advisor: ")]
    assert line.startswith("Advisor: expected_batch_size=") and 'advisor="none"' in line
    assert "Outlook: noise over signal" in line


@pytest.mark.parametrize(
    "by_hand, left",
    [
        ({"expected_batch_size": 16}, {"expected_batch_size": 16}),
        ({"gradient_accumulation_steps": 4}, {"expected_batch_size": 16}),
        ({"max_steps": 5}, {"expected_batch_size": 4, "max_steps": 5}),
        ({"learning_rate": 1e-4}, {"learning_rate": 1e-4, "warmup_steps": 0}),
        ({"optim": "sgd"}, {"learning_rate": 5e-5}),
        ({"optim": "adafactor"}, {"learning_rate": 5e-5}),
        ({"warmup_steps": 3}, {"warmup_steps": 3}),
        ({"lr_scheduler_type": "cosine"}, {"warmup_steps": 0}),
        ({"clipping_norm": 0.5}, {"clipping": "flat", "clipping_norm": 0.5}),
        ({"clipping": "per_layer"}, {"clipping": "per_layer"}),
        ({"preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 1}}, {"learning_rate": 5e-5}),
        ({"preconditioner": "quantile", "expected_batch_size": 100}, {"learning_rate": 5e-5}),
        ({"noise_mechanism": "banded", "noise_kwargs": {"num_bands": 16}}, {"expected_batch_size": 4}),
        ({"sampling": "fixed_order"}, {"expected_batch_size": 4}),
        (
            {"advisor": "none"},
            {"expected_batch_size": 4, "learning_rate": 5e-5, "clipping": "flat", "warmup_steps": 0},
        ),
        ({"noise_multiplier": 1.0, "target_epsilon": None}, {"expected_batch_size": 4, "learning_rate": 5e-5}),
    ],
    ids=str,
)
def test_what_was_set_by_hand_stays(tmp_path, by_hand, left):
    made = trainer(tmp_path, **big(**by_hand))
    assert {name: getattr(made.args, name) for name in left} == left
    assert not set(left) & set(made.plan.advised)
    assert made.plan.config.clipping == made.args.clipping


@pytest.mark.parametrize("given", [{}, {"model_init": lambda: model()}], ids=["model", "model_init"])
def test_a_resumed_run_keeps_what_was_advised_whatever_later_rules_say(tmp_path, monkeypatch, given):
    options = big(save_strategy="steps", save_steps=2, **given)
    first = trainer(tmp_path, **options)
    first.train()
    chosen = dict(first.plan.advised)
    monkeypatch.setattr(advice, "RATES", {key: 10 * rate for key, rate in advice.RATES.items()})
    monkeypatch.setattr(advice, "SHORTEST", 2)
    advice.advise.cache_clear()
    again = trainer(tmp_path, **options)
    assert again.plan.advised == chosen and again.args.learning_rate == chosen["learning_rate"]
    assert again.plan.num_steps == first.plan.num_steps
    checkpoint = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    again.train(resume_from_checkpoint=str(checkpoint))
    advice.advise.cache_clear()


def test_a_run_that_began_without_advice_goes_on_without(tmp_path):
    trainer(tmp_path, **big(advisor="none", expected_batch_size=50)).train()
    again = trainer(tmp_path, **big(expected_batch_size=50))
    assert not again.plan.advised and again.args.learning_rate == 5e-5 and again.args.clipping == "flat"


def test_users_are_counted_not_their_records(tmp_path):
    rows = [{**row, "who": i % 100} for i, row in enumerate(records(400))]
    made = trainer(
        tmp_path, **big(train_dataset=rows, privacy_unit="user", user_id_column="who", target_delta=1e-3)
    )  # fmt: skip
    assert made.plan.advised["expected_batch_size"] <= 100


@pytest.mark.parametrize(
    "written",
    [[], {"learning_rate": "fast"}, {"learning_rate": -1.0}, {"learning_rate": float("nan")},
     {"warmup_steps": None}, {"trained_head": True}, {"expected_batch_size": 0}, {"expected_batch_size": True}, {"optim": "sgd"}],
    ids=str,
)  # fmt: skip
def test_advised_options_that_no_run_wrote_are_refused(written):
    with pytest.raises(DPConfigError, match="advised options that no run wrote"):
        read_advised(written)


def test_the_same_arguments_are_advised_anew(tmp_path):
    """A sweep over epsilon in a notebook: what the first run was given is not taken for typed by the second."""
    args = arguments(tmp_path / "a", **OPEN)
    rows = records(400)
    made = [DPTrainer(model(), args, train_dataset=rows, data_collator=collate)]
    args.output_dir, args.target_epsilon = str(tmp_path / "b"), 1.0
    made.append(DPTrainer(model(), args, train_dataset=rows[:100], data_collator=collate))
    first, second = (dict(one.plan.advised) for one in made)
    assert set(first) == set(second) and first != second
    assert made[1].plan.sampler.expected_batch_size == second["expected_batch_size"] <= 100


def test_nothing_is_set_by_a_trainer_that_could_not_be_made(tmp_path):
    args = arguments(tmp_path, **{**OPEN, "target_delta": 0.5})
    with pytest.raises(DPConfigError, match="delta"):
        DPTrainer(model(), args, train_dataset=records(400), data_collator=collate)
    assert args.expected_batch_size is None and args.learning_rate == 5e-5


@pytest.mark.parametrize(
    "flags",
    [
        {"target_epsilon": 0.01, "target_delta": 1e-8, "expected_batch_size": 16},
        {"target_epsilon": 1e4, "expected_batch_size": 16},
        {"lr_scheduler_type": "polynomial", "warmup_steps": 100},
        {"optimizer_cls_and_kwargs": (lambda p, **k: torch.optim.AdamW(p, **k), {"lr": 1e-3})},
        {"num_train_epochs": 1e-3},
        {"train_dataset": records(2), "target_delta": 0.1, "per_device_train_batch_size": 1},
    ],
    ids=lambda flags: ", ".join(map(str, flags)),
)
def test_advice_is_no_reason_to_refuse_a_run(tmp_path, flags):
    assert trainer(tmp_path, **big(**flags)).plan.is_private


# --- the log ---


def test_a_poor_run_is_told_so_with_what_would_be_better(tmp_path, log):
    """All by hand: a batch in which the noise is a thousand times the signal."""
    trainer(tmp_path, **big(advisor="none", expected_batch_size=4, learning_rate=1e-3)).train()
    (line,) = [line for line in log() if "expected to learn little" in line]
    assert "the signal" in line and "expected_batch_size=" in line and "learning_rate=" in line


def test_a_poor_run_that_no_batch_mends_is_told_what_would(tmp_path, log):
    trainer(tmp_path, **big(advisor="none", expected_batch_size=4, max_steps=3, learning_rate=1e-3)).train()
    (line,) = [line for line in log() if "expected to learn little" in line]
    assert "A linear head on the frozen model would be worth" in line and "expected_batch_size=" not in line
    assert "recipes/glue.py --freeze encoder --pooling cls mean --num_train_epochs 24" in line


@pytest.mark.parametrize("typed, word", [(1e-5, "small"), (5.0, "large")])
@pytest.mark.parametrize("argv", [[], ["--learning_rate", "1e-5"], ["--output-dir=out"]], ids=str)
def test_a_rate_given_for_another_batch_is_judged_in_the_first_line(tmp_path, log, monkeypatch, typed, word, argv):
    """It is kept, and the batch that it was for is not: the worst of both."""
    monkeypatch.setattr("sys.argv", ["script.py", *argv])
    made = trainer(tmp_path, **big(learning_rate=typed))
    made.train()
    assert (
        made.args.learning_rate == typed and made.args.expected_batch_size == made.plan.advised["expected_batch_size"]
    )
    advised = trainer(tmp_path / "b", **big()).args.learning_rate
    (warning,) = [line for line in log() if "that was chosen" in line]
    use = f"--learning_rate {advised:g}, or --advisor all" if argv else f'learning_rate={advised:g}, or advisor="all"'
    said = f"--learning_rate {typed:g}" if argv else f"learning_rate={typed:g}"
    assert warning.startswith(
        f"{said}: too {word} for the batch of {made.args.expected_batch_size:,} that was chosen. Use {use}"
    )


@pytest.mark.parametrize(
    "typed", [{"expected_batch_size": 16}, {"gradient_accumulation_steps": 4}, {"learning_rate": 1e-5},
              {"expected_batch_size": 16, "learning_rate": 1e-5}],
    ids=str,
)  # fmt: skip
def test_all_replaces_both_batch_and_rate(tmp_path, log, typed):
    open_ = trainer(tmp_path / "a", **big()).plan.advised
    made = trainer(tmp_path / "b", **big(advisor="all", **typed))
    assert made.plan.advised == open_ and made.args.learning_rate == open_["learning_rate"]
    assert made.plan.sampler.expected_batch_size == open_["expected_batch_size"]
    made.train()
    assert not any("that was chosen" in line for line in log())
    again = trainer(tmp_path / "b", **big(advisor="all", **typed))  # a resumed run keeps them
    assert again.plan.advised == made.plan.advised and again.plan.num_steps == made.plan.num_steps


def test_the_log_takes_the_head_of_an_earlier_run_for_trained(tmp_path, log, monkeypatch):
    monkeypatch.setattr(
        module, "outlook_of",
        lambda plan, kind, **kwargs: advice.Outlook(
            num_steps=40, noise=4e-4, run_noise=4e-4 / 40**0.5, signal=5e-4,
            has_trained_head=kwargs["has_trained_head"],
        ),
    )  # fmt: skip
    trainer(tmp_path / "head", **big(target_epsilon=2.0, num_train_epochs=1.0)).train()
    assert not any("(on a trained head)" in line for line in log())
    trainer(tmp_path / "all", **big(earlier_runs=[str(tmp_path / "head")])).train()
    assert any("(on a trained head)" in line for line in log())


def test_long_correlated_noise_is_announced_without_its_error(tmp_path, log, monkeypatch):
    """That of a tree over 60,000 steps would take 54 GB."""
    monkeypatch.setattr(module, "MAX_CORRELATED_STEPS", 2)
    trainer(tmp_path, **big(noise_mechanism="tree", expected_batch_size=40, num_train_epochs=0.3)).train()
    assert not any("Outlook" in line for line in log())


def test_an_unknown_advisor_is_refused(tmp_path):
    with pytest.raises((DPConfigError, ValueError), match="advisor"):
        trainer(tmp_path, **big(advisor="best"))


@pytest.mark.parametrize(("model_class", "config_class", "kind"), [
    (transformers.BertForSequenceClassification, transformers.BertConfig, "head"),
    (transformers.RobertaForSequenceClassification, transformers.RobertaConfig, "lora"),
])  # fmt: skip
def test_only_one_linear_layer_gets_the_rate_of_a_head(tmp_path, model_class, config_class, kind):
    """RoBERTa's head has a hidden layer, which a rate of 0.1 would wreck."""
    config = config_class(
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = model_class(config)
    for parameter in model.base_model.parameters():
        parameter.requires_grad_(False)
    args = DPTrainingArguments(output_dir=str(tmp_path), target_epsilon=8.0, expected_batch_size=8, use_cpu=True)
    assert Trained.of(TrainerInputs(args=args, model=model)).kind == kind


@pytest.mark.parametrize(("name", "has_adapters", "starts_trained"), [
    ("texts", True, True), ("texts", False, False), ("label words", True, True), ("new head", True, False),
])  # fmt: skip
def test_adapters_on_a_language_head_start_trained(tmp_path, name, has_adapters, starts_trained):
    """Whatever such a model answers at first, it is no coin toss as that of a new head."""
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    made = {
        "texts": lambda: transformers.GPT2LMHeadModel(config),
        "label words": lambda: PromptForSequenceClassification(PromptConfig(config, num_labels=2)),
        "new head": lambda: transformers.GPT2ForSequenceClassification(config),
    }[name]()
    args = DPTrainingArguments(output_dir=str(tmp_path), target_epsilon=8.0, expected_batch_size=8, use_cpu=True)
    found = Trained.of(TrainerInputs(args=args, model=made, peft_config=LoraConfig() if has_adapters else None))
    assert found.starts_trained == starts_trained
    assert found.is_glue == (name == "new head"), "a language model is never told of a linear head"
