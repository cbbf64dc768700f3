"""Synthetic rows of a table: learned as texts, sampled as texts that fit the schema, chosen by private counts.

Shape legend: B = texts of a batch, V = vocabulary of the model.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LogitsProcessor, PreTrainedTokenizerBase

from hf_dpopt import DPConfigError
from hf_dpopt.common.extras import import_extra
from recipes.histogram import vectors_of
from recipes.synthetic_scores import accuracy, distance_of
from recipes.synthetic_text import Histograms, Made, Scores, resample, sample
from recipes.table_schema import Row, Schema

logger = logging.getLogger(__name__)

PROMPT = "row:"


class TableRows:
    """Rows of a table, with a histogram of each column, or of each together with the label.

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
        self.columns, label, sizes = schema.names, args.label_column, schema.sizes
        self.cells, self.meaning = self._counted(schema.cells(train)), repr((schema, label))
        pairs = {f"{label}_and_{name}": sizes[label] * sizes[name] for name in sizes if label not in (None, name)}
        self.sizes = pairs or sizes
        self.texts = [*map(schema.write, train)]
        self._example = max(schema.examples, key=len)
        self.codes, self.least = [PROMPT], f"a row such as '{self._example}'"
        logger.info(f"A row is learned as: {PROMPT} {self._example}")

    def records(self, model: str) -> list[dict[str, Any]]:
        """Token ids of each row, and labels of the tokens that the schema leaves open; a grammar writes the others.

        Raises:
            DPConfigError: if the tokenizer cannot write every row of the schema.
        """
        tokenizer = AutoTokenizer.from_pretrained(model)
        start, end = tokenizer(PROMPT)["input_ids"], tokenizer.eos_token_id
        texts = [f"{PROMPT} {text}" for text in [*self._schema.examples, *self.texts]]
        every = [ids[len(start) :] for ids in tokenizer(texts, split_special_tokens=True)["input_ids"]]
        begun, num, found = _matcher(tokenizer, self._schema), len(texts) - len(self.texts), []
        self.num_tokens = max(map(len, every[:num])) + 1
        for text, ids in zip(texts[:num], every, strict=False):
            if begun.deep_copy().validate_tokens(ids) < len(ids):
                raise DPConfigError(
                    f"schema={self._args.schema}: the tokenizer of the model cannot write {text!r} "
                    f"({begun.get_error() or 'a character is unknown'}). Correct the schema, or use another model."
                )
        for ids in every[num:]:
            row, labels = begun.deep_copy(), [-100] * len(start)
            for token in ids:  # of exponents and of some control characters the grammar has none
                labels.append(token if row.is_error() or not row.compute_ff_tokens() else -100)
                row.consume_token(token)
            found.append({"input_ids": [*start, *ids, end], "labels": [*labels, -100]})
        return found

    def make(self, model: Any, tokenizer: PreTrainedTokenizerBase, counts: Histograms, max_length: int) -> Made:
        """As `TextRows.make`: rows that fit the schema, drawn so that each histogram has the shares of its counts.

        Those of pairs have the counts of the label between them.

        Raises:
            DPConfigError: if no sampled row ends.
        """
        args, found = self._args, list[Row]()
        wanted = math.ceil(args.num_rows * args.oversampling)
        begun = _matcher(tokenizer, self._schema)
        torch.manual_seed(self._seed)  # public: samples of a private model are post-processing
        for start in range(0, wanted, args.sampling_batch_size):
            num = min(args.sampling_batch_size, wanted - start)
            texts = sample(model, tokenizer, [PROMPT] * num, max_length, max_length, args, Fits(begun))
            found += filter(None, (self._schema.parse(text) for text, has_ended in texts if has_ended))
            if start // args.sampling_batch_size % 10 == 9:
                logger.info(f"{len(found)} of {wanted} rows are sampled.")
        if not found:
            raise DPConfigError(
                f"max_length={max_length}: none of {wanted} sampled rows ends within it. Sample again, which costs "
                "nothing: --resume_from_checkpoint True, and a larger --max_length or a lower --temperature."
            )
        if len(found) < args.num_rows:
            logger.warning(f"Only {len(found)} of {wanted} sampled rows end within {max_length} tokens.")
        cells, num = self._schema.cells(found), self._schema.sizes.get(args.label_column, 1)
        tables = [one.reshape(num, -1) for one in counts.values()]
        of_labels = np.average([one.sum(1) for one in tables], 0, [1 / one.shape[1] for one in tables])  # by variance
        labels = np.array(cells.get(args.label_column, [0] * len(found))), of_labels
        others = [(np.array(some), counts[name]) for name, some in self._counted(cells).items()]
        rng = np.random.default_rng(self._seed)
        rows = [found[place] for place in resample(labels, others, args.num_rows, rng)]
        return [*zip(*rows, strict=True)], functools.partial(self._scores, rows, counts, {"rows": len(rows)})

    def _counted(self, cells: Mapping[str, list[int]]) -> Mapping[str, list[int]]:
        """Places in the histograms that are counted: those of the columns, or of pairs of the label and a column.

        Sampled columns hardly know of each other after the few steps of a private run; chosen by such pairs, they
        tell the label.
        """
        label, sizes = self._args.label_column, self._schema.sizes
        if label is None:
            return cells
        of_label, others = np.array(cells[label]), {name: some for name, some in cells.items() if name != label}
        return {f"{label}_and_{name}": (of_label * sizes[name] + some).tolist() for name, some in others.items()}

    def _scores(self, rows: Sequence[Row], counts: Histograms, scores: Scores) -> tuple[Scores, Scores]:
        made, tested = map(self._schema.cells, (rows, self._held_out))
        train, known = {*self._train}, {"counts": (self._counted(made), counts)}
        exact = {"copies_of_whole_records": float(np.mean([row in train for row in rows]))}
        if self._held_out:
            exact["copies_of_records_among_held_out_rows"] = float(np.mean([row in train for row in self._held_out]))
            known["held_out_rows"] = made, {name: np.bincount(cells) for name, cells in tested.items()}
            if self._args.label_column is not None:
                scores["accuracy_of_synthetic"] = self._accuracy(made, tested)
                exact["accuracy_of_real"] = self._accuracy(self._schema.cells(self._train), tested)
        for where, (places, histograms) in known.items():
            for name, histogram in histograms.items():
                scores[f"distance_of_{name}_from_{where}"] = distance_of(np.array(places[name]), histogram)
        return scores, exact

    def _accuracy(self, train: Mapping[str, list[int]], test: Mapping[str, list[int]]) -> float:
        """Of the label, by the cells of the other columns."""
        label = self._args.label_column
        sizes = {name: size for name, size in self._schema.sizes.items() if name != label}
        others = [[*zip(*(cells[name] for name in sizes), strict=True)] for cells in (train, test)]
        vectors = [vectors_of(cells, [*sizes.values()]).numpy() for cells in others]
        return accuracy(vectors[0], train[label], vectors[1], test[label])


