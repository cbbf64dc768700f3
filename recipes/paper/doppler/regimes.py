"""Where should a filter pay? Three regimes that were named before they were run, and Figures 9 to 11 in the cheapest.

``small rate``: softmax regression on words of AG News, 2,000 steps at an eighth of the best learning rate.
``smooth``: an MLP with 0.5 million parameters and GELU learns the largest of four smooth functions of 32 inputs.
``digits``: a convolutional network with fresh weights on scikit-learn's digits, the paper's regime at a small size.

Eq. 4 comes first, on the gradients of a run without a filter whose seed is not reported: as the batches have them, and
without the noise of sampling (the gradient of the first records, the same at every step). Then the gain, over paired
seeds. The ablation varies the clipping, the learning rate and its schedule on the digits, one at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from recipes.paper.doppler.spectra import FILTER, Recorder, analyse
from recipes.paper.doppler.task import PADDING, Data, Records, Size, read_data
from recipes.paper.doppler.training import OPTIONS, PLAIN, TUNING_SEED, Run, train
from recipes.paper.runs import KeptRuns, best_of, experiment, interval, labelled, percent

NUM_SEEDS, ABLATION_SEEDS = 8, 5
WHOLE, SEGMENT = 1000, 256  # records of the gradient without sampling; steps of a segment of a spectrum
BUCKETS, TOPICS = 1024, 4
INPUTS, WIDTH = 32, 512


class Bag(nn.Module):
    """Softmax regression on the mean of one-hot words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(BUCKETS, TOPICS)
        nn.init.zeros_(self.words.weight)

    def forward(self, words_BT: torch.Tensor) -> torch.Tensor:
        known_BT1 = (words_BT != PADDING)[..., None].float()
        return (self.words(words_BT) * known_BT1).sum(dim=1) / known_BT1.sum(dim=1).clamp(min=1)


class Patches(nn.Module):
    """A convolution of 3 x 3 without padding, as a linear layer of the patches, and a LayerNorm over the channels."""

    def __init__(self, channels: int, out: int):
        super().__init__()
        self.linear, self.norm = nn.Linear(9 * channels, out), nn.LayerNorm(out)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        patches_BPK = nn.functional.unfold(images_BCHW, 3).mT
        side = images_BCHW.shape[-1] - 2
        return nn.functional.gelu(self.norm(self.linear(patches_BPK))).mT.unflatten(2, (side, side))


def convolutional() -> nn.Module:
    return nn.Sequential(Patches(1, 16), Patches(16, 32), Patches(32, 32), nn.Flatten(), nn.Linear(32 * 4, 10))


def mlp() -> nn.Module:
    widths = (INPUTS, WIDTH, WIDTH, WIDTH, TOPICS)
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def split(records: Records, ends: tuple[int, int]) -> Data:
    """The first ones to train on, then those that choose, then those that are reported; in random order."""
    records = records[torch.tensor(np.random.default_rng(0).permutation(len(records)))]
    return Data(records[: ends[0]], records[ends[0] : ends[1]], records[ends[1] :])


def digits(folder: Path) -> Data:
    images, labels = load_digits(return_X_y=True)
    return split(Records(torch.tensor(images / 8 - 1).float().view(-1, 1, 8, 8), torch.tensor(labels)), (1197, 1497))


def smooth(folder: Path) -> Data:
    rng = np.random.default_rng(0)
    x, inner, outer = (rng.standard_normal(shape) for shape in ((16_000, INPUTS), (INPUTS, 16), (16, TOPICS)))
    values = np.tanh(x @ inner / INPUTS**0.5) @ outer
    return split(Records(torch.tensor(x).float(), torch.tensor(values.argmax(axis=1))), (10_000, 12_000))


@dataclasses.dataclass(frozen=True)
class Regime:
    """What is learned, and how.

    Args:
        data: of the folder with AG News.
        model: with fresh weights, of the global seed.
        start: learning rate where the climb begins.
        share: of the best rate without a filter, taken by all runs; None for a climb of every cell.
        num_steps: of `batch` records.
        clipping_norm: about the median norm of a record's gradient.
    """

    data: Callable[[Path], Data]
    model: Callable[[], nn.Module]
    start: float
    share: float | None
    num_steps: int
    batch: int
    clipping_norm: float = 1.0


