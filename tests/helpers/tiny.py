"""A tiny private run: a two-layer BERT on a list of records with uneven lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast, TrainerCallback

from hf_dpopt import DPTrainer, DPTrainingArguments

VOCABULARY = 40
_PLAIN: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
_SIZES: dict[str, dict[str, Any]] = {  # by the type of model
    "bert": _PLAIN | dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "llama": _PLAIN | dict(num_key_value_heads=2),
    "gpt2": dict(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
    "t5": dict(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
        pad_token_id=0, decoder_start_token_id=0,
    ),
    "bart": dict(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    ),
}  # fmt: skip


def made(kind: type, **changes: Any) -> Any:
    """A tiny model of a class of transformers, without dropout; `changes` are those of its configuration."""
    torch.manual_seed(0)
    config: Any = kind.config_class  # type: ignore[attr-defined]
    return kind(config(**_SIZES.get(config.model_type, _SIZES["bert"]) | changes))


def model(dropout: float = 0.1, **changes: Any) -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = dict(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=600, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForSequenceClassification(BertConfig(**config | changes))


def records(num: int = 64) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 12, (num,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator).tolist(), "label": i % 2}
        for i, n in enumerate(lengths)
    ]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(r["input_ids"]) for r in rows)
    pad = [[0] * (width - len(r["input_ids"])) for r in rows]
    return {
        "input_ids": torch.tensor([r["input_ids"] + p for r, p in zip(rows, pad, strict=True)]),
        "attention_mask": torch.tensor([[1] * len(r["input_ids"]) + p for r, p in zip(rows, pad, strict=True)]),
        "labels": torch.tensor([r["label"] for r in rows]),
    }


def arguments(output_dir: Path | str, **changes: Any) -> DPTrainingArguments:
    values = dict(
        output_dir=str(output_dir), use_cpu=True, report_to="none", disable_tqdm=True, remove_unused_columns=False,
        per_device_train_batch_size=4, expected_batch_size=16, max_steps=6, logging_steps=1, save_strategy="no",
        learning_rate=0.05, lr_scheduler_type="constant", noise_multiplier=1.0, target_delta=1e-3,
        amplification_samples=0,  # the tests of certificates draw them
        skip_self_check=True,  # half a second of every run; the tests of the check, and the adversary's, switch it on
    )  # fmt: skip
    return DPTrainingArguments(**values | changes)


def trainer(output_dir: Path | str, *, cls: type = DPTrainer, **changes: Any) -> DPTrainer:
    """`changes` go to the trainer where it knows the name, else to the arguments."""
    own = ("model", "train_dataset", "eval_dataset", "data_collator", "callbacks", "optimizers", "compute_metrics",
           "public_dataset", "preclip", "postprocess", "optimizer_cls_and_kwargs",
           "per_example_loss_func", "compute_loss_func", "model_init", "processing_class")  # fmt: skip
    for_trainer = {k: changes.pop(k) for k in own if k in changes}
    if "model_init" not in for_trainer:
        for_trainer.setdefault("model", model())
    for_trainer.setdefault("train_dataset", records())
    for_trainer.setdefault("data_collator", collate)
    return cls(args=arguments(output_dir, **changes), **for_trainer)


class At(TrainerCallback):
    """Calls a function with the state and the model at a moment of every step.

    Args:
        moment: of the Trainer, as "step_end".
        do: the function.
        step: the one step at which it is called; None for all.
    """

    def __init__(self, moment: str, do: Callable[[Any, Any], Any], step: int | None = None):
        is_before = moment in ("step_begin", "pre_optimizer_step")

        def call(args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if step in (None, state.global_step + is_before):
                do(state, model)

        setattr(self, f"on_{moment}", call)


class Gradients(TrainerCallback):
    """Keeps what the optimizer is given in every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})


class StopAt(TrainerCallback):
    """Stops training after a step, as a preempted run stops."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def weights(m: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in m.named_parameters()}


class Bomb:
    """A pickle of it makes a file where it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte, so that any template can be read."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    made.chat_template = chat_template
    return made
