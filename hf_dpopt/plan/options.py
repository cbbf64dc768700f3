"""Every option, described once: what it does, its choices and its default, in a dataclass per group.

`DPTrainingArguments` inherits the groups, so that each option is a flat flag (``--target_epsilon 8``) with the help
text that is written here. `PrivacyConfig` takes single descriptions by name (`copy_option`, `documented`), and so does
the command line (`hf_dpopt.cli.flags`); docs/arguments.md is printed from the groups. Inheritance alone would not do:
a frozen dataclass cannot inherit from one that is not, as `TrainingArguments`.

This module imports neither torch nor transformers, so that help texts are printed at once. Options that name what is
in a registry (mechanisms, samplers, preconditioners) have no list of choices here: `PrivacyConfig` refuses a name that
nobody registered, and lists those that are there.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

T = TypeVar("T")

ClippingName = Literal["flat", "per_layer", "automatic"]
NoiseAtChanges = Literal["auto", "carry_on", "restart"]
PrivacyUnit = Literal["example", "user", "block"]
UserWeighting = Literal["constant", "mean"]
AMPLIFICATION_SAMPLES = 4_000_000  # by default
RECORDS_PER_USER = 16  # by default


class Help(str):
    """Text of ``--help``, with the parts that tables and docstrings show apart.

    Attributes:
        says: what the option does, without its default.
        unset: what happens where no value is given, if the default itself does not tell.
        more: what ``--help`` leaves out.
    """

    says: str
    unset: str | None
    more: str

    def __new__(cls, says: str, unset: str | None = None, more: str = "") -> Help:
        text = super().__new__(cls, f"{says} Default: {unset}." if unset else says)
        text.says, text.unset, text.more = says, unset, more
        return text


def option(
    default: Any,
    says: str,
    *,
    unset: str | None = None,
    more: str = "",
    choices: Iterable[str] | None = None,
    repr: bool = True,
) -> Any:
    """A field of a group. Its metadata are arguments of `argparse`, as `HfArgumentParser` wants them."""
    metadata: dict[str, Any] = {"help": Help(says, unset, more)}
    if choices is not None:
        metadata["choices"] = tuple(choices)
    return dataclasses.field(default=default, metadata=metadata, repr=repr)


# --- the groups, in the order of --help and docs/arguments.md --------------------------------------------------------


@dataclass
class PrivacyOptions:
    """Privacy: what is promised, and for whom."""

    target_epsilon: float | None = option(
        None,
        "Privacy budget of the whole run, usually 1 to 8; sets the noise.",
        more="Give this or noise_multiplier.",
    )
    target_delta: float | None = option(
        None,
        "Delta, at most 1/n for n records (or users).",
        unset="min(n^-1.1, 1/(10 n)), one digit",
    )
    allow_large_delta: bool = option(False, "Accept a target_delta above 1/n; the statement reports it.")
    earlier_runs: list[str] | None = option(
        None,
        "Output folders of private runs on the same records that this run builds on. target_epsilon and the statement "
        "then cover all of them.",
        unset="none: epsilons add up",
    )
    noise_multiplier: float | None = option(
        None,
        "Noise stddev / sensitivity, instead of target_epsilon.",
        more="0 adds no noise: NOT PRIVATE, epsilon is infinite.",
    )
    clipping_norm: float = option(1.0, "Bound on the L2 norm of one record's gradient.")
    clipping: str = option(
        "flat",
        "Bound of a record's gradient.",
        more="flat: one norm over all parameters. per_layer: one per layer. automatic: normalised.",
        choices=get_args(ClippingName),
    )
    expected_batch_size: int | None = option(
        None,
        "Mean number of records per optimizer step, over all devices.",
        unset="per_device_train_batch_size * gradient_accumulation_steps * world size",
    )
    sampling: str = option(
        "auto",
        "How logical batches are drawn; auto fits the noise.",
        more="poisson: each record independently. truncated_poisson: the same with a cap on the batch size; taken for "
        "independent noise. fixed_order: one secret order, without amplification. cyclic_poisson: groups of records "
        "take turns, for banded noise. balls_in_bins: every record in one secret batch of the epoch, for coefficients "
        ">= 0. capped_poisson: records, from at most records_per_user rows of each user.",
    )
    adjacency: str = option(
        "auto",
        "Datasets that the guarantee compares; auto takes the first that the sampler has a proof for.",
        more="add_or_remove_one: one record more or less. zero_out: one record without gradient. replace_one: one "
        "record swapped, twice the sensitivity.",
        choices=("auto", "add_or_remove_one", "zero_out", "replace_one"),
    )
    privacy_unit: str = option(
        "example",
        "Unit of protection: one record, all rows of one user, or one block of text. With users, expected_batch_size "
        "counts users.",
        choices=get_args(PrivacyUnit),
    )
    rows_are_records: bool = option(
        False,
        "Declare that rows that look like blocks of text are whole records; the statement repeats it.",
    )
    log_private_metrics: float | None = option(
        None,
        "Share of each step's budget for noisy metrics in the log, such as 0.02: loss, clip fraction, norms. Epsilon "
        "stays the same: docs/private_metrics.md.",
        unset="none",
    )
    private_metrics_kwargs: dict[str, Any] | str | None = option(
        None,
        'Their options, JSON: \'{"loss_bound": 2, "loss_share": 0.5, "norm_thresholds": [0.5, 1, 2]}\'. loss_bound is '
        "public.",
        unset="loss_bound 5 ln(labels or vocabulary)",
    )
    eval_data_privacy: str = option(
        "undeclared",
        "Whose data the evaluation set is; the statement repeats it. Only private evaluations add noise, under "
        "eval_target_epsilon.",
        choices=("undeclared", "public", "not_protected", "private"),
    )
    data_dependent_preprocessing: str = option(
        "not declared", "Preprocessing fitted to the training data (vocabulary, filters); for the statement."
    )


@dataclass
class TuningOptions:
    """Tuning: several runs, of which the best is released. `hf-dpopt tune` sets these options."""

    tuned_runs: float | None = option(
        None,
        "Mean of the secret, geometric number of runs; target_epsilon covers all of them: docs/tuning.md.",
        unset="no tuning",
    )


@dataclass
class LedgerOptions:
    """Dataset ledger: one budget for all runs on the same people."""

    privacy_ledger: str | None = option(
        None,
        "File in which all runs on these people are charged; a run that costs more than remains is refused: "
        "docs/tuning.md.",
        unset="this run is counted alone",
    )
    privacy_ledger_epsilon: float | None = option(
        None, "Total budget of a privacy_ledger that this run creates.", unset="as in the ledger"
    )
    privacy_ledger_entry: str | None = option(
        None, "Entry that all runs of a tuning share; `hf-dpopt tune` sets it.", unset="one entry per run"
    )


@dataclass
class EvaluationOptions:
    """Private evaluation set: for `--eval_data_privacy private`, which releases loss, accuracy and F1 with noise."""

    eval_target_epsilon: float | None = option(
        None,
        "Privacy budget of the people in the evaluation set, over all evaluations; sets their noise. Delta is the "
        "default for that many records.",
    )
    eval_times: int | None = option(
        None,
        "Number of evaluations that share eval_target_epsilon; more are refused.",
        unset="those of eval_strategy, and one at the end",
    )
    eval_loss_bound: float | None = option(
        None,
        "Bound at which losses of single evaluation records are cut; public.",
        unset="5 ln(labels or vocabulary)",
    )


@dataclass
class AdvisorOptions:
    """Advisor: chooses settings that were left at their defaults."""

    advisor: str = option(
        "auto",
        "auto chooses batch, learning rate and warm-up for target_epsilon from public numbers, where they have their "
        "default values; all replaces batch and learning rate whatever they are; none leaves them: docs/choosing.md.",
        choices=("auto", "all", "none"),
    )


@dataclass
class NoiseOptions:
    """Noise: how it is drawn, and correlated over steps."""

    noise_mechanism: str = option(
        "gaussian",
        "Correlation of the noise over steps: gaussian (independent, DP-SGD), nu_dpftrl, blt, banded, tree and others "
        "in docs/mechanisms.md; auto compares them for this run.",
    )
    noise_kwargs: dict[str, Any] | str | None = option(
        None, "Options of the mechanism, JSON: '{\"num_buffers\": 3}'.", unset="tuned"
    )
    noise_restart_every: int | None = option(None, "Restart correlated noise after so many steps.", unset="never")
    noise_at_changes: str = option(
        "auto",
        "Correlated noise when a preconditioner or clipping norm changes: continue or restart; auto continues where "
        "later steps take the noise back: docs/optimizers.md.",
        choices=get_args(NoiseAtChanges),
    )
    amplification_samples: int = option(
        AMPLIFICATION_SAMPLES,
        "Samples that verify a smaller epsilon of balls_in_bins with correlated noise; wrong with probability at most "
        "0.001. 0 takes the computed bound.",
    )
    unsafe_fixed_noise_key: str | None = option(
        None, "Noise key for tests, 64 hex digits: NOT PRIVATE, epsilon is infinite.", repr=False
    )


@dataclass
class PreconditionerOptions:
    """Preconditioner: maps each record's gradient before it is clipped."""

    preconditioner: str = option(
        "none",
        "Scale of each record's gradient before the clip: docs/optimizers.md.",
        more="dp2_rmsprop, dp2_adagrad and dp2_yogi learn it from earlier noised gradients, adadps from "
        "public_dataset, one_query from a private query that epsilon includes. quantile: adapts the clipping norm, "
        "within epsilon. subspace: clips in the span of public gradients.",
    )
    preconditioner_kwargs: dict[str, Any] | str | None = option(
        None,
        'Its options, JSON: \'{"delay": 20, "clipping_norm": 5}\' for dp2_* (delay: by default a tenth of the steps), '
        "'{\"quantile\": 0.5}' for quantile.",
    )


