"""Where gradients are captured: the leaf modules that own trainable parameters, patched only inside a step.

A patched module computes its usual output through an autograd Function that hands its contribution to the engine in
the backward and gives autograd no gradient for the parameters. Whatever else uses a managed parameter goes through
ordinary autograd and leaves a `.grad` behind, which the engine turns into an error: nothing is omitted silently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_dpopt.errors import UnsupportedModuleError
from hf_dpopt.grads.contributions import Contribution
from hf_dpopt.grads.rules import Rule, rule_for


class Site:
    """One module under capture: its rule, its parameters' names, and the way back to the engine."""

    def __init__(self, name: str, module: nn.Module, parameter_names: dict[str, str], sink: Capture):
        self.name, self.module, self.parameter_names, self.sink = name, module, parameter_names, sink
        self.rule: Rule = rule_for(module)
        self.original: Any = None

    @property
    def num_records(self) -> int:
        return self.sink.num_records

    def trains(self, attribute: str) -> bool:
        return attribute in self.parameter_names

    def add(self, attribute: str, contribution: Contribution) -> None:
        self.sink.add(self, self.parameter_names[attribute], contribution)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # the recorded run is the one autograd follows (checkpointing runs two)
            return self.original(*args, **kwargs)
        return self.rule(self, *args, **kwargs)

    def install(self) -> None:
        self.had_own_forward = "forward" in self.module.__dict__
        self.original = self.module.forward
        self.module.forward = self  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        if self.had_own_forward:
            self.module.forward = self.original  # type: ignore[method-assign]
        else:
            del self.module.forward

    @contextlib.contextmanager
    def original_forward(self) -> Iterator[None]:
        self.remove()
        try:
            yield
        finally:
            self.install()


class Capture:
    """The sites of a model and what they recorded during one forward and backward.

    Args:
        model: any module; parameters that require a gradient must each be owned by a leaf module.

    Raises:
        UnsupportedModuleError: if a trainable parameter is owned by no leaf module; names all of them.
    """

    def __init__(self, model: nn.Module):
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.contributions: dict[str, list[Contribution]] = {}
        self.num_records = 0
        names = {id(p): name for name, p in self.parameters.items()}
        self.sites: list[Site] = []
        for path, module in model.named_modules(remove_duplicate=True):
            if next(module.children(), None) is not None:
                continue
            if path.endswith("relative_attention_bias") and module.weight.requires_grad:
                raise UnsupportedModuleError(
                    f"{path} is looked up once for all records of a batch, so its per-record gradient cannot be told. "
                    "Freeze it: model.get_submodule(name).requires_grad_(False); the rest of the model can be trained."
                )
            own = {a: names[id(p)] for a, p in module.named_parameters(recurse=False) if id(p) in names}
            if own:
                self.sites.append(Site(path, module, own, self))
        covered = {name for site in self.sites for name in site.parameter_names.values()}
        missing = [name for name in self.parameters if name not in covered]
        if missing:
            raise UnsupportedModuleError(
                "These trainable parameters are used directly by a module with children, where their per-record "
                f"gradients cannot be captured: {', '.join(missing)}. Freeze them (requires_grad_(False)), finetune "
                "with LoRA, or add a rule under hf_dpopt/grads/rules."
            )

    def add(self, site: Site, name: str, contribution: Contribution) -> None:
        size = next(iter(vars(contribution).values())).size(0)
        if size != self.num_records:
            raise UnsupportedModuleError(
                f"The gradient at {site.name} ({type(site.module).__name__}) has first dimension {size}, but the "
                f"batch has {self.num_records} records: the layer mixes, flattens or reorders records, so one "
                "record's gradient cannot be told from another's. Freeze its parameters, or train others with LoRA."
            )
        self.contributions.setdefault(name, []).append(contribution)

    @contextlib.contextmanager
    def recording(self, num_records: int) -> Iterator[dict[str, list[Contribution]]]:
        """Inside, the sites are patched; the dictionary fills up during the backward: parameter -> contributions."""
        self.num_records, self.contributions = num_records, {}
        for site in self.sites:
            site.install()
        try:
            yield self.contributions
        finally:
            for site in self.sites:
                site.remove()
            self.contributions = {}