def _matcher(tokenizer: PreTrainedTokenizerBase, schema: Schema) -> Any:
    """Make llguidance's matcher of a row. Above log_level=0 it would print tokens of records."""
    wrap = import_extra("llguidance.hf", "--schema").from_tokenizer
    try:
        of_model = wrap(tokenizer)
    except ValueError as error:
        what = f"model_name_or_path={tokenizer.name_or_path}: llguidance cannot read its tokenizer"
        raise DPConfigError(f"{what} ({str(error).split(':')[0]}). Use another model.") from None
    return import_extra("llguidance", "--schema").LLMatcher(of_model, schema.grammar, log_level=0)


class Fits(LogitsProcessor):
    """Allows each text of a batch only the tokens that can still lead to a row of the schema.

    Args:
        row: matcher of llguidance, of a row that has not begun.
    """

    def __init__(self, row: Any):
        self._row, self._rows = row, list[Any]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores of the next tokens, (B, V), with -inf for the others."""
        for row, token in zip(self._rows, input_ids[:, -1].tolist(), strict=bool(self._rows)):
            row.consume_token(token)
        self._rows = self._rows or [self._row.deep_copy() for _ in input_ids]
        bits = np.stack([np.frombuffer(row.compute_bitmask(), np.uint8) for row in self._rows])
        may_be = np.unpackbits(bits, axis=1, count=scores.shape[1], bitorder="little")  # 0 beyond the tokenizer's
        return scores.masked_fill(torch.from_numpy(may_be == 0).to(scores.device), -torch.inf)
