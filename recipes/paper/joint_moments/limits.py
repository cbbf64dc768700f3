r"""When a private second moment can be known at all: on paper, on the tasks of words, and for LoRA on an encoder.

A mean square of one step has noise of stddev ``z C^2 sqrt(1 + s^2) / (s B)`` in every coordinate: noise multiplier z,
clip C, scale s in 1 / C, batch B. Adam's average over T steps multiplies that by ``averaged(T)``. A record's squares
add up to at most C^2 over d coordinates, so the signal of a coordinate is C^2 / d on average at most, and

    signal / noise  <=  B / (d z averaged(T))    for every s: what is left if the squares had the whole budget.

The square of the noisy mean, which needs no second release, has noise ``sqrt(2) z^2 C^2 / B^2`` and the signal
``rho C^2 / d``, rho being the squared norm of the mean clipped gradient in units of C^2. It is the better known one if

    rho B / z  >  sqrt(2) s / sqrt(1 + s^2)

though it is another number: it knows how far a coordinate goes, the mean square also how often it is used.

    python -m recipes.paper.joint_moments.limits --sst2 FOLDER --imdb FOLDER --ag_news FOLDER --model ENCODER \
        --output_dir docs/reproductions
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_dpopt.clipping import ClippingEngine, make_engine
from hf_dpopt.clipping.squared_sum import SquaredSum
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.preclip import Identity
from recipes.models import choose_trained
from recipes.options import ModelArguments
from recipes.paper.dp2.output import versions
from recipes.paper.joint_moments import words
from recipes.paper.joint_moments.releases import averaged, joint_sums
from recipes.paper.linear import TwoClasses
from recipes.paper.one_query.words import Method, plan_of, reviews, sst2
from recipes.paper.top_layer.task import read

EPSILON = 8.0
NUM_RECORDS, AT_A_TIME, WARM_UP, RATE = (
    512,
    32,
    20,
    1e-3,
)  # of the encoder: looked at, in a pass, steps before, their rate
LORA = {"batch": 1024, "num_steps": 264}  # four passes over SST-2


@dataclasses.dataclass(frozen=True)
class Known:
    """What an average of private mean squares could know of the coordinates, with the whole budget.

    Args:
        coordinates: trained.
        noise_multiplier: of the plan, for the gradient alone.
        on_paper: ``B / (d z averaged(T))``.
        above: share of the coordinates whose true mean square exceeds one stddev of the averaged noise.
        of_energy: share of the sum of mean squares that lies in those.
        rho: squared norm of the mean clipped gradient / C^2.
        ratio: ``rho B / z``, which is compared with ``sqrt(2) s / sqrt(1 + s^2)``.
    """

    coordinates: int
    noise_multiplier: float
    on_paper: float
    above: float
    of_energy: float
    rho: float
    ratio: float


def known(
    moment: np.ndarray, mean: np.ndarray, clip: float, *, batch: int, num_steps: int, noise_multiplier: float
) -> Known:
    """Compare true moments with the noise of the averaged release.

    Args:
        moment: mean squares of clipped gradients, flat.
        mean: mean clipped gradients, flat.
    """
    stddev = noise_multiplier * averaged(num_steps) / batch  # in C^2
    relative, rho = moment / clip**2, float((mean / clip) @ (mean / clip))
    above = relative > stddev
    return Known(
        len(moment), noise_multiplier, 1 / len(moment) / stddev, float(above.mean()),
        float(relative[above].sum() / relative.sum()), rho, rho * batch / noise_multiplier,
    )  # fmt: skip


def of_words(task: Any, clip: float) -> Known:
    """A task of words at its first weights, which are zero."""
    outputs = 1 if isinstance(task.train, TwoClasses) else int(task.train.labels_N.max()) + 1
    sums = joint_sums(task.train, np.zeros((task.train.num_features, outputs)), clip)
    mean, moment = (total.ravel() / len(task.train) for total in sums)
    z = words.plan_of(task, EPSILON).noise_multiplier
    return known(moment, mean, clip, batch=task.batch, num_steps=task.num_steps, noise_multiplier=z)


def of_lora(folder: Path, model: str, clip: float) -> dict[str, Known]:
    """LoRA of rank 8 on all linear layers and the head, on phrases of SST-2, after a few steps without privacy.

    At the first weights half of the adapters have no gradient at all.
    """
    tokenizer, (texts, labels) = AutoTokenizer.from_pretrained(model), read(folder / "train.tsv")
    order = np.random.default_rng(0).permutation(len(texts))
    torch.manual_seed(0)
    adapted = choose_trained(
        AutoModelForSequenceClassification.from_pretrained(model, num_labels=2),
        ModelArguments(model_name_or_path=model, lora_r=8), "SEQ_CLS",
    ).eval()  # fmt: skip

    def losses(rows: np.ndarray) -> torch.Tensor:
        inputs = tokenizer([texts[i] for i in rows], padding=True, truncation=True, max_length=64, return_tensors="pt")
        logits = adapted(**inputs).logits
        return nn.functional.cross_entropy(logits, torch.tensor([labels[i] for i in rows]), reduction="none")

    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    for rows in np.split(order[: WARM_UP * AT_A_TIME], WARM_UP):
        optimizer.zero_grad()
        losses(rows).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    engine = make_engine(adapted, make_clipping("flat", clip))
    rows = np.split(order[WARM_UP * AT_A_TIME :][:NUM_RECORDS], NUM_RECORDS // AT_A_TIME)
    sums = sums_of(engine, losses, rows)
    z = plan_of(LORA["batch"], LORA["num_steps"], len(texts), Method(), EPSILON, Identity()).noise_multiplier

    def of_parts(part: str) -> Known:
        mean, moment = (
            np.concatenate([found for name, found in total.items() if part in name]) / NUM_RECORDS for total in sums
        )
        return known(moment, mean, clip, **LORA, noise_multiplier=z)

    return {"lora": of_parts(""), "lora, adapters alone": of_parts(".lora_")}


def sums_of(
    engine: ClippingEngine, losses: Callable[[np.ndarray], torch.Tensor], batches: list[np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Sums of clipped gradients and of their squares over records: name -> flat sum."""
    plain, squares = engine.empty_sum(None), SquaredSum(engine.parameters, by_rows=False)
    for rows in batches:
        for total in (plain, squares):
            engine.add_clipped_sum(total, lambda rows=rows: losses(rows), len(rows))  # type: ignore[misc]
    first, second = (
        {name: part.double().flatten().numpy() for name, part in found.items()}
        for found in (plain.result(), squares.result())
    )
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sst2", type=Path, required=True, help="folder with train.tsv of GLUE's SST-2")
    parser.add_argument("--imdb", type=Path, required=True, help="folder with train, test and unsup .jsonl.gz")
    parser.add_argument("--ag_news", type=Path, required=True, help="folder with train.tsv and test.tsv")
    parser.add_argument("--model", required=True, help="folder of a pretrained encoder")
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args()
    found = {
        "sst2": of_words(sst2(options.sst2), 1.0), "imdb": of_words(reviews(options.imdb), 1.0),
        "ag_news": of_words(words.ag_news(options.ag_news), 1.0), **of_lora(options.sst2, options.model, 1.0),
    }  # fmt: skip
    made: dict[str, Any] = {
        "command": "python -m recipes.paper.joint_moments.limits",
        **versions(),
        "date": words.DATE,
    }
    made |= {"epsilon": EPSILON, "tasks": {name: dataclasses.asdict(one) for name, one in found.items()}}
    (options.output_dir / "joint_moments_limits.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(made["tasks"], indent=1))


if __name__ == "__main__":
    main()
