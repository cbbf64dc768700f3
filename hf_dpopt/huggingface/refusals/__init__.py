"""Refusals, before anything is touched, of what cannot be private, each with the way out.

One file for each thing that is examined; a new refusal is one line of a table there.
"""

from hf_dpopt.huggingface.refusals.arguments import check_accelerator, check_accumulation, check_arguments
from hf_dpopt.huggingface.refusals.data import check_batch, check_data, check_datasets, check_evaluation, check_public
from hf_dpopt.huggingface.refusals.model import check_model, check_model_given
from hf_dpopt.huggingface.refusals.resume import check_resume, gradient_options
from hf_dpopt.huggingface.refusals.shards import check_shards
from hf_dpopt.huggingface.refusals.stages import check_stages
from hf_dpopt.huggingface.refusals.trainer import check_hooks, check_loss, check_order

__all__ = [
    "check_accelerator",
    "check_accumulation",
    "check_arguments",
    "check_batch",
    "check_data",
    "check_datasets",
    "check_evaluation",
    "check_hooks",
    "check_loss",
    "check_model",
    "check_model_given",
    "check_order",
    "check_public",
    "check_resume",
    "check_shards",
    "check_stages",
    "gradient_options",
]
