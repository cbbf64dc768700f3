"""Runs that are killed, for tests of the journal and the kill storm: settings, what a kill leaves, and references.

A kill at a point is simulated by a copy of everything on the disk at that moment, which is then gone on with: what the
process did afterwards is not in it. The reference of a run is one that nothing disturbed, under the same key; where a
charged step lost its release, one in which that step clips, sums and adds its noise as always, and updates nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import Trainer

import hf_dpopt.huggingface.session as session_module
from hf_dpopt.common.chained import ChainedFile
from hf_dpopt.run.journal import Journal
from hf_dpopt.run.keys import Chain
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.run.run_log import RunLog
from hf_dpopt.run.step import ask, clip_and_sum, in_step
from tests.helpers import tiny

NUM_STEPS, SAVE_STEPS, TARGET = 8, 3, 6.0


def model() -> torch.nn.Module:
    """A BERT of one layer, with dropout."""
    return tiny.model(num_hidden_layers=1, hidden_size=8, intermediate_size=8, max_position_embeddings=16)


def adapted() -> torch.nn.Module:
    """The same with LoRA, whose first weights depend on a seed."""
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"])
    return peft.get_peft_model(model(), config)


def _by_user(num: int = 64) -> list[dict[str, Any]]:
    return [record | {"author": f"user {i % 11}"} for i, record in enumerate(tiny.records(num))]


def _held_out() -> list[dict[str, Any]]:
    """Records for a private evaluation: others than those of the training."""
    return [record | {"input_ids": record["input_ids"][::-1]} for record in tiny.records(100)[64:]]


# What is given to the trainer: options, or functions that make them. The privacy ledger is a file of the run's folder.
SETTINGS: dict[str, dict[str, Any]] = {
    "gaussian": {"optim": "adamw_torch", "lr_scheduler_type": "linear"},
    "nu_dpftrl": {"noise_mechanism": "nu_dpftrl", "optim": "sgd"},
    "blt": {"noise_mechanism": "blt", "optim": "sgd"},
    "banded": {"noise_mechanism": "banded", "noise_kwargs": {"num_bands": 3}, "optim": "sgd"},
    "dp2": {"preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 2}, "optim": "sgd"},
    "dp2_correlated": {
        "preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 2}, "noise_mechanism": "nu_dpftrl",
        "optim": "sgd",
    },
    "filter": {"filter": "first_order_v1", "optim": "dp_adam_bc", "average_iterate": "exponential"},
    "noise_aware": {"noise_mechanism": "nu_dpftrl", "optim": "dp_adam_bc"},
    "quantile": {"preconditioner": "quantile", "preconditioner_kwargs": {"count_noise": 0.5}, "optim": "sgd"},
    "users": {
        "privacy_unit": "user", "user_id_column": "author", "records_per_user": 8, "expected_batch_size": 4,
        "noise_mechanism": "nu_dpftrl", "optim": "sgd", "train_dataset": _by_user,
    },
    "one_query": {"preconditioner": "one_query", "noise_mechanism": "nu_dpftrl", "optim": "sgd"},
    "lora": {"model": adapted, "optim": "adamw_torch", "max_grad_norm": 0.5},
    "evaluation": {
        "noise_mechanism": "nu_dpftrl", "optim": "sgd", "eval_dataset": _held_out, "eval_data_privacy": "private",
        "eval_target_epsilon": 2.0, "eval_strategy": "steps", "eval_steps": 3,
    },
    "dataset_ledger": {
        "privacy_ledger": "people.jsonl", "privacy_ledger_epsilon": 16.0, "optim": "adamw_torch",
    },
    "shards": {
        "noise_mechanism": "nu_dpftrl", "optim": "adamw_torch", "fsdp": True,
        "fsdp_config": {
            "transformer_layer_cls_to_wrap": ["BertLayer"], "version": 2, "state_dict_type": "SHARDED_STATE_DICT",
        },
    },
}  # fmt: skip

IN_SHARDS = ("shards",)  # FSDP2: in two processes alone


def root_of(number: int) -> bytes:
    """Root key of the chain that a private directory begins as its number-th."""
    return hashlib.sha256(f"kill storm {number}".encode()).digest()


@contextlib.contextmanager
def known_keys(first: int = 0) -> Iterator[None]:
    """Give chains keys that can be told in advance: the number of the chain decides. For comparisons only."""
    made = PrivateRun._chain

    def chain_of(self: PrivateRun, resume: Any) -> Chain:
        count = self.log.keys.folder.parents[2] / "keys_made"  # also those that a kill left without a chain

        def new_chain() -> Chain:
            number = first + (len(count.read_text()) if count.exists() else 0)
            with open(count, "a") as file:
                file.write(".")
            return Chain(secrets.token_hex(8), root_of(number))

        with mock.patch("hf_dpopt.run.run.new_chain", new_chain):
            return made(self, resume)

    with mock.patch.object(PrivateRun, "_chain", chain_of):
        yield


def number_of(key_id: str, first: int = 0) -> int:
    """Number of the chain with a key of `known_keys`."""
    return next(i for i in range(first, first + 1000) if Chain("any", root_of(i)).key_id == key_id)


def make(folder: Path, setting: str, **changes: Any) -> Any:
    """The trainer of a setting whose files lie in ``folder``."""
    options = {name: value() if callable(value) else value for name, value in SETTINGS[setting].items()}
    if "privacy_ledger" in options:
        options["privacy_ledger"] = str(folder / options["privacy_ledger"])
    return tiny.trainer(
        folder / "out", private_state_dir=str(folder / "keys"),
        **{
            "model": None, "max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": SAVE_STEPS,
            "learning_rate": 0.02, "per_device_train_batch_size": 16, "noise_multiplier": None, "target_epsilon": TARGET, **options, **changes,
        } | ({} if "model" in options else {"model": model()}),
    )  # fmt: skip


@contextlib.contextmanager
def losing(trainer: Any, steps: frozenset[int], *, loses_opening: bool = False) -> Iterator[None]:
    """Let steps of a run make no update: the release is thrown away, the optimizer does not step."""
    whole = session_module.private_step

    def step_without_update(engine, losses, batches, *, run, step, after_noise=(), everything=None, stand_in=None):
        if step not in steps:
            return whole(
                engine,
                losses,
                batches,
                run=run,
                step=step,
                after_noise=after_noise,
                everything=everything,
                stand_in=stand_in,
            )
        if everything is not None and run.preclip.awaits_opening:
            if loses_opening:
                run.preclip.receive_opening = lambda released: run.preclip.pass_over_opening()
            ask(engine, losses, everything, run=run, step=step)
        scales = run.begin(step, engine)
        reduction, measures = run.reduction(engine, scales), run.metrics.measures()
        if engine.is_collective:
            batches = in_step(engine, batches, stand_in, run.ranks)
        sums, seen = clip_and_sum(
            engine, losses, batches, scales, sums_users=run.plan.sums_users, reduction=reduction, measures=measures
        )
        run.release(reduction.finish(sums), step)
        run.preclip.pass_over()
        for p in engine.parameters.values():
            p.grad = torch.zeros_like(p)
        optimizer = trainer.optimizer
        step_of = optimizer.step  # a scheduler may have put its own on the object

        def no_step(closure: Any = None) -> None:
            optimizer.step = step_of

        optimizer.step = no_step
        return seen

    with mock.patch.object(session_module, "private_step", step_without_update):
        yield


# --- what a test does with a run ---


def start(folder: Path, setting: str, *, resumes: bool = False, key: int = 0, **changes: Any) -> Any:
    """Train under keys that can be told, and return the trainer; changes are those of its arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer = make(folder, setting, **changes)
    with known_keys(key):
        trainer.train(resume_from_checkpoint=resumes)
    return trainer


