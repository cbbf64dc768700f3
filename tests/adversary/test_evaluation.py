"""Metrics on training records, under every disguise; and evaluation sets that only look like it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from hf_dpopt import DPConfigError
from tests.helpers import tiny

NUM = 200
REFUSED = "held-out records"


def rows(num: int = NUM, seed: int = 1) -> list[dict[str, Any]]:
    """Records of 8 tokens each: two are the same with probability 37^-8."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, tiny.VOCABULARY, (num, 8), generator=generator).tolist()
    return [{"input_ids": ids, "label": i % 2} for i, ids in enumerate(tokens)]


def table(records: list[dict[str, Any]]) -> datasets.Dataset:
    return datasets.Dataset.from_list(records)


class Wrapped(torch.utils.data.Dataset):
    """Rows of something else."""

    def __init__(self, inner: Any, change: Callable[[dict[str, Any]], dict[str, Any]] = dict):
        self.inner, self.change = inner, change

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.change(self.inner[i])


def noisy(row: dict[str, Any]) -> dict[str, Any]:
    """Random augmentation: no two looks are alike."""
    ids = torch.randint(3, tiny.VOCABULARY, (8,), generator=torch.Generator().manual_seed(torch.seed() % 2**31))
    return row | {"input_ids": ids.tolist()}


def swapped(dataset: datasets.Dataset) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"label": r["label"], "input_ids": r["input_ids"]} for r in dataset])


def renamed(dataset: datasets.Dataset) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"ids": r["input_ids"], "input_ids": r["input_ids"][:4]} for r in dataset])


DISGUISES: dict[str, Callable[[datasets.Dataset], Any]] = {
    "itself": lambda d: d,
    "select": lambda d: d.select(range(20)),
    "select of scattered rows": lambda d: d.select([3, 77, 5]),
    "one row": lambda d: d.select([9]),
    "shuffle().select": lambda d: d.shuffle(seed=0).select(range(20)),
    "with_format": lambda d: d.with_format("torch"),
    "with_transform": lambda d: d.with_transform(lambda batch: {"input_ids": [x[:4] for x in batch["input_ids"]]}),
    "map that adds a column": lambda d: d.map(lambda r: {"length": len(r["input_ids"])}),
    "map and shuffle": lambda d: d.map(lambda r: {"length": len(r["input_ids"])}).shuffle(seed=3),
    "map that changes labels": lambda d: d.map(lambda r: {"label": 1 - r["label"]}),
    "filter": lambda d: d.filter(lambda r: r["label"] == 1),
    "remove_columns": lambda d: d.remove_columns("label"),
    "cast": lambda d: d.cast(datasets.Features({"input_ids": datasets.List(datasets.Value("int32")),
                                                "label": datasets.Value("int8")})),
    "rename_column": lambda d: d.rename_column("input_ids", "ids").add_column("input_ids", [[5]] * len(d)),
    "swapped columns": swapped,
    "renamed copy": renamed,
    "concatenate_datasets": lambda d: datasets.concatenate_datasets([table(rows(300, 7)), d.select(range(3))]),
    "list": list,
    "list of a part": lambda d: list(d)[40:60],
    "list of tensors": lambda d: list(d.with_format("torch")),
    "a torch dataset around a copied list": lambda d: Wrapped(list(d)),
    "a torch dataset around it, augmented at random": lambda d: Wrapped(d, noisy),
    "Subset": lambda d: Subset(d, [0, 5]),
    "Subset of ConcatDataset": lambda d: Subset(ConcatDataset([table(rows(50, 9)), d]), [3, 4, 60]),
    "ConcatDataset of Subsets": lambda d: ConcatDataset([Subset(Subset(d, range(50)), [1, 2]), Subset(rows(9, 9), [0])]),
    "a stream": lambda d: d.to_iterable_dataset(),
    "60 % copies": lambda d: table(list(d)[:60] + rows(40, 5)),
    "half copies": lambda d: list(d)[:50] + rows(50, 5),
}  # fmt: skip


@pytest.fixture
def train() -> datasets.Dataset:
    return table(rows())


@pytest.fixture
def trainer(tmp_path, train):
    return tiny.trainer(tmp_path / "out", train_dataset=train, eval_dataset=table(rows(30, 2)))


@pytest.mark.parametrize("disguise", DISGUISES)
def test_training_records_are_not_evaluated_on(trainer, train, disguise):
    disguised = DISGUISES[disguise](train)
    for evaluate in (trainer.evaluate, trainer.predict, trainer.get_eval_dataloader, trainer.get_test_dataloader):
        with pytest.raises(DPConfigError, match=REFUSED) as refused:
            evaluate(disguised)
        assert not any(c.isdigit() for c in str(refused.value)), "how many were found is data"


@pytest.mark.parametrize("disguise", ["select", "list", "map that adds a column", "60 % copies"])
def test_nor_handed_to_the_trainer_at_the_start(tmp_path, train, disguise):
    disguised = DISGUISES[disguise](train)
    for evaluation in (disguised, {"held_out": rows(9, 2), "seen": disguised}):
        with pytest.raises(DPConfigError, match=REFUSED):
            tiny.trainer(tmp_path / "out", train_dataset=train, eval_dataset=evaluation)
    assert not (tmp_path / "out").exists()


def test_one_of_several_sets_is_enough_before_the_first_is_evaluated(trainer, train, monkeypatch):
    ran: list[Any] = []
    monkeypatch.setattr(type(trainer), "evaluation_loop", lambda *a, **k: ran.append(a))
    with pytest.raises(DPConfigError, match=REFUSED):
        trainer.evaluate({"held_out": table(rows(9, 2)), "seen": list(train)})
    assert not ran


