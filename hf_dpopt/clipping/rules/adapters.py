"""peft layers that keep parameters outside of any layer of their own. B = records, T = tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hf_dpopt.clipping.rules.broadcast import copy_per_record
from hf_dpopt.clipping.rules.embedding import look_up
from hf_dpopt.clipping.rules.linear import matmul
from hf_dpopt.clipping.site import Site
from hf_dpopt.common.errors import UnsupportedModuleError


def _is_idle(layer: Any) -> bool:
    return layer.disable_adapters or layer.merged


def ia3_linear(site: Site, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """(IA)^3, learned scales of a layer's input or output: Liu et al. (2022), arXiv:2205.05638, Section 3.3."""
    layer: Any = site.module
    if _is_idle(layer):
        return site.original(x, *args, **kwargs)
    names = [f"ia3_l.{adapter}" for adapter in layer.active_adapters if adapter in layer.ia3_l]
    target = x if layer.is_feedforward else layer.base_layer(x, *args, **kwargs)
    dtype = target.dtype
    for name in names:
        target = target * copy_per_record(site, name, target)
    return layer.base_layer(target.to(dtype), *args, **kwargs) if layer.is_feedforward else target.to(dtype)


def lora_embedding(site: Site, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A low-rank update of an embedding table; both factors are parameters of the layer itself."""
    layer: Any = site.module
    if _is_idle(layer):
        return site.original(ids, *args, **kwargs)
    result = layer.base_layer(ids, *args, **kwargs)
    base, dtype = layer.get_base_layer(), result.dtype
    embed_scale = layer._get_embed_scale()  # tables that scale what they look up (Gemma)
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_embedding_A:
            continue
        if adapter in layer.lora_variant:
            raise UnsupportedModuleError(
                f"{site.name} is a DoRA or other variant of LoRA on an embedding, which has no clipping rule. Leave "
                "embeddings out of target_modules, or use plain LoRA on them."
            )
        rows_BTR = look_up(site, f"lora_embedding_A.{adapter}", ids, base.padding_idx, transposed=True)
        update = matmul(site, rows_BTR, f"lora_embedding_B.{adapter}") * layer.scaling[adapter]
        result = result + (update if embed_scale is None else update * embed_scale.to(update.dtype))
    return result.to(dtype)


def dora_magnitude(
    site: Site,
    x: torch.Tensor,
    *,
    lora_A: Any,
    lora_B: Any,
    scaling: float,
    base_layer: Any,
    base_result: torch.Tensor | None = None,
    adapter_name: str = "default",
) -> torch.Tensor:
    """DoRA's magnitudes: Liu et al. (2024), arXiv:2402.09353, Eq. 5, with the norm held constant (Section 4.3)."""
    from peft.utils.integrations import dequantize_module_weight
    from peft.utils.other import transpose

    layer: Any = site.module
    weight = dequantize_module_weight(base_layer).to(x.dtype)
    with torch.no_grad():
        update = layer.get_lora_weight(lora_A=lora_A, lora_B=lora_B, adapter_name=adapter_name).to(x.dtype)
        norm = layer.get_weight_norm(weight=weight, lora_weight=update, scaling=scaling, adapter_name=adapter_name)
    if base_result is None:
        base_result = F.linear(x, transpose(weight, layer.fan_in_fan_out))
    elif base_layer.bias is not None:
        base_result = base_result - base_layer.bias
    scale = copy_per_record(site, "weight", base_result) / norm
    return (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling


def virtual_tokens(site: Site, batch_size: int, *args: Any, **kwargs: Any) -> Any:
    """`get_prompt` of a peft model, which makes a prompt once and repeats it; the table's rule makes one per record.

    Lester et al. (2021), arXiv:2104.08691. A prefix (Li and Liang 2021, arXiv:2101.00190) is looked up per record.
    """
    config: Any = site.module.active_peft_config
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    encoder: Any = site.module.prompt_encoder
    is_trained = torch.is_grad_enabled() and any(p.requires_grad for p in encoder.parameters())
    once = kind in ("PROMPT_TUNING", "P_TUNING") and not config.inference_mode and is_trained
    return site.original(1 if once else batch_size, *args, **kwargs)
