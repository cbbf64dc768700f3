"""Refusals of preconditioners, filters and optimizers that do not go together or lack their inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_dpopt.common.checks import check_choice, check_count, check_mapping, check_positive
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.refusal import Refusal, raise_first
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.optimizers import optimizer_from_arguments
from hf_dpopt.huggingface.refusals.data import shared_rows
from hf_dpopt.optim import OPTIMIZERS, NoiseAwareOptimizer
from hf_dpopt.plan.options import FILTER_DTYPES, OPTIONS
from hf_dpopt.postprocess import Filter, IndependentNoise, Postprocess, as_postprocess
from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.preclip import Preclip, make_preclip

MAX_SHARED = 0.1  # of the public records, that the training set may hold too: short texts repeat


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The stages that arguments and the trainer's parameters ask for, as far as they can be made without a model."""

    args: Any
    preclip: Preclip
    own: Preclip | None
    optimizer: torch.optim.Optimizer | None  # the user's, or one like it; None for one of transformers'
    is_given: bool  # by the user, not by name
    filter: Any
    postprocess: Sequence[Any]
    public_dataset: Any
    train_dataset: Any

    @property
    def corrects(self) -> bool:
        """Whether the optimizer subtracts the variance of the noise."""
        return isinstance(self.optimizer, NoiseAwareOptimizer) and self.optimizer.subtracts_noise

    @property
    def inner(self) -> Filter | None:
        """The filter inside of the optimizer."""
        return self.optimizer.filter if isinstance(self.optimizer, NoiseAwareOptimizer) else None

    @property
    def chain(self) -> list[Postprocess]:
        """Maps of the released gradient before the optimizer, in their order."""
        first = [] if self.filter is None or self.inner is not None else [self.filter]
        return [as_postprocess(stage) for stage in (*first, *self.postprocess)]

    @property
    def adaptive(self) -> list[str]:
        """Filters that correct for the noise."""
        stages = [*self.chain, *([] if self.inner is None else [self.inner])]
        return [stage.label for stage in stages if _needs_level(stage)]

    @property
    def told_nothing(self) -> list[str]:
        """Filters that correct for the noise, behind a map that leaves it with no one level."""
        found, is_known = [], True
        for stage in (*self.chain, *([] if self.inner is None else [self.inner])):
            if _needs_level(stage) and not is_known:
                found.append(stage.label)
            is_known = is_known and stage.gain is not None
        return found


def _needs_level(stage: Postprocess | None) -> bool:
    return isinstance(stage, Filter) and stage.needs_noise_level


def check_stages(args: Any, inputs: TrainerInputs) -> None:
    """Refuse preconditioners, filters and optimizers that do not go together, or lack their inputs."""
    own = inputs.preclip
    for name in ("public_mirror_descent", "average_iterate"):
        if getattr(args, name) is not None:
            check_choice(name, getattr(args, name), OPTIONS[name].metadata["choices"])
    _check_filter_options(args.filter_kwargs)
    check_count("public_batch_size", args.public_batch_size)
    check_positive(ball_radius=args.ball_radius)
    if own is not None and not isinstance(own, Preclip):
        raise DPConfigError(
            f"preclip={own!r} is no preconditioner. Give an object such as ScaleThenPrivatize(scale=..), or one of "
            "a class of your own that extends hf_dpopt.preclip.Preclip; names go to the argument preconditioner."
        )
    for stage in inputs.postprocess:
        if not (callable(stage) and hasattr(stage, "state_dict") and hasattr(stage, "load_state_dict")):
            raise DPConfigError(
                f"postprocess={stage!r} is no map of gradients. Give objects with __call__, state_dict and "
                "load_state_dict (see hf_dpopt.postprocess.Postprocess)."
            )
    asked = _request(args, inputs)
    raise_first(_on_what_is_given_twice(asked))
    raise_first(_on_public_records(asked))
    raise_first(_on_noise_level(asked))


def _request(args: Any, inputs: TrainerInputs) -> _Asked:
    low_pass = None
    if args.filter is not None:
        if not isinstance(args.filter, str):
            raise DPConfigError(
                f"filter={args.filter!r} is no text. Use 'second_order' or 'butterworth:2:0.1', say; an object "
                "goes to the trainer's postprocess, or into an optimizer."
            )
        low_pass = LowPassFilter.parse(args.filter, noise=IndependentNoise())
    optimizer, cls_and_kwargs = (inputs.optimizers or (None, None))[0], inputs.optimizer_cls_and_kwargs
    name = args.optimizer_name()
    is_given = optimizer is not None or cls_and_kwargs is not None
    is_ours = cls_and_kwargs is not None and isinstance(cls_and_kwargs[0], type)  # it may be a function that makes one
    if cls_and_kwargs is not None and is_ours and issubclass(cls_and_kwargs[0], NoiseAwareOptimizer):
        optimizer = cls_and_kwargs[0](_parameters(), **{"lr": args.learning_rate, **cls_and_kwargs[1]})
    elif not is_given and name is not None:
        cls, options = optimizer_from_arguments(name, args)
        decay = {"weight_decay": args.weight_decay, "filter": low_pass}
        optimizer = cls(_parameters(), **options, **decay)  # refuses what is out of range
    return _Asked(
        args=args,
        preclip=inputs.preclip or make_preclip(args.preconditioner_name(), _options(args)),
        own=inputs.preclip,
        optimizer=optimizer,
        is_given=is_given,
        filter=low_pass,
        postprocess=inputs.postprocess,
        public_dataset=inputs.public_dataset,
        train_dataset=inputs.train_dataset,
    )


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(1))]


