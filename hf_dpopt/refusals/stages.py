"""What stands before the clip and after the noise, and what it needs to know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_dpopt.errors import DPConfigError
from hf_dpopt.optim import OPTIMIZERS, from_arguments
from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.preclip import Preclip, make_preclip
from hf_dpopt.refusals.data import is_training_data
from hf_dpopt.refusals.table import Refusal, raise_first

NEED_NOISE = ("dp_adam_bc",)


def check_stages(args: Any, own: Preclip | None, given: Mapping[str, Any], public_dataset: Any) -> None:
    """Refuses preconditioners, filters and optimizers that do not go together, or lack what they learn from."""
    raise_first(_on_stages(args, own, given, public_dataset))
    if args.filter is not None:
        LowPassFilter.parse(args.filter, noise=IndependentNoise())
    name = args.optimizer_name()
    if name is not None and not any(given.get("optimizers") or ()):
        cls, options = from_arguments(name, args)
        cls([_parameter()], **options)  # refuses what is out of range


def _parameter() -> Any:
    import torch

    return torch.nn.Parameter(torch.zeros(1))


def _on_stages(args: Any, own: Preclip | None, given: Mapping[str, Any], public_dataset: Any) -> Iterator[Refusal]:
    yield (
        own is not None and args.preconditioner != "none",
        f"Two preconditioners were given: preclip={type(own).__name__} and preconditioner={args.preconditioner!r}.",
        "Give one of them.",
    )
    preclip = own or make_preclip(args.preconditioner, _options(args))
    yield (
        preclip.name == "adadps" and public_dataset is None,
        "preconditioner='adadps' takes its scale from public records, and there are none.",
        "Pass public_dataset to the trainer; without public records use --preconditioner dp2_rmsprop.",
    )
    yield (
        public_dataset is not None and is_training_data(public_dataset, given.get("train_dataset")),
        "public_dataset is the training dataset, whose records are private: their gradients would be used un-noised.",
        "Pass records that are public, or leave it out.",
    )
    splits_noise = getattr(preclip, "unscale", False) or getattr(preclip, "variant", "") == "noise_first"
    yield (
        splits_noise and (args.optimizer_name() in NEED_NOISE or str(args.filter).startswith("adaptive")),
        "The noise that this preconditioner leaves differs from coordinate to coordinate, and "
        f"{args.optimizer_name() or args.filter} corrects for one level.",
        "Use --optim adamw_torch, dp_adamw or sgd, and a fixed filter.",
    )
    given_optimizer = (given.get("optimizers") or (None, None))[0]
    yield (
        given_optimizer is not None and args.optimizer_name() in OPTIMIZERS and args.filter is None,
        f"Two optimizers were given: --optim {args.optimizer_name()} and {type(given_optimizer).__name__}.",
        "Give one of them.",
    )


def _options(args: Any) -> Mapping[str, Any]:
    options = args.preconditioner_kwargs or {}
    if not isinstance(options, Mapping):
        raise DPConfigError(
            f"preconditioner_kwargs={options!r} is no mapping of names to values. Use JSON on a command line."
        )
    return options
