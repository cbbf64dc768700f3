"""Loss functions of the user that read the inputs: weights of records, and what mixes them."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.adversary.harness import SLACK, assert_refused, clipped_sums, influence, making
from tests.helpers import tiny

WEIGHTS = [3, 1, 2, 5, 1, 4, 2, 7]


def _rows() -> list[dict[str, Any]]:
    ids = torch.randint(3, tiny.VOCABULARY, (len(WEIGHTS), 6), generator=torch.Generator().manual_seed(3)).tolist()
    return [
        {"input_ids": row, "label": i % 2, "weight": w} for i, (row, w) in enumerate(zip(ids, WEIGHTS, strict=True))
    ]


def _collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return tiny.collate(rows) | {"weight": torch.tensor([row["weight"] for row in rows])}


def _make(loss: Any, **changes: Any) -> Any:
    return making(data_collator=_collate, per_example_loss_func=loss, **changes)


def by_record(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.logits, labels, reduction="none")


def weighted(outputs: Any, labels: torch.Tensor, inputs: Any) -> torch.Tensor:
    return by_record(outputs, labels) * inputs["weight"]


def weighted_by_position(outputs: Any, labels: torch.Tensor, batch: Any, /) -> torch.Tensor:
    return by_record(outputs, labels) * batch["weight"]


@pytest.mark.parametrize("loss", [weighted, weighted_by_position])
def test_a_loss_that_reads_a_column_which_the_model_does_not(loss, tmp_path):
    rows, large = _rows(), {"clipping_norm": 1e6}  # nothing is clipped
    found = clipped_sums(_make(loss, **large), rows, [3, 7], tmp_path / "weighted")
    plain = making(per_example_loss_func=by_record, **large)
    bare = [{k: v for k, v in row.items() if k != "weight"} for row in rows]
    one, other = (clipped_sums(plain, bare, [i], tmp_path / f"{i}") for i in (3, 7))
    assert all(torch.allclose(found[n], WEIGHTS[3] * one[n] + WEIGHTS[7] * other[n], atol=1e-12) for n in found)
    assert influence(_make(loss), rows, 7, tmp_path) <= 1 + SLACK


def test_long_records_are_not_checked_four_at_a_time(tmp_path):
    tokens = list[int]()

    def noting(outputs: Any, labels: torch.Tensor, inputs: Any) -> torch.Tensor:
        tokens.append(inputs["input_ids"].numel())
        return by_record(outputs, labels)

    long = [
        {"input_ids": (row["input_ids"] * 8)[: 48 if i else 24], "label": row["label"]}
        for i, row in enumerate(_rows())
    ]
    tiny.trainer(
        tmp_path,
        train_dataset=long,
        per_example_loss_func=noting,
        per_device_train_batch_size=1,
        expected_batch_size=4,
        max_steps=1,
        skip_self_check=False,
    ).train()
    assert max(tokens) <= 2 * 48


def test_a_third_parameter_with_a_default_is_left_alone(tmp_path):
    def stock(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        assert num_items_in_batch is None
        return by_record(outputs, labels)

    assert clipped_sums(making(per_example_loss_func=stock), tiny.records(4), [0, 1], tmp_path)


def scaled_by_the_largest(outputs: Any, labels: torch.Tensor, inputs: Any) -> torch.Tensor:
    return by_record(outputs, labels) * inputs["weight"] / inputs["weight"].max()


def mean(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.logits, labels)


def squeezed(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """No list of losses where a physical batch has one record: a step that stopped there would tell how many it had."""
    return by_record(outputs, labels).squeeze()


def centred(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return by_record(outputs, labels) - by_record(outputs, labels).mean()


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (scaled_by_the_largest, ": the self-check failed"),
        (centred, ": the self-check failed"),
        (mean, ": .*return the per-record losses"),
        (squeezed, ": .*return the per-record losses"),
    ],
)
def test_one_that_mixes_records_is_named_first(loss, told, tmp_path):
    is_of_weights = loss is scaled_by_the_largest
    make = _make(loss) if is_of_weights else making(per_example_loss_func=loss)
    rows = _rows() if is_of_weights else tiny.records(8)
    assert_refused(make, rows, tmp_path, match=f"^per_example_loss_func={loss.__name__}{told}")


def test_a_column_that_was_removed_is_pointed_to(tmp_path):
    make = making(per_example_loss_func=weighted, remove_unused_columns=True)
    match = "^per_example_loss_func=weighted or .* fails .*'weight'.*remove_unused_columns=False"
    assert_refused(make, datasets.Dataset.from_list(_rows()), tmp_path, match=match)
