"""TRL's `SFTTrainer` with differential privacy: chat templates, losses on the answers alone, LoRA and QLoRA.

This module needs the package `trl` (``pip install 'hf-dpopt[chat]'``); nothing else imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_dpopt.common import log
from hf_dpopt.common.extras import missing
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.refusals.data import check_left
from hf_dpopt.huggingface.trainer import DPTrainerMixin

try:
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    raise missing("trl", "DPSFTTrainer", str(error)) from None
log.hide_prompts(SFTTrainer.__module__)


@dataclass(repr=False)  # that of TrainingArguments hides tokens
class DPSFTConfig(DPTrainingArguments, SFTConfig):
    """`trl.SFTConfig` with the fields of `DPTrainingArguments`.

    Options that both `SFTConfig` and `TrainingArguments` have start at the value of `TrainingArguments`:
    `gradient_checkpointing` is off, for example. Refused, because they mix records: `packing`, `padding_free`, and
    every `loss_type` but "nll".
    """


class DPSFTTrainer(DPTrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` with differential privacy; use it with `DPSFTConfig`.

    One row is one record: a conversation (`messages`), a prompt with its completion, or a string. Its loss is the mean
    over the tokens that are learned (`assistant_only_loss`, `completion_only_loss`), as SFTTrainer masks them. To
    protect all conversations of a person together, use `privacy_unit="user"` and `user_id_column`.

    Formal guarantee: that of `DPTrainerMixin`.
    """

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: Any, formatting_func: Any, dataset_name: str
    ) -> Any:
        found = super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        check_left(dataset, found, args, dataset_name)
        return found
