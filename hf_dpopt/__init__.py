"""Differentially private finetuning of language models on a stock Hugging Face Trainer."""

from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError, UnsupportedModuleError
from hf_dpopt.huggingface.arguments import DPSeq2SeqTrainingArguments, DPTrainingArguments
from hf_dpopt.huggingface.functional import clipped_gradient_sum
from hf_dpopt.huggingface.trainer import DPSeq2SeqTrainer, DPTrainer, DPTrainerMixin
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.make import make_plan
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.run.run import PrivacySpent, PrivateRun
from hf_dpopt.run.step import private_step

__version__ = "0.1.0"

__all__ = [
    "DPBudgetExceeded",
    "DPConfigError",
    "DPSeq2SeqTrainer",
    "DPSeq2SeqTrainingArguments",
    "DPTrainer",
    "DPTrainerMixin",
    "DPTrainingArguments",
    "PrivacyConfig",
    "PrivacyPlan",
    "PrivacySpent",
    "PrivateRun",
    "UnsupportedModuleError",
    "clipped_gradient_sum",
    "make_plan",
    "private_step",
]
