"""What cannot be private is refused by name, with the way out, before anything is touched.

Each refusal is one line of a table: is it so, what was found and why it matters, how to mend it. The identifiers are
those of the pitfalls in the documentation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorWithFlattening, TrainingArguments
from transformers.utils.import_utils import is_peft_available

from hf_dpopt.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.grads import ENGINES

Refusal = tuple[bool, str, str]  # (does it apply, what is wrong, how to mend it)

DATA_PARALLEL = "Use plain accelerate launch (data parallel), with LoRA if memory is short."
DEALT = "Remove it: a logical batch is dealt to the ranks without repetition."
NOT_REENTRANT = "Use activation_checkpointing_kwargs={'use_reentrant': False}, the default."


def _raise_first(refusals: Iterator[Refusal], error: type[DPConfigError] = DPConfigError) -> None:
    for applies, what, mend in refusals:
        if applies:
            raise error(f"{what} {mend}")


# --- arguments -------------------------------------------------------------------------------------------------------


def check_arguments(args: TrainingArguments) -> None:
    """Refuses training arguments under which the statement would be false."""
    _raise_first(_on_arguments(args))


def _on_arguments(args: Any) -> Iterator[Refusal]:
    yield from _on_devices(args)
    yield from _on_batching(args)
    yield from _on_backward(args)
    yield from _on_side_channels(args)


def _on_devices(args: Any) -> Iterator[Refusal]:
    yield (
        args.fp16,
        "fp16 skips an update exactly when one record overflows, which tells that the record is there.",
        "Use --bf16, or full precision.",
    )
    yield (
        args.mixed_precision not in ("no", "bf16"),
        f"The environment's mixed precision is {args.mixed_precision}: skipped updates and rescaled gradients depend "
        "on single records.",
        "Use bf16 or no (unset ACCELERATE_MIXED_PRECISION, or run `accelerate config` again).",
    )
    yield (
        args.n_gpu > 1,
        f"{args.n_gpu} GPUs are visible without a launcher, so the Trainer would wrap the model in DataParallel.",
        f"Start with `accelerate launch --num_processes {args.n_gpu}`, or set CUDA_VISIBLE_DEVICES to one GPU.",
    )
    yield bool(args.fsdp), "FSDP shards gradients, and norms across shards are not supported yet.", DATA_PARALLEL
    yield (
        bool(args.deepspeed) or args.deepspeed_plugin is not None,
        "DeepSpeed averages and clips gradients itself, which is not supported yet.",
        DATA_PARALLEL,
    )
    yield (
        args.parallelism_config is not None,
        "parallelism_config (tensor, context, sequence parallelism) is not supported yet.",
        DATA_PARALLEL,
    )


def _on_batching(args: Any) -> Iterator[Refusal]:
    loader = args.accelerator_config
    yield (
        bool(args.auto_find_batch_size),
        "auto_find_batch_size restarts after an out-of-memory error with the changed weights, uncounted.",
        "Set --per_device_train_batch_size to what fits; it does not change the result.",
    )
    yield (
        args.train_sampling_strategy != "random",
        f"train_sampling_strategy={args.train_sampling_strategy!r} picks batches by the records' lengths or order.",
        "Leave it at 'random': batches are formed by --sampling, and records of a batch are ordered by length anyway.",
    )
    for option in ("split_batches", "dispatch_batches"):
        what = f"accelerator_config.{option} re-serves records to fill a batch."
        yield bool(getattr(loader, option)), what, DEALT
    yield (
        bool(args.ignore_data_skip),
        "ignore_data_skip would serve the batches of earlier steps again.",
        "Remove --ignore_data_skip: skipping costs nothing here.",
    )
    yield (
        not args.dataloader_in_order,
        "dataloader_in_order=False would serve batches in another order than they were charged.",
        "Remove it.",
    )


def _on_backward(args: Any) -> Iterator[Refusal]:
    yield (
        args.clipping_engine not in ("auto", *ENGINES),
        f"clipping_engine={args.clipping_engine!r} is not known.",
        f"Choose one of: auto, {', '.join(ENGINES)}.",
    )
    optim = str(getattr(args.optim, "value", args.optim))
    checkpointing = {**(args.activation_checkpointing_kwargs or {}), **(args.gradient_checkpointing_kwargs or {})}
    yield (
        bool(args.torch_compile),
        "torch_compile is not supported yet: compiled graphs drop the capture of per-record gradients.",
        "Remove --torch_compile.",
    )
    dynamo = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    yield (
        dynamo not in ("no", ""),
        f"ACCELERATE_DYNAMO_BACKEND={dynamo} switches torch.compile on, which is not supported yet.",
        "Unset it, or run `accelerate config` again without dynamo.",
    )
    yield (
        bool(args.use_liger_kernel),
        "Liger kernels form the head's gradient inside the forward, before it can be clipped.",
        "Remove --use_liger_kernel.",
    )
    yield (
        "lomo" in optim or "layerwise" in optim,
        f"optim={optim} updates parameters inside the backward, before the clip and the noise.",
        "Use adamw_torch, sgd or another optimizer that steps after the backward.",
    )
    yield (
        args.neftune_noise_alpha is not None,
        "neftune_noise_alpha scales its noise by the padded length, which depends on the other records.",
        "Remove --neftune_noise_alpha.",
    )
    what = "Reentrant checkpointing runs a second backward inside the first."
    yield is_reentrant(checkpointing), what, NOT_REENTRANT


def is_reentrant(checkpointing: Mapping[str, Any]) -> bool:
    """Whether these keywords checkpoint reentrantly: given others but not `use_reentrant`, torch does."""
    keywords = {k: v for k, v in checkpointing.items() if k not in ("every_n_layers", "offload")}
    return bool(keywords) and bool(keywords.get("use_reentrant", True))


def _on_side_channels(args: Any) -> Iterator[Refusal]:
    yield bool(args.debug), "debug prints un-noised activations and gradients.", "Remove --debug."
    yield (
        args.include_num_input_tokens_seen not in ("no", False),
        "include_num_input_tokens_seen logs the size of the sampled batches.",
        "Leave it at 'no'.",
    )
    yield (
        bool(args.enable_jit_checkpoint),
        "enable_jit_checkpoint saves between a gradient and its update, so the step would run twice.",
        "Use --save_steps.",
    )
    yield (
        os.environ.get("WANDB_WATCH", "false").lower() in ("gradients", "all"),
        "WANDB_WATCH uploads raw gradients.",
        "Unset it, or set WANDB_WATCH=false.",
    )


def check_accelerator(accelerator: Any) -> None:
    """Refuses what environment variables or `accelerate config` switched on behind the arguments."""
    _raise_first(_on_accelerator(accelerator))


def _on_accelerator(accelerator: Any) -> Iterator[Refusal]:
    kind = str(accelerator.distributed_type.value)
    yield (
        kind not in ("NO", "MULTI_CPU", "MULTI_GPU"),
        f"Accelerate runs in mode {kind}, which is not supported yet (FSDP, DeepSpeed, TPU and others).",
        "Run `accelerate config` again and choose plain multi-GPU or CPU.",
    )
    precision = accelerator.mixed_precision
    yield (
        precision not in ("no", "bf16") or accelerator.scaler is not None,
        f"Accelerate's mixed precision is {precision}: skipped updates and rescaled gradients depend on single "
        "records.",
        "Use bf16 or no (unset ACCELERATE_MIXED_PRECISION, or run `accelerate config` again).",
    )
    yield (
        getattr(accelerator, "parallelism_config", None) is not None,
        "Accelerate has a parallelism_config (tensor, context, sequence parallelism), which is not supported yet.",
        "Unset ACCELERATE_USE_PARALLELISM_CONFIG, or run `accelerate config` again.",
    )
    backend = str(getattr(getattr(accelerator.state, "dynamo_plugin", None), "backend", "NO"))
    yield (
        not backend.endswith("NO"),
        f"Accelerate's dynamo backend is {backend}: torch.compile is not supported yet.",
        "Run `accelerate config` again without dynamo.",
    )


# --- model -----------------------------------------------------------------------------------------------------------


def check_model(model: nn.Module) -> None:
    """Refuses models whose records influence each other, or that change outside the optimizer."""
    _raise_first(_on_model(model), UnsupportedModuleError)


def _on_model(model: nn.Module) -> Iterator[Refusal]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    yield not trained, "The model has no trainable parameter.", "Unfreeze some (requires_grad_(True)) or add LoRA."
    yield (
        len(set(getattr(model, "hf_device_map", {}).values())) > 1,
        "The model is spread over several devices (device_map).",
        "Load it on one device; use accelerate launch for several.",
    )
    yield (
        bool(getattr(model, "is_distributed_loading_by_transformers", False)),
        "The model was sharded while it was loaded (distributed_config).",
        "Load it without; use accelerate launch for several devices.",
    )
    for name, module in model.named_modules():
        yield from _on_module(name, module)
    yield (
        any(p.dtype == torch.float16 for p in trained.values()),
        "Trainable parameters are float16, in which a clipped gradient underflows or overflows.",
        "Load the model in float32 or bfloat16 (dtype=...).",
    )
    rotary = {kind for kind in _rope_types(getattr(model, "config", None)) if kind == "longrope" or "dynamic" in kind}
    yield (
        bool(rotary),
        f"rope_type {', '.join(sorted(rotary))} depends on the longest record of the batch.",
        "Use a model with another rope_type (default, linear, yarn, llama3).",
    )
    yield from _on_experts(model)
    for name, p in trained.items():
        yield (
            bool(p._post_accumulate_grad_hooks) or bool(p._backward_hooks),
            f"A gradient hook is registered on {name}; it would act on un-noised gradients.",
            "Remove the hook (an optimizer that steps inside the backward may have set it).",
        )
    yield from _on_adapters(model)


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary embedding a config names, in whatever depth."""
    found: set[str] = set()
    for name in ("rope_parameters", "rope_scaling"):
        values = [getattr(config, name, None)]
        while values:
            value = values.pop()
            if isinstance(value, dict):
                found |= {str(value[key]) for key in ("rope_type", "type") if isinstance(value.get(key), str)}
                values += list(value.values())
    return found


