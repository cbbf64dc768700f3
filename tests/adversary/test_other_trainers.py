"""Private arguments in a trainer that is not private, and methods of a user's trainer that would not run."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers as tf
import trl

from hf_dpopt import DPConfigError, DPSeq2SeqTrainingArguments, DPTrainer, DPTrainerMixin, DPTrainingArguments
from hf_dpopt.cli.folders import show_findings
from tests.adversary.harness import words
from tests.helpers import tiny

BUDGETS = ({"target_epsilon": 8.0, "noise_multiplier": None}, {"noise_multiplier": 1.0})


class Own(tf.Trainer):
    """A trainer of a user, with its own schedule, whose callbacks are its own, too."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer or self.optimizer)
        return self.lr_scheduler


def _stock(args: Any, cls: type = tf.Trainer, **changes: Any) -> Any:
    held_out = tiny.records(70)[64:]
    given = {"model": tiny.model(), "train_dataset": tiny.records(), "eval_dataset": held_out, **changes}
    return cls(args=args, data_collator=tiny.collate, **given)


def _assert_refused(trainer: Any) -> None:
    before = tiny.weights(trainer.model)
    with pytest.raises(DPConfigError, match="without privacy.*DPTrainerMixin.*TrainingArguments"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(p, before[name]) for name, p in tiny.weights(trainer.model).items())


COPIES = (copy.copy, copy.deepcopy, dataclasses.replace, lambda a: pickle.loads(pickle.dumps(a)))


@pytest.mark.parametrize(
    ("cls", "budget", "copied"),
    [
        *((cls, budget, lambda a: a) for cls in (tf.Trainer, tf.Seq2SeqTrainer, Own) for budget in BUDGETS),
        *((tf.Trainer, BUDGETS[0], copied) for copied in COPIES),
    ],
)
def test_no_other_trainer_trains_with_private_arguments(cls: type, budget: Any, copied: Any, tmp_path: Path) -> None:
    kind = DPSeq2SeqTrainingArguments if cls is tf.Seq2SeqTrainer else DPTrainingArguments
    values = vars(tiny.arguments(tmp_path / "out", **budget))
    given = {f.name: values[f.name] for f in dataclasses.fields(DPTrainingArguments) if f.init}
    _assert_refused(_stock(copied(kind(**given)), cls))


def test_arguments_of_a_command_line(tmp_path: Path) -> None:
    line = f"--output_dir {tmp_path / 'out'} --target_epsilon 8 --use_cpu --max_steps 2 --remove_unused_columns False"
    (args,) = tf.HfArgumentParser(DPTrainingArguments).parse_args_into_dataclasses(
        [*line.split(), "--report_to", "none"]
    )
    _assert_refused(_stock(args))


def test_arguments_that_are_given_later_or_with_everything_else(tmp_path: Path) -> None:
    model = tiny.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    private = tiny.arguments(tmp_path / "out", eval_strategy="steps", eval_steps=1, eval_on_start=True)
    _assert_refused(_stock(private, model=model, optimizers=(optimizer, schedule), callbacks=[tf.TrainerCallback()]))
    late = _stock(tf.TrainingArguments(output_dir=str(tmp_path / "late"), use_cpu=True, report_to="none"))
    late.args = private
    _assert_refused(late)


@dataclasses.dataclass
class SFTArguments(DPTrainingArguments, trl.SFTConfig):
    pass


@dataclasses.dataclass
class DPOArguments(DPTrainingArguments, trl.DPOConfig):
    pass


@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_trainers_of_trl(name: str, tmp_path: Path) -> None:
    kind, cls = {"SFT": (SFTArguments, trl.SFTTrainer), "DPO": (DPOArguments, trl.DPOTrainer)}[name]
    model = tiny.made(tf.GPT2LMHeadModel)
    answers = {"completion": ["w4 w5"] * 8} if name == "SFT" else {"chosen": ["w4"] * 8, "rejected": ["w5"] * 8}
    data = datasets.Dataset.from_dict({"prompt": ["w1 w2 w3"] * 8, **answers})
    args = kind(
        output_dir=str(tmp_path / "out"), noise_multiplier=1.0, use_cpu=True, report_to="none", max_steps=2,
        bf16=False, pad_token="<pad>",
    )  # fmt: skip
    given = {"train_dataset": data, "processing_class": words()}
    reference = {} if name == "SFT" else {"ref_model": copy.deepcopy(model)}
    _assert_refused(cls(model, args=args, **given, **reference))
    if name == "SFT":  # it makes its own arguments of others, and those know no budget
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            cls(model, args=tiny.arguments(tmp_path / "out"), **given)


def test_a_stock_trainer_evaluates_and_predicts(tmp_path: Path) -> None:
    trainer = _stock(tiny.arguments(tmp_path / "out"), train_dataset=None)
    assert trainer.evaluate()["eval_loss"] > 0
    assert len(trainer.predict(tiny.records(4)).predictions) == 4


