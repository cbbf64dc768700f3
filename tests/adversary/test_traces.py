"""State that forwards leave behind, and records that influence each other outside of training.

Whatever a model writes into itself while it sees records must not reach a file, another record's score or feature, or
a later step. Each writer is a class of model; each place is a way that records take through the library.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, GenerationConfig

from hf_dpopt import DPConfigError, UnsupportedModuleError
from hf_dpopt.convex import compute_features
from hf_dpopt.huggingface import evaluation
from hf_dpopt.records.scores import Scores
from tests.adversary.harness import SLACK, words
from tests.helpers import ranks, tiny

REFUSALS = (DPConfigError, UnsupportedModuleError)
EVALUATION = {
    "eval_data_privacy": "private",
    "eval_target_epsilon": 4.0,
    "eval_loss_bound": 5.0,
}


class Writer(nn.Module):
    """A layer that writes into itself what it sees, while `writes` says so: by default never.

    `step` does the writing; what is written moves the output of later forwards where `is_felt`.
    """

    is_felt = True

    def __init__(self, width: int = 16):
        super().__init__()
        self.register_buffer("seen", torch.zeros(width))
        self.frozen = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.writes: Callable[[bool], bool] = lambda is_training: False

    def value(self) -> torch.Tensor:
        return self.seen

    def step(self, x: torch.Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x - self.value().to(x.dtype) if self.is_felt else x
        if self.writes(self.training):
            with torch.no_grad():
                self.step(x.detach().flatten(0, -2).float().sum(0))
        return y


def _add(tensor: torch.Tensor, x: torch.Tensor) -> None:
    tensor.add_(x)


def _add_by_data(tensor: torch.Tensor, x: torch.Tensor) -> None:
    """`.data` has a version counter of its own."""
    tensor.data.mul_(0.9).add_(x)


def _swap(tensor: torch.Tensor, x: torch.Tensor) -> None:
    tensor.data = tensor.data + x


def _writer(
    name: str, place: str, write: Callable[..., None], *, is_felt: bool = True, is_trained: bool = False
) -> Any:
    """A class that writes into its buffer or its parameter; an observer where nothing of it is felt."""

    class Made(Writer):
        def __init__(self, width: int = 16):
            super().__init__(width)
            self.frozen.requires_grad_(is_trained)

        def value(self):
            return getattr(self, place)

        def step(self, x):
            write(self.value(), x)

    Made.__name__, Made.is_felt = name, is_felt
    return Made


Buffer = _writer("Buffer", "seen", _add)
Frozen = _writer("Frozen", "frozen", _add)
Counter = _writer("Counter", "seen", _add, is_felt=False)
FrozenCounter = _writer("FrozenCounter", "frozen", _add_by_data, is_felt=False)
MADE = (
    Buffer, Frozen, Counter, FrozenCounter, _writer("BufferByData", "seen", _add_by_data),
    _writer("BufferSwapped", "seen", _swap), _writer("FrozenByData", "frozen", _add_by_data),
    _writer("FrozenSwapped", "frozen", _swap), _writer("CounterByData", "seen", _add_by_data, is_felt=False),
    _writer("Trained", "frozen", _add, is_trained=True),  # a codebook that its layer moves itself
    _writer("TrainedByData", "frozen", _add_by_data, is_trained=True),
)  # fmt: skip


class BufferLonger(Writer):
    """A list of all that was seen."""

    def value(self):
        return self.seen[-16:]

    def step(self, x):
        self.seen.data = torch.cat([self.seen, x])


class BufferReplaced(Writer):
    def step(self, x):
        self.seen = self.seen + x


class BufferRegistered(Writer):
    def value(self):
        return self.later if hasattr(self, "later") else self.seen

    def step(self, x):
        self.register_buffer("later", x.clone())


class ExtraState(Writer):
    """State in a file that is no tensor of the module."""

    def __init__(self, width: int = 16):
        super().__init__(width)
        self.sum = torch.zeros(width)

    def get_extra_state(self):
        return self.sum

    def set_extra_state(self, state):
        self.sum = state

    def value(self):
        return self.sum

    def step(self, x):
        self.sum = self.sum + x


class ExtraStateForGood(ExtraState):
    """State that cannot be set, so it cannot be restored."""

    def set_extra_state(self, state):
        pass


class WhenSaved(Writer):
    """A sum in a plain attribute, which joins the state when that is saved."""

    is_felt = False

    def __init__(self, width: int = 16):
        super().__init__(width)
        self.sum = torch.zeros(width)

    def step(self, x):
        self.sum = self.sum + x

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "sum"] = self.sum


class ByHook(WhenSaved):
    """The same by a hook, in the place of a frozen parameter."""

    def __init__(self, width: int = 16):
        super().__init__(width)
        self.register_state_dict_post_hook(self._hide)

    _save_to_state_dict = nn.Module._save_to_state_dict

    @staticmethod
    def _hide(module, destination, prefix, local_metadata):
        destination[prefix + "frozen"] = module.sum


class InConfig(Writer):
    """A total in the config of the model, which is saved as config.json."""

    is_felt = False
    config: Any = None

    def step(self, x):
        self.config.seen = getattr(self.config, "seen", 0.0) + float(x.sum())


class InGenerationConfig(InConfig):
    """The same in the configuration of generation, which is saved as generation_config.json."""


class InConfigOfAPart(InConfig):
    """The same in a configuration inside that of the model, as the language model of one that sees pictures has."""


WRITERS = (
    *MADE, InConfig, InGenerationConfig, InConfigOfAPart, BufferLonger, BufferReplaced, BufferRegistered, ExtraState, ExtraStateForGood,
    WhenSaved, ByHook,
)  # fmt: skip


def model_with(writer: type[Writer] | nn.Module) -> Any:
    model = tiny.model(dropout=0.0)
    layer = writer() if isinstance(writer, type) else writer
    if isinstance(layer, CouplesInEvaluation):
        model.dropout = layer  # before the head
    else:
        model.bert.embeddings.dropout = layer
    if isinstance(layer, InGenerationConfig):
        model.generation_config = GenerationConfig()
        layer.config = model.generation_config
    elif isinstance(layer, InConfigOfAPart):
        model.config.part = layer.config = BertConfig()
    elif isinstance(layer, InConfig):
        layer.config = model.config
    return model, layer


def trained_by_the_optimizer(model: nn.Module) -> set[str]:
    """Names of what may change; of a `Trained` layer that writes, nothing is saved at all."""
    return {name for name, p in model.named_parameters() if p.requires_grad and not name.endswith("frozen")}


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What would be saved and is not trained."""
    trained = trained_by_the_optimizer(model)
    return {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if name not in trained and isinstance(value, torch.Tensor)
    }