def _on_module(name: str, module: nn.Module) -> Iterator[Refusal]:
    yield (
        isinstance(module, nn.modules.batchnorm._BatchNorm),
        f"{name} ({type(module).__name__}) normalises over the batch, so a record's gradient depends on the others.",
        "Replace it by GroupNorm or LayerNorm.",
    )
    if isinstance(module, nn.Embedding):
        yield from _on_embedding(name, module)
    if getattr(module, "gradient_checkpointing", False):
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        yield (
            is_reentrant(getattr(checkpoint, "keywords", {})),
            f"{name} uses reentrant checkpointing, a second backward inside the first.",
            "Enable it with {'use_reentrant': False}.",
        )


def _on_experts(model: nn.Module) -> Iterator[Refusal]:
    yield (
        bool(getattr(getattr(model, "config", None), "output_router_logits", False)),
        "The model adds a load-balancing loss over the batch (output_router_logits).",
        "Set config.output_router_logits = False.",
    )


def _on_embedding(name: str, module: nn.Embedding) -> Iterator[Refusal]:
    yield (
        module.max_norm is not None,
        f"{name} renormalises the rows it looks up (max_norm), without noise.",
        "Set max_norm=None.",
    )
    trained = module.weight.requires_grad
    yield (
        trained and module.scale_grad_by_freq,
        f"{name} scales gradients by how often a token occurs in the batch.",
        "Set scale_grad_by_freq=False.",
    )
    yield trained and module.sparse, f"{name} makes sparse gradients, and every row needs noise.", "Set sparse=False."


