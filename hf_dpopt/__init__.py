"""Differentially private finetuning of language models on a stock Hugging Face Trainer."""

from hf_dpopt.args import DPSeq2SeqTrainingArguments, DPTrainingArguments
from hf_dpopt.config import PrivacyConfig
from hf_dpopt.errors import DPBudgetExceeded, DPConfigError, UnsupportedModuleError
from hf_dpopt.gradients import clipped_gradient_sum
from hf_dpopt.plan import PrivacyPlan, make_plan
from hf_dpopt.run import PrivacySpent, PrivateRun
from hf_dpopt.step import private_step
from hf_dpopt.trainer import DPSeq2SeqTrainer, DPTrainer, DPTrainerMixin

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
