"""Capture of gradients at the layers that own trainable parameters, which are patched only inside a step.

A patched module computes its usual output through an autograd Function that hands its contribution to the engine in
the backward and gives autograd no gradient for the parameters. Whatever else uses a managed parameter goes through
ordinary autograd and leaves a `.grad` behind, which the engine turns into an error: nothing is omitted silently.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hf_dpopt.clipping.contributions import Contribution
from hf_dpopt.clipping.rules import COMPOSITES, calls_its_layers, fallback, flattening, is_adapter, rule_for
from hf_dpopt.clipping.site import Site
from hf_dpopt.clipping.units import Units
from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.common.sharding import is_fsdp


def in_mixture(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Names of parameters in a mixture of experts: the gate lies beside the experts, under a name of its own."""
    blocks = tuple(
        f"{path}."
        for path, module in model.named_modules()
        if {"experts", "router"} & dict(module.named_children()).keys()
    )
    by_name = re.compile(r"(^|\.)(experts?|router|moe)(\.|$)")
    return [name for name in names if name.startswith(blocks) or by_name.search(name)]


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module run through torch.compile."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _is_layer(module: nn.Module) -> bool:
    """Whether a module computes something by itself, without children."""
    return next(module.children(), None) is None and _has_forward(module)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


Receiver = Callable[[str, Contribution], None]


def _not_recording(name: str, contribution: Contribution) -> None:
    raise AssertionError(f"{name} handed over a gradient outside of a step")


