"""The experiments on arXiv:2408.13460: runs, rates and what filters do, on small data made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.paper.doppler import task, training

pytestmark = pytest.mark.slow

SMALL = task.Size(buckets=32, width=8, heads=2, layers=1, max_words=4)
TOPICS = {"World": "war", "Sports": "ball", "Business": "stock", "Sci/Tech": "chip"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts whose first word tells the class, and one without words."""
    made = tmp_path_factory.mktemp("news")
    lines = [f"{word} #{i} filler\t{label}" for i in range(20) for label, word in TOPICS.items()]
    for name in ("train.tsv", "test.tsv"):
        (made / name).write_text("\n".join([*lines, "42\tWorld"]) + "\n", encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def data(folder: Path) -> task.Data:
    return task.read_data(folder, SMALL)


def short_run(**changes: Any) -> training.Run:
    values = dict(
        optimizer="dp_sgd", filter=training.PLAIN, epsilon=8.0, rate=0.5, seed=0, num_steps=12, batch=16, size=SMALL
    )
    return training.Run(**{**values, **changes})


@pytest.mark.parametrize("low_pass", [training.PLAIN, "first_order_v1"])
def test_a_run_releases_noisy_gradients_and_filters_them(data: task.Data, low_pass: str) -> None:
    steps: list[tuple[torch.Tensor, ...]] = []

    def observe(step: int, *stages: dict[str, torch.Tensor]) -> None:
        steps.append(tuple(torch.cat([x[name].flatten() for name in sorted(x)]).double().clone() for x in stages))

    run = short_run(filter=low_pass)
    result = training.train(run, data, observe=observe)
    before_TD, released_TD, filtered_TD = (torch.stack(x).numpy() for x in zip(*steps, strict=True))
    noise = released_TD - before_TD
    stddev = result["noise_multiplier"] * run.clipping_norm / run.batch
    assert noise.std() == pytest.approx(stddev, rel=0.1)  # 12 x 700 draws: 0.8 % is one standard error
    sums = np.linalg.norm(before_TD, axis=1) * run.batch
    assert (sums > 0).any() and (sums <= run.clipping_norm * len(data.train)).all()
    expected = released_TD
    if low_pass == "first_order_v1":
        expected, ones = np.zeros_like(released_TD), np.zeros(len(released_TD))
        for t in range(len(released_TD)):
            g, c = released_TD[t], 1.0
            if t:
                g, c = g + released_TD[t - 1] + 9 * expected[t - 1], c + 1 + 9 * ones[t - 1]
            expected[t], ones[t] = g / 11, c / 11
        expected = expected / ones[:, None]
    np.testing.assert_allclose(filtered_TD, expected, atol=1e-5 * stddev + 1e-6)
    assert [step for step, _ in result["curve"]] == [2, 3, 5, 6, 8, 9, 11, 12]
    assert 0 <= result["accuracy"] <= 1 and result["loss"] > 0 and 0 <= result["clipped"] <= 1
