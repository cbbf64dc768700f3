"""Refusals of what does not work yet where the weights lie in shards (FSDP2), each with the way out."""

from __future__ import annotations

from collections.abc import Iterator

from hf_dpopt.common.errors import Refusal, refuses
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.plan.plan import PrivacyPlan

WHOLE = "Start plain data parallel (accelerate launch without --use_fsdp)"


@refuses
def check_shards(plan: PrivacyPlan, inputs: TrainerInputs) -> Iterator[Refusal]:
    """Refuse the options of a run that need whole gradients on one rank, before the ledger is opened.

    Args:
        plan: plan of the run, whose model lies in shards.
        inputs: what the trainer was given.
    """
    config, args = plan.config, inputs.args
    yield (
        plan.preclip.opening is not None,
        f"preconditioner={config.preconditioner!r} asks a query before the first step, whose squared sums are not "
        f"cut into shards yet. {WHOLE}, or use a dp2_* preconditioner.",
    )
    yield (
        inputs.public_dataset is not None,
        "Gradients of public records (adadps, subspaces, mirror descent) are taken by a plain backward, which adds "
        f"up the processes of a model in shards. {WHOLE}.",
    )
    yield (
        config.local_training is not None,
        f"Users that train locally need the whole model each, and it lies in shards. {WHOLE}, or let users give "
        "gradients (leave local_training out).",
    )
    rows = config.records_per_user
    yield (
        plan.sums_users and rows is not None and rows > args.per_device_train_batch_size,
        f"records_per_user={rows} is more than per_device_train_batch_size={args.per_device_train_batch_size}: a "
        "user that does not fit into one physical batch is summed in parts, by plain backwards, which add up the "
        "processes of a model in shards. Raise --per_device_train_batch_size, or lower --records_per_user.",
    )