class Capture:
    """The sites of a model and what they recorded during one forward and backward.

    Args:
        model: any module.

    Raises:
        UnsupportedModuleError: if a trainable parameter has a hook on its gradient, or belongs to experts of a mixture
            or to a module that has to run again for each record and draws at random or is sharded; names it.
    """

    def __init__(self, model: nn.Module):
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.receive: Receiver = _not_recording
        self.num_records = 0
        self.units: Units | None = None
        self._model = model
        self._copies: dict[Any, torch.Tensor] = {}
        self._names = {id(p): name for name, p in self.parameters.items()}
        hooked = [n for n, p in self.parameters.items() if p._backward_hooks or p._post_accumulate_grad_hooks]
        if hooked:
            raise UnsupportedModuleError(
                f"A gradient hook on {hooked[0]} would act on un-noised gradients, or on none. Remove the hook: an "
                "optimizer that steps inside the backward sets one, or an adapter (OSF, CPT); use LoRA, DoRA or VeRA."
            )
        experts = in_mixture(model, self.parameters)
        if experts:
            raise UnsupportedModuleError(
                f"These belong to a mixture of experts: {', '.join(experts)}. Routing and its capacity couple the "
                "records of a batch. Freeze experts and routers, and train LoRA on the attention layers."
            )
        composites = [*self._composites(model)]
        captured = {id(site.module.get_parameter(a)) for site in composites for a in site.parameter_names}
        whole = [*self._adapters(model, captured)]
        captured |= {id(site.module.get_parameter(a)) for site in whole for a in site.parameter_names}
        self.sites = [*composites, *whole, *self._layers(model, captured)]
        self.sites += [*self._direct(model)]

    def _trained(self, module: nn.Module, *, below: bool) -> dict[str, str]:
        own = module.named_parameters(recurse=below, remove_duplicate=False)
        return {path: self._names[id(p)] for path, p in own if id(p) in self._names}

    def _composites(self, model: nn.Module) -> Iterator[Site]:
        captured: set[str] = set()  # an outer rule runs what is inside it by autograd
        for path, module in model.named_modules():
            for composite in COMPOSITES:
                if composite.matches(module):
                    below = self._trained(module, below=True)
                    own = {a: n for a, n in below.items() if a.startswith(composite.owns) and n not in captured}
                    captured |= set(own.values())
                    if own or not composite.owns:
                        yield Site(path, module, own, composite.rule, self, composite.method, changes_shapes=True)

    def _adapters(self, model: nn.Module, captured: set[int]) -> Iterator[Site]:
        """Layers of peft that own parameters or make weights out of those below: each runs whole, record by record."""
        whole: list[str] = []
        for path, module in model.named_modules():
            below = self._trained(module, below=True) if is_adapter(module) else {}
            own = {a: name for a, name in below.items() if id(module.get_parameter(a)) not in captured}
            if path.startswith(tuple(whole)):  # an adapter inside of one that runs whole
                continue
            calls_layers = calls_its_layers(module) and all(
                _is_layer(module.get_submodule(a.rpartition(".")[0])) for a in own
            )
            if own and type(module).__module__.startswith("peft.tuners.lily."):
                raise UnsupportedModuleError(
                    f"{path} is a layer of Lily, which averages the choice of its experts over the batch, so records "
                    "influence each other. Use LoRA, DoRA or VeRA."
                )
            if own and not calls_layers:
                fallback.check_draws(path, module)
                whole.append(f"{path}.")
                yield Site(path, module, own, fallback.forward, self)

    def _layers(self, model: nn.Module, captured: set[int]) -> Iterator[Site]:
        flattened: list[str] = []
        for path, module in model.named_modules():
            flattened += [f"{path}.{child}" for child in flattening.children(module)]
            own = self._trained(module, below=False)
            own = {a: name for a, name in own.items() if id(module.get_parameter(a)) not in captured}
            if own and _is_layer(module):
                rule = rule_for(module)
                is_flattened = any(path == p or path.startswith(p + ".") for p in flattened)
                yield Site(path, module, own, flattening.by_record(rule) if is_flattened else rule, self)

    def _direct(self, model: nn.Module) -> Iterator[Site]:
        """Modules with children that use a parameter themselves (a class token, positions): run record by record.

        Their children are captured as they are anywhere else.
        """
        covered = {name for site in self.sites for name in site.parameter_names.values()}
        users: dict[str, dict[str, str]] = {}
        for name in (n for n in self.parameters if n not in covered):
            path = name.rpartition(".")[0].partition(".parametrizations.")[0]  # a layer with weight norm is one
            while path and not _has_forward(model.get_submodule(path)):  # a list or dict of parameters
                path = path.rpartition(".")[0]
            users.setdefault(path, {})[name.removeprefix(f"{path}.")] = name
        for path, module in model.named_modules():
            if path in users:
                fallback.check_draws(path, module)
                if any(map(is_fsdp, module.modules())):
                    raise UnsupportedModuleError(
                        f"These belong to {path}, which is sharded and runs again for each record: "
                        f"{', '.join(users[path].values())}. Freeze them, or start plain data parallel."
                    )
                yield Site(path, module, users[path], fallback.forward, self)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run modules as they are inside the context."""
        for site in reversed(self.sites):
            site.remove()
        try:
            yield
        finally:
            for site in self.sites:
                site.install()

    def add(self, site: Site, name: str, contribution: Contribution) -> None:
        size = contribution.num_records
        if size != self.num_records:
            raise UnsupportedModuleError(
                f"The gradient at {site.name} ({type(site.module).__name__}) has first dimension {size}, but the "
                f"batch has {self.num_records} records: the layer mixes, flattens or reorders records, so one "
                "record's gradient cannot be told from another's. Freeze its parameters, or train others with LoRA."
            )
        self.receive(name, contribution if self.units is None else self.units.group_by_unit(contribution))

    def _rows_of_records(self, num_records: int, rows_per_record: int) -> None:
        """Tell the engine that the layers see so many rows of each record; these add up before anything else."""
        if self.num_records == num_records:  # a forward that is run again finds it done
            units = Units([1] * num_records) if self.units is None else self.units
            self.units = Units([size * rows_per_record for size in units.sizes])
            self.num_records = num_records * rows_per_record

    def copy_of(self, parameter: torch.Tensor, kind: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A copy of a parameter (in autocast's dtype, say) that all its uses in a step share."""
        key = (id(parameter), kind)
        if key not in self._copies:
            self._copies[key] = make()
        return self._copies[key]

    @contextlib.contextmanager
    def recording(self, num_records: int, receive: Receiver, units: Units | None = None) -> Iterator[Capture]:
        """Patch the sites inside the context; the backward calls `receive(parameter name, contribution)`.

        Args:
            num_records: rows of the batch.
            receive: takes the contributions, one per row, or one per unit if `units` is given.
            units: rows that belong together and add up first; None if each row stands for itself.
        """
        self.num_records, self.receive, self.units = num_records, receive, units
        with flattening.choices(self._model, self._rows_of_records):
            for site in self.sites:
                site.install()
            try:
                yield self
            finally:
                for site in self.sites:
                    site.remove()
            self.receive, self.units = _not_recording, None
            self._copies.clear()
