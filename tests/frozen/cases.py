"""What is frozen: plans, statements, noise streams, private steps and ledgers, as plain JSON values.

Nothing here is secret or random: keys are fixed, clocks and names of keys are left out.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import MECHANISMS
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.report.facts import RunFacts
from hf_dpopt.report.statement import render_statement
from hf_dpopt.sampling import SAMPLERS
from tests.helpers import tiny

KEY = "5a" * 32
NUM_STEPS = 10
NUM_EXAMPLES, PLANNED_STEPS = 2000, 60
# certificates are drawn at random, so one case alone has one, without its numbers
BASE = {"noise_multiplier": 1.0, "expected_batch_size": 50, "target_delta": 1e-4, "amplification_samples": 0}

# Cheap to tune, and every mechanism is here; a new one is added to the file by `python -m tests.frozen`.
OPTIONS: dict[str, dict[str, Any]] = {"blt": {"num_buffers": 2}, "banded": {"num_bands": 4}}

VARIANTS: dict[str, dict[str, Any]] = {
    "target epsilon 8": {"noise_multiplier": None, "target_epsilon": 8.0},
    "target epsilon 0.5": {"noise_multiplier": None, "target_epsilon": 0.5},
    "target epsilon 3, blt": {"noise_multiplier": None, "target_epsilon": 3.0, "noise_mechanism": "blt"},
    "target epsilon 2, banded": {"noise_multiplier": None, "target_epsilon": 2.0, "noise_mechanism": "banded"},
    "target epsilon 8, auto": {"noise_multiplier": None, "target_epsilon": 8.0, "noise_mechanism": "auto"},
    "default delta": {"target_delta": None},
    "no noise": {"noise_multiplier": 0.0},
    "fixed key": {"unsafe_fixed_noise_key": KEY},
    "zero out": {"adjacency": "zero_out", "sampling": "poisson"},
    "replace one": {"adjacency": "replace_one", "sampling": "fixed_order"},
    "per layer": {"clipping": "per_layer"},
    "automatic": {"clipping": "automatic"},
    "blocks": {"privacy_unit": "block"},
    "users": {"privacy_unit": "user", "user_id_column": "author", "records_per_user": 4},
    "users, mean": {
        "privacy_unit": "user", "user_id_column": "author", "records_per_user": 4, "user_weighting": "mean",
        "noise_mechanism": "blt", "sampling": "fixed_order",
    },
    "users, records sampled": {
        "privacy_unit": "user", "user_id_column": "author", "records_per_user": 4, "sampling": "capped_poisson",
    },
    "users, local": {
        "privacy_unit": "user", "user_id_column": "author", "records_per_user": 4,
        "local_training": {"learning_rate": 0.1, "batch_size": 2, "epochs": 1},
    },
    "restarted blt": {"noise_mechanism": "blt", "noise_restart_every": 20},
    "restarted tree": {"noise_mechanism": "tree", "noise_restart_every": 16},
    "DP2": {"preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 20}},
    "DP2 adagrad, blt": {
        "preconditioner": "dp2_adagrad", "preconditioner_kwargs": {"delay": 20}, "noise_mechanism": "blt",
    },
    "DP2 adagrad, blt, anew": {
        "preconditioner": "dp2_adagrad", "preconditioner_kwargs": {"delay": 20}, "noise_mechanism": "blt",
        "noise_at_changes": "restart",
    },
    "quantile": {"preconditioner": "quantile"},
    "one query, nu": {"preconditioner": "one_query", "noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.05}},
    "AdaDPS": {"preconditioner": "adadps"},
    "public subspace": {"preconditioner": "subspace"},
    "balls in bins, certified": {
        "noise_mechanism": "blt", "sampling": "balls_in_bins", "noise_multiplier": 4.0, "target_delta": 4e-4,
        "amplification_samples": 200_000,
    },
}  # fmt: skip


def plans() -> dict[str, Callable[[], PrivacyPlan]]:
    """Name -> makes it; every pair of a mechanism and a sampler, and variants of one."""
    made = {}
    for mechanism, sampling in itertools.product(MECHANISMS, SAMPLERS):
        config = {"noise_mechanism": mechanism, "sampling": sampling, "noise_kwargs": OPTIONS.get(mechanism, {})}
        if sampling == "capped_poisson":
            config |= {"privacy_unit": "user", "user_id_column": "author", "records_per_user": 4}
        made[f"{mechanism}, {sampling}"] = config
    made |= VARIANTS
    return {name: _maker(config) for name, config in made.items()}


def _maker(config: dict[str, Any]) -> Callable[[], PrivacyPlan]:
    return lambda: make_plan(PrivacyConfig(**(BASE | config)), num_examples=NUM_EXAMPLES, num_steps=PLANNED_STEPS)


def plan_outputs(make: Callable[[], PrivacyPlan]) -> dict[str, Any]:
    """What a plan promises, or that it is refused."""
    try:
        plan = make()
    except DPConfigError:
        return {"refused": True}
    public = plan.record.to_json()
    public.pop("dp_accounting")
    for drawn in ("remove", "add"):
        public.get("certificate", {}).pop(drawn, None)
    return json.loads(json.dumps(public)) | {
        "sensitivity": plan.sensitivity,
        "epsilon_of_7": _finite(plan.epsilon(7)),
        "epsilon_of_chains": _finite(plan.epsilon((5, 9))),
        "epsilon_replace_one": _finite(plan.epsilon_replace_one()),
        "sampling_in_words": plan.describe_sampling(),
    }


def _finite(value: float | None) -> float | str | None:
    return "inf" if value == math.inf else value


def statement(make: Callable[[], PrivacyPlan]) -> str:
    """The privacy statement of a run of a plan that went to its end."""
    plan = make()
    facts = RunFacts(
        plan=plan.record.to_json(), epsilon_spent=plan.epsilon(), epsilon_replace_one=plan.epsilon_replace_one(),
        delta=plan.delta, steps_charged=plan.num_steps, steps_planned=plan.num_steps, chains=1,
        world_size=1, ledger_digest="ab" * 32, self_check="passed",
        unsafe=plan.config.unsafe_fixed_noise_key is not None, model_class="RobertaForSequenceClassification",
        num_trainable=123457, versions={"torch": "9.8.7"},
    )  # fmt: skip
    return render_statement(facts)


# --- noise ---


def streams() -> dict[str, dict[str, Any]]:
    """Name -> configuration of a stream; every mechanism in each way it can be computed."""
    made: dict[str, dict[str, Any]] = {}
    for name in MECHANISMS:
        for backend in ("auto", "history", "regenerate"):
            if name != "gaussian" or backend == "auto":
                kwargs = OPTIONS.get(name, {}) | ({} if name == "gaussian" else {"backend": backend})
                made[f"{name}, {backend}"] = {"noise_mechanism": name, "noise_kwargs": kwargs}
    made["blt, restarted"] = {"noise_mechanism": "blt", "noise_restart_every": 4}
    return made


def stream_outputs(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The noise of ten steps on two tensors."""
    made = PrivacyConfig(**(BASE | {"sampling": "auto"} | config))
    try:
        plan = make_plan(made, num_examples=NUM_EXAMPLES, num_steps=PLANNED_STEPS)
        source = ChaCha20Gaussian(bytes.fromhex(KEY))
        stream = plan.mechanism.stream(source, plan.sensitivity, first_step=1, num_steps=NUM_STEPS)
    except DPConfigError:  # trees draw in one way only
        return []
    found = []
    for step in range(1, NUM_STEPS + 1):
        sums = {"weight": torch.zeros(7, 5), "bias": torch.zeros(3)}
        stream.add_(sums, step)
        found.append(summary(sums))
    return found


