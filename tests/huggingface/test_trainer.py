"""The trainer as a user meets it: what is released is the clipped sum plus noise, and nothing else leaves."""

from __future__ import annotations

import json
import logging
import math
import random

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import Trainer, TrainerCallback

from hf_dpopt import DPBudgetExceeded, DPConfigError, DPTrainer, make_plan
from hf_dpopt.records.losses import RecordLosses
from tests.helpers import tiny
from tests.reference import clipping as reference

FIXED = "11" * 32
ALPHA = 1e-6  # false-alarm probability of each random test, whatever the seed


def _drawn(trainer, step: int) -> list[int]:
    return trainer._session.run.plan.sampler.draw(trainer._session.run.chain.sampling_key, step).tolist()


def test_without_noise_a_step_is_the_clipped_sum_of_the_drawn_records(tmp_path):
    """Through the real loader, sampler, collator and step, against a loop over single records."""
    seen = tiny.Gradients()
    trainer = tiny.trainer(
        tmp_path / "out", model=tiny.model(dropout=0.0), callbacks=[seen], noise_multiplier=0.0, clipping_norm=0.5,
        max_steps=3, learning_rate=0.0,
    )  # fmt: skip
    trainer.train()
    records = trainer.train_dataset
    for step, got in enumerate(seen.steps, start=1):
        batch = tiny.collate([records[i] for i in _drawn(trainer, step)])
        want = {n: g / 16 for n, g in reference.clipped_sum(trainer.model, batch, 0.5).items()}
        assert reference.relative_error(got, want) < 1e-5


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("physical", [1, 3, 64])
def test_physical_batch_size_changes_nothing(tmp_path, physical):
    def run(size: int) -> dict:
        trainer = tiny.trainer(
            tmp_path / f"out{size}", model=tiny.model(dropout=0.0), per_device_train_batch_size=size,
            unsafe_fixed_noise_key=FIXED, max_steps=4, learning_rate=1e-3,
        )  # fmt: skip
        trainer.train()
        return tiny.weights(trainer.model)

    got, want = run(physical), run(7)
    assert reference.relative_error(got, want) < 1e-5


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_clipping_engine_changes_nothing(tmp_path, checkpointing, caplog):
    """Dropout is on: both backwards of the two-pass engine must see the masks of the one forward."""

    def run(engine: str) -> dict:
        trainer = tiny.trainer(
            tmp_path / engine, model=tiny.model(dropout=0.5), clipping_engine=engine, max_steps=4,
            gradient_checkpointing=checkpointing, unsafe_fixed_noise_key=FIXED, learning_rate=1e-3, log_level="debug",
        )  # fmt: skip
        trainer.train()
        return tiny.weights(trainer.model)

    want = run("book_keeping")
    assert reference.relative_error(run("two_pass"), want) < 1e-6
    with caplog.at_level(logging.DEBUG, logger="hf_dpopt"):
        assert reference.relative_error(run("auto"), want) < 1e-6
    expected = "two_pass, gradient checkpointing is on" if checkpointing else "book_keeping, one backward"
    assert f"Clipping engine: {expected}" in caplog.text


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")]
)
def test_out_of_memory_says_what_to_try_and_costs_one_step(tmp_path, error):
    trainer = tiny.trainer(tmp_path / "out", save_strategy="steps", save_steps=1, max_steps=4)
    losses, before = RecordLosses.__call__, []

    def runs_out(self, batch):
        if trainer.state.global_step == 2:
            before.append(tiny.weights(trainer.model))
            raise error
        return losses(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordLosses, "__call__", runs_out)
        patch.setattr(trainer.args, "skip_self_check", True)
        with pytest.raises(type(error), match="step 3, with physical batches of 4.*per_device_train_batch_size 2"):
            trainer.train()
    assert trainer.privacy_spent().num_steps == 3
    assert all(torch.equal(p, before[0][n]) for n, p in trainer.model.named_parameters())
    again = tiny.trainer(tmp_path / "out", per_device_train_batch_size=2, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert again.state.global_step == 4 and again.privacy_spent().num_steps == 4  # the lost step is not paid twice


class _Adversary:
    """A dataset whose last record is made to break the bound."""

    LONG = {"input_ids": [5] * 512, "label": 1}
    HUGE = {"input_ids": [3] * 4, "label": 0}

    def __init__(self, record):
        self.records = [r for r in tiny.records(32) if 3 not in r["input_ids"]] + [record]

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        return self.records[i]


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("adversary", ["LONG", "HUGE", "NAN"])
def test_leave_one_out_through_the_trainer(tmp_path, monkeypatch, adversary, clipping):
    """D3: one record more moves the released mean by at most C / expected batch size, and the bound is reached."""
    # weights that make one record's loss NaN are refused at the start: here they stand for a loss that overflows
    monkeypatch.setattr("hf_dpopt.huggingface.refusals.model.is_finite", lambda weights: True)
    model = tiny.model(dropout=0.0)
    record = getattr(_Adversary, adversary, _Adversary.HUGE)
    with torch.no_grad():
        factor = {"LONG": 1.0, "HUGE": 1e4, "NAN": float("nan")}[adversary]
        model.bert.embeddings.word_embeddings.weight[3] *= factor
    dataset = _Adversary(record)
    n, norm = len(dataset), 1e-2
    grads = []
    for num in (n, n - 1):
        seen = tiny.Gradients()
        trainer = tiny.trainer(
            tmp_path / f"{num}", model=model, train_dataset=dataset.records[:num], callbacks=[seen], max_steps=1,
            noise_multiplier=0.0, expected_batch_size=num, clipping_norm=norm, clipping=clipping, learning_rate=0.0,
            sampling="poisson", skip_self_check=adversary == "NAN",  # made-up records meet the poisoned row too
        )  # fmt: skip
        trainer.train()
        grads.append({name: g.double() * num for name, g in seen.steps[0].items()})
    assert all(g.isfinite().all() for g in grads[0].values())
    moved = reference.norm({name: grads[0][name] - grads[1][name] for name in grads[0]}).item()
    assert moved <= norm * (1 + 1e-5)
    # the others are cut into other physical batches when the record is there: their rounding is what is left
    assert moved < 1e-5 * norm if adversary == "NAN" else moved > 0.5 * norm


def test_a_noise_only_step_noises_every_coordinate(tmp_path):
    """D4: with expected size 1, empty batches occur; every coordinate then moves, with the claimed variance.

    Chi-square on all coordinates at level ALPHA; 5,000 coordinates and more catch a stddev wrong by 10%.
    """
    seen = tiny.Gradients()
    trainer = tiny.trainer(
        tmp_path / "out",
        callbacks=[seen],
        expected_batch_size=1,
        max_steps=30,
        noise_multiplier=2.0,
        clipping_norm=0.25,
    )
    trainer.train()
    empty = [step for step in range(1, 31) if not _drawn(trainer, step)]
    assert empty, "no empty batch in 30 steps: probability 1e-6 or less"
    noise = torch.cat([g.flatten() for g in seen.steps[empty[0] - 1].values()])
    assert (noise != 0).all()
    energy = (noise.double() / (2.0 * 0.25)).square().sum().item()
    low, high = scipy.stats.chi2.ppf([ALPHA / 2, 1 - ALPHA / 2], df=noise.numel())
    assert low < energy < high
    if len(empty) > 1:
        again = torch.cat([g.flatten() for g in seen.steps[empty[1] - 1].values()])
        assert abs(torch.corrcoef(torch.stack([noise, again]))[0, 1]) < 5.5 / math.sqrt(noise.numel())


def test_noise_of_a_run_has_the_calibrated_scale(tmp_path):
    """Test V: with dead gradients (learning rate 0, records without loss) what is left is noise at sigma C / B."""
    trainer = tiny.trainer(
        tmp_path / "out", callbacks=[seen := tiny.Gradients()], target_epsilon=3.0, noise_multiplier=None, max_steps=8,
        clipping_norm=1e-9, per_example_loss_func=lambda outputs, labels: outputs.logits[:, 0] * 0,
    )  # fmt: skip
    trainer.train()
    noise = torch.cat([g.flatten() for step in seen.steps for g in step.values()]).double()
    stddev = trainer.plan.noise_multiplier * 1e-9 / 16
    low, high = scipy.stats.chi2.ppf([ALPHA / 2, 1 - ALPHA / 2], df=noise.numel())
    assert low < (noise / stddev).square().sum().item() < high


def test_planned_epsilon_is_reported_and_logged(tmp_path):
    trainer = tiny.trainer(tmp_path / "out", target_epsilon=4.0, noise_multiplier=None)
    planned = trainer.plan.epsilon()
    output = trainer.train()
    spent = trainer.privacy_spent()
    assert spent.epsilon == planned == output.metrics["epsilon"] <= 4.0
    assert spent.num_steps == 6 and spent.delta == 1e-3 and spent.unit == "example"
    running = [line["epsilon"] for line in trainer.state.log_history if "grad_norm" in line]
    assert len(running) == 6 and running == sorted(running) and running[-1] == planned
    report = json.loads((tmp_path / "out/privacy/report.json").read_text())
    assert report["epsilon_spent"] == planned and report["steps_charged"] == 6
    assert f"epsilon = {str(planned)[:4]}" in (tmp_path / "out/privacy/statement.md").read_text()


def test_nothing_unprivatized_is_logged_or_saved(tmp_path):
    """D7: the exact loss is in no log, no file, no return value."""
    trainer = tiny.trainer(tmp_path / "out", save_strategy="steps", save_steps=3)
    output = trainer.train()
    trainer.save_model()
    trainer.save_state()
    assert math.isnan(output.training_loss)
    for line in trainer.state.log_history:
        assert not {"loss", "train_loss", "total_flos", "num_input_tokens_seen"} & set(line)
    assert trainer.state.total_flos == 0
    key = trainer._session.run.chain
    for path in (tmp_path / "out").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        for secret in (key.root, key.noise_key, key.sampling_key, key.dropout_key):
            assert secret not in content and secret.hex().encode() not in content, path
        assert "rng_state" not in path.name


def test_log_unprivatized_prints_to_the_console_only(tmp_path, caplog):
    trainer = tiny.trainer(tmp_path / "out", log_unprivatized=True)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "UNPRIVATIZED" in caplog.text
    assert all("loss" not in line for line in trainer.state.log_history)
    assert "console" in (tmp_path / "out/privacy/statement.md").read_text()


def test_fixed_key_is_stamped_not_private_everywhere(tmp_path):
    trainer = tiny.trainer(tmp_path / "out", unsafe_fixed_noise_key=FIXED)
    output = trainer.train()
    trainer.create_model_card()
    assert math.isinf(output.metrics["epsilon"]) and math.isinf(trainer.privacy_spent().epsilon)
    for name in ("privacy/statement.md", "README.md"):
        assert "NOT PRIVATE" in (tmp_path / "out" / name).read_text()
    assert json.loads((tmp_path / "out/privacy/report.json").read_text())["private"] is False


def test_two_runs_with_the_same_seed_have_different_noise(tmp_path):
    runs = []
    for name in "ab":
        trainer = tiny.trainer(tmp_path / name, callbacks=[seen := tiny.Gradients()], max_steps=2, seed=42)
        trainer.train()
        runs.append(torch.cat([g.flatten() for g in seen.steps[0].values()]))
    assert abs(torch.corrcoef(torch.stack(runs))[0, 1]) < 5.5 / math.sqrt(runs[0].numel())


class Outside(TrainerCallback):
    """Draws from the generators between two steps, as a callback of a user may."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.drawn = random.getrandbits(64), int(np.random.randint(0, 2**62)), int(torch.randint(0, 2**62, ()))


def test_what_is_drawn_between_steps_does_not_follow_from_the_public_seed(tmp_path):
    """Two runs with one seed: equal numbers by chance with probability below 2^-61."""
    seen = []
    for name in "ab":
        tiny.trainer(tmp_path / name, callbacks=[outside := Outside()], max_steps=1, seed=42).train()
        seen.append(outside.drawn)
    assert all(one != other for one, other in zip(*seen, strict=True))


def test_the_stock_parts_stay_stock(tmp_path):
    """Same model object and class, plain optimizer, scheduler values of the stock Trainer, evaluation untouched."""
    model = tiny.model()
    kwargs = dict(lr_scheduler_type="linear", learning_rate=0.01, warmup_steps=2, eval_strategy="steps", eval_steps=3)
    trainer = tiny.trainer(tmp_path / "out", model=model, eval_dataset=tiny.records(10), **kwargs)
    trainer.train()
    assert trainer.model is model and "forward" not in model.bert.encoder.layer[0].attention.self.query.__dict__
    rates = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
    from transformers import TrainingArguments

    stock_args = TrainingArguments(
        output_dir=str(tmp_path / "stock"), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=6,
        per_device_train_batch_size=16, logging_steps=1, save_strategy="no", remove_unused_columns=False, **kwargs,
    )  # fmt: skip
    stock = Trainer(tiny.model(), stock_args, train_dataset=tiny.records(), eval_dataset=tiny.records(10), data_collator=tiny.collate)  # fmt: skip
    stock.train()
    assert rates == [line["learning_rate"] for line in stock.state.log_history if "learning_rate" in line]
    evaluations = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert len(evaluations) == 2 and [e["step"] for e in evaluations] == [3, 6]
    assert trainer.state.epoch == stock.state.epoch


def test_epochs_and_accumulation_translate_as_on_the_command_line(tmp_path):
    trainer = tiny.trainer(
        tmp_path / "out", expected_batch_size=None, per_device_train_batch_size=4, gradient_accumulation_steps=3,
        max_steps=-1, num_train_epochs=1.5,
    )  # fmt: skip
    assert trainer.args.expected_batch_size == 12
    trainer.train()
    assert trainer.state.global_step == math.ceil(1.5 * math.ceil(64 / 12)) == trainer.plan.num_steps


def test_model_init_is_captured_too(tmp_path):
    """The model that trains is made inside train(); the capture must be on that one."""
    trainer = tiny.trainer(tmp_path / "out", model_init=lambda: tiny.model(dropout=0.0), max_steps=2, noise_multiplier=0.0, callbacks=[seen := tiny.Gradients()])  # fmt: skip
    trainer.train()
    assert all(g.abs().sum() > 0 for n, g in seen.steps[0].items() if "classifier" in n)


def test_second_train_adds_up_and_stops_at_the_budget(tmp_path):
    trainer = tiny.trainer(tmp_path / "a", max_steps=3)
    trainer.train()
    once = trainer.privacy_spent()
    trainer.train()
    twice = trainer.privacy_spent()
    assert (once.num_steps, twice.num_steps) == (3, 6) and twice.epsilon > once.epsilon
    assert twice.epsilon == pytest.approx(
        make_plan(trainer.plan.config, num_examples=64, num_steps=6).epsilon(), rel=0.02
    )
    budget = tiny.trainer(tmp_path / "b", max_steps=3, target_epsilon=2.0, noise_multiplier=None)
    budget.train()
    before = tiny.weights(budget.model)
    with pytest.raises(DPBudgetExceeded, match="Raise --target_epsilon.*another output_dir"):
        budget.train()
    assert all(torch.equal(p, before[n]) for n, p in tiny.weights(budget.model).items())
    assert budget.privacy_spent().num_steps == 3


def test_a_branch_over_the_budget_is_refused_and_mended(tmp_path):
    """The two ways out that the message offers both work."""
    options = {"noise_multiplier": None, "save_strategy": "steps", "save_steps": 2}
    tiny.trainer(tmp_path, target_epsilon=3.0, **options).train()
    checkpoint = str(tmp_path / "checkpoint-2")
    with pytest.raises(DPBudgetExceeded, match="--target_epsilon"):
        tiny.trainer(tmp_path, target_epsilon=3.0, **options).train(resume_from_checkpoint=checkpoint)
    more = tiny.trainer(tmp_path, target_epsilon=6.0, **options)
    more.train(resume_from_checkpoint=checkpoint)
    assert 3.0 < more.privacy_spent().epsilon <= 6.0
    report = json.loads((tmp_path / "privacy/report.json").read_text())
    assert more.plan.noise_multiplier == report["plan"]["noise_multiplier"]


def test_evaluation_only_needs_no_budget(tmp_path):
    trainer = tiny.trainer(
        tmp_path / "out", train_dataset=None, eval_dataset=tiny.records(8), noise_multiplier=None, target_epsilon=None
    )
    assert "eval_loss" in trainer.evaluate()
    with pytest.raises(DPConfigError, match="Pass train_dataset"):
        trainer.train()


def test_bf16_autocast_trains_with_float32_sums(tmp_path):
    trainer = tiny.trainer(tmp_path / "out", bf16=True, callbacks=[seen := tiny.Gradients()], noise_multiplier=0.0, clipping_norm=0.5, max_steps=2, model=tiny.model(dropout=0.0), learning_rate=0.0)  # fmt: skip
    trainer.train()
    batch = tiny.collate([trainer.train_dataset[i] for i in _drawn(trainer, 1)])
    with torch.autocast("cpu", enabled=False):
        want = {n: g / 16 for n, g in reference.clipped_sum(tiny.model(dropout=0.0), batch, 0.5).items()}
    assert reference.relative_error(seen.steps[0], want) < 3e-2


def test_a_scheduler_alone_is_no_second_optimizer(tmp_path):
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0)
    assert tiny.trainer(tmp_path, optim="dp_adam_bc", optimizers=(None, scheduler)).plan is not None


def test_a_trainer_that_only_evaluates_has_no_loader_of_training_records(tmp_path):
    with pytest.raises(DPConfigError, match="no privacy plan without a train_dataset"):
        tiny.trainer(tmp_path, train_dataset=None).get_train_dataloader()


def test_an_argument_that_transformers_renamed_is_named(tmp_path):
    with pytest.raises(TypeError, match="'tokenizer'. Since transformers 5 it is processing_class="):
        DPTrainer(tiny.model(), tiny.arguments(tmp_path), tokenizer=None)
