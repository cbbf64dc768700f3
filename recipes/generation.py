"""Texts for the prompts of an evaluation set, and their scores against all references of each prompt."""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from hf_dpopt import DPConfigError
from recipes.clm_data import Pairs
from recipes.tables import Table

logger = logging.getLogger(__name__)


def group_references(table: Table, kind: Pairs) -> dict[str, list[str]]:
    """Prompt -> its references, in the order of the table; rows with the same prompt are one entry."""
    groups: dict[str, list[str]] = {}
    for prompt, target in zip(kind.prompts(table.columns), table.columns[kind.target], strict=True):
        groups.setdefault(prompt, []).append(target)
    return groups


def most_prompt_tokens(tokenizer: PreTrainedTokenizerBase, model: Any, max_new_tokens: int) -> int:
    """How long a prompt may be so that there is room for the text.

    Raises:
        DPConfigError: if there is none for any prompt.
    """
    most = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or sys.maxsize)
    if max_new_tokens >= most:
        raise DPConfigError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt: the model takes {most} tokens. Use less."
        )
    return most - max_new_tokens


def generate(
    trainer: Any,
    prompts: list[str],
    kind: Pairs,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_beams: int,
    max_new_tokens: int,
) -> list[str]:
    """One text per prompt, by greedy or beam search; the prompts are dealt to the processes."""
    model, args = trainer.model, trainer.args
    room = most_prompt_tokens(tokenizer, model, max_new_tokens)
    has_encoder = model.config.is_encoder_decoder
    ids = kind.prompt_ids(prompts, tokenizer)
    num_cut = sum(len(row) > room for row in ids)
    if num_cut and not has_encoder:  # sources are cut as in training
        logger.warning(
            f"{num_cut} prompts are cut to their last {room} tokens to leave room for {max_new_tokens} new."
        )
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # like lengths together: less padding
    mine = order[args.process_index :: args.world_size]
    texts: list[tuple[int, str]] = []
    model.eval()
    model.config.use_cache = True
    with torch.no_grad():
        for start in range(0, len(mine), args.per_device_eval_batch_size):
            batch = mine[start : start + args.per_device_eval_batch_size]
            rows = [ids[i] if has_encoder else ids[i][-room:] for i in batch]
            inputs = pad(rows, tokenizer.pad_token_id, left=not has_encoder).to(args.device)
            mask = pad([[1] * len(row) for row in rows], 0, left=not has_encoder).to(args.device)
            out = model.generate(
                input_ids=inputs,
                attention_mask=mask,
                do_sample=False,
                num_beams=num_beams,
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
            new = tokenizer.batch_decode(out if has_encoder else out[:, inputs.size(1) :], skip_special_tokens=True)
            texts += [(i, " ".join(text.split())) for i, text in zip(batch, new, strict=True)]
    by_prompt = dict(gather_object(texts))
    return [by_prompt[i] for i in range(len(prompts))]


def pad(rows: list[list[int]], value: int, *, left: bool) -> torch.Tensor:
    """On the left where the text goes on after the prompt: all prompts of a batch end in one column."""
    width = max(map(len, rows))
    padding = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([p + row if left else row + p for p, row in zip(padding, rows, strict=True)])


# --- scores ----------------------------------------------------------------------------------------------------------


def generation_metrics(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """BLEU and mean ROUGE-L (F1 of the best reference) in percent, and NIST-5, of one text per prompt.

    Args:
        predictions: generated texts.
        references: all references of each text.
    """
    import sacrebleu  # here: these packages take a second to load, and few runs generate
    from rouge_score.rouge_scorer import RougeScorer

    most = max(map(len, references))  # sacrebleu takes the first references of all texts, then the second, ...
    streams = [[group[i] if i < len(group) else None for group in references] for i in range(most)]
    scorer, pairs = RougeScorer(["rougeL"]), zip(references, predictions, strict=True)
    return {
        "bleu": float(sacrebleu.corpus_bleu(list(predictions), streams).score),
        "rouge_l": 100 * float(np.mean([scorer.score_multi(list(r), p)["rougeL"].fmeasure for r, p in pairs])),
        "nist": nist(predictions, references),
    }


def nist(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """NIST-5 as mteval-v13a computes it, on sacrebleu's 13a tokens; case counts.

    Not from a package: `nltk.translate.nist_score` matches an n-gram against the best single reference, where mteval,
    and with it all results on E2E, matches it against all references. With one reference both give the same.

    References:
        Doddington (2002), doi:10.3115/1289189.1289273, Eq. 2 and 3.
    """
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokenize = Tokenizer13a()
    texts = [tokenize(text).split() for text in predictions]
    groups = [[tokenize(reference).split() for reference in group] for group in references]
    counts = Counter({(): sum(len(reference) for group in groups for reference in group)})
    score = 0.0
    for n in range(1, 6):
        found = [_ngrams(text, n) for text in texts]
        own = [[_ngrams(reference, n) for reference in group] for group in groups]
        counts.update(ngram for group in own for reference in group for ngram in reference.elements())
        known = [reduce(or_, group) for group in own]
        matches = [match for pair in zip(found, known, strict=True) for match in and_(*pair).items()]
        information = sum(times * math.log2(counts[ngram[:-1]] / counts[ngram]) for ngram, times in matches)
        score += information / max(1, sum(map(Counter.total, found)))
    length, wanted = sum(map(len, texts)), sum(np.mean([len(reference) for reference in group]) for group in groups)
    if not length or not wanted:
        return 0.0
    beta = math.log(0.5) / math.log(1.5) ** 2  # the penalty is 1/2 at two thirds of the references' length
    return score * math.exp(beta * math.log(min(1.0, length / wanted)) ** 2)


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[i:] for i in range(n)), strict=False))
