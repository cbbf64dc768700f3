"""Options: of the trainers, of a head, of plans and of advice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from hf_dpopt import (
    PrivacyConfig,
    TrainingJob,
    advise,
    make_plan,
)
from hf_dpopt.convex import HeadRun, HeadTrainingArguments, SubspaceHeadConfig, make_head_plan, make_subspace_plan
from hf_dpopt.noise import MECHANISMS
from hf_dpopt.noise.registry import STREAM_OPTIONS
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.plan.options import GROUPS, HeadOptions
from hf_dpopt.preclip import PRECLIPS
from hf_dpopt.sampling import SAMPLERS
from tests import tiny
from tests.fuzz.outcome import Case
from tests.fuzz.values import BAD_JSON, TEXTS, anything, numbers, shown

OWN = tuple(field.name for group in GROUPS for field in dataclasses.fields(group))
THEIRS = (  # options of transformers that a plan or a step depends on
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_steps", "lr_scheduler_type", "optim",
    "optim_args", "label_smoothing_factor", "logging_steps", "seed", "dataloader_num_workers", "output_dir",
    "lr_scheduler_kwargs", "save_steps", "bf16", "gradient_checkpointing_kwargs",
)  # fmt: skip
FILTERS = (
    "momentum", "first_order_v1", "second_order", "butterworth:2:0.1", "butterworth:0:0.1", "butterworth:99:0.1",
    "butterworth:1000000:0.1", "butterworth:2:0", "butterworth:2:1", "butterworth:2:nan", "butterworth:2:1e-300",
    "butterworth:-1:0.1", "butterworth:2", "butterworth", "butterworth:x:y", "chebyshev:2:0.1:3", "chebyshev:2:0.1:0",
    "chebyshev:2:0.1:inf", "chebyshev:2:0.1:1e300", "chebyshev:30:0.001:1e-9", "b=0.1;a=-0.9", "b=;a=", "b=nan;a=0",
    "b=0.1;a=-1.5", "b=1e300,1e300;a=0", "b=0;a=0", "b=0.1", "a=-0.9", "adaptive:8", "adaptive:0", "adaptive:1000000",
    "adaptive:8:0", "adaptive:x", "adaptive:-3", "adaptive_as_printed:4:2", "adaptive_as_printed:4:1000000000", ":::",
    "b=" + ",".join(["0.001"] * 300) + ";a=0", "none", "NONE",
)  # fmt: skip
FILES = ("private_state_dir", "output_dir", "earlier_runs")  # never a place outside the case's folder


def train(folder: Path, arguments: dict[str, Any]) -> None:
    """Make arguments and a trainer as a script would, and take one step.

    Args:
        folder: holds output_dir and keys.
        arguments: options, and parameters of the trainer.
    """
    given = {"callbacks": [tiny.StopAt(1)], **arguments}
    made = tiny.trainer(given.pop("output_dir", folder / "out"), **given)
    try:
        made.train()
    finally:
        if getattr(made, "_run", None) is not None:
            made._session.run.close()


def options_case() -> st.SearchStrategy[Case]:
    """One to three options of a trainer with any values."""
    names = st.sampled_from((*OWN, *OWN, *THEIRS))
    drawn = st.dictionaries(names, anything(), min_size=1, max_size=3)
    return drawn.map(lambda given: trainer_case("options", _placed(given)))


def numbers_case() -> st.SearchStrategy[Case]:
    """One to three numeric options with numbers."""
    names = ("target_epsilon", "target_delta", "noise_multiplier", "clipping_norm", "expected_batch_size", "max_steps",
             "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
             "noise_restart_every", "amplification_samples", "records_per_user", "max_grad_norm",
             "ball_radius", "public_batch_size", "weight_decay", "adam_beta1")  # fmt: skip

    def case(given: dict[str, Any]) -> Case:
        if "target_epsilon" in given and "noise_multiplier" not in given:
            given = {**given, "noise_multiplier": None}
        if "num_train_epochs" in given and "max_steps" not in given:
            given = {**given, "max_steps": -1}
        return trainer_case("options", given)

    return st.dictionaries(st.sampled_from(names), numbers(), min_size=1, max_size=3).map(case)


def noise_case() -> st.SearchStrategy[Case]:
    """A mechanism, its options, a sampler and a length."""
    keys = sorted({key for one in MECHANISMS.values() for key in one.options} | set(STREAM_OPTIONS) | {"unknown"})
    values = st.one_of(
        numbers(), anything(), st.lists(numbers(), max_size=4), st.lists(st.floats(0.01, 0.99), max_size=4)
    )

    def case(mechanism: str, options: Any, sampling: str, steps: Any, more: dict[str, Any]) -> Case:
        given = {
            "noise_mechanism": mechanism,
            "noise_kwargs": options,
            "sampling": sampling,
            "max_steps": steps,
            **more,
        }
        return trainer_case("mechanisms", given)

    kwargs = st.one_of(st.dictionaries(st.sampled_from(keys), values, max_size=2), st.sampled_from(BAD_JSON))
    steps = st.sampled_from((1, 2, 6, 40, 300, 3000, 2 * 10**7, 10**9, 10**15))
    more = st.sampled_from(
        ({}, {}, {"noise_restart_every": 3}, {"noise_restart_every": 10**9}, {"target_epsilon": 1.0, "noise_multiplier": None},
         {"preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 2}, "noise_at_changes": "restart"},
         {"adjacency": "replace_one"}, {"expected_batch_size": 64}, {"privacy_unit": "user"})
    )  # fmt: skip
    return st.builds(
        case,
        st.sampled_from((*MECHANISMS, "auto")),
        kwargs,
        st.sampled_from((*SAMPLERS, "auto", "auto", "auto")),
        steps,
        more,
    )


def stages_case() -> st.SearchStrategy[Case]:
    """A preconditioner, a filter or an optimizer with options."""
    keys = sorted({f.name for cls, _ in PRECLIPS.values() for f in dataclasses.fields(cls)} | {"unknown"})
    kwargs = st.one_of(
        st.dictionaries(st.sampled_from(keys), st.one_of(numbers(), anything()), max_size=2), st.sampled_from(BAD_JSON)
    )
    before = st.builds(
        lambda n, o: {"preconditioner": n, "preconditioner_kwargs": o}, st.sampled_from(tuple(PRECLIPS)), kwargs
    )
    after = st.builds(lambda f: {"filter": f}, st.sampled_from(FILTERS))
    words = [f"{key}={value}" for key in ("rank", "refresh_every", "alpha", "scale", "variance_floor", "eps", "unbiased", "inner")
             for value in ("0", "-1", "nan", "inf", "1e300", "x", "", "3", "1000000000", "0.5")]  # fmt: skip
    optim = st.builds(
        lambda n, a: {"optim": n, "optim_args": a},
        st.sampled_from((*OPTIMIZERS, "adamw_torch", "sgd", "adafactor", "nope", "lomo")),
        st.one_of(st.none(), st.lists(st.sampled_from(words), max_size=2).map(",".join), st.sampled_from(TEXTS)),
    )
    return st.one_of(before, after, optim, st.builds(lambda a, b: a | b, before, after)).map(
        lambda given: trainer_case("stages", given)
    )


def users_case() -> st.SearchStrategy[Case]:
    """Options of users, on records that name them or do not."""
    names = ("records_per_user", "local_training",
             "expected_batch_size", "user_weighting", "user_id_column")  # fmt: skip

    def case(given: dict[str, Any], sampling: str, column: Any, ids: Any) -> Case:
        rows = [{**row, "who": ids[i % len(ids)]} if ids else row for i, row in enumerate(tiny.records())]
        chosen = {
            "privacy_unit": "user",
            "user_id_column": column,
            "expected_batch_size": 3,
            "sampling": sampling,
            **given,
        }
        return trainer_case("users", chosen, train_dataset=rows, note=f"ids {shown(ids[:3])}")

    ids = st.sampled_from(
        (
            (0, 1, 2, 3, 4, 5, 6, 7),
            ("a", "b"),
            (None, 1),
            (float("nan"), 1.0),
            ([1], [2]),
            (),
            ({}, 1),
            (1, "1"),
            (True, 1),
        )
    )
    return st.builds(
        case, st.dictionaries(st.sampled_from(names), st.one_of(numbers(), anything()), max_size=2),
        st.sampled_from(("auto", "poisson", "capped_poisson", "fixed_order")),
        st.sampled_from(("who", "who", "who", "missing", None, 5, "input_ids")), ids,
    )  # fmt: skip


def plans_case() -> st.SearchStrategy[Case]:
    """Plans of any size, made without a trainer."""
    sizes = st.sampled_from(
        (1, 2, 64, 10**5, 10**8, 10**12, 10**30, 0, -5, 2.5, None, "64", float("nan"), float("inf"), True)
    )
    steps = st.sampled_from((1, 10, 1000, 10**5, 2 * 10**7, 10**9, 10**30, 0, -1, 1e6, None, "9", float("nan")))
    config = st.dictionaries(
        st.sampled_from(("target_epsilon", "target_delta", "noise_multiplier", "clipping_norm", "adjacency", "sampling",
                         "noise_mechanism", "noise_kwargs", "amplification_samples", "allow_large_delta", "privacy_unit")),
        st.one_of(numbers(), anything(), st.sampled_from((*MECHANISMS, *SAMPLERS, "zero_out", "replace_one"))), max_size=2,
    )  # fmt: skip
    batch = st.sampled_from((1, 64, 1024, 10**6, 10**9, 0, -1, 3.5, "8", None))

    def plan(given: dict[str, Any], num_examples: Any, num_steps: Any, batch: Any) -> Case:
        noise = {} if {"target_epsilon", "noise_multiplier"} & given.keys() else {"noise_multiplier": 1.0}
        values = {"expected_batch_size": batch, **noise, **given}

        def run(folder: Path) -> None:
            made = make_plan(PrivacyConfig(**values), num_examples=num_examples, num_steps=num_steps)
            made.record.to_json()

        return Case(
            "plans", f"make_plan({shown(values)}, num_examples={num_examples!r}, num_steps={num_steps!r})", run
        )

    jobs = st.dictionaries(
        st.sampled_from(("num_units", "target_epsilon", "target_delta", "passes", "kind", "objective", "model_size", "batch")),
        st.one_of(numbers(), anything()), min_size=1, max_size=2,
    )  # fmt: skip

    def job(given: dict[str, Any]) -> Case:
        known = {f.name for f in dataclasses.fields(TrainingJob)}
        values = {"num_units": 10_000, "target_epsilon": 8.0, **{k: v for k, v in given.items() if k in known}}
        return Case("plans", f"advise(TrainingJob({shown(values)}))", lambda folder: advise(TrainingJob(**values)))

    return st.one_of(
        st.builds(plan, config, sizes, steps, batch),
        st.builds(plan, config, sizes, steps, batch),
        jobs.map(job),
    )


def heads_case() -> st.SearchStrategy[Case]:
    """Options of a convex head, trained on a few features."""
    own = tuple(f.name for f in dataclasses.fields(HeadOptions))
    names = st.sampled_from((*own, *own, "max_steps", "num_train_epochs", "expected_batch_size", "target_epsilon", "target_delta",
                             "noise_multiplier", "learning_rate", "preconditioner", "preconditioner_kwargs", "noise_rng", "lr_scheduler_type"))  # fmt: skip

    def case(given: dict[str, Any]) -> Case:
        values = {
            "head_radius": 1.0,
            "feature_norm": 1.0,
            "max_steps": 2,
            "noise_multiplier": 1.0,
            "expected_batch_size": 8,
            **given,
        }

        def run(folder: Path) -> None:
            args = HeadTrainingArguments(output_dir=str(folder / "out"), use_cpu=True, report_to="none", **values)
            config = args.head_config(40)
            in_subspace = isinstance(config, SubspaceHeadConfig)
            plan = (make_subspace_plan if in_subspace else make_head_plan)(config, num_examples=40)
            generator = torch.Generator().manual_seed(0)
            features = 0.1 * torch.rand(40, 4, generator=generator)
            public = (0.1 * torch.rand(20, 4, generator=generator), torch.arange(20) % 2)
            norm = float(config.feature_norm)
            scaled = [one * min(1.0, norm) for one in (features, public[0])]
            if config.num_steps <= 200:
                more = {"public": (scaled[1], public[1])} if in_subspace else {}
                run = HeadRun(plan, output_dir=folder / "out", noise_rng=args.noise_rng)
                run.train(scaled[0], torch.arange(40) % 2, 2, **more)

        return Case("heads", shown(given), run)

    return st.dictionaries(names, st.one_of(numbers(), anything(), st.just("subspace")), min_size=1, max_size=3).map(
        case
    )


def trainer_case(family: str, given: dict[str, Any], *, note: str = "", **more: Any) -> Case:
    """A case that takes a step with these options; `more` are parameters of the trainer."""
    text = ", ".join([f"{name}={shown(value)}" for name, value in given.items()] + ([note] if note else []))
    return Case(family, text, lambda folder: train(folder, {**given, **more}))


def _placed(given: dict[str, Any]) -> dict[str, Any]:
    """Without texts that would name a place outside the case's folder."""
    return {
        k: v for k, v in given.items() if k not in FILES or not isinstance(v, (str, list, bytes, tuple)) or not v
    } or {"seed": -1}
