"""Synthetic rows: control codes, sampling from the trained model, and a choice of rows by private counts of clusters.

Shape legend: N = texts, E = embedding size, K = clusters.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from transformers import AutoModel, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hf_dpopt import DPConfigError
from recipes import hub
from recipes.tables import Table

logger = logging.getLogger(__name__)

LENGTHS = (5, 10, 15, 20, 25, 30, 35, 40, 50, 60, 80, 100, 150, 200)  # words: the most of each interval but the last
MOST_CELLS = 256  # combinations of the control columns
TOKENS_PER_WORD, ROUNDS = 2.0, 3
SENTENCE_END = re.compile(r"[.!?][\"')]*(?=\s|$)")


@dataclass(frozen=True)
class Controls:
    """The control columns and all combinations of their values, which are public.

    Args:
        names: columns.
        values: for each combination the value of each column, as text.
    """

    names: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, table: Table, names: Sequence[str]) -> Controls:
        """The combinations of all values that occur in each column.

        Raises:
            DPConfigError: if there are too many for a histogram.
        """
        kinds = [sorted({str(value) for value in table.columns[name]}) for name in names]
        num = math.prod(map(len, kinds))
        if num > MOST_CELLS:
            raise DPConfigError(
                f"control_columns={' '.join(names)}: have {num} combinations of values, and noise would hide most of "
                f"{num} counts. Use columns with at most {MOST_CELLS} combinations."
            )
        return cls(tuple(names), tuple(itertools.product(*kinds)))

    def cells(self, table: Table) -> list[int]:
        """Place of each row's values among the combinations.

        Raises:
            DPConfigError: for a row of a held-out file with values of its own.
        """
        places = {values: place for place, values in enumerate(self.values)}
        rows = list(zip(*(map(str, table.columns[name]) for name in self.names), strict=True)) or [()] * len(table)
        for i, row in enumerate(rows):
            if row not in places:
                raise DPConfigError(f"{table.where(i)}: {row} is not in the training file. Correct or remove the row.")
        return [places[row] for row in rows]

    def prompt(self, cell: int, length: int) -> str:
        """What the model reads before a text with these values and this length."""
        codes = [f"{name}: {value}" for name, value in zip(self.names, self.values[cell], strict=True)]
        return "\n".join([*codes, f"length: {interval(length)}", "text:"])


def length_cell(text: str) -> int:
    """Interval of `LENGTHS` that the number of words is in."""
    return int(np.searchsorted(LENGTHS, len(text.split())))


def interval(cell: int) -> str:
    """An interval of lengths in words."""
    if cell == len(LENGTHS):
        return f"more than {LENGTHS[-1]} words"
    return f"{1 + (LENGTHS[cell - 1] if cell else 0)} to {LENGTHS[cell]} words"


# --- clusters of public text -----------------------------------------------------------------------------------------


def embed(texts: Sequence[str], encoder: str, *, batch_size: int = 64, max_length: int = 128) -> np.ndarray:
    """Embed texts by the mean of the encoder's last states, of length 1; float32, (N, E).

    The embedding of a text depends on that text alone, whatever the encoder does with padding: each is padded to the
    next multiple of 16 of its own tokens, and each forward has as many rows.

    Raises:
        DPConfigError: if the encoder cannot be loaded.
    """
    fix = "Give --encoder_name_or_path a local folder with an encoder and its tokenizer."
    tokenizer = hub.load(f"The tokenizer of {encoder!r}", AutoTokenizer.from_pretrained, encoder, fix=fix)
    model = hub.load(f"The encoder {encoder!r}", AutoModel.from_pretrained, encoder, fix=fix).float().eval()
    most = min(max_length, tokenizer.model_max_length)
    found = np.zeros((len(texts), model.config.hidden_size), np.float32)
    by_width: dict[int, list[int]] = {}
    for i, ids in enumerate(tokenizer(list(texts), truncation=True, max_length=most)["input_ids"]):
        by_width.setdefault(min(-(-len(ids) // 16) * 16, most), []).append(i)
    for width, places in by_width.items():
        for start in range(0, len(places), batch_size):
            some = places[start : start + batch_size]
            filled = [*some, *[some[-1]] * (batch_size - len(some))]
            batch = tokenizer(
                [texts[i] for i in filled],
                return_tensors="pt",
                padding="max_length",
                truncation=True,
                max_length=width,
            )
            with torch.no_grad():
                states_BTE = model(**batch).last_hidden_state
            mask_BT1 = batch["attention_mask"].unsqueeze(-1).float()
            means_BE = (states_BTE * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1)
            found[some] = torch.nn.functional.normalize(means_BE, dim=1).numpy()[: len(some)]
    return found


def find_clusters(public_NE: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """Different centres of clusters of public embeddings, (K, E); no private record has a part in them."""
    made = KMeans(num_clusters, n_init=1, random_state=seed).fit(public_NE)
    return np.unique(made.cluster_centers_.astype(np.float32), axis=0)  # between equal ones last digits would choose


def nearest(embeddings_NE: np.ndarray, centres_KE: np.ndarray) -> np.ndarray:
    """The nearest centre of each embedding, (N,)."""
    centres_KE = centres_KE.astype(np.float64)  # the last digits of a product of matrices depend on the other rows
    return ((centres_KE**2).sum(1) - 2 * embeddings_NE.astype(np.float64) @ centres_KE.T).argmin(1)


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Synthetic texts, and the cell of the control columns that each was asked for with."""

    texts: list[str]
    cells: np.ndarray

    def take(self, places: Sequence[int]) -> Rows:
        return Rows([self.texts[i] for i in places], self.cells[list(places)])