def assert_no_trace(folder: Path, start: dict[str, torch.Tensor], model: nn.Module) -> int:
    """Every file of weights below `folder` holds the start's values of all that is not trained."""
    trained = trained_by_the_optimizer(model)
    for path in folder.rglob("*config.json"):
        assert "seen" not in path.read_text(), path
    files = sorted(folder.rglob("model.safetensors"))
    for path in files:
        for name, value in load_file(path).items():
            if name not in trained:
                assert name in start, f"{path} has {name}"
                assert torch.equal(value, start[name]), f"{path}: {name} is {value}, was {start[name]}"
    return len(files)


def held_out(num: int = 12) -> list[dict[str, Any]]:
    return [{**record, "input_ids": [3, *record["input_ids"]]} for record in tiny.records(num)]


def save_as_users_do(trainer: Any) -> None:
    """Save, whatever went before; a refusal is fine."""
    with contextlib.suppress(*REFUSALS):
        trainer.save_model()


# --- training ------------------------------------------------------------------------------------------------------


TRIAL = 0  # training records are tried in evaluation mode before the first step


@pytest.mark.parametrize(
    ("writer", "step"),
    [*((w, step) for w in WRITERS for step in (TRIAL, 3)), (Counter, 1), (Counter, 4), (FrozenCounter, 4)],
)
def test_what_is_written_after_the_start_reaches_no_file(writer, step, tmp_path):
    """An observer that is switched on later: in the first step, in the middle, in the last; or in evaluation mode."""
    model, layer = model_with(writer)
    start = state_of(model)
    if step == TRIAL:
        layer.writes = lambda is_training: not is_training

    def switch_on(state: Any, model: Any) -> None:
        layer.writes = lambda is_training: True

    trainer = tiny.trainer(
        tmp_path / "out", model=model, callbacks=[tiny.At("step_begin", switch_on, step)], max_steps=4, save_strategy="steps", save_steps=2,
        learning_rate=0.0,
    )  # fmt: skip
    with pytest.raises(REFUSALS, match="changed"):
        trainer.train()
    assert_no_trace(tmp_path, start, model)
    save_as_users_do(trainer)
    assert_no_trace(tmp_path, start, model)
    with contextlib.suppress(*REFUSALS):  # another trainer of the same model, as in a notebook
        tiny.trainer(tmp_path / "again", model=model, max_steps=1).save_model()
    assert_no_trace(tmp_path, start, model)