def _on_adapters(model: nn.Module) -> Iterator[Refusal]:
    if not is_peft_available():
        return
    configs = getattr(model, "peft_config", None)
    for adapter, config in configs.items() if isinstance(configs, dict) else ():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        yield kind == "ADALORA", f"Adapter {adapter!r} is AdaLoRA, which ranks by un-noised gradients.", "Use LoRA."
        start = getattr(config, "init_lora_weights", None)
        yield (
            isinstance(start, str) and start.lower() in ("eva", "corda", "lora_ga"),
            f"Adapter {adapter!r} is initialised from data (init_lora_weights={start!r}), which would be un-noised.",
            "Use init_lora_weights=True, or 'gaussian', 'pissa', 'olora', which look at the weights only.",
        )


# --- data ------------------------------------------------------------------------------------------------------------


def check_data(train_dataset: Any, eval_dataset: Any, data_collator: Any) -> None:
    """Refuses datasets that cannot be sampled, or whose evaluation would release the training data."""
    _raise_first(_on_data(train_dataset, eval_dataset, data_collator))


def is_training_data(dataset: Any, training: Any) -> bool:
    """The same object, a `Subset` of it, or a copy that `datasets` knows to be one; other copies are not found."""
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        return any(is_training_data(part, training) for part in dataset.datasets)
    if isinstance(dataset, torch.utils.data.Subset):
        if isinstance(training, torch.utils.data.Subset) and dataset.dataset is training.dataset:
            return not set(dataset.indices).isdisjoint(training.indices)
        return is_training_data(dataset.dataset, training)
    fingerprint = getattr(dataset, "_fingerprint", None)
    return dataset is training or (fingerprint is not None and fingerprint == getattr(training, "_fingerprint", None))


