"""Arguments, environment and launchers that are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers as tf
from accelerate.utils import DistributedType, DynamoBackend
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from hf_dpopt import DPConfigError, DPSeq2SeqTrainer, DPTrainer, DPTrainingArguments, UnsupportedModuleError
from hf_dpopt.huggingface.refusals.training_arguments import check_accelerator
from tests.refusals.base import bert, num_charged, records


def test_what_is_refused_below_is_the_option_not_the_run(arguments, tmp_path):
    """The base of every case trains, so a refusal comes from what the case changes."""
    assert DPTrainer(bert(), arguments(), train_dataset=records()).train().global_step == 2
    assert num_charged(tmp_path / "out") == 2 and (tmp_path / "keys").exists()


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"fp16": True}, "skips an update.*Use --bf16"),
    "n_gpu": ({"late": {"_n_gpu": 2}}, "2 GPUs.*accelerate launch --num_processes 2"),
    "fsdp alone": ({"fsdp": True}, "several processes, and this is one.*accelerate launch --num_processes"),
    "parallelism_config": ({"late": {"parallelism_config": object()}}, "parallelism_config.*Use plain accelerate"),
    "torch_compile": ({"torch_compile": True}, "Remove --torch_compile"),
    "torch_compile_mode": ({"torch_compile_mode": "default"}, "Remove --torch_compile"),
    "liger": ({"use_liger_kernel": True}, "Remove --use_liger_kernel"),
    "lomo": ({"optim": "lomo"}, "optim=lomo.*Use adamw_torch"),
    "adalomo": ({"optim": "adalomo"}, "optim=adalomo.*Use adamw_torch"),
    "galore layerwise": ({"optim": "galore_adamw_layerwise"}, "galore_adamw_layerwise.*Use adamw_torch"),
    "apollo layerwise": ({"optim": "apollo_adamw_layerwise"}, "apollo_adamw_layerwise.*Use adamw_torch"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "Set --per_device_train_batch_size"),
    "neftune": ({"neftune_noise_alpha": 5.0}, "Remove --neftune_noise_alpha"),
    "group_by_length": ({"train_sampling_strategy": "group_by_length"}, "group_by_length.*Leave it at 'random'"),
    "sequential": ({"train_sampling_strategy": "sequential"}, "sequential.*Leave it at 'random'"),
    "accumulation of accelerate": (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
        "num_steps=2.*Use --gradient_accumulation_steps",
    ),
    "ignore_data_skip": ({"ignore_data_skip": True}, "Remove --ignore_data_skip"),
    "dataloader_in_order": ({"dataloader_in_order": False}, "dataloader_in_order=False.*Remove it"),
    "reentrant": (
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        "Reentrant.*'use_reentrant': False",
    ),
    "reentrant, old name": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "Reentrant.*'use_reentrant': False",
    ),
    "reentrant by torch's default": (  # torch takes reentrant where other keywords are given without this one
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"preserve_rng_state": True}},
        "Reentrant.*'use_reentrant': False",
    ),
    "save_on_each_node": ({"save_on_each_node": True}, "put output_dir on a disk that all machines see"),
    "enable_jit_checkpoint": ({"enable_jit_checkpoint": True}, "Remove --enable_jit_checkpoint: SIGTERM"),
    "debug": ({"debug": "underflow_overflow"}, "Remove --debug"),
    "tokens seen": ({"include_num_input_tokens_seen": True}, "include_num_input_tokens_seen.*Leave it at 'no'"),
    "tokens seen, text": ({"include_num_input_tokens_seen": "non_padding"}, "Leave it at 'no'"),
    "clipping_engine": ({"clipping_engine": "vmap"}, "clipping_engine='vmap'.*Use one of: 'auto', 'book_keeping'"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case, arguments, refused):
    values, mend = ARGUMENTS[case]
    args, model, dataset = arguments(**values), bert(), records()
    with refused(mend):
        DPTrainer(model, args, train_dataset=dataset)


FSDP_1 = "FSDP version 1 flattens.*Use FSDP2"  # before accelerate fails on a machine without accelerators
ENVIRONMENT = {
    "fp16": ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed precision is fp16.*ACCELERATE_MIXED_PRECISION"),
    "fp8": ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed precision is fp8.*ACCELERATE_MIXED_PRECISION"),
    "dynamo": ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "ACCELERATE_DYNAMO_BACKEND=inductor.*Unset it"),
    "wandb gradients": ({"WANDB_WATCH": "gradients"}, "WANDB_WATCH.*Unset it"),
    "wandb all": ({"WANDB_WATCH": "all"}, "WANDB_WATCH.*Unset it"),
    "fsdp of a launcher": ({"ACCELERATE_USE_FSDP": "true"}, FSDP_1),
    "fsdp 1 of a launcher": ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, FSDP_1),
}


@pytest.mark.parametrize("case", ENVIRONMENT)
def test_environment(case, arguments, refused, monkeypatch):
    variables, mend = ENVIRONMENT[case]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    args, model, dataset = arguments(), bert(), records()
    with refused(mend):
        DPTrainer(model, args, train_dataset=dataset)


def test_weights_that_fsdp_loads_on_one_rank(arguments, refused, monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "True")
    args, model, dataset = arguments(), bert().to("meta"), records()
    with refused("has no values yet.*fsdp_cpu_ram_efficient_loading to false", UnsupportedModuleError):
        DPTrainer(model, args, train_dataset=dataset)


@pytest.mark.parametrize("variable, value", [("ACCELERATE_DYNAMO_BACKEND", "no"), ("WANDB_WATCH", "false")])
def test_harmless_environment_is_allowed(variable, value, arguments, monkeypatch):
    monkeypatch.setenv(variable, value)
    assert DPTrainer(bert(), arguments(), train_dataset=records()).train().global_step == 2


def _accelerator(mode: str = "NO", **values: Any) -> SimpleNamespace:
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO), fsdp_plugin=None)
    defaults = {
        "mixed_precision": "no",
        "scaler": None,
        "state": state,
        "parallelism_config": None,
        "num_processes": 1,
    }
    return SimpleNamespace(distributed_type=DistributedType(mode), **(defaults | values))


def _fsdp(**values: Any) -> SimpleNamespace:
    defaults = {"fsdp_version": 2, "cpu_offload": OffloadPolicy(), "activation_checkpointing": False}
    plugin = SimpleNamespace(**(defaults | values))
    return SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO), fsdp_plugin=plugin)


ACCELERATORS: dict[str, tuple[dict[str, Any], str]] = {
    "one of two": (
        {"num_processes": 2},
        "The launcher started 1 processes, and the Trainer knows 2.*Start with torchrun",
    ),
    "fsdp 1": ({"mode": "FSDP", "state": _fsdp(fsdp_version=1)}, "version 1 flattens.*Set --fsdp_version 2"),
    "offload": ({"mode": "FSDP", "state": _fsdp(cpu_offload=CPUOffloadPolicy())}, "Set --fsdp_offload_params false"),
    "fsdp checkpointing": ({"mode": "FSDP", "state": _fsdp(activation_checkpointing=True)}, "Use --gradient_check"),
    "deepspeed": ({"mode": "DEEPSPEED"}, "mode DEEPSPEED.*choose plain multi-GPU, FSDP with version 2"),
    "megatron": ({"mode": "MEGATRON_LM"}, "mode MEGATRON_LM.*choose plain multi-GPU"),
    "tpu": ({"mode": "XLA"}, "mode XLA.*choose plain multi-GPU"),
    "fp16": ({"mixed_precision": "fp16"}, "precision is fp16.*Use bf16 or no"),
    "scaler": ({"scaler": object()}, "Use bf16 or no"),
    "tensor parallelism": ({"parallelism_config": object()}, "parallelism_config.*Unset ACCELERATE_USE_PARALLELISM"),
    "dynamo": (
        {"state": SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.INDUCTOR), fsdp_plugin=None)},
        "INDUCTOR.*without dynamo",
    ),
}


@pytest.mark.parametrize("case", ACCELERATORS)
def test_accelerator(case):
    """States that this machine cannot be put in, so the check is called with what accelerate would hold."""
    values, mend = ACCELERATORS[case]
    with pytest.raises(DPConfigError, match=mend):
        check_accelerator(_accelerator(**values))


@pytest.mark.parametrize("mode", ["NO", "MULTI_CPU", "MULTI_GPU"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_plain_data_parallelism_is_allowed(mode, precision):
    assert check_accelerator(_accelerator(mode, mixed_precision=precision)) is None  # it raises else


def test_fsdp2_is_allowed():
    assert check_accelerator(_accelerator("FSDP", state=_fsdp())) is None


def test_stock_arguments(tmp_path, refused):
    args = tf.TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none")
    model, dataset = bert(), records()
    with refused("got TrainingArguments.*Replace it by hf_dpopt.DPTrainingArguments"):
        DPTrainer(model, args, train_dataset=dataset)
    with refused("got NoneType.*DPTrainingArguments"):
        DPTrainer(model, train_dataset=dataset)
    args = DPTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none", target_epsilon=8.0)
    with refused("DPSeq2SeqTrainer got DPTrainingArguments, .*Use hf_dpopt.DPSeq2SeqTrainingArguments"):
        DPSeq2SeqTrainer(model, args, train_dataset=dataset)


def test_deepspeed_is_refused_before_its_package_is_looked_for(tmp_path):
    with pytest.raises(DPConfigError, match="^deepspeed='zero2.json': takes the backward .* Leave deepspeed out; use"):
        DPTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, target_epsilon=8.0, deepspeed="zero2.json")