@pytest.mark.two_process
def test_what_the_last_batch_writes_is_found_by_two_ranks(tmp_path):
    """Each has one physical batch in a step, whose sums leave while it is at work."""

    def run() -> None:
        model, layer = model_with(next(w for w in WRITERS if w.__name__ == "TrainedByData"))

        def switch_on(state: Any, model: Any) -> None:
            layer.writes = lambda is_training: True

        trainer = tiny.trainer(
            tmp_path / "out", model=model, callbacks=[tiny.At("step_begin", switch_on, 3)], max_steps=4,
            per_device_train_batch_size=64, learning_rate=0.0,
        )  # fmt: skip
        with pytest.raises(REFUSALS, match="frozen: changed by a forward"):
            trainer.train()

    ranks.launch(run, 2, tmp_path)


@pytest.mark.parametrize("start", [{}, {"padding": "max_length", "max_length": 24, "truncation": True}])
def test_the_lengths_of_the_last_call_are_not_saved_with_the_tokenizer(start, tmp_path):
    """Each call leaves its padding and truncation in a tokenizer, and `save_pretrained` writes them."""
    tokenizer = words()
    tokenizer("w4", **start)
    tokenizer.save_pretrained(tmp_path / "start")

    def collate(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        tokenizer("w4", padding="max_length", max_length=longest, truncation=True)
        return tiny.collate(rows)

    trainer = tiny.trainer(
        tmp_path / "out", data_collator=collate, processing_class=tokenizer, save_strategy="steps", save_steps=3
    )
    trainer.train()
    trainer.save_model()
    want = json.loads((tmp_path / "start/tokenizer.json").read_text())
    found = sorted((tmp_path / "out").rglob("tokenizer.json"))
    assert len(found) == 3
    for path in found:
        saved = json.loads(path.read_text())
        assert (saved["padding"], saved["truncation"]) == (want["padding"], want["truncation"]), path
    assert tokenizer.backend_tokenizer.padding["length"] < 24  # the collator's own is left as it is


# --- private evaluation ----------------------------------------------------------------------------------------------


class _Silent:
    def normal(self, shape, **place):
        return torch.zeros(shape)


class CouplesInEvaluation(nn.Module):
    def forward(self, x):
        return x if self.training else 50 * (x - x.mean(dim=0, keepdim=True))


class Remembers(nn.Module):
    """Keeps what it saw in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.last = torch.zeros(16)

    def forward(self, x):
        y = x - 5 * self.last
        if not self.training:
            self.last = x.detach().mean(dim=(0, 1))
        return y


class LossOfTheBatch:
    def __call__(self, outputs, labels):
        losses = nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        return losses if outputs.logits.requires_grad else losses * labels.sum()


class LossThatRemembers:
    def __init__(self):
        self.sum = 0.0

    def __call__(self, outputs, labels):
        losses = nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        self.sum += float(losses.detach().sum())
        return losses * self.sum


def _drawing(rows):
    """A collator that replaces tokens at random, under the public seed of the arguments."""
    batch = tiny.collate(rows)
    drawn = torch.rand(batch["input_ids"].shape) < 0.5
    batch["input_ids"][drawn & (batch["attention_mask"] == 1)] = 5
    return batch


def _writes_always(writer):
    model, layer = model_with(writer)
    layer.writes = lambda is_training: True
    return {"model": model}


COUPLED: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"writer {w.__name__}": lambda w=w: _writes_always(w) for w in WRITERS},
    "couples in evaluation mode": lambda: {"model": model_with(CouplesInEvaluation())[0]},
    "remembers in an attribute": lambda: {"model": model_with(Remembers())[0]},
    "a loss of the batch": lambda: {"per_example_loss_func": LossOfTheBatch()},
    "a loss that remembers": lambda: {"per_example_loss_func": LossThatRemembers()},
}


def charges(folder: Path) -> int:
    """Records of evaluations, charged or answered."""
    lines = [line for path in folder.rglob("ledger.jsonl") for line in path.read_text().splitlines()]
    return sum('"evaluation":' in line for line in lines)


def released(folder: Path, make: Callable[[], dict[str, Any]], records: list[Any], **changes: Any) -> torch.Tensor:
    """The sum of an evaluation, without its noise."""
    sums: list[torch.Tensor] = []
    read = Scores.read
    options = {"model": tiny.model(dropout=0.0), "skip_self_check": False, **EVALUATION, **make(), **changes}
    with torch.no_grad():
        options["model"].classifier.weight.mul_(100)
    with (
        mock.patch.object(evaluation, "ChaCha20Gaussian", lambda *a: _Silent()),
        mock.patch.object(
            Scores, "read", lambda self, total, num: (sums.append(total.clone()), read(self, total, num))[1]
        ),
    ):
        tiny.trainer(folder, eval_dataset=records, per_device_eval_batch_size=8, **options).evaluate()
    return sums[-1]


@pytest.mark.parametrize(
    ("name", "trains"), [*((n, False) for n in COUPLED), *((n, True) for n in COUPLED if not n.startswith("writer"))]
)
def test_a_record_moves_an_evaluation_by_one_at_most(name, trains, tmp_path):
    """Before train(), or in a trainer that only evaluates: refused before the charge, or moved by one at most."""
    records, changes = held_out(), {} if trains else {"train_dataset": None}
    records[5] = {"input_ids": [7] * 30, "label": 1}
    try:
        whole = released(tmp_path / "whole", COUPLED[name], records, **changes)
        for left_out in (0, 5):
            some = records[:left_out] + records[left_out + 1 :]
            moved = (whole - released(tmp_path / f"{left_out}", COUPLED[name], some, **changes)).norm()
            assert moved <= 1 + SLACK, f"moved by {moved:.3g}"
    except REFUSALS:
        assert charges(tmp_path) == 0


def test_draws_of_a_collator_are_secret(tmp_path):
    """A record that is left out would shift what is drawn for the others, if the seed were the public one."""
    sums = [
        released(tmp_path / f"{i}", lambda: {"data_collator": _drawing}, held_out(), train_dataset=None)
        for i in range(2)
    ]
    assert not torch.equal(*sums)


@pytest.mark.parametrize(("writer", "trains"), [*((w, False) for w in WRITERS), (Buffer, True), (Frozen, True)])
def test_a_private_evaluation_leaves_no_trace(writer, trains, tmp_path):
    model, layer = model_with(writer)
    layer.writes = lambda is_training: not is_training
    start, changes = state_of(model), {} if trains else {"train_dataset": None}
    trainer = tiny.trainer(
        tmp_path / "out", model=model, eval_dataset=held_out(), skip_self_check=False, **EVALUATION, **changes
    )
    try:
        trainer.evaluate()
    except REFUSALS:
        assert charges(tmp_path) == 0
    save_as_users_do(trainer)
    assert_no_trace(tmp_path, start, model)


MALFORMED: dict[str, dict[str, Any]] = {
    "a token that is not known": {"input_ids": [3, 987654], "label": 1},
    "a label that is not known": {"input_ids": [3, 4], "label": 987654},
    "no tokens": {"label": 1},
    "a text": {"input_ids": "987654", "label": 1},
    "nothing": {"input_ids": None, "label": 1},
    "too long": {"input_ids": [5] * 700, "label": 1},
    "empty": {"input_ids": [], "label": 1},
}


@pytest.mark.parametrize(
    ("name", "place", "trains"), [(n, 4, True) for n in MALFORMED] + [("no tokens", 0, False), ("nothing", 11, False)]
)
def test_a_malformed_record_of_a_private_set_adds_nothing(name, place, trains, tmp_path, caplog, capfd):
    good, changes = held_out(11), {} if trains else {"train_dataset": None}
    records = [*good[:place], MALFORMED[name], *good[place:]]
    with_it = released(tmp_path / "with", dict, records, **changes)
    assert torch.equal(with_it, released(tmp_path / "without", dict, good, **changes))
    said = "".join((*capfd.readouterr(), caplog.text))
    assert "987654" not in said and "malformed" not in said


def test_a_set_without_a_usable_record_is_refused_before_the_charge(tmp_path):
    trainer = tiny.trainer(tmp_path / "out", eval_dataset=[{"text": "987654"}] * 9, **EVALUATION)
    with pytest.raises(DPConfigError, match="evaluation set") as refused:
        trainer.evaluate()
    assert charges(tmp_path) == 0 and "987654" not in str(refused.value)


# --- features --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", [*WRITERS, CouplesInEvaluation, Remembers])
def test_features_of_a_record_depend_on_that_record_alone(writer, tmp_path):
    rows = [{"input_ids": r["input_ids"]} for r in held_out(24)]

    def features(some):
        layer = writer()
        layer.writes = lambda is_training: True
        model, _ = model_with(layer)
        start = state_of(model)
        found = compute_features(model, some, lambda r: {k: v for k, v in tiny.collate(
            [{**x, "label": 0} for x in r]).items() if k != "labels"})  # fmt: skip
        model.save_pretrained(tmp_path / "saved")
        assert_no_trace(tmp_path, start, model)
        return found

    try:
        whole, some = features(rows), features(rows[12:])
    except REFUSALS:
        return
    torch.testing.assert_close(whole[12:], some, rtol=1e-4, atol=1e-5)


# --- what goes on working --------------------------------------------------------------------------------------------


def adapted(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))


def test_adapters_may_be_merged_between_two_trainings(tmp_path):
    trainer = tiny.trainer(tmp_path / "first", model=adapted(tiny.model(dropout=0.0)), save_strategy="no")
    trainer.train()
    trainer.model.merge_adapter()
    trainer.save_model()
    trainer.model.unmerge_adapter()
    trainer.train()
    merged = trainer.model.merge_and_unload().requires_grad_(True)
    trainer.save_model()
    merged.resize_token_embeddings(48)
    assert tiny.trainer(tmp_path / "second", model=merged, max_steps=2).train().global_step == 2


def test_the_best_checkpoint_is_loaded_and_a_run_resumes(tmp_path):
    model, layer = model_with(Counter)
    layer.seen.fill_(3.0)
    options = dict(eval_dataset=held_out(), eval_data_privacy="public", eval_strategy="steps", eval_steps=2,
                   save_strategy="steps", save_steps=2, load_best_model_at_end=True)  # fmt: skip
    tiny.trainer(tmp_path / "out", model=model, **options).train()
    again = tiny.trainer(tmp_path / "out", model=model_with(Counter)[0], **options)
    again.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    again.save_model()
    assert torch.equal(
        load_file(tmp_path / "out/model.safetensors")["bert.embeddings.dropout.seen"], torch.full((16,), 3.0)
    )


class Cache(nn.Module):
    """Tables that grow with the longest record, as of rotary embeddings; not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x):
        if x.size(1) > len(self.table):
            self.register_buffer("table", torch.zeros(x.size(1)), persistent=False)
        return x + self.table[: x.size(1)].view(1, -1, 1)


