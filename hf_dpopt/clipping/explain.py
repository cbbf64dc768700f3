"""Explanation of what clipping does with each trained parameter and what it costs; from shapes, not from records."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator

from torch import nn

from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.clipping.rules import conv1d, embedding, fallback, linear
from hf_dpopt.clipping.site import Site

MATMULS = (linear.forward, conv1d.forward)
LOOK_UPS = (embedding.forward, embedding.subclass)


def explain(engine: ClippingEngine) -> str:
    """One line per kind of parameter: name (x number of layers), class of its layer, shape, form of its norm.

    The form depends on the tokens T of a physical batch (its longest record): a matmul weight of P x Q is
    materialised per record where that takes no more memory than its inputs and output gradients, P Q <= T (P + Q),
    and else its norm is taken from two T x T Gram matrices.
    """
    groups: dict[tuple[str, str, str], list[str]] = {}
    tied = _used_more_than_once(engine.capture.sites)
    for site, attribute, name in _parameters(engine.capture.sites):
        p = engine.parameters[name]
        form = _form(site, attribute, p)
        if name in tied:
            form += "; used more than once, with the cross terms of its uses"
        layer = f"{type(site.module).__name__} {'x'.join(map(str, p.shape))}"
        groups.setdefault((re.sub(r"\d+", "*", name), layer, form), []).append(name)
    lines = [f"Clipping by {engine.name}:"]
    for (pattern, layer, form), names in groups.items():
        what = names[0] if len(set(names)) == 1 else f"{pattern} (x{len(set(names))})"
        lines.append(f"  {what}: {layer}: {form}")
    return "\n".join(lines)


def unruled(engine: ClippingEngine) -> list[str]:
    """Names of layers that the general fallback runs."""
    sites = (site for site in engine.capture.sites if inspect.unwrap(site.rule) is fallback.forward)
    return [f"{site.name} ({type(site.module).__name__})" for site in sites]


def _parameters(sites: Iterable[Site]) -> Iterator[tuple[Site, str, str]]:
    for site in sites:
        for attribute, name in site.parameter_names.items():
            yield site, attribute, name


def _used_more_than_once(sites: Iterable[Site]) -> set[str]:
    seen: set[str] = set()
    return {name for _, _, name in _parameters(sites) if name in seen or seen.add(name)}  # type: ignore[func-returns-value]


def _form(site: Site, attribute: str, p: nn.Parameter) -> str:
    rule = inspect.unwrap(site.rule)
    if rule is fallback.forward:
        return "no rule: one vector-Jacobian product per record: a second forward, B copies of the gradient"
    if rule in LOOK_UPS:
        return "sparse: only the rows that a record looks up"
    if rule in MATMULS and attribute == "weight":
        rows, columns = p.shape
        switch = linear.materialised_from(rows, columns)
        return f"Gram matrices below {switch} tokens, materialised per record from there on"
    return f"materialised per record, {p.numel():,} values each"