@dataclass
class AfterNoiseOptions:
    """Post-processing: maps the noised gradient, at no privacy cost."""

    max_grad_norm: float = option(
        0.0, "Clip of the noised mean gradient; 0 is off. Not the privacy clip (clipping_norm)."
    )
    filter: str | None = option(
        None,
        "Low-pass filter of the noised gradients (in Adam, the first moment): a preset (momentum, first_order_v1, "
        "second_order ..), butterworth:ORDER:CUTOFF, chebyshev:ORDER:CUTOFF:RIPPLE, 'b=0.1;a=-0.9' or "
        "adaptive:TAPS[:EVERY].",
        unset="none",
    )
    public_batch_size: int = option(32, "Records of public_dataset in one public gradient.")
    public_mirror_descent: str | None = option(
        None,
        "Schedule that mixes in gradients of public_dataset (PDA-DPMD).",
        choices=("cosine", "linear"),
    )
    average_iterate: str | None = option(
        None,
        "Average of the weights to end with: over all steps, the second half (tail), or exponential over about a "
        "tenth.",
        unset="the last weights",
        choices=("uniform", "tail", "exponential"),
    )


@dataclass
class UserOptions:
    """Users: for `--privacy_unit user`, which protects all rows of a person together."""

    user_id_column: str | None = option(None, "Column of train_dataset with the user ids; the model does not see it.")
    records_per_user: int | None = option(
        None, "Maximum number of records of a user in one step, chosen anew in each.", unset=f"{RECORDS_PER_USER}"
    )
    user_weighting: str = option(
        "constant",
        "Weight of a user's records before the clip: 1 / records_per_user (constant), or their mean.",
        choices=get_args(UserWeighting),
    )
    local_training: dict[str, Any] | str | None = option(
        None,
        "Federated style: local SGD on a user's records, whose clipped model delta is released. Options, JSON: "
        '\'{"learning_rate": 0.5, "batch_size": 16, "epochs": 1, "steps": 20}\'; only learning_rate is required.',
        unset="off",
    )