def test_without_a_budget_a_stock_trainer_trains_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _stock(tiny.arguments(tmp_path / "out", noise_multiplier=None, max_steps=1)).train()
    assert "NOT PRIVATE" in caplog.text


def test_a_statement_does_not_describe_weights_that_a_stock_trainer_wrote(tmp_path: Path) -> None:
    """It trains nowhere near a statement; where this package is not imported, `hf-dpopt scan` finds what it wrote."""
    private = tiny.trainer(tmp_path / "out", max_steps=1)
    private.train()
    private.save_model()
    assert show_findings(tmp_path / "out", None) == 0
    plain = tf.TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none", max_steps=1)
    with pytest.raises(
        DPConfigError, match="^output_dir=.*out: holds the privacy statement of another run.*Choose another"
    ):
        _stock(plain).train()
    model = tiny.model()
    model.classifier.weight.data += 1
    model.save_pretrained(tmp_path / "out")
    assert show_findings(tmp_path / "out", None) == 1


def test_other_trainers_are_left_alone(tmp_path: Path) -> None:
    args = tf.TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none", max_steps=1,
                                remove_unused_columns=False)  # fmt: skip
    _stock(args).train()
    made = tiny.trainer(tmp_path / "private", max_steps=1)
    made.train()
    assert made._release.user_callbacks() == ()


# --- the order of base classes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bases", [(tf.Trainer, DPTrainerMixin), (Own, DPTrainerMixin), (tf.Seq2SeqTrainer, DPTrainer), (Own, DPTrainer)]
)
def test_the_mixin_in_second_place(bases: tuple[type, ...]) -> None:
    name = bases[0].__name__
    with pytest.raises(DPConfigError, match=rf"Mine: {name} .* before DPTrainerMixin.*\(DPTrainerMixin, {name}\)"):
        type("Mine", bases, {})


def test_orders_that_are_right() -> None:
    first = type("First", (DPTrainerMixin, Own), {})
    second = type("Second", (type("Helper", (), {}), first), {})
    assert issubclass(type("Third", (second, DPTrainer), {}), Own)


# --- methods that private training does not call ---------------------------------------------------------------------

UNIMPORTANT = {"get_cp_size", "get_tp_size"}  # what `get_total_train_batch_size` alone asks


def _overridden(names: list[str], called: set[str]) -> type:
    """A user's trainer that overrides these methods, and notes which of them run."""

    def noting(name: str, method: Any) -> Any:
        function = getattr(method, "__func__", method)

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return function(*args, **kwargs)

        return type(method)(noted) if isinstance(method, (staticmethod, classmethod)) else noted

    return type("Mine", (tf.Trainer,), {name: noting(name, vars(tf.Trainer)[name]) for name in names})


def _methods() -> list[str]:
    kinds = (staticmethod, classmethod)
    found = [n for n, f in vars(tf.Trainer).items() if inspect.isfunction(f) or isinstance(f, kinds)]
    return [n for n in found if n not in ("__init__", "compute_loss")]  # the latter is refused with a way out


def test_every_method_of_a_users_trainer_runs_or_is_refused(tmp_path: Path) -> None:
    """Whatever stock training calls, private training calls, too, or the override is refused by name."""
    options: dict[str, Any] = dict(
        max_steps=2, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, max_grad_norm=1.0,
        logging_steps=1, per_device_train_batch_size=4, remove_unused_columns=False, use_cpu=True, report_to="none",
    )  # fmt: skip
    stock: set[str] = set()
    args = tf.TrainingArguments(output_dir=str(tmp_path / "stock"), **options)
    trainer = _stock(args, _overridden(_methods(), stock))
    trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "stock" / "checkpoint-1"))
    refused = set()
    for name in _methods():
        private = type("Private", (DPTrainerMixin, _overridden([name], set())), {})
        try:
            tiny.trainer(tmp_path / "never", cls=private)
        except DPConfigError as error:
            assert f"Mine.{name}" in str(error) and "private training does not call" in str(error)
            refused.add(name)
    called: set[str] = set()
    private = type("Private", (DPTrainerMixin, _overridden(sorted(set(_methods()) - refused), called)), {})
    held_out = tiny.records(70)[64:]
    trainer = tiny.trainer(tmp_path / "p", cls=private, eval_dataset=held_out, eval_data_privacy="public", **options)
    trainer.train()
    trainer = tiny.trainer(tmp_path / "p", cls=private, eval_dataset=held_out, eval_data_privacy="public", **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "p" / "checkpoint-1"))
    assert stock - refused - called == UNIMPORTANT
    assert {"_get_train_sampler", "get_train_dataloader", "training_step"} <= refused


def test_a_sampler_in_front_of_the_mixin_is_refused(tmp_path: Path) -> None:
    class Mine(DPTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with pytest.raises(DPConfigError, match="Mine._get_train_sampler.*private training does not call"):
        tiny.trainer(tmp_path / "out", cls=Mine)
