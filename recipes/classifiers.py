"""Classifiers that read a model otherwise than the heads of transformers: pooled hidden states, or its language head.

The heads that come with transformers read one token through a layer that most encoders were not trained with.
`PooledForSequenceClassification` reads the mean, the first or the last token, of one layer or of several.

A new head starts from random weights, and a private run spends its first steps on it. The head with which the model
was pretrained knows the words already: "a gripping film. It was <gap>." `PromptForSequenceClassification` asks it
which label word fits into the gap of a template; texts have to be put into the template of the configuration first.

This file is saved beside the weights, and needs transformers alone:
`AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)` loads what was trained.

B = records, T = tokens, D = width of the model, F = features, K = labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

WAYS = ("cls", "mean", "last")
FEATURE_NORM = 4.0  # of a record's features: what moves the head and what moves the rest are then about as large


class BodyConfig(PreTrainedConfig):
    """Configuration of a classifier around another model, whose configuration it holds.

    Its names are its own, so that a folder is never loaded as the bare model with a new head.

    Args:
        body_config: configuration of the model, as an object or as its dictionary.
    """

    sub_configs = {"body_config": AutoConfig}

    def __init__(self, body_config: Any = None, **kwargs: Any):
        super().__init__(**kwargs)  # first: it would unset how a part that is there computes attention
        self.body_config = AutoConfig.for_model(**body_config) if isinstance(body_config, dict) else body_config

    @property
    def hidden_size(self) -> int:
        return self.body_config.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.body_config.num_hidden_layers

    @property
    def max_position_embeddings(self) -> int | None:
        return getattr(self.body_config, "max_position_embeddings", None)


class BodyForSequenceClassification(PreTrainedModel):
    """What the two have alike; the model is the attribute `base_model_prefix`."""

    # what the model does not support, it refuses itself
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.get_input_embeddings()

    def answer(self, logits: torch.Tensor, labels: torch.Tensor | None) -> SequenceClassifierOutput:
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


# --- pooled hidden states --------------------------------------------------------------------------------------------


class PooledConfig(BodyConfig):
    """Configuration of a classifier that reads pooled states.

    Args:
        body_config: see `BodyConfig`; of an encoder or decoder.
        pooling: ways, of `WAYS`.
        pooling_layers: hidden states, of which 0 are the embeddings and -1 those of the last layer.
    """

    model_type = "pooled_encoder"

    def __init__(
        self,
        body_config: Any = None,
        pooling: Sequence[str] = ("mean",),
        pooling_layers: Sequence[int] = (-1,),
        **kwargs: Any,
    ):
        super().__init__(body_config, **kwargs)
        self.pooling, self.pooling_layers = list(pooling), list(pooling_layers)


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


class PooledForSequenceClassification(BodyForSequenceClassification):
    """A linear head on pooled states of an encoder or decoder.

    Args:
        config: see `PooledConfig`.
        encoder: the model, or None to make one of the configuration.
    """

    config_class = PooledConfig
    base_model_prefix = "encoder"

    def __init__(self, config: PooledConfig, encoder: PreTrainedModel | None = None):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.encoder = AutoModel.from_config(config.body_config) if encoder is None else encoder
        if getattr(self.encoder, "pooler", None) is not None:
            self.encoder.pooler = None  # nothing reads it
        self.dropout = nn.Dropout(getattr(config.body_config, "classifier_dropout", None) or 0.0)
        width = config.hidden_size * len(config.pooling) * len(config.pooling_layers)
        self.classifier = nn.Linear(width, config.num_labels)
        self.post_init()

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
        return self.answer(self.classifier(self.dropout(features_BF)), labels)


# --- label words in the gap of a template ----------------------------------------------------------------------------


class PromptConfig(BodyConfig):
    """Configuration of a classifier by label words.

    Args:
        body_config: see `BodyConfig`; of a masked or causal language model.
        template: text with {text}, {pair} for the second text of pairs, and {mask} for the gap.
        label_word_ids: token of every label.
        mask_token_id: token of the gap; None for a causal model, whose gap is after the last token.
    """

    model_type = "prompt_classifier"

    def __init__(
        self,
        body_config: Any = None,
        template: str = "{text} {mask}",
        label_word_ids: Sequence[int] = (0, 1),
        mask_token_id: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(body_config, **kwargs)
        self.template, self.label_word_ids, self.mask_token_id = template, list(label_word_ids), mask_token_id


def is_prompted(config: Any) -> bool:
    """Whether a configuration was saved with a model that classifies by label words."""
    return config.model_type == PromptConfig.model_type


class PromptForSequenceClassification(BodyForSequenceClassification):
    """Label words in the gap of a template, by the language head of a masked or causal model.

    Args:
        config: see `PromptConfig`.
        lm: the language model, or None to make one of the configuration.
    """

    config_class = PromptConfig
    base_model_prefix = "lm"

    def __init__(self, config: PromptConfig, lm: PreTrainedModel | None = None):
        super().__init__(config)
        self.num_labels = config.num_labels
        auto = AutoModelForCausalLM if config.mask_token_id is None else AutoModelForMaskedLM
        self.lm = auto.from_config(config.body_config) if lm is None else lm
        self._gap_B: torch.Tensor | None = None
        self.lm.base_model.register_forward_hook(self._keep_gap)  # the head sees one token of a record, not T
        self.post_init()

    def _keep_gap(self, module: nn.Module, args: Any, output: Any) -> Any:
        states_BTD = output.last_hidden_state
        place_B11 = self._gap_B.view(-1, 1, 1).expand(-1, 1, states_BTD.size(-1))
        output.last_hidden_state = states_BTD.gather(1, place_B11)
        return output

    def gap(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Place of the gap in every record, (B,), or of the last token for a causal model; 0 for one without a gap."""
        place_T = torch.arange(input_ids.size(1), device=input_ids.device)
        is_text_BT = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if self.config.mask_token_id is None:
            return place_T.masked_fill(is_text_BT == 0, 0).amax(1)
        is_gap_BT = (input_ids == self.config.mask_token_id) & (is_text_BT != 0)
        return place_T.masked_fill(~is_gap_BT, 0).amax(1)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutput:
        del return_dict  # wrappers pass it on; there is one kind of answer
        assert input_ids is not None
        self._gap_B = self.gap(input_ids, attention_mask)
        words_B1V = self.lm(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **inputs).logits
        return self.answer(words_B1V[:, 0, self.config.label_word_ids], labels)


for _config, _model in (
    (PooledConfig, PooledForSequenceClassification),
    (PromptConfig, PromptForSequenceClassification),
):
    _config.register_for_auto_class()
    _model.register_for_auto_class("AutoModelForSequenceClassification")
