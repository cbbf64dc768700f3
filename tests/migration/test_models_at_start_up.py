"""Models that stopped with an error that said nothing: they run, and exactly, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from hf_dpopt import DPConfigError, clipped_gradient_sum
from hf_dpopt.records.losses import decoder_inputs
from tests.helpers import tiny
from tests.reference import clipping as reference

VOCABULARY = 40
_DECODER = dict(
    vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, pad_token_id=1,
    decoder_start_token_id=2, bos_token_id=0, eos_token_id=2, dropout=0.0, attention_dropout=0.0,
    activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
)  # fmt: skip


def _m2m100() -> nn.Module:  # and NLLB
    return tf.M2M100ForConditionalGeneration(tf.M2M100Config(**_DECODER))


def _blenderbot() -> nn.Module:
    return tf.BlenderbotForConditionalGeneration(tf.BlenderbotConfig(**_DECODER))


def _seamless() -> nn.Module:
    return tf.SeamlessM4TForTextToText(
        tf.SeamlessM4TConfig(
            vocab_size=VOCABULARY, hidden_size=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
            speech_encoder_layers=1, pad_token_id=0, decoder_start_token_id=3, dropout=0.0, attention_dropout=0.0,
            activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        )
    )  # fmt: skip


SHIFTING = {"M2M100, NLLB": _m2m100, "Blenderbot": _blenderbot, "SeamlessM4T": _seamless}


def _pairs(num: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    rows = []
    for i in range(num):
        labels = torch.randint(4, VOCABULARY, (6,), generator=generator)
        labels[6 - i % 3 :] = -100
        ids = torch.randint(4, VOCABULARY, (8,), generator=generator)
        rows.append({"input_ids": ids, "attention_mask": torch.ones(8, dtype=torch.long), "labels": labels})
    return rows


def _batch(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _assert_trains(folder: Path, **changes: Any) -> None:
    """A run begins with its self-check, and takes a step."""
    trainer = tiny.trainer(
        folder, **{"data_collator": tf.default_data_collator, "max_steps": 1, "skip_self_check": False, **changes}
    )
    trainer.train()
    assert trainer._session.self_check == "passed"


@pytest.mark.parametrize("model", SHIFTING)
def test_decoders_whose_models_shift_labels_in_their_forward(model, tmp_path):
    made, batch = SHIFTING[model]().double().eval(), _batch(_pairs(3))
    got = clipped_gradient_sum(made, batch, clipping_norm=0.05)
    assert reference.relative_error(got, reference.clipped_sum(made, batch, 0.05)) < 1e-10
    _assert_trains(tmp_path, model=SHIFTING[model](), train_dataset=_pairs())


def test_a_decoder_that_says_nowhere_how_labels_are_shifted():
    class Other(nn.Module):
        config = tf.M2M100Config(**_DECODER)

    with pytest.raises(DPConfigError, match=r"Other does not say.*Let the collator add decoder_input_ids"):
        decoder_inputs(Other(), torch.zeros(2, 3, dtype=torch.long))


def _canine() -> tuple[nn.Module, list[dict[str, Any]]]:
    config = tf.CanineConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_hash_functions=2,
        num_hash_buckets=128, local_transformer_stride=16, max_position_embeddings=64, downsampling_rate=2,
        upsampling_kernel_size=2,
    )  # fmt: skip
    rows = [
        {
            "input_ids": torch.randint(4, 300, (32,)),
            "attention_mask": torch.ones(32, dtype=torch.long),
            "labels": i % 2,
        }
        for i in range(24)
    ]
    return tf.CanineForSequenceClassification(config), rows


def _wav2vec2() -> tuple[nn.Module, list[dict[str, Any]]]:
    config = tf.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_stride=(4, 4), conv_kernel=(4, 4), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
        classifier_proj_size=8, num_labels=2, feat_extract_norm="layer", apply_spec_augment=False, layerdrop=0.0,
    )  # fmt: skip
    model = tf.Wav2Vec2ForSequenceClassification(config)
    model.freeze_base_model()
    return model, [{"input_values": torch.randn(400), "labels": i % 2} for i in range(24)]


@pytest.mark.parametrize("make", [_canine, _wav2vec2])
def test_models_without_a_table_of_tokens(make, tmp_path):
    model, rows = make()
    _assert_trains(tmp_path, model=model, train_dataset=rows)


def test_a_model_in_bfloat16_under_bf16(tmp_path):
    """The stock Trainer runs it: autocast gives the norm float32 inputs, scale and shift included."""
    model = tiny.model().to(torch.bfloat16)
    _assert_trains(tmp_path, model=model, bf16=True, data_collator=tiny.collate)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