@dataclass
class EngineOptions:
    """Engine and files: computation, checks, log and keys."""

    clipping_engine: str = option(
        "auto",
        "How clipped sums are computed, with equal results. book_keeping: one backward pass. two_pass: two, for "
        "gradient checkpointing. auto logs its choice.",
        choices=("auto", "book_keeping", "two_pass"),
    )
    skip_self_check: bool = option(
        False, "Skip the comparison with a loop over records at start-up; the statement reports it."
    )
    log_unprivatized: bool = option(
        False, "Print exact training loss, clip fraction and batch size, marked. NOT PRIVATE."
    )
    private_state_dir: str | None = option(
        None, "Private folder of keys and run log, never inside output_dir.", unset="the user's state directory"
    )
    journal_limit: float = option(
        4.0,
        "GB at which a checkpoint empties the journal, from which a killed run resumes without paying twice; 0 keeps "
        "none.",
    )


@dataclass
class HeadOptions:
    """Convex head: in `HeadTrainingArguments` and `hf-dpopt plan-head` only."""

    head_radius: float | None = option(
        None, "Radius of the ball that the weights of the head stay in, needed without l2. Public."
    )
    feature_norm: float | None = option(
        None, "Norm that features are shortened to. Public: sqrt(hidden size) after a tanh."
    )
    l2: float = option(0.0, "Strength of l2 regularisation.")
    decay: float = option(0.0, "Step t has learning_rate t^-decay; in [0, 1).")


@dataclass
class RunOptions(  # a dataclass lists the fields of its last base first
    EngineOptions,
    UserOptions,
    AfterNoiseOptions,
    PreconditionerOptions,
    NoiseOptions,
    AdvisorOptions,
    EvaluationOptions,
    LedgerOptions,
    TuningOptions,
    PrivacyOptions,
):
    """All options of a training run."""


GROUPS: tuple[Any, ...] = RunOptions.__bases__[::-1]
OPTIONS: dict[str, dataclasses.Field] = {
    field.name: field for group in (RunOptions, HeadOptions) for field in dataclasses.fields(group)
}

# --- for those who take single options -------------------------------------------------------------------------------


def copy_option(name: str) -> Any:
    """Make a field of another dataclass with the default and the description of the option `name`."""
    described = OPTIONS[name]
    return dataclasses.field(default=described.default, metadata=described.metadata, repr=described.repr)


def help_of(name: str) -> Help:
    """Description of the option `name`."""
    return OPTIONS[name].metadata["help"]


def documented(cls: type[T]) -> type[T]:
    """Append the ``Args`` section to the docstring of a dataclass: what is said of the options it is made of."""
    lines = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        text: Help = field.metadata["help"]
        is_required = field.default is dataclasses.MISSING
        said = " ".join(filter(None, [text.says if is_required else text, text.more]))
        lines += textwrap.wrap(f"{field.name}: {said}", 112, initial_indent=" " * 4, subsequent_indent=" " * 8)
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nArgs:\n" + "\n".join(lines)
    return cls
