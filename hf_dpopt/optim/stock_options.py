"""Optimizers by the names and options of Hugging Face's command line."""

from __future__ import annotations

import inspect
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from hf_dpopt.common.checks import check_choice, check_known
from hf_dpopt.common.errors import DPConfigError, shown
from hf_dpopt.optim import OPTIMIZERS

# Constructor argument -> the fields it comes from. The trainer gives weight_decay per group, and the last two itself.
FIELDS = {
    "lr": "learning_rate",
    "betas": "adam_beta1, adam_beta2",
    "weight_decay": "weight_decay",
    "noise": "the noise mechanism",
    "filter": "the filter options",
}


def optimizer_from_arguments(name: str, args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and constructor arguments of the optimizer called `name`.

    Args:
        name: key of `OPTIMIZERS`.
        args: `transformers.TrainingArguments`, or what has the fields learning_rate, adam_beta1, adam_beta2,
            adam_epsilon and optim_args, e.g. ``"rank=8,refresh_every=100"``. The adam_* fields are used by the
            optimizers with betas; the others take eps from optim_args.

    Raises:
        DPConfigError: for an unknown name or key, a key that has a field of its own, or a value of another type.
    """
    check_choice("optim", name, OPTIMIZERS)
    cls = OPTIMIZERS[name]
    hints = get_type_hints(cls.__init__)
    parameters = {n: p for n, p in inspect.signature(cls).parameters.items() if n != "params"}
    fields = dict(FIELDS)
    kwargs: dict[str, Any] = {"lr": args.learning_rate}
    if "betas" in parameters:
        fields["eps"] = "adam_epsilon"
        kwargs |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    allowed = [n for n in parameters if n not in fields]
    for key, text in pairs_of(args.optim_args):
        if key in kwargs and key in allowed:
            raise DPConfigError(f"`optim_args` has {key} twice. Give it once.")
        if key in fields:
            raise DPConfigError(f"`optim_args` has {key}={text}, which {name} takes from {fields[key]}. Set it there.")
        check_known(name, [key], allowed)
        kwargs[key] = _read_value(key, text, hints[key])
    missing = [n for n in allowed if parameters[n].default is inspect.Parameter.empty and n not in kwargs]
    if missing:
        raise DPConfigError(f"{name} needs {', '.join(missing)}. Give it as --optim_args '{missing[0]}=...'.")
    return cls, kwargs


def pairs_of(optim_args: str | None) -> list[tuple[str, str]]:
    """The options in ``"rank=8,scale=1"``.

    Raises:
        DPConfigError: for a piece that is no pair.
    """
    pieces = optim_args.replace(" ", "").split(",") if optim_args else []
    for piece in pieces:
        if piece.count("=") != 1 or piece.startswith("=") or piece.endswith("="):
            raise DPConfigError(
                f"`optim_args` has {shown(piece)}, which is no key=value. Use for instance 'rank=8,scale=1'."
            )
    return [(key, text) for key, _, text in (piece.partition("=") for piece in pieces)]


def _read_value(key: str, text: str, hint: Any) -> Any:
    """The value a constructor argument of that type is given as text."""
    if get_origin(hint) in (Union, types.UnionType):  # optional
        if text.lower() == "none":
            return None
        hint = next(t for t in get_args(hint) if t is not types.NoneType)
    if get_origin(hint) is Literal:
        return text  # the constructor knows the choices
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise DPConfigError(f"`optim_args` has {key}={text}. Use true or false.")
        return text.lower() == "true"
    try:
        return hint(text)
    except ValueError:
        kind = "a whole number" if hint is int else "a number"
        raise DPConfigError(f"`optim_args` has {key}={text}, which is not {kind}.") from None