TRAINING: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "a list": list,
    "a torch dataset": lambda r: Wrapped(r),
    "a ConcatDataset": lambda r: ConcatDataset([table(r[:90]), Wrapped(r[90:])]),
    "objects": lambda r: [types.SimpleNamespace(**x) for x in r],
    "tuples": lambda r: [(torch.tensor(x["input_ids"]), x["label"]) for x in r],
    "a lazy transform": lambda r: table([{"text": " ".join(map(chr, (x + 60 for x in q["input_ids"])))} for q in r])
    .with_transform(lambda b: {"input_ids": [[ord(c) - 60 for c in t.split()] for t in b["text"]]}),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRAINING)
def test_whatever_the_training_set_is_made_of(kind):
    from hf_dpopt.records.overlap import TrainingRows

    known = TrainingRows(TRAINING[kind](rows()))
    copies = [rows(), table(rows()), Wrapped(rows()), list(known.dataset)[10:20], Subset(known.dataset, [4])]
    assert [known.make_up(x) for x in copies] == [True] * 5
    assert [known.make_up(x) for x in (rows(50, 8), table(rows(50, 8)), Wrapped(rows(50, 8)), None)] == [False] * 4


@pytest.mark.parametrize("num", [20, 60])
def test_a_part_of_the_training_set_finds_public_records_that_are_all_copies(num, monkeypatch):
    """A set that is too large to be read whole: a tenth of few public records is below what chance would make."""
    from hf_dpopt.records import overlap

    read = overlap._read
    monkeypatch.setattr(overlap, "_read", lambda found, *rest: read([(d, r[::2]) for d, r in found], *rest))
    training = overlap.TrainingRows(Wrapped(rows(200, 1)))
    assert training.make_up(rows(200, 1)[:num], 0.1)
    assert not training.make_up(rows(num, 8), 0.1)


ALLOWED: dict[str, Callable[[datasets.Dataset], Any]] = {
    "other records": lambda d: table(rows(60, 3)),
    "40 % copies": lambda d: table(list(d)[:40] + rows(60, 5)),
    "one natural duplicate": lambda d: table([*rows(20, 5), dict(d[17])]),
    "the same labels and ids": lambda d: table([r | {"idx": i, "name": f"{i:09}.png"} for i, r in enumerate(rows(40, 5))]),
    "the same masks": lambda d: [r | {"attention_mask": [1] * 8} for r in rows(40, 5)],
    "a stream of others": lambda d: table(rows(40, 5)).to_iterable_dataset(),
    "disjoint Subset of ConcatDataset": lambda d: Subset(ConcatDataset([d, table(rows(50, 9))]), range(NUM, NUM + 50)),
}  # fmt: skip


@pytest.mark.parametrize("case", ALLOWED)
def test_held_out_records_are_evaluated_on(tmp_path, case):
    train = table([r | {"idx": i, "name": f"{i:09}.png", "attention_mask": [1] * 8} for i, r in enumerate(rows())])
    held_out = ALLOWED[case](train)
    trainer = tiny.trainer(tmp_path / "out", train_dataset=train, eval_dataset=held_out)
    trainer.get_eval_dataloader(held_out)
    if case == "other records":
        assert trainer.evaluate()["eval_loss"] > 0 and len(trainer.predict(held_out).predictions) == 60


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_halves_of_a_split_share_a_table_and_no_row(tmp_path, train, shuffle):
    parts = train.train_test_split(0.2, shuffle=shuffle, seed=0)
    trainer = tiny.trainer(tmp_path / "out", train_dataset=parts["train"], eval_dataset=parts["test"])
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(DPConfigError, match=REFUSED):
        trainer.evaluate(train)


def test_texts_that_repeat_by_nature_are_no_evidence(tmp_path):
    """A column of which a tenth repeats does not tell records apart; the next one does."""
    greetings = [
        {"text": f"a short greeting, number {i % 20}", "input_ids": r["input_ids"]} for i, r in enumerate(rows())
    ]
    others = [g | {"input_ids": r["input_ids"]} for g, r in zip(greetings, rows(60, 4), strict=False)]
    options = dict(train_dataset=table(greetings), data_collator=lambda r: tiny.collate([x | {"label": 0} for x in r]))
    trainer = tiny.trainer(tmp_path / "out", eval_dataset=table(others), **options)
    with pytest.raises(DPConfigError, match=REFUSED):
        trainer.evaluate(table(greetings[5:25]).map(lambda r: {"text": r["text"] + "!"}))


def test_a_tokenised_copy_of_texts_is_found(tmp_path):
    texts = [{"text": " ".join(map(str, r["input_ids"])), "label": r["label"]} for r in rows()]
    train = table(texts).map(lambda r: {"input_ids": [int(x) for x in r["text"].split()]})
    trainer = tiny.trainer(tmp_path / "out", train_dataset=train, data_collator=tiny.collate)
    again = table(texts).map(lambda r: {"input_ids": [int(x) for x in r["text"].split()]}, remove_columns="text")
    for copy in (again, again.select(range(30)), table(texts), list(again)):
        with pytest.raises(DPConfigError, match=REFUSED):
            trainer.get_eval_dataloader(copy)


def test_a_training_set_that_was_replaced_is_looked_at_anew(trainer):
    later = table(rows(40, 6))
    trainer.get_eval_dataloader(later)
    trainer.train_dataset = later
    with pytest.raises(DPConfigError, match=REFUSED):
        trainer.get_eval_dataloader(list(later))
