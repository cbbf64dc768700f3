"""Records longer than the positions of a model, found before any of them is looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers as tf
from torch import nn

from hf_dpopt import DPConfigError
from hf_dpopt.records.inspection import refuse_malformed
from hf_dpopt.records.limits import Limits, positions
from hf_dpopt.records.losses import RecordLosses
from tests.refusals.base import bert, small


def _with_prompt(model: nn.Module) -> nn.Module:
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def _with_wrapped_positions(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(target_modules=["c_attn"], modules_to_save=["wpe"], fan_in_fan_out=True)
    return peft.get_peft_model(model, config)


def _tiny(family: str, head: str = "Model", **more: Any) -> nn.Module:
    return small(getattr(tf, f"{family}{head}"), **more).eval()


_OPT = {"ffn_dim": 16, "word_embed_proj_dim": 16}


def _led() -> nn.Module:
    config = tf.LEDConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=16, attention_window=4,
    )  # fmt: skip
    return tf.LEDModel(config).eval()


POSITIONS: dict[str, tuple[Callable[[], nn.Module], str, int | None]] = {
    "bert": (bert, "input_ids", 16),
    "roberta": (lambda: _tiny("Roberta", pad_token_id=1), "input_ids", 14),  # counted from 2
    "opt": (lambda: _tiny("OPT", **_OPT), "input_ids", 16),
    "gpt2": (lambda: _tiny("GPT2"), "input_ids", 16),
    "gpt2, prompt tuning": (lambda: _with_prompt(_tiny("GPT2", "LMHeadModel")), "input_ids", 12),
    "gpt2, trained positions": (lambda: _with_wrapped_positions(_tiny("GPT2", "LMHeadModel")), "input_ids", 16),
    "bart, sources": (lambda: _tiny("Bart"), "input_ids", 16),
    "bart, targets": (lambda: _tiny("Bart"), "labels", 16),
    "led, sources": (_led, "input_ids", 32),
    "led, targets": (_led, "labels", 16),
    "llama": (lambda: _tiny("Llama"), "input_ids", None),
}  # fmt: skip


@pytest.mark.parametrize("case", POSITIONS)
def test_positions_of_a_model(case):
    make, column, most = POSITIONS[case]
    model = make()
    table = positions(model, column)
    assert (None if table is None else table.most) == most

    def run(num_tokens: int) -> None:
        ids = torch.full((1, num_tokens), 5)
        inputs = {"input_ids": ids} if column == "input_ids" else {"input_ids": ids[:, :4], "decoder_input_ids": ids}
        if column == "input_ids" and model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids[:, :4]
        with torch.no_grad():
            model(**inputs)

    run(most or 64)
    if most:
        with pytest.raises((IndexError, RuntimeError)):
            run(most + 1)


def _check(dataset: Any, model: nn.Module) -> None:
    refuse_malformed(dataset, Limits.of(model, RecordLosses(model, "auto").kind))


def test_long_targets_of_a_decoder_are_refused():
    model = _tiny("Bart", "ForConditionalGeneration")
    short, long = {"input_ids": [5] * 4, "labels": [5] * 16}, {"input_ids": [5] * 4, "labels": [5] * 17}
    _check([short], model)
    for dataset in ([short, long], datasets.Dataset.from_list([short, long])):
        with pytest.raises(
            DPConfigError, match="record 1: 'labels' is longer than the 16 positions of the model: .*max_length=16"
        ):
            _check(dataset, model)


def test_what_is_not_a_stored_row_of_tokens_is_not_measured():
    """Padding that takes no position, rows that a transform makes, rows that are missing or no lists."""
    roberta = _tiny("Roberta", "ForSequenceClassification", pad_token_id=1)
    for stored in (list, datasets.Dataset.from_list):
        _check(stored([{"input_ids": [5] * 14 + [1] * 2}]), roberta)
        with pytest.raises(DPConfigError, match="14 positions"):
            _check(stored([{"input_ids": [5] * 15 + [1]}]), roberta)
    served = datasets.Dataset.from_dict({"input_ids": [[5] * 40]})
    served.set_transform(lambda batch: {"input_ids": [row[:8] for row in batch["input_ids"]]})
    for dataset in (served, [{"input_ids": None}], datasets.Dataset.from_dict({"input_ids": ["a text " * 9]})):
        _check(dataset, bert())  # it raises else
