"""Rules, one for each kind of layer: how it runs under capture and what it contributes to a record's gradient.

A new rule is one file that defines `forward(site, *args)` and one line in `RULES`, for a layer that owns its
parameters, or in `COMPOSITES`, for a method of a module that has children. Layers without a rule are run by
`fallback`, which is right for every module that maps records to records, and slower.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from hf_dpopt.clipping.rules import adapters, broadcast, conv1d, embedding, fallback, linear, norms, shared
from hf_dpopt.clipping.site import Rule
from hf_dpopt.common.sharding import class_of


def class_path(cls: type) -> str:
    """The name a class is registered under: other packages need not be installed, nor imported, to be known here."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is a layer that peft put around one of the model's."""
    return any(class_path(cls) == "peft.tuners.tuners_utils.BaseTunerLayer" for cls in type(module).__mro__)


def calls_its_layers(adapter: nn.Module) -> bool:
    """Whether an adapter passes activations, not weights, through the layers below it."""
    return type(adapter).__module__.startswith(("peft.tuners.lora.", "peft.tuners.ia3.", "peft.tuners.ln_tuning."))


RULES: dict[str, Rule] = {
    class_path(nn.Linear): linear.forward,
    "transformers.pytorch_utils.Conv1D": conv1d.forward,
    class_path(nn.Embedding): embedding.forward,
    class_path(nn.LayerNorm): norms.layer_norm,
}


@dataclasses.dataclass(frozen=True)
class Composite:
    """A method of a module with children, and the parameters below it that the method's rule captures.

    Args:
        class_path: import path of the module's class, whose package need not be installed; None for any class that has
            the method.
        method: name of the method, which is replaced while the engine records.
        rule: called in place of the method, with (site, *args).
        owns: first parts of the paths, below the module, of parameters that the rule captures. If empty, the rule
            captures none itself but calls layers in a way in which they can; it is then always installed.
    """

    class_path: str | None
    method: str
    rule: Rule
    owns: tuple[str, ...] = ()

    def matches(self, module: nn.Module) -> bool:
        return self.class_path in (None, class_path(class_of(module))) and hasattr(module, self.method)


_DEBERTA = "transformers.models.deberta_v2.modeling_deberta_v2"
COMPOSITES = [
    Composite(None, "compute_bias", shared.t5_position_bias, owns=("relative_attention_bias.",)),
    Composite(
        "transformers.models.mpnet.modeling_mpnet.MPNetEncoder", "compute_position_bias", shared.mpnet_position_bias,
        owns=("relative_attention_bias.",),
    ),
    Composite(
        f"{_DEBERTA}.DebertaV2Encoder", "get_rel_embedding", shared.deberta_relative_embeddings,
        owns=("rel_embeddings.", "LayerNorm."),
    ),
    Composite(
        f"{_DEBERTA}.DisentangledSelfAttention", "disentangled_attention_bias", shared.deberta_attention_bias
    ),
    Composite("peft.tuners.ia3.layer.Linear", "forward", adapters.ia3_linear, owns=("ia3_l.",)),
    Composite(
        "peft.tuners.lora.layer.Embedding", "forward", adapters.lora_embedding,
        owns=("lora_embedding_A.", "lora_embedding_B."),
    ),
    Composite("peft.tuners.lora.dora.DoraLinearLayer", "forward", adapters.dora_magnitude, owns=("weight",)),
    Composite(None, "get_prompt", adapters.virtual_tokens),
]  # fmt: skip


def rule_for(module: nn.Module) -> Rule:
    """The rule of exactly this class, else of what the layer is seen to compute, else the fallback.

    A subclass may compute something else in its forward, so it is not served by the rule of its base unless it
    inherits the forward unchanged (`torch.nn.modules.linear.NonDynamicallyQuantizableLinear`, for one).
    """
    for cls in type(module).__mro__:
        rule = RULES.get(class_path(cls))
        if rule is not None and type(module).forward is cls.forward:  # type: ignore[attr-defined]
            return rule
    if isinstance(module, nn.Embedding):
        return embedding.subclass
    return broadcast.forward if broadcast.broadcasts(module) else fallback.forward
