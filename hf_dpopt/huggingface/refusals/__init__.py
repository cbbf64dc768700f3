"""Refusals, before anything is touched, of what cannot be private, each with the way out.

One file for each thing that is examined; a new refusal is one line of a table there.
"""

from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.refusals.data import check_data, check_datasets, check_private_evaluation
from hf_dpopt.huggingface.refusals.gradient_stages import check_stages
from hf_dpopt.huggingface.refusals.model import check_model_given, check_model_with_records
from hf_dpopt.huggingface.refusals.trainer_class import check_loss
from hf_dpopt.huggingface.refusals.training_arguments import check_arguments
from hf_dpopt.records.overlap import TrainingRows


def check_inputs(inputs: TrainerInputs, training: TrainingRows) -> None:
    """Refuse what a trainer was given and cannot train privately; nothing is touched yet.

    Args:
        inputs: what it was given.
        training: rows of the training set.

    Raises:
        DPConfigError: naming the option and the way out.
        UnsupportedModuleError: for a model whose records cannot be told apart, or a layer that is not covered.
    """
    check_loss(inputs)
    check_arguments(inputs.args)
    check_model_given(inputs)
    check_datasets(inputs)
    check_private_evaluation(inputs)
    if inputs.has_final_model:
        check_model_with_records(inputs)
    check_stages(inputs, training)
    check_data(inputs, training)
