"""A classifier that asks the model's own language head: which label word fits into the gap of a template.

A new head starts from random weights, and a private run spends its first steps on it. The head with which the model
was pretrained knows the words already: "a gripping film. It was <gap>." This file is saved beside the weights, and
needs transformers alone: `AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)`; texts
have to be put into the template of the configuration first.

B = records, T = tokens, D = width of the model, K = labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class PromptConfig(PreTrainedConfig):
    """Configuration of a classifier by label words.

    Args:
        lm_config: configuration of the language model, as an object or as its dictionary.
        template: text with {text}, {pair} for the second text of pairs, and {mask} for the gap.
        label_word_ids: token of every label.
        mask_token_id: token of the gap; None for a causal model, whose gap is after the last token.
    """

    model_type = "prompt_classifier"
    sub_configs = {"lm_config": AutoConfig}

    def __init__(
        self,
        lm_config: Any = None,
        template: str = "{text} {mask}",
        label_word_ids: Sequence[int] = (0, 1),
        mask_token_id: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)  # first: it would unset how a part that is there computes attention
        self.lm_config = AutoConfig.for_model(**lm_config) if isinstance(lm_config, dict) else lm_config
        self.template, self.label_word_ids, self.mask_token_id = template, list(label_word_ids), mask_token_id

    @property
    def hidden_size(self) -> int:
        return self.lm_config.hidden_size

    @property
    def max_position_embeddings(self) -> int | None:
        return getattr(self.lm_config, "max_position_embeddings", None)


def is_prompted(config: Any) -> bool:
    """Whether a configuration was saved with a model that classifies by label words."""
    return config.model_type == PromptConfig.model_type


class PromptForSequenceClassification(PreTrainedModel):
    """Label words in the gap of a template, by the language head of a masked or causal model.

    Args:
        config: see `PromptConfig`.
        lm: the language model, or None to make one of the configuration.
    """

    config_class = PromptConfig
    base_model_prefix = "lm"
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(self, config: PromptConfig, lm: PreTrainedModel | None = None):
        super().__init__(config)
        self.num_labels = config.num_labels
        auto = AutoModelForCausalLM if config.mask_token_id is None else AutoModelForMaskedLM
        self.lm = auto.from_config(config.lm_config) if lm is None else lm
        self._gap_B: torch.Tensor | None = None
        self.lm.base_model.register_forward_hook(self._keep_gap)  # the head sees one token of a record, not T
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.lm.get_input_embeddings()

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
        logits = words_B1V[:, 0, self.config.label_word_ids]
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


PromptConfig.register_for_auto_class()
PromptForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
