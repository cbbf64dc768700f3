"""Losses of canaries under a model: the whole of the attack on a run of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from hf_dpopt import DPConfigError
from hf_dpopt.common.extras import import_extra
from recipes import glue, models
from recipes.canary_texts import Row
from recipes.clm import loss_of_records
from recipes.clm_data import choose_block_size, find_kind, tokenize
from recipes.glue_data import build
from recipes.glue_model import load_model
from recipes.options import ModelArguments
from recipes.tables import Table

ADAPTER = "adapter_config.json"


def base_of(folder: str) -> str | None:
    """The model that adapters in a folder were trained on; None if it holds a whole model."""
    path = Path(folder) / ADAPTER
    return json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"] if path.is_file() else None


def language_losses(folder: str, rows: list[Row], data_args: Any) -> np.ndarray:
    """Mean loss of each canary's learned tokens, (M,), in nats."""
    table = _table(rows)
    model_args = ModelArguments(model_name_or_path=base_of(folder) or folder, tokenizer_name=folder)
    tokenizer = models.load_tokenizer(model_args)
    tokenizer.padding_side = "right"
    config = models.load_config(model_args)
    model = _adapted(models.load_weights(AutoModelForCausalLM, model_args, config, dtype=torch.float32), folder)
    models.set_padding(tokenizer, model)
    block_size = choose_block_size(data_args.block_size, tokenizer, model)
    split = tokenize(table, find_kind({"train": table}, data_args), tokenizer, block_size=block_size)
    records = [dict(record) for record in split.dataset]
    if len(records) != len(rows) or split.num_without_target:
        raise DPConfigError("The canaries do not fit into records. Make them with fewer --num_tokens.")
    found = models.outputs(model, records, DataCollatorForSeq2Seq(tokenizer))
    sums_M2 = torch.cat([loss_of_records(logits, labels) for logits, labels in found]).double().numpy()
    return sums_M2[:, 0] / sums_M2[:, 1]


def labelled_losses(folder: str, rows: list[Row], data_args: Any) -> np.ndarray:
    """Cross entropy of each canary's label, (M,), in nats."""
    model_args = glue.ModelArguments(model_name_or_path=base_of(folder) or folder, tokenizer_name=folder)
    labels = data_args.label_list.split(",")
    data = build(
        {"train": _table(rows)}, text_column=data_args.text_column, text_pair_column=data_args.text_pair_column,
        label_column=data_args.label_column, label_list=labels,
    )  # fmt: skip
    tokenizer, loaded = load_model(model_args, data)
    model = _adapted(loaded, folder)
    training_args = TrainingArguments(output_dir=folder, report_to="none")  # says which process this is
    dataset = glue.tokenize(data, tokenizer, loaded, data_args, training_args)["train"]
    found = models.outputs(model, list(dataset), DataCollatorWithPadding(tokenizer))
    return torch.cat([F.cross_entropy(logits, truth, reduction="none") for logits, truth in found]).double().numpy()


def _table(rows: list[Row]) -> Table:
    return Table("the canaries", {name: [row[name] for row in rows] for name in rows[0]})


def _adapted(model: PreTrainedModel, folder: str) -> Any:
    """The model with the adapters of a folder, if it has any; in evaluation mode."""
    if base_of(folder) is not None:
        return import_extra("peft", f"The adapter in {folder}").PeftModel.from_pretrained(model, folder).eval()
    return model.eval()


def load_tokenizer(model_args: Any) -> PreTrainedTokenizerBase:
    """The tokenizer that canaries are made with."""
    if model_args.model_name_or_path is None and model_args.tokenizer_name is None:
        raise DPConfigError("Canaries are made of a model's tokens. Give --model_name_or_path.")
    return models.load_tokenizer(model_args)
