"""Tiny models of the families people finetune, with batches that have uneven lengths."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import nn

VOCABULARY, NUM_RECORDS, NUM_TOKENS = 60, 5, 12
LENGTHS = [12, 7, 3, 9, 1]
_BERT = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
    max_position_embeddings=80, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def bert() -> nn.Module:
    return tf.BertForSequenceClassification(tf.BertConfig(**_BERT))


def roberta() -> nn.Module:
    return tf.RobertaForSequenceClassification(tf.RobertaConfig(**_BERT, pad_token_id=1))


def roberta_mlm() -> nn.Module:  # tied embeddings and head
    return tf.RobertaForMaskedLM(tf.RobertaConfig(**_BERT, pad_token_id=1))


def albert() -> nn.Module:  # one layer used three times
    return tf.AlbertForSequenceClassification(
        tf.AlbertConfig(
            vocab_size=VOCABULARY, embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=48, classifier_dropout_prob=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def distilbert() -> nn.Module:
    return tf.DistilBertForSequenceClassification(
        tf.DistilBertConfig(
            vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=2, n_heads=2, dropout=0.0, attention_dropout=0.0,
            seq_classif_dropout=0.0, max_position_embeddings=80,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:  # Conv1D, broadcast positions, tied head
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=80, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama() -> nn.Module:  # RMSNorm has no rule: the fallback's case
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True,
        )
    )  # fmt: skip


def with_lora(make: Callable[[], nn.Module], targets: list[str]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = get_peft_model(
            make(), LoraConfig(r=4, lora_alpha=8, target_modules=targets, modules_to_save=["classifier"])
        )
        for name, p in model.named_parameters():  # a fresh B is 0, and A would get no gradient
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)
        return model

    return build


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": bert,
    "bert-lora": with_lora(bert, ["query", "value"]),
    "roberta": roberta,
    "roberta-lora": with_lora(roberta, ["query", "value", "dense"]),
    "roberta-mlm": roberta_mlm,
    "albert": albert,
    "distilbert": distilbert,
    "distilbert-lora": with_lora(distilbert, ["q_lin", "v_lin"]),
    "gpt2": gpt2,
    "llama": llama,
}
# transformers' causal LM loss rounds float64 logits to float32, so these references are no better than that
FLOAT32_REFERENCE = ("gpt2", "llama")


def batch_for(model: nn.Module, lengths: list[int] | None = None, width: int = NUM_TOKENS) -> dict[str, torch.Tensor]:
    """A padded batch: random tokens, uneven lengths, one label per record or per token."""
    lengths = LENGTHS if lengths is None else lengths
    config = model.config
    ids_BT = torch.randint(3, VOCABULARY, (len(lengths), width))
    mask_BT = (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).long()
    ids_BT = ids_BT.masked_fill(mask_BT == 0, config.pad_token_id or 0)
    name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    labels = torch.randint(0, 2, (len(lengths),)) if "Sequence" in name else ids_BT.masked_fill(mask_BT == 0, -100)
    return {"input_ids": ids_BT, "attention_mask": mask_BT, "labels": labels}
