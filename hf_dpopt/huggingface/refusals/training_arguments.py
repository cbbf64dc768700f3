"""Refusals of training arguments, and of settings that accelerate made from them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainingArguments

from hf_dpopt.common import collectives
from hf_dpopt.common.checks import is_reentrant
from hf_dpopt.common.errors import Refusal, refuses, shown
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.values import check_values
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


DATA_PARALLEL = "Use plain accelerate launch (data parallel), with LoRA if memory is short."
STAYS: dict[str, str] = {  # option of transformers that has to keep its default -> what it would do, and the way out
    "fp16": "skips an update exactly when one record overflows, which tells that the record is there. Use --bf16, or "
    "full precision.",
    "auto_find_batch_size": "restarts after an out-of-memory error with the changed weights, uncounted. Set "
    "--per_device_train_batch_size to what fits; it does not change the result.",
    "train_sampling_strategy": "picks batches by the records' lengths or order. Leave it at 'random': batches are "
    "formed by --sampling, and records of a batch are ordered by length anyway.",
    "ignore_data_skip": "would serve the batches of earlier steps again. Remove --ignore_data_skip: skipping costs "
    "nothing here.",
    "dataloader_in_order": "would serve batches in another order than they were charged. Remove it.",
    "torch_compile": "compiles the whole model, with it the places where per-record gradients are captured. Remove "
    "--torch_compile, and compile parts: for layer in model.model.layers: layer.mlp.compile().",
    "use_liger_kernel": "forms the head's gradient inside the forward, before it can be clipped. Remove "
    "--use_liger_kernel.",
    "neftune_noise_alpha": "scales its noise by the padded length, which depends on the other records. Remove "
    "--neftune_noise_alpha.",
    "save_on_each_node": "writes checkpoints apart from the ledger, which one machine has. Remove "
    "--save_on_each_node, and put output_dir on a disk that all machines see.",
    "enable_jit_checkpoint": "saves between a gradient and its update. Remove --enable_jit_checkpoint: SIGTERM and "
    "SIGUSR1 save a checkpoint after the step in progress without it.",
    "debug": "prints un-noised activations and gradients. Remove --debug.",
    "include_num_input_tokens_seen": "logs the size of the sampled batches. Leave it at 'no'.",
}


@refuses
def check_arguments(args: Any) -> Iterator[Refusal]:
    """Refuse training arguments under which the privacy statement would be false."""
    for name, value in vars(args).items():
        yield (
            isinstance(value, str) and value == f"<{name.upper()}>",
            f"{name}={value}: it was left out when these arguments were pickled. Set args.{name} again (None if there "
            "was none); pass it to a worker by an environment variable or file.",
        )

    check_values(args)
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    for name, why in STAYS.items():
        value = getattr(args, name)
        yield (value or None) != (defaults[name] or None), f"{name}={shown(value)}: {why}"
    yield from _on_devices(args)
    yield from _on_backward(args)
    accumulation = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    yield (
        "num_steps" in accumulation,
        f"`accelerator_config.gradient_accumulation_kwargs` sets num_steps={accumulation.get('num_steps')}, which "
        "the Trainer would take for loader items, and an item is a whole step here. Use "
        "--gradient_accumulation_steps, or --expected_batch_size.",
    )
    yield (
        os.environ.get("WANDB_WATCH", "false").lower() in ("gradients", "all"),
        "WANDB_WATCH uploads raw gradients. Unset it, or set WANDB_WATCH=false.",
    )


def _on_devices(args: Any) -> Iterator[Refusal]:
    yield (
        args.n_gpu > 1,
        f"{args.n_gpu} GPUs are visible without a launcher, so the Trainer would wrap the model in DataParallel. "
        f"Start with `accelerate launch --num_processes {args.n_gpu}`, or set CUDA_VISIBLE_DEVICES to one GPU.",
    )
    # before accelerate meets it: on a machine without accelerators it would fail with an error of its own
    is_launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    by_launcher = int(os.environ.get("FSDP_VERSION") or 1) if is_launched else 2
    version = int((args.fsdp_plugin_args or {}).get("fsdp_version", 2)) if args.fsdp else by_launcher
    dynamo = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    yield from _on_acceleration(args.mixed_precision, version, args.parallelism_config, dynamo.lower())
    yield (
        bool(args.fsdp) and args.world_size == 1,
        "FSDP deals the weights to several processes, and this is one. Start with accelerate launch --num_processes "
        "N (or torchrun --nproc_per_node N), or remove --fsdp.",
    )


@refuses
def check_accumulation(args: Any) -> Iterator[Refusal]:
    """Refuse accumulation that was set after the trainer took it over: an item of its loader is a whole step."""
    steps = args.gradient_accumulation_steps
    yield (
        steps != 1,
        f"gradient_accumulation_steps={steps} was set after the trainer was made, and its plan has logical batches of "
        f"{args.expected_batch_size} records. Set it in DPTrainingArguments before, and make a new trainer.",
    )


def _on_backward(args: Any) -> Iterator[Refusal]:
    optim = str(getattr(args.optim, "value", args.optim))
    checkpointing = {**(args.activation_checkpointing_kwargs or {}), **(args.gradient_checkpointing_kwargs or {})}
    yield (
        "lomo" in optim or "layerwise" in optim,
        f"optim={optim} updates parameters inside the backward, before the clip and the noise. Use adamw_torch, sgd "
        "or another optimizer that steps after the backward.",
    )
    yield (
        is_reentrant(checkpointing),
        "Reentrant checkpointing runs a second backward inside the first. Use "
        "activation_checkpointing_kwargs={'use_reentrant': False}, the default.",
    )


def _on_acceleration(precision: str, fsdp_version: int, parallelism: Any, dynamo: str) -> Iterator[Refusal]:
    """Refusals of what arguments ask for, and of what accelerate was told by others."""
    yield (
        precision not in ("no", "bf16"),
        f"The mixed precision is {precision}: skipped updates and rescaled gradients depend on single records. Use "
        "bf16 or no (unset ACCELERATE_MIXED_PRECISION, or run `accelerate config` again).",
    )
    yield (
        fsdp_version != 2,
        f"FSDP version {fsdp_version} flattens several layers into one parameter, where gradients of records cannot "
        f"be cut. Use FSDP2: fsdp_config={{'version': 2}}. Set --fsdp_version 2 of accelerate launch.",
    )
    yield (
        parallelism is not None,
        "`parallelism_config` (tensor, context, sequence parallelism) is not supported yet. Unset "
        f"ACCELERATE_USE_PARALLELISM_CONFIG, or run `accelerate config` again. {DATA_PARALLEL}",
    )
    yield (
        dynamo.lower() not in ("no", ""),
        f"ACCELERATE_DYNAMO_BACKEND={dynamo} switches torch.compile on, which is not supported yet. Unset it, or run "
        "`accelerate config` again without dynamo.",
    )


@refuses
def check_accelerator(accelerator: Any) -> Iterator[Refusal]:
    """Refuse settings that environment variables or `accelerate config` switched on behind the arguments."""
    kind = str(accelerator.distributed_type.value)
    ranks, known = collectives.world_size(), accelerator.num_processes
    yield (
        ranks != known,
        f"The launcher started {ranks} processes, and the Trainer knows {known} (as accelerate's FSDP does on a CPU): "
        "each would train alone. Start with torchrun --nproc_per_node N; on a CPU add --use_cpu, without FSDP.",
    )
    yield (
        kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"),
        f"Accelerate runs in mode {kind}, which is not supported yet (DeepSpeed, Megatron, TPU and others). Run "
        "`accelerate config` again and choose plain multi-GPU, FSDP with version 2, or CPU.",
    )
    plugin = getattr(accelerator.state, "fsdp_plugin", None) if kind == "FSDP" else None
    backend = getattr(getattr(accelerator.state, "dynamo_plugin", None), "backend", "no")
    yield from _on_acceleration(
        accelerator.mixed_precision if accelerator.scaler is None else "fp16",
        2 if plugin is None else plugin.fsdp_version,
        getattr(accelerator, "parallelism_config", None),
        str(getattr(backend, "value", backend)),
    )
    yield (
        plugin is not None and isinstance(plugin.cpu_offload, CPUOffloadPolicy),  # its shards cannot be looked at
        "FSDP's CPU offload keeps shards where gradients do not come, which is not supported yet. Set "
        "--fsdp_offload_params false.",
    )
    yield (
        plugin is not None and bool(plugin.activation_checkpointing),
        "FSDP's activation checkpointing wraps layers where the capture of gradients does not see it. Use "
        "--gradient_checkpointing in its place, and no fsdp_activation_checkpointing.",
    )
