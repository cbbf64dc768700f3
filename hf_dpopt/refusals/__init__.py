"""What cannot be private is refused by name, with the way out, before anything is touched.

One file for each thing that is looked at; a new refusal is one line of a table there.
"""

from hf_dpopt.refusals.arguments import check_accelerator, check_accumulation, check_arguments
from hf_dpopt.refusals.data import check_data, check_evaluation
from hf_dpopt.refusals.lengths import check_lengths
from hf_dpopt.refusals.model import check_model
from hf_dpopt.refusals.resume import gradient_options
from hf_dpopt.refusals.stages import check_stages
from hf_dpopt.refusals.trainer import check_hooks, check_loss

__all__ = [
    "check_accelerator",
    "check_accumulation",
    "check_arguments",
    "check_data",
    "check_evaluation",
    "check_hooks",
    "check_lengths",
    "check_loss",
    "check_model",
    "check_stages",
    "gradient_options",
]
