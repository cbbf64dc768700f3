"""Differentially private finetuning of language models on a stock Hugging Face Trainer.

The names below are the public ones; docs/api.md describes each. They are imported when they are asked for, so
``import hf_dpopt`` costs nothing, and ``hf_dpopt.accounting`` can be used without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_dpopt.common import log
from hf_dpopt.common.version import __version__ as __version__

if TYPE_CHECKING:
    from hf_dpopt.accounting.calibrate import calibrate_noise_multiplier
    from hf_dpopt.clipping import make_engine
    from hf_dpopt.common.errors import (
        DPBudgetExceeded,
        DPConfigError,
        DPStorageError,
        PrivacyWarning,
        UnsupportedModuleError,
    )
    from hf_dpopt.huggingface.arguments import DPSeq2SeqTrainingArguments, DPTrainingArguments
    from hf_dpopt.huggingface.preferences import DPDPOConfig, DPDPOTrainer, DPRewardConfig, DPRewardTrainer
    from hf_dpopt.huggingface.sft import DPSFTConfig, DPSFTTrainer
    from hf_dpopt.huggingface.trainer import DPSeq2SeqTrainer, DPTrainer, DPTrainerMixin
    from hf_dpopt.optim import DPAdamBC
    from hf_dpopt.plan.advice import Advice, TrainingJob, advise
    from hf_dpopt.plan.choose import compare_mechanisms, make_plan
    from hf_dpopt.plan.config import PrivacyConfig
    from hf_dpopt.plan.plan import PrivacyPlan
    from hf_dpopt.postprocess.low_pass import LowPassFilter
    from hf_dpopt.records.functional import clipped_gradient_sum
    from hf_dpopt.report.facts import RunFacts
    from hf_dpopt.report.release_scan import scan_for_secrets
    from hf_dpopt.report.report import read_report
    from hf_dpopt.run.run import PrivacySpent, PrivateRun
    from hf_dpopt.run.stages import Stages
    from hf_dpopt.run.step import private_step

__all__ = [
    "Advice",
    "DPAdamBC",
    "DPBudgetExceeded",
    "DPConfigError",
    "DPDPOConfig",
    "DPDPOTrainer",
    "DPRewardConfig",
    "DPRewardTrainer",
    "DPSFTConfig",
    "DPSFTTrainer",
    "DPSeq2SeqTrainer",
    "DPSeq2SeqTrainingArguments",
    "DPStorageError",
    "DPTrainer",
    "DPTrainerMixin",
    "DPTrainingArguments",
    "LowPassFilter",
    "PrivacyConfig",
    "PrivacyPlan",
    "PrivacySpent",
    "PrivacyWarning",
    "PrivateRun",
    "RunFacts",
    "Stages",
    "TrainingJob",
    "UnsupportedModuleError",
    "advise",
    "calibrate_noise_multiplier",
    "clipped_gradient_sum",
    "compare_mechanisms",
    "make_engine",
    "make_plan",
    "private_step",
    "read_report",
    "scan_for_secrets",
]

# Module -> the names above that come from it; what the imports above tell the type checker.
_EXPORTS = {
    "accounting.calibrate": ("calibrate_noise_multiplier",),
    "clipping": ("make_engine",),
    "common.errors": (
        "DPBudgetExceeded",
        "DPConfigError",
        "DPStorageError",
        "PrivacyWarning",
        "UnsupportedModuleError",
    ),
    "huggingface.arguments": ("DPSeq2SeqTrainingArguments", "DPTrainingArguments"),
    "records.functional": ("clipped_gradient_sum",),
    "huggingface.preferences": ("DPDPOConfig", "DPDPOTrainer", "DPRewardConfig", "DPRewardTrainer"),
    "huggingface.sft": ("DPSFTConfig", "DPSFTTrainer"),
    "huggingface.trainer": ("DPSeq2SeqTrainer", "DPTrainer", "DPTrainerMixin"),
    "optim": ("DPAdamBC",),
    "plan.advice": ("Advice", "TrainingJob", "advise"),
    "plan.choose": ("compare_mechanisms", "make_plan"),
    "plan.config": ("PrivacyConfig",),
    "plan.plan": ("PrivacyPlan",),
    "postprocess.low_pass": ("LowPassFilter",),
    "report.facts": ("RunFacts",),
    "report.release_scan": ("scan_for_secrets",),
    "report.report": ("read_report",),
    "run.run": ("PrivacySpent", "PrivateRun"),
    "run.stages": ("Stages",),
    "run.step": ("private_step",),
}
_ORIGIN = {name: f"{__name__}.{module}" for module, names in _EXPORTS.items() for name in names}

if not TYPE_CHECKING:  # a type checker would take every name for granted

    def __getattr__(name: str) -> Any:
        if name not in _ORIGIN:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_ORIGIN[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


log.leave_out()
