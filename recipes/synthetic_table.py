"""Synthetic rows of a table: learned and sampled as texts, kept if they fit the schema, chosen by private counts."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_dpopt import DPConfigError
from recipes.histogram import vectors_of
from recipes.synthetic_scores import accuracy, distance_of
from recipes.synthetic_text import ROUNDS, Histograms, Made, Scores, rake, sample, shares
from recipes.table_schema import Row, Schema

logger = logging.getLogger(__name__)

PROMPT = "row:"


class TableRows:
    """Rows of a table, with a histogram of each column.

    Args:
        args: `SyntheticArguments`.
        schema: public.
        train: training records.
        held_out: other rows; may be empty.
        seed: public.
    """

    task, public_parts = "tabular-classification", "columns, ranges and categories of the schema"

    def __init__(self, args: Any, schema: Schema, train: Sequence[Row], held_out: Sequence[Row], seed: int):
        self._args, self._schema, self._train, self._held_out, self._seed = args, schema, train, held_out, seed
        self.columns, self.cells, self.sizes = schema.names, schema.cells(train), schema.sizes
        self.meaning = repr(schema)
        self.texts = [*map(schema.write, train)]
        self.prompts, self.codes, self.least = [PROMPT] * len(train), [PROMPT], f"a row such as '{schema.example}'"
        logger.info(f"A row is learned as: {PROMPT} {schema.example}")

    def num_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Of `least`, with its end."""
        return len(tokenizer(f" {self._schema.example}")["input_ids"]) + 1

    def make(self, model: Any, tokenizer: PreTrainedTokenizerBase, counts: Histograms, max_length: int) -> Made:
        """As `TextRows.make`: rows that fit the schema, drawn so that each column has the shares of its counts.

        Raises:
            DPConfigError: if no sampled row fits.
        """
        args, found, num_sampled = self._args, list[Row](), 0
        wanted = math.ceil(args.num_rows * args.oversampling)
        most = max_length
        if {column.type for column in self._schema.columns} <= {"category", "integer"}:
            most = 2 * self.num_tokens(tokenizer)  # a row that does not end is not waited for
        torch.manual_seed(self._seed)  # public: samples of a private model are post-processing
        while len(found) < wanted and num_sampled < ROUNDS * wanted:
            num = min(args.sampling_batch_size, ROUNDS * wanted - num_sampled)
            texts = sample(model, tokenizer, [PROMPT] * num, most, max_length, args.top_p, args.temperature)
            found += filter(None, (self._schema.parse(text) for text, has_ended in texts if has_ended))
            num_sampled += num
            if num_sampled // args.sampling_batch_size % 10 == 0:
                logger.info(f"{len(found)} of {num_sampled} sampled rows fit the schema; {wanted} are wanted.")
        if len(found) < args.num_rows:
            logger.warning(f"Only {len(found)} of {num_sampled} sampled rows fit the schema.")
        if not found:
            raise DPConfigError(
                f"schema={args.schema}: none of {num_sampled} sampled rows fits it. The model is in output_dir, and "
                "what was spent stays spent. Sampling again costs nothing: add --resume_from_checkpoint True and a "
                "lower --temperature. Or train longer, use a larger target_epsilon, or a schema of fewer columns."
            )
        cells = [np.array(places) for places in self._schema.cells(found).values()]
        weights = rake(cells, [shares(counts[name]) for name in self.columns])
        keys = np.random.default_rng(self._seed).exponential(size=len(found)) / weights
        rows = [found[place] for place in np.sort(np.argsort(keys)[: args.num_rows])]
        scores = {"rows": len(rows), "share_that_fits_the_schema": len(found) / num_sampled}
        return [*zip(*rows, strict=True)], functools.partial(self._scores, rows, counts, scores)

    def _scores(self, rows: Sequence[Row], counts: Histograms, scores: Scores) -> tuple[Scores, Scores]:
        exact, known = {"copies_of_whole_records": _share_in(rows, self._train)}, {"counts": counts}
        made = self._schema.cells(rows)
        if self._held_out:
            exact["copies_of_whole_records_among_held_out_rows"] = _share_in(self._held_out, self._train)
            tested = self._schema.cells(self._held_out)
            known["held_out_rows"] = {name: np.bincount(cells) for name, cells in tested.items()}
            if self._args.label_column:
                scores["accuracy_of_synthetic"] = self._accuracy(made, tested)
                exact["accuracy_of_real"] = self._accuracy(self.cells, tested)
        for where, histograms in known.items():
            for name, histogram in histograms.items():
                scores[f"distance_of_{name}_from_{where}"] = distance_of(np.array(made[name]), histogram)
        return scores, exact

    def _accuracy(self, train: Mapping[str, list[int]], test: Mapping[str, list[int]]) -> float:
        """Of the label, by the cells of the other columns."""
        label = self._args.label_column
        sizes = [size for name, size in self.sizes.items() if name != label]
        others = [[*zip(*(cells[name] for name in cells if name != label), strict=True)] for cells in (train, test)]
        vectors = [vectors_of(cells, sizes).numpy() for cells in others]
        return accuracy(vectors[0], train[label], vectors[1], test[label])


def _share_in(rows: Sequence[Row], others: Sequence[Row]) -> float:
    known = set(others)
    return float(np.mean([row in known for row in rows]))