def summary(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Bits of tensors, and a few numbers by which other machines can compare them."""
    digest, flat = hashlib.sha256(), [t.detach().float().cpu().contiguous() for t in tensors.values()]
    for name, tensor in zip(tensors, flat, strict=True):
        digest.update(name.encode() + tensor.numpy().tobytes())
    whole = torch.cat([t.flatten() for t in flat]).double()
    return {"sha256": digest.hexdigest()[:16], "norm": float(whole.norm()), "first": whole[:3].tolist()}


# --- runs ---


RUNS: dict[str, dict[str, Any]] = {
    **{name: {"noise_mechanism": name, "noise_kwargs": OPTIONS.get(name, {})} for name in MECHANISMS},
    "two pass": {"clipping_engine": "two_pass"},
    "per layer": {"clipping": "per_layer"},
    "users": {"privacy_unit": "user", "user_id_column": "author", "records_per_user": 2, "expected_batch_size": 4},
    "DP2, filtered": {
        "preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 2}, "optim": "dp_adam_bc", "filter": "first_order_v1",
    },
    "GaLore": {"optim": "dp_galore", "optim_args": "rank=4"},
}  # fmt: skip


def run_outputs(options: dict[str, Any]) -> list[dict[str, Any]]:
    """The gradients that ten private steps of the trainer left in the model."""
    rows = [row | {"author": f"user {i % 11}"} for i, row in enumerate(tiny.records())]
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            Path(folder) / "out", model=tiny.model(dropout=0.0), train_dataset=rows, callbacks=[seen := tiny.Gradients()],
            private_state_dir=f"{folder}/keys", skip_self_check=True, max_steps=NUM_STEPS, learning_rate=1e-3,
            unsafe_fixed_noise_key=KEY, **options,
        )  # fmt: skip
        trainer.train()
    return [summary(step) for step in seen.steps]


def ledger_outputs() -> list[dict[str, Any]]:
    """The records of a run that stopped after three steps, went on, and was then trained again from step 4."""
    options = {"noise_mechanism": "blt", "noise_kwargs": OPTIONS["blt"], "max_steps": 6}
    with tempfile.TemporaryDirectory() as folder:
        for resume, stop in ((None, 3), (f"{folder}/out/checkpoint-3", 6), (f"{folder}/out/checkpoint-3", 5)):
            trainer = tiny.trainer(
                Path(folder) / "out", private_state_dir=f"{folder}/keys", save_strategy="steps", save_steps=1,
                callbacks=[tiny.StopAt(stop)], skip_self_check=True, **options,
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=resume)
        lines = (Path(folder) / "out" / "privacy" / "ledger.jsonl").read_text().splitlines()
    return list(_without_names([json.loads(line) for line in lines]))


NAMES = ("chain", "chain_id", "key_id", "parent", "run_id", "run")
LEFT_OUT = ("sha256", "prev", "time", "dp_accounting", "hf_dpopt", "version", "versions")


def _without_names(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Records with their random names numbered in the order in which they appear."""
    known: dict[str, str] = {}

    def plain(name: str, value: Any) -> Any:
        if name in NAMES and isinstance(value, str):
            return known.setdefault(value, f"name {len(known)}")
        if isinstance(value, dict):
            return {k: plain(k, v) for k, v in value.items() if k not in LEFT_OUT}
        return value

    for record in records:
        yield plain("", record)


# --- all of it ---


STATED = (
    *VARIANTS, "gaussian, fixed_order", "gaussian, poisson", "banded, cyclic_poisson", "blt, fixed_order",
    "nu_dpftrl, balls_in_bins", "tree, fixed_order",
)  # fmt: skip


def every_output() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, what computes it), in the order of the file."""
    made = plans()
    for name, make in made.items():
        yield f"plan: {name}", functools.partial(plan_outputs, make)
    for name in STATED:
        yield f"statement: {name}", functools.partial(statement, made[name])
    for name, config in streams().items():
        yield f"noise: {name}", functools.partial(stream_outputs, config)
    for name, options in RUNS.items():
        yield f"run: {name}", functools.partial(run_outputs, options)
    yield "ledger", ledger_outputs