def _on_data(train_dataset: Any, eval_dataset: Any, data_collator: Any) -> Iterator[Refusal]:
    yield (
        isinstance(train_dataset, torch.utils.data.IterableDataset) or not hasattr(train_dataset, "__len__"),
        "The training dataset is iterable (streaming), so records cannot be sampled by index.",
        "Load it as a map-style dataset (streaming=False).",
    )
    yield len(train_dataset) == 0, "The training dataset is empty.", "Check the file and the preprocessing."
    evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    yield (
        any(is_training_data(e, train_dataset) for e in evaluated),
        "The evaluation dataset is the training dataset: its metrics would be exact values of private data.",
        "Hold out records for evaluation.",
    )
    yield (
        isinstance(data_collator, DataCollatorWithFlattening),
        "DataCollatorWithFlattening packs records into one row, so they would be clipped as one.",
        "Use DataCollatorWithPadding.",
    )
    yield (
        getattr(data_collator, "seed", None) is not None,
        "The collator has a seed of its own: its coins are public, and one record more shifts those of the others.",
        "Leave seed=None; masks are then drawn from a secret key.",
    )


def check_labels(train_dataset: Any, model: nn.Module) -> None:
    """Refuses labels out of range, which would end the run in the step that samples them and tell that they are there.

    Looks at classification labels only: one integer per record, in a column named label or labels.
    """
    config = getattr(model, "config", None)
    num_labels = getattr(config, "num_labels", 0)
    single = getattr(config, "problem_type", None) in (None, "single_label_classification")
    if num_labels < 2 or not single or not type(model).__name__.endswith("ForSequenceClassification"):
        return
    columns = getattr(train_dataset, "column_names", None)
    if isinstance(columns, list):
        labels: Any = next((train_dataset[name] for name in ("label", "labels") if name in columns), [])
    elif isinstance(train_dataset, list):
        labels = [row.get("label", row.get("labels")) for row in train_dataset if isinstance(row, dict)]
    else:
        return
    wrong = next((i for i, x in enumerate(labels) if isinstance(x, int) and not 0 <= x < num_labels), None)
    if wrong is not None:
        raise DPConfigError(
            f"The label of training record {wrong} is outside 0 to {num_labels - 1}, the labels of the model. Correct "
            "it, or load the model with num_labels=<number of labels>."
        )


# --- trainer ---------------------------------------------------------------------------------------------------------


def check_loss(trainer_class: type, stock_compute_loss: tuple[Any, ...], compute_loss_func: Any, args: Any) -> None:
    """Refuses losses of the whole batch."""
    if trainer_class.compute_loss.__module__ == "trl.trainer.sft_trainer":  # type: ignore[attr-defined]
        _raise_first(_on_sft(args))
        stock_compute_loss = (*stock_compute_loss, trainer_class.compute_loss)  # type: ignore[attr-defined]
    mend = "Pass per_example_loss_func=f, with f(outputs, labels) -> one loss per record, shape (batch,)."
    if compute_loss_func is not None:
        raise DPConfigError(f"compute_loss_func returns one number for the batch, in which records are mixed. {mend}")
    if trainer_class.compute_loss not in stock_compute_loss:  # type: ignore[attr-defined]
        raise DPConfigError(
            f"{trainer_class.__name__} overrides compute_loss, which returns one number for the batch and would not "
            f"be used. {mend}"
        )


def _on_sft(args: Any) -> Iterator[Refusal]:
    """TRL's SFTTrainer: its default loss is the token mean, which is taken record by record here."""
    if not hasattr(args, "loss_type"):
        yield (
            True,
            f"SFTTrainer would replace {type(args).__name__} by a plain SFTConfig, without the privacy budget.",
            "Derive them from both: @dataclass(repr=False) class DPSFTConfig(DPTrainingArguments, SFTConfig).",
        )
        return
    yield (
        args.loss_type != "nll",
        f"SFTTrainer's loss_type={args.loss_type!r} is not taken record by record.",
        "Use loss_type='nll', the default.",
    )
    yield (
        args.packing or args.padding_free,
        "packing and padding_free put several records into one row, where they would be clipped as one.",
        "Set packing=False and padding_free=False.",
    )
    yield (
        args.activation_offloading,
        "activation_offloading keeps layers' inputs where the capture of per-record gradients does not see them.",
        "Set activation_offloading=False; use gradient_checkpointing.",
    )


HOOK_POINTS = (
    "create_accelerator_and_postprocess", "get_train_dataloader", "set_initial_training_values", "training_step",
    "_prepare_for_training", "_finalize_training", "_save_rng_state",
)  # fmt: skip


def check_hooks(trainer_class: type, mixin: type) -> None:
    """Refuses trainers in which another class stands in front of the private step."""
    replaced = [n for n in HOOK_POINTS if getattr(trainer_class, n) is not getattr(mixin, n)]
    if replaced:
        raise DPConfigError(
            f"{trainer_class.__name__} replaces {', '.join(replaced)}, through which gradients are clipped, noised "
            "and charged. Name DPTrainerMixin first among its bases and leave these methods out; use callbacks."
        )
