"""Refusals of models whose records influence each other, or that change outside the optimizer."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import torch
from torch import nn
from transformers import Seq2SeqTrainer, Trainer
from transformers.utils.import_utils import is_peft_available

from hf_dpopt.clipping.capture import Capture, is_compiled
from hf_dpopt.common.checks import is_reentrant
from hf_dpopt.common.errors import DPConfigError, Refusal, UnsupportedModuleError, refuses, shown
from hf_dpopt.common.sharding import is_sharded
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.records.losses import RecordLosses, base_model
from hf_dpopt.records.settings import settings
from hf_dpopt.run.kept_state import refuse_spoilt


@functools.partial(refuses, error=UnsupportedModuleError)
def check_model(model: nn.Module) -> Iterator[Refusal]:
    """Refuse models whose records influence each other, or that change outside the optimizer."""
    refuse_spoilt(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    yield from _on_values(model)
    yield not trained, "The model has no trainable parameter. Unfreeze some (requires_grad_(True)) or add LoRA."
    yield (
        len(set(getattr(model, "hf_device_map", {}).values())) > 1,
        "The model is spread over several devices (device_map). Load it on one device; accelerate launch uses all.",
    )
    yield (
        any(is_compiled(module) for module in (model, base_model(model))),
        "The whole model is compiled, with it the places where per-record gradients are captured. Compile parts of "
        "it instead, before or after LoRA: for layer in model.model.layers: layer.mlp.compile().",
    )
    for name, module in model.named_modules():
        yield from _on_module(name, module)
    is_xlnet = getattr(getattr(base_model(model), "config", None), "model_type", None) == "xlnet"
    yield (
        is_xlnet and any("transformer." in name for name in trained),
        "XLNet computes with the tokens in the first dimension and the records in the second, so the gradients of "
        "records cannot be told apart. Train its head alone (freeze model.transformer), or another model: "
        "run_mlm.py, run_clm.py, run_qa.py.",
    )
    yield (
        any(p.dtype == torch.float16 for p in trained.values()),
        "Trainable parameters are float16, in which a clipped gradient underflows or overflows. Load the model in "
        "float32 or bfloat16 (dtype=...).",
    )
    rotary = {kind for kind in _rope_types(model) if kind in ("longrope", "su") or "dynamic" in kind}
    yield (
        bool(rotary),
        f"`rope_type` {', '.join(sorted(rotary))} depends on the longest record of the batch. Use a model with "
        "another rope_type (default, linear, yarn, llama3).",
    )
    yield from _on_experts(model)
    yield from _on_quantisation(model)
    yield from _on_adapters(model)


def check_model_with_records(inputs: TrainerInputs) -> None:
    """Refuse a model that cannot be trained, or not on these records."""
    model = inputs.model
    check_model(model)
    Capture(model)
    if inputs.train_dataset is not None:
        RecordLosses(model, inputs.per_example_loss_func or "auto")  # refuses an unknown head


def check_model_given(inputs: TrainerInputs) -> None:
    """Refuse what is no model, before the Trainer moves it to a device."""
    model, order = inputs.model, inputs.trainer_class.__mro__  # other trainers may load a model by its name
    makes = next(cls for cls in order if "__init__" in vars(cls) and not cls.__name__.startswith("DP"))
    if isinstance(model, nn.Module) or makes not in (Trainer, Seq2SeqTrainer):
        return
    if model is None and callable(inputs.model_init):
        return
    raise DPConfigError(
        f"model={shown(model)} is no model. Pass one that is loaded, such as "
        "AutoModelForSequenceClassification.from_pretrained(..), or model_init, a function that makes it."
    )


def _on_values(model: nn.Module) -> Iterator[Refusal]:
    """Refusals of parameters that hold no numbers, or none that training could start from."""
    loads_on_one_rank = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() in ("true", "1")
    fix = "Load or initialise the weights before the trainer is made."
    if loads_on_one_rank:
        fix = (
            "Set fsdp_cpu_ram_efficient_loading to false (`accelerate config`), which loads weights on one rank only."
        )
    for name, p in model.named_parameters():
        has_values, trained = not (isinstance(p, nn.parameter.UninitializedParameter) or p.is_meta), p.requires_grad
        yield (
            trained and not has_values,
            f"{name} has no values yet (a lazy layer, or a model on the device 'meta'). {fix}",
        )
        yield (
            trained and p.is_complex(),
            f"{name} is complex, and clips are of real numbers. Freeze it, or train both parts.",
        )
        yield (
            trained and p.is_inference(),
            f"{name} was made in torch.inference_mode, so it cannot be trained. Load the model outside of it.",
        )
        yield (
            has_values and not is_finite(p),
            f"The weights of the model are not finite: {name} holds NaN or infinity, so the run would train on noise. "
            "Load them again, or, if a run diverged, start from an older checkpoint with a smaller learning rate.",
        )


def is_finite(p: torch.Tensor) -> bool:
    """Whether it holds neither NaN nor infinity."""
    has_sum = p.is_floating_point() and p.element_size() > 1 and not is_sharded(p)  # there is none of 8 bits
    if has_sum and p.sum().isfinite():  # what is not finite shows in it, and it may overflow
        return True
    return not p.is_floating_point() or bool(torch.isfinite(p).all())


def _rope_types(model: nn.Module) -> set[str]:
    """Names of the kinds of rotary embedding in configs (at any depth) and modules of the model."""
    found: set[str] = set()
    for path, name, value in settings(model):
        in_rope = "rope" in path or "rotary" in path
        if isinstance(value, str) and (name == "rope_type" or (name == "type" and in_rope)):
            found.add(value)
        elif name == "use_dynamic_ntk" and value:
            found.add(f"dynamic ({name})")
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        found |= {str(k) for k in (kind.values() if isinstance(kind, dict) else [kind]) if isinstance(k, str)}
        made_by = getattr(getattr(module, "rope_init_fn", None), "__name__", "")
        described = f"{type(module).__name__} {made_by}".lower()
        if "dynamic_ntk" in described or "dynamicntk" in described:
            found.add(f"dynamic ({type(module).__name__})")
        elif "longrope" in described:
            found.add("longrope")
    return found


def _on_module(name: str, module: nn.Module) -> Iterator[Refusal]:
    yield (
        isinstance(module, nn.modules.batchnorm._BatchNorm),
        f"{name} ({type(module).__name__}) normalises over the batch, so a record's gradient depends on the others. "
        "Replace it by GroupNorm or LayerNorm.",
    )
    # LLM.int8() computes a feature in full precision for every record once one record has an outlier in it.
    is_int8 = any(cls.__name__ == "Linear8bitLt" for cls in type(module).__mro__)
    yield (
        is_int8 and getattr(getattr(module, "state", None), "threshold", 0.0) > 0,
        f"{name} (Linear8bitLt) looks for outliers over the whole batch: a record's loss depends on the others. Load "
        "the model with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits.",
    )
    if isinstance(module, nn.Embedding):
        yield from _on_embedding(name, module)
    if getattr(module, "gradient_checkpointing", False):
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        yield (
            is_reentrant(getattr(checkpoint, "keywords", {})),
            f"{name} uses reentrant checkpointing, a second backward inside the first. Enable it with "
            "{'use_reentrant': False}.",
        )


def _on_quantisation(model: nn.Module) -> Iterator[Refusal]:
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    method = str(getattr(method, "value", method))
    yield (
        config is not None and method != "bitsandbytes",
        f"The base model is quantised by {method}; only bitsandbytes was checked, as scales of activations over the "
        "batch couple records. Load it with BitsAndBytesConfig(load_in_4bit=True), or unquantised in bfloat16.",
    )


def _on_experts(model: nn.Module) -> Iterator[Refusal]:
    asked = [f"config.{path}{name}" for path, name, on in settings(model) if name == "output_router_logits" and on]
    yield (
        bool(asked),
        f"The model adds a load-balancing loss over the batch. Set {' = '.join(asked)} = False.",
    )


def _on_embedding(name: str, module: nn.Embedding) -> Iterator[Refusal]:
    yield (
        module.max_norm is not None,
        f"{name} renormalises the rows it looks up (max_norm), without noise. Set max_norm=None.",
    )
    trained = module.weight.requires_grad
    yield (
        trained and module.scale_grad_by_freq,
        f"{name} scales gradients by how often a token occurs in the batch. Set scale_grad_by_freq=False.",
    )
    yield trained and module.sparse, f"{name} makes sparse gradients, and every row needs noise. Set sparse=False."


def _on_adapters(model: nn.Module) -> Iterator[Refusal]:
    if not is_peft_available():
        return
    configs = getattr(model, "peft_config", None)
    for adapter, config in configs.items() if isinstance(configs, dict) else ():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        yield kind == "ADALORA", f"Adapter {adapter!r} is AdaLoRA, which ranks by un-noised gradients. Use LoRA."
        yield (
            bool(getattr(config, "alora_invocation_tokens", None)),
            f"Adapter {adapter!r} is aLoRA, which mixes the tokens of all records. Set alora_invocation_tokens=None.",
        )
        yield (
            bool(getattr(config, "use_asa", False)),
            f"Adapter {adapter!r} freezes parameters while it is trained (use_asa). Set use_asa=False.",
        )
        yield (
            getattr(config, "velora_config", None) is not None,
            f"Adapter {adapter!r} is VeLoRA, which compresses by the first, un-noised batch. Set velora_config=None.",
        )
        start = getattr(config, "init_lora_weights", None)
        yield (
            isinstance(start, str) and start.lower() in ("eva", "corda", "lora_ga"),
            f"Adapter {adapter!r} is initialised from data (init_lora_weights={start!r}), which would be un-noised. "
            "Use init_lora_weights=True, or 'gaussian', 'pissa', 'olora', which look at the weights only.",
        )