def kill(
    folder: Path,
    left: Path,
    setting: str,
    point: str,
    step: int,
    *,
    resumes: bool = False,
    key: int = 0,
    **changes: Any,
) -> None:
    """Leave in ``left`` what a run leaves that dies at a point of a step."""
    with dying(folder, left, point, step):
        start(folder, setting, resumes=resumes, key=key, **changes)
    assert left.exists(), f"the run never came to {point!r} of step {step}"


def resume(left: Path, setting: str, **changes: Any) -> Any:
    """Go on with what a run left, as a job that is started again, and return the trainer."""
    return start(left, setting, resumes=True, **changes)


def undisturbed(
    folder: Path,
    setting: str,
    lost: frozenset[int] = frozenset(),
    *,
    key: int = 0,
    loses_opening: bool = False,
    **changes: Any,
) -> Any:
    """The trainer of a run that nothing disturbed, in which some steps made no update."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer = make(folder, setting, save_strategy="no", journal_limit=0.0, **changes)
    with known_keys(key), losing(trainer, lost, loses_opening=loses_opening):
        trainer.train()
    return trainer


def assert_same(trainer: Any, want: Any) -> None:
    """Two trainers have the same weights, to the last bit, and have spent the same."""
    wanted = tiny.weights(want.model)
    for name, p in tiny.weights(trainer.model).items():
        assert torch.equal(p, wanted[name]), name
    assert trainer.privacy_spent() == want.privacy_spent()


# --- points at which a run dies ---


class Killed(BaseException):
    """The process is gone."""


@contextlib.contextmanager
def dying(folder: Path, to: Path, point: str, step: int) -> Iterator[None]:
    """Let the run in a folder die at a point of a step: ``to`` then holds what a kill would leave."""

    def die(*unused: Any) -> None:
        if not to.exists():
            shutil.copytree(folder, to)
        raise Killed

    with POINTS[point](die, step), contextlib.suppress(Killed):
        yield


def _around(owner: Any, name: str, at: Callable[..., bool], die: Callable[..., None], *, after: bool) -> Any:
    """Replace a method by one that dies before or after the original, in the call that `at` picks."""
    whole = getattr(owner, name)

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not after and at(self, *args, **kwargs):
            die()
        done = whole(self, *args, **kwargs)
        if after and at(self, *args, **kwargs):
            die()
        return done

    return mock.patch.object(owner, name, patched)


def _half_an_entry(die: Callable[..., None], step: int) -> Any:
    def patched(self: Journal, kind: str, of_step: int, values: Any) -> None:
        whole(self, kind, of_step, values)
        if of_step == step and kind == "step":  # a disk that lied
            path = self.folder / f"{self.chain_id}-{step:09d}-step.release"
            with open(path, "r+b") as file:
                file.truncate(path.stat().st_size // 2)
            die()

    whole = Journal.write
    return mock.patch.object(Journal, "write", patched)


def _exports(file: ChainedFile, records: tuple[Any, ...], step: int) -> bool:
    """Whether a step, which is in the log by now, comes into the ledger."""
    return file.path.name == "ledger.jsonl" and records[0].get("step") == step


POINTS: dict[str, Callable[[Callable[..., None], int], Any]] = {
    "before the charge": lambda die, step: _around(RunLog, "charge", lambda log, chain, t: t == step, die, after=False),
    "in the charge": lambda die, step: _around(
        ChainedFile, "append", lambda file, *records: _exports(file, records, step), die, after=False
    ),
    "after the charge": lambda die, step: _around(RunLog, "charge", lambda log, chain, t: t == step, die, after=True),
    "after the noise": lambda die, step: _around(
        Journal, "write", lambda journal, kind, t, *rest: (kind, t) == ("step", step), die, after=False
    ),
    "in the entry": _half_an_entry,
    "after the entry": lambda die, step: _around(
        Journal, "write", lambda journal, kind, t, *rest: (kind, t) == ("step", step), die, after=True
    ),
    "after the optimizer": lambda die, step: _around(
        Trainer, "_maybe_log_save_evaluate", lambda trainer, *rest, **named: trainer.state.global_step == step, die,
        after=False,
    ),
    "in a save": lambda die, step: _around(
        Trainer, "_save_optimizer_and_scheduler", lambda trainer, *rest: trainer.state.global_step == step, die,
        after=False,
    ),
    "after a save": lambda die, step: _around(
        Trainer, "_save_checkpoint", lambda trainer, *rest: trainer.state.global_step == step, die, after=True
    ),
    "in the query": lambda die, step: _around(
        Journal, "write", lambda journal, kind, t, *rest: (kind, t) == ("opening", step), die, after=False
    ),
    "after the query": lambda die, step: _around(
        Journal, "write", lambda journal, kind, t, *rest: (kind, t) == ("opening", step), die, after=True
    ),
}  # fmt: skip
LOSES = {"in the charge", "after the charge", "after the noise", "in the entry"}