REGIMES = {
    "small rate": Regime(
        lambda folder: read_data(folder, Size(buckets=BUCKETS, max_words=32)), Bag, 32.0, 0.125, 2000, 256, 0.2
    ),
    "smooth": Regime(smooth, mlp, 1.0, None, 200, 256),
    "digits": Regime(digits, convolutional, 1.0, None, 150, 128),
}
# what differs from the runs of the digits; rates relative to the best one without a filter
ABLATION: tuple[dict[str, Any], ...] = (
    {}, {"clipping": "per_layer"}, {"clipping": "automatic"}, {"rate": 0.25}, {"rate": 4.0}, {"schedule": "cosine"},
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegimeRun(Run):
    """A run of a regime."""

    regime: str
    clipping: str = "flat"
    schedule: str = "constant"

    def model(self) -> nn.Module:
        return REGIMES[self.regime].model()


def spectra_of(run: RegimeRun, data: Data) -> dict[str, Any]:
    """Eq. 4 and our ratios by filter, of one run without a filter."""
    recorder = Recorder()
    result = train(run, data, observe=recorder, whole=WHOLE)
    stddev = result["noise_multiplier"] * run.clipping_norm / run.batch
    found = analyse(recorder.recorded(), stddev**2, SEGMENT)
    return {name: found[name] for name in ("snr_of_a_gradient", "gains")} | {"clipped": result["clipped"]}


def pair(kept: KeptRuns, runs: dict[str, RegimeRun], num_seeds: int) -> dict[str, Any]:
    """Rates and accuracies without and with the filter; the gain in points, and half of its 95 % interval."""
    accuracies = {
        name: [one["accuracy"] for one in kept.of_seeds(run, range(num_seeds))] for name, run in runs.items()
    }
    gain, half = interval(percent(accuracies[FILTER]) - percent(accuracies[PLAIN]))
    rates = {name: run.rate for name, run in runs.items()}
    return {"rates": rates, "accuracies": accuracies, "gain": gain, "half_of_95_interval": half}


def compute(given: argparse.Namespace) -> dict[str, Any]:
    regimes, ablation = {}, []
    for name in given.regimes:
        regime, data = REGIMES[name], REGIMES[name].data(given.data)
        kept = KeptRuns(given.output_dir / "doppler_regimes.jsonl", functools.partial(train, data=data))
        spectra = KeptRuns(
            given.output_dir / "doppler_regimes_spectra.jsonl", functools.partial(spectra_of, data=data)
        )
        base = RegimeRun(
            regime=name, optimizer="dp_sgd", filter=PLAIN, epsilon=given.epsilon, rate=0.0, seed=0,
            num_steps=regime.num_steps, batch=regime.batch, clipping_norm=regime.clipping_norm,
        )  # fmt: skip
        tried = {PLAIN: kept.rates(base, regime.start, (TUNING_SEED,), "validation_accuracy")}
        plain = dataclasses.replace(base, rate=best_of(tried[PLAIN]) * (regime.share or 1.0))
        predicted = spectra.result(dataclasses.replace(plain, seed=TUNING_SEED))
        filtered = dataclasses.replace(plain, filter=FILTER)
        if regime.share is None:
            tried[FILTER] = kept.rates(filtered, regime.start, (TUNING_SEED,), "validation_accuracy")
            filtered = dataclasses.replace(filtered, rate=best_of(tried[FILTER]))
        regimes[name] = {
            "parameters": sum(p.numel() for p in regime.model().parameters()), "predicted": predicted,
            "tried": {low_pass: labelled(scores) for low_pass, scores in tried.items()},
            **pair(kept, {PLAIN: plain, FILTER: filtered}, NUM_SEEDS),
        }  # fmt: skip
        for change in ABLATION if name == "digits" else ():
            varied = dataclasses.replace(plain, **{**change, "rate": plain.rate * change.get("rate", 1.0)})
            runs = {low_pass: dataclasses.replace(varied, filter=low_pass) for low_pass in (PLAIN, FILTER)}
            ablation.append({"change": change, **pair(kept, runs, ABLATION_SEEDS)})
    return {"regimes": regimes, "ablation": ablation}


main = experiment("doppler_regimes", compute, data=OPTIONS["data"], epsilon=8.0, regimes=tuple(REGIMES))

if __name__ == "__main__":
    main()