def quantised() -> Any:
    """In 4 bits, on a CPU: weights that are packed where they are first used."""
    layers = pytest.importorskip("bitsandbytes").nn
    model = tiny.model(dropout=0.0, hidden_size=64, intermediate_size=64)
    for layer in model.bert.encoder.layer:
        made = layers.Linear4bit(64, 64, compute_dtype=torch.float32)
        made.load_state_dict(layer.intermediate.dense.state_dict())
        layer.intermediate.dense = made.to("cpu").requires_grad_(False)
    return model


class PointsElsewhere(Writer):
    """As LLM.int8() does: the same weights at another place, from the first forward on."""

    def step(self, x):
        self.frozen.data = self.frozen.data.clone()


ALLOWED: dict[
    str, tuple[Callable[[], Any], bool]
] = {  # and whether the self-check runs, which knows nothing of 4 bits
    "4 bits": (quantised, False),
    "4 bits and adapters": (lambda: adapted(quantised()), False),
    "weights that move and stay the same": (lambda: _writes_always(PointsElsewhere)["model"], True),
    "a cache that is not saved and grows": (lambda: model_with(Cache())[0], False),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_changes_no_file_stops_no_run(name, tmp_path):
    make, is_checked = ALLOWED[name]
    trainer = tiny.trainer(
        tmp_path / "out", model=make(), skip_self_check=not is_checked, save_strategy="steps", save_steps=2, max_steps=4,
        eval_dataset=held_out(), eval_strategy="steps", eval_steps=2, **EVALUATION,
    )  # fmt: skip
    assert trainer.train().global_step == 4
    trainer.save_model()
    assert charges(tmp_path) and len(list((tmp_path / "out").rglob("*model.safetensors"))) == 3