def shares(counts: np.ndarray) -> np.ndarray:
    """Noisy counts, none below 0, as probabilities; equal ones if the noise left none."""
    return counts / counts.sum() if counts.sum() else np.full(len(counts), 1 / len(counts))


def generate_rows(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    controls: Controls,
    counts: Mapping[str, np.ndarray],
    num_rows: int,
    *,
    max_length: int,
    batch_size: int,
    top_p: float,
    temperature: float,
    seed: int,
) -> Rows:
    """Sample so many different texts; values of the control columns and lengths are drawn from private counts.

    A text that occurred before is drawn again, in at most `ROUNDS` rounds. One that did not end is cut after its last
    sentence.

    Args:
        counts: those of "controls" and "length".
        max_length: most tokens of prompt and text together.
    """
    rng, found = np.random.default_rng(seed), dict[str, tuple[str, int]]()
    torch.manual_seed(seed)  # public: samples of a private model are post-processing
    for _ in range(ROUNDS):
        num = num_rows - len(found)
        if num <= 0:
            break
        cells = rng.choice(len(counts["controls"]), num, p=shares(counts["controls"]))
        lengths = np.sort(rng.choice(len(counts["length"]), num, p=shares(counts["length"])))  # they end together
        for start in range(0, num, batch_size):
            part = slice(start, start + batch_size)
            prompts = [controls.prompt(*both) for both in zip(cells[part], lengths[part], strict=True)]
            longest = int(lengths[part].max())
            most = (max_length if longest == len(LENGTHS) else int(TOKENS_PER_WORD * LENGTHS[longest]) + 8, max_length)
            texts = _sample(model, tokenizer, prompts, min(most), max_length, top_p, temperature)
            for text, cell in zip(texts, cells[part], strict=True):
                if text:
                    found.setdefault(text.casefold(), (text, int(cell)))
            if start // batch_size % 10 == 9:
                logger.info(f"{len(found)} of {num_rows} different texts are sampled.")
    if len(found) < num_rows:
        logger.warning(f"Only {len(found)} of {num_rows} texts are different: the model repeats itself.")
    return Rows([text for text, _ in found.values()], np.array([cell for _, cell in found.values()], int))


def _sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int,
    max_length: int,
    top_p: float,
    temperature: float,
) -> list[str]:
    """One text for each prompt, on one line."""
    tokenizer.padding_side = "left"
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
    width = inputs["input_ids"].shape[1]
    config = GenerationConfig(
        max_new_tokens=max(1, min(max_new_tokens, max_length - width)), do_sample=True, top_p=top_p, top_k=0,
        temperature=temperature, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.no_grad():
        out = model.generate(**inputs, generation_config=config)[:, width:]
    has_ended = (out == tokenizer.eos_token_id).any(1).tolist()
    texts = (" ".join(text.split()) for text in tokenizer.batch_decode(out, skip_special_tokens=True))
    return [text if ended else finished(text) for text, ended in zip(texts, has_ended, strict=True)]


def finished(text: str) -> str:
    """The text up to the end of its last sentence; all of it if none ends."""
    ends = [found.end() for found in SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else text


def resample(
    rows: Rows, clusters: np.ndarray, counts: Mapping[str, np.ndarray], num_rows: int, rng: np.random.Generator
) -> list[int]:
    """Choose rows so that clusters and control columns have the shares of the private counts.

    Yu et al. (2024), arXiv:2402.13659; here the clusters are fixed before, of public text. A cell of the control
    columns gets its share of the rows; within it a row is drawn with a weight of its cluster's private share over the
    synthetic one. Without replacement: no row occurs twice.

    Args:
        rows: synthetic rows, more than are wanted.
        clusters: cluster of each.
        counts: those of "controls" and "cluster".
        num_rows: rows wanted; fewer are returned where a cell has too few. One without any leaves its share to others.

    Returns:
        Places of the chosen rows, at least one, in a random order.
    """
    made = np.bincount(clusters, minlength=len(counts["cluster"])) / max(1, len(clusters))
    weights = (shares(counts["cluster"]) + 1e-9)[clusters] / made[clusters]
    keys = rng.exponential(size=len(clusters)) / weights  # the smallest are a weighted draw without replacement
    is_sampled = np.bincount(rows.cells, minlength=len(counts["controls"])) > 0
    wanted = num_rows * shares((counts["controls"] + 1e-9) * is_sampled)
    quotas = np.floor(wanted).astype(int)
    quotas[np.argsort(quotas - wanted)[: num_rows - quotas.sum()]] += 1
    chosen = []
    for cell, quota in enumerate(quotas):
        places = np.flatnonzero(rows.cells == cell)
        chosen += places[np.argsort(keys[places])[:quota]].tolist()
    return rng.permutation(np.array(chosen, int)).tolist()