def _options(args: Any) -> Mapping[str, Any]:
    options = check_mapping("preconditioner_kwargs", args.preconditioner_kwargs or {}, '{"clipping_norm": 5}')
    by_quantile = args.clipping_quantile is not None and args.preconditioner_name() == "quantile"
    quantile = {"quantile": args.clipping_quantile} if by_quantile else {}
    return {**options, **quantile}


def _check_filter_options(options: Any) -> None:
    given = check_mapping("filter_kwargs", options or {}, '{"dtype": "bfloat16"}')
    unknown = sorted(given.keys() - {"dtype"})
    if unknown:
        raise DPConfigError(f"`filter_kwargs` has {', '.join(unknown)}, which no filter knows. It takes: dtype.")
    if "dtype" in given:
        check_choice("filter_kwargs dtype", given["dtype"], FILTER_DTYPES)


def _on_what_is_given_twice(asked: _Asked) -> Iterator[Refusal]:
    args = asked.args
    yield (
        asked.own is not None and args.preconditioner_name() != "none",
        f"Two preconditioners were given: preclip={type(asked.own).__name__} and "
        f"preconditioner={args.preconditioner_name()!r}.",
        "Give one of them.",
    )
    yield (
        asked.is_given and args.optim in OPTIMIZERS,
        f"Two optimizers were given: --optim {args.optim} and one that the trainer was called with.",
        "Give one of them.",
    )
    yield (
        asked.is_given and args.filter is not None and isinstance(asked.optimizer, NoiseAwareOptimizer),
        f"--filter {args.filter} belongs into the optimizer, and {type(asked.optimizer).__name__} was "
        "made by the caller.",
        "Give the filter to the optimizer: filter=LowPassFilter.parse(..).",
    )
    yield (
        args.average_iterate is not None and bool(args.load_best_model_at_end),
        "`load_best_model_at_end` would replace the average by single iterates, which are evaluated on the way.",
        "Leave out one of load_best_model_at_end and average_iterate.",
    )


def _on_public_records(asked: _Asked) -> Iterator[Refusal]:
    preclip, public, args = asked.preclip, asked.public_dataset, asked.args
    yield (
        preclip.needs_public_records and public is None,
        f"preconditioner={preclip.name!r} learns from public records, and there are none.",
        "Pass public_dataset to the trainer; without public records use --preconditioner dp2_rmsprop.",
    )
    yield (
        args.public_mirror_descent is not None and public is None,
        f"public_mirror_descent={args.public_mirror_descent!r} mixes gradients of public records in.",
        "Pass public_dataset to the trainer.",
    )
    if public is None:
        return
    shared = shared_rows(public, asked.train_dataset)
    yield (
        shared > MAX_SHARED * len(public),
        f"{shared} of the {len(public)} records of public_dataset are in the training dataset, whose records are "
        "private: their gradients would be used un-noised.",
        "Pass records that are public, or leave it out.",
    )
    needed = preclip.num_public_records or args.public_batch_size
    yield (
        len(public) < needed,
        f"A draw of {needed} public records was asked for, and public_dataset has {len(public)}.",
        "Lower public_batch_size (or rank and num_public of the subspace), or give more public records.",
    )


def _on_noise_level(asked: _Asked) -> Iterator[Refusal]:
    """Refusals of optimizers and filters that correct for the noise without knowing its level."""
    args, preclip, optimizer = asked.args, asked.preclip, type(asked.optimizer).__name__
    yield (
        not preclip.keeps_one_noise_level and (asked.corrects or bool(asked.adaptive)),
        "The noise that this preconditioner leaves differs from coordinate to coordinate, and "
        f"{optimizer if asked.corrects else asked.adaptive[0] if asked.adaptive else ''} corrects for one level.",
        "Use --optim adamw_torch, dp_adamw or sgd, and a fixed filter.",
    )
    silent = [stage.label for stage in map(as_postprocess, asked.postprocess) if stage.gain is None]
    yield (
        asked.corrects and bool(silent),
        f"{', '.join(silent)} changes the noisy gradient, and {optimizer} has to know the noise level in it.",
        "Give a map that multiplies all coordinates by one number the attribute gain; for others use adamw_torch.",
    )
    yield (
        bool(asked.told_nothing),
        f"{', '.join(asked.told_nothing)} corrects for the noise, and a map before it changes the noisy gradient: its "
        "noise has no one level there.",
        "Put the filter that corrects first, and leave one out if there are two.",
    )
    yield (
        bool(args.max_grad_norm) and (asked.corrects or _needs_level(asked.inner)),
        f"max_grad_norm={args.max_grad_norm} rescales the noisy gradient, and {optimizer} would subtract the variance "
        "of a noise that is not there.",
        "Leave max_grad_norm at 0 (the clip of privacy is clipping_norm), or use --optim adamw_torch.",
    )
