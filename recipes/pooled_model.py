"""A classifier that reads pooled hidden states: their mean, the first or the last token, of one layer or of several.

The heads that come with transformers read one token through a layer that most encoders were not trained with. This
file is saved beside the weights, and needs transformers alone: `AutoModelForSequenceClassification.from_pretrained(
folder, trust_remote_code=True)` loads what was trained.

B = records, T = tokens, D = width of the model, F = features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

WAYS = ("cls", "mean", "last")
FEATURE_NORM = 4.0  # of a record's features: what moves the head and what moves the rest are then about as large


class PooledConfig(PreTrainedConfig):
    """Configuration of a classifier that reads pooled states.

    Its name is its own, so that a folder is never loaded as the bare encoder with a new head.

    Args:
        encoder_config: configuration of the encoder, as an object or as its dictionary.
        pooling: ways, of `WAYS`.
        pooling_layers: hidden states, of which 0 are the embeddings and -1 those of the last layer.
    """

    model_type = "pooled_encoder"
    sub_configs = {"encoder_config": AutoConfig}

    def __init__(
        self,
        encoder_config: Any = None,
        pooling: Sequence[str] = ("mean",),
        pooling_layers: Sequence[int] = (-1,),
        **kwargs: Any,
    ):
        super().__init__(**kwargs)  # first: it would unset how a part that is there computes attention
        is_stored = isinstance(encoder_config, dict)
        self.encoder_config = AutoConfig.for_model(**encoder_config) if is_stored else encoder_config
        self.pooling, self.pooling_layers = list(pooling), list(pooling_layers)

    @property
    def hidden_size(self) -> int:
        return self.encoder_config.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.encoder_config.num_hidden_layers

    @property
    def max_position_embeddings(self) -> int | None:
        return getattr(self.encoder_config, "max_position_embeddings", None)


def is_pooled(config: Any) -> bool:
    """Whether a configuration was saved with a model that reads pooled states."""
    return config.model_type == PooledConfig.model_type


def pool(states_BTD: torch.Tensor, mask_BT: torch.Tensor, way: str) -> torch.Tensor:
    """One state per record, (B, D); padding has no part in it, on whichever side it stands."""
    if way == "mean":
        weights_BT = mask_BT.to(states_BTD.dtype)
        return torch.einsum("btd,bt->bd", states_BTD, weights_BT / weights_BT.sum(1, keepdim=True).clamp(min=1))
    place_T = torch.arange(mask_BT.size(1), device=mask_BT.device)
    is_text_BT = mask_BT != 0
    first_B = place_T.masked_fill(~is_text_BT, mask_BT.size(1) - 1).amin(1)
    last_B = place_T.masked_fill(~is_text_BT, 0).amax(1)
    chosen_B = first_B if way == "cls" else last_B
    return states_BTD.gather(1, chosen_B.view(-1, 1, 1).expand(-1, 1, states_BTD.size(-1))).squeeze(1)


class PooledForSequenceClassification(PreTrainedModel):
    """A linear head on pooled states of an encoder or decoder.

    Args:
        config: see `PooledConfig`.
        encoder: the model, or None to make one of the configuration.
    """

    config_class = PooledConfig
    base_model_prefix = "encoder"
    # what the encoder does not support, it refuses itself
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(self, config: PooledConfig, encoder: PreTrainedModel | None = None):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.encoder = AutoModel.from_config(config.encoder_config) if encoder is None else encoder
        if getattr(self.encoder, "pooler", None) is not None:
            self.encoder.pooler = None  # nothing reads it
        self.dropout = nn.Dropout(getattr(config.encoder_config, "classifier_dropout", None) or 0.0)
        width = config.hidden_size * len(config.pooling) * len(config.pooling_layers)
        self.classifier = nn.Linear(width, config.num_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def features(self, input_ids: Any = None, attention_mask: Any = None, **inputs: Any) -> torch.Tensor:
        """Pooled states of every layer and way side by side, equally large, of the norm `FEATURE_NORM`; (B, F)."""
        layers = list(self.config.pooling_layers)
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
        outputs = self.encoder(**inputs, return_dict=True, output_hidden_states=layers != [-1])
        if attention_mask is None:
            attention_mask = torch.ones(outputs.last_hidden_state.shape[:2], device=outputs.last_hidden_state.device)
        parts = []
        for layer in layers:
            states_BTD = outputs.last_hidden_state if layer == -1 else outputs.hidden_states[layer]
            parts += [pool(states_BTD, attention_mask, way) for way in self.config.pooling]
        normed_BF = torch.cat([nn.functional.layer_norm(part, part.shape[-1:]) for part in parts], dim=-1)
        return normed_BF * (FEATURE_NORM * normed_BF.size(-1) ** -0.5)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        output_hidden_states: bool | None = None,
        features: torch.Tensor | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutput:
        del return_dict, output_hidden_states  # wrappers pass them on; there is one kind of answer
        features_BF = self.features(input_ids, attention_mask, **inputs) if features is None else features
        logits = self.classifier(self.dropout(features_BF))
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


PooledConfig.register_for_auto_class()
PooledForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
