"""One index, several rows: lazy chunking, overflowing tokens, datasets that read several indices at once."""

from __future__ import annotations

import datasets
import pytest
import torch

from tests.adversary.harness import assert_kept, assert_nothing_charged, clipped_sums, influence, trainer
from tests.helpers import tiny
from tests.reference import clipping as reference

NUM = 10


def documents() -> list[dict]:
    """One of them much longer than the others."""
    rows = tiny.records(NUM)
    generator = torch.Generator().manual_seed(5)
    rows[3]["input_ids"] = torch.randint(3, tiny.VOCABULARY, (60,), generator=generator).tolist()
    return rows


def _chunks(ids: list[int]) -> list[list[int]]:
    return [ids[i : i + 6] for i in range(0, len(ids), 6)]


def _chunked(batch: dict) -> dict:
    """What `return_overflowing_tokens` does inside of a transform: more rows than it was given."""
    chunks = [(c, label) for ids, label in zip(batch["input_ids"], batch["label"], strict=True) for c in _chunks(ids)]
    return {"input_ids": [c for c, _ in chunks], "label": [label for _, label in chunks]}


class SeveralAtOnce(torch.utils.data.Dataset):
    """A torch dataset that reads batches, and gives a row for every chunk."""

    def __init__(self, rows: list[dict]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        return {"input_ids": self.rows[i]["input_ids"][:6], "label": self.rows[i]["label"]}

    def __getitems__(self, indices: list[int]) -> list[dict]:
        return [{"input_ids": c, "label": self.rows[i]["label"]} for i in indices for c in _chunks(self.rows[i]["input_ids"])]  # fmt: skip


class ReadsNeighbours(SeveralAtOnce):
    """Puts the words of the first record that was asked for in front of all the others."""

    def __getitems__(self, indices: list[int]) -> list[dict]:
        first = self.rows[indices[0]]["input_ids"]
        return [{**self.rows[i], "input_ids": first + self.rows[i]["input_ids"]} for i in indices]


DATASETS = {
    "transform": lambda: datasets.Dataset.from_list(documents()).with_transform(_chunked),
    "torch": lambda: SeveralAtOnce(documents()),
    "subset": lambda: torch.utils.data.Subset(SeveralAtOnce(documents()), list(range(NUM))),
    "neighbours": lambda: ReadsNeighbours(documents()),
}


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("kind", DATASETS)
def test_a_record_of_several_rows_moves_the_sum_by_one_clip(kind, tmp_path):
    assert_kept(trainer, DATASETS[kind](), 3, tmp_path)


@pytest.mark.parametrize("kind", DATASETS)
def test_the_first_record_too(kind, tmp_path):
    assert_kept(trainer, DATASETS[kind](), 0, tmp_path)


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("kind", ["transform", "torch"])
@pytest.mark.parametrize("size", [1, 4, 64])
def test_the_rows_of_a_record_are_averaged_and_clipped_once(kind, size, tmp_path):
    """Against a loop over documents, whatever the physical batch: 10 rows of one do not fit into one of 4."""

    def make(output_dir, dataset):
        return trainer(output_dir, dataset, per_device_train_batch_size=size)

    got = clipped_sums(make, DATASETS[kind](), range(NUM), tmp_path)
    model, units = tiny.model(dropout=0.0).double().train(), []
    for document in documents():
        rows = [{"input_ids": c, "label": document["label"]} for c in _chunks(document["input_ids"])]
        weights_B = torch.full((len(rows),), 1 / len(rows), dtype=torch.float64)
        units += reference.unit_gradients(model, tiny.collate(rows), sizes=[len(rows)], weights_B=weights_B)
    assert reference.relative_error(got, reference.sum_of_clipped(units, 1.0)) < 1e-9


def test_users_whose_records_have_several_rows(tmp_path):
    rows = [{**row, "author": i // 2} for i, row in enumerate(documents())]

    class ByAuthor(SeveralAtOnce):
        def __getitem__(self, i: int) -> dict:
            return self.rows[i]

        def __getitems__(self, indices: list[int]) -> list[dict]:
            return [{**self.rows[i], "input_ids": c} for i in indices for c in _chunks(self.rows[i]["input_ids"])]

    def make(output_dir, dataset):
        return trainer(
            output_dir, dataset, privacy_unit="user", user_id_column="author", expected_batch_size=2,
            records_per_user=2, user_weighting="mean",
        )  # fmt: skip

    assert influence(make, ByAuthor(rows), 1, tmp_path, drawn=range(NUM // 2)) <= 1 + 1e-5


def test_an_index_without_a_row_adds_nothing(tmp_path):
    class Filtered(SeveralAtOnce):
        def __getitems__(self, indices: list[int]) -> list[dict]:
            return [self.rows[i] for i in indices if i != 3]

    assert influence(trainer, Filtered(documents()), 3, tmp_path) == 0


def test_rows_as_such_are_read_as_before(tmp_path):
    """Stored columns, in one read; the sum is that of a list of the same rows."""
    rows = tiny.records(NUM)
    stored = clipped_sums(trainer, datasets.Dataset.from_list(rows), range(NUM), tmp_path / "stored")
    listed = clipped_sums(trainer, rows, range(NUM), tmp_path / "listed")
    assert reference.relative_error(stored, listed) < 1e-12


def test_nothing_is_charged_for_a_dataset_that_cannot_be_read(tmp_path):
    class Broken(SeveralAtOnce):
        def __getitems__(self, indices: list[int]) -> list[dict]:
            raise ValueError("no such column")

    with pytest.raises(ValueError, match="cannot be read.*no such column"):
        clipped_sums(trainer, Broken(documents()), range(NUM), tmp_path)
    assert_nothing_charged(tmp_path)
