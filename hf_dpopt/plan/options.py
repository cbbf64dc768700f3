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
NoiseAtChanges = Literal["auto", "carry_on", "restart", "by_phase"]
NoiseRng = Literal["secure", "fast"]
PrivacyUnit = Literal["example", "user", "block"]
UserWeighting = Literal["constant", "mean"]
AMPLIFICATION_SAMPLES = 4_000_000  # by default
RECORDS_PER_USER = 16  # by default
FILTER_DTYPES = ("float32", "bfloat16")


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
        "Privacy budget of the whole run; the noise is calibrated to it. Usual: 1 to 8.",
        more="From 1e-4 to 1e6. Give this or noise_multiplier.",
    )
    target_delta: float | None = option(
        None,
        "Delta, at most 1/n (n records, or users).",
        unset="min(n^-1.1, 1/(10 n)) rounded down to one digit, which tells n to one digit",
        more="In (0, 0.5]. The default 1e-6 stands for 50,001 to 100,000 records, 9e-7 for 100,001 to 111,111.",
    )
    allow_large_delta: bool = option(
        False,
        "Accept a target_delta above 1/n, which a run that publishes a record outright would keep; the privacy "
        "statement says so.",
    )
    earlier_runs: list[str] | None = option(
        None,
        "Folders (output_dir) of private runs on the same records whose results this one builds on, such as a head "
        "that was trained first: target_epsilon and the epsilon of the statement are for all of them together.",
        unset="none: this run's epsilon adds to theirs",
        more="Same records, unit and adjacency. Composed exactly, which costs less than to add epsilons.",
    )
    noise_multiplier: float | None = option(
        None,
        "Noise stddev / sensitivity, instead of target_epsilon; epsilon is what results.",
        more="From 1e-9 to 1e9, or 0, which adds no noise at all: NOT PRIVATE, epsilon is infinite; it is there for "
        "comparisons.",
    )
    clipping_norm: float = option(
        1.0,
        "Bound on the L2 norm of one record's gradient.",
        more="From 1e-10 to 1e10, between which norms in float32 can be held to it.",
    )
    clipping: str = option(
        "flat",
        "How a record is bounded.",
        more="flat: one norm over all parameters. per_layer: one for each layer. automatic: normalised instead of "
        "clipped.",
        choices=get_args(ClippingName),
    )
    expected_batch_size: int | None = option(
        None,
        "Records per optimizer step on average, over all devices.",
        unset="per_device_train_batch_size * gradient_accumulation_steps * world size",
        more="At least 1. The noisy sum is divided by this public number, never by the size that was drawn.",
    )
    sampling: str = option(
        "auto",
        "How logical batches are formed; auto is what the noise is made for (truncated_poisson for independent "
        "noise).",
        more="truncated_poisson: Poisson sampling with a cap on the batch size that costs next to nothing. "
        "fixed_order: the order is fixed once, and no amplification is claimed. cyclic_poisson: groups of records "
        "take turns, for banded noise. balls_in_bins: every record is in one batch of the epoch, secretly and once, "
        "for noise with coefficients >= 0. capped_poisson: for users; records are sampled and clipped, of which a "
        "user has at most records_per_user from the first step to the last, and expected_batch_size counts records. "
        "All others sample users where users are the unit.",
    )
    adjacency: str = option(
        "auto",
        "Which datasets the guarantee compares; auto is the first of these that the sampler has a proof for.",
        more="add_or_remove_one: one record more or less. zero_out: one record without gradient, dataset size public. "
        "replace_one: one record swapped, which doubles the sensitivity.",
        choices=("auto", "add_or_remove_one", "zero_out", "replace_one"),
    )
    privacy_unit: str = option(
        "example",
        "What is protected as a whole: one record, everything that one user wrote, or one block: a row that may hold "
        "several documents or a part of one. With users, expected_batch_size counts users.",
        more="Neighbouring datasets then differ in one whole user.",
        choices=get_args(PrivacyUnit),
    )
    rows_are_records: bool = option(
        False,
        "Every row is a whole record, though rows look like blocks or windows of text (one length, nothing padded; "
        "text shared by neighbours). The privacy statement repeats it.",
    )
    log_private_metrics: float | None = option(
        None,
        "Share of every step's budget for noisy numbers in the log, such as 0.02: private_loss, "
        "private_clip_fraction, private_norm_p50 and _p90 (in clipping norms). Epsilon stays; the noise of the "
        "gradients grows by 1 / sqrt(1 - share).",
        unset="no such numbers",
        more="In (0, 1). They are released with the gradient as one vector: docs/private_metrics.md.",
    )
    private_metrics_kwargs: dict[str, Any] | str | None = option(
        None,
        'Their options as JSON: \'{"loss_bound": 2, "loss_share": 0.5, "norm_thresholds": [0.5, 1, 2]}\'. Losses of '
        "single records above loss_bound count as that.",
        unset="loss_bound 5 ln(labels) for classification, ln(vocabulary) for language models",
        more="loss_bound is public: declare it, and do not look it up in the data. For other losses, and in a "
        "`PrivacyConfig`, it has to be given.",
    )
    eval_data_privacy: str = option(
        "undeclared",
        "Whose data the evaluation set is; repeated in the privacy statement. Evaluation data is not protected, "
        "unless it is private.",
        more="private: metrics are released with noise, at a budget of its own (eval_target_epsilon).",
        choices=("undeclared", "public", "not_protected", "private"),
    )
    data_dependent_preprocessing: str = option(
        "not declared",
        "What was fitted on the training data before training (vocabulary, filters); for the report.",
    )


@dataclass
class TuningOptions:
    """Tuning: for a run of which the best of several is released, as `hf-dpopt tune` starts it."""

    tuned_runs: float | None = option(
        None,
        "This run is one of a random number of runs with this mean, of which only the best is released: "
        "target_epsilon and the epsilon of the statement are for all of them together.",
        unset="this run is released whatever the others did",
        more="Above 1. Runs with one law of hyperparameters, and a number that stays secret: docs/tuning.md.",
    )
    tuned_shape: float = option(
        1.0,
        "Shape of the law of that number: 1 is geometric, 0 logarithmic (cheaper and more spread), inf Poisson.",
    )


@dataclass
class LedgerOptions:
    """Ledger of a dataset: what all runs on the same people cost together, and when to stop."""

    privacy_ledger: str | None = option(
        None,
        "File in which all runs on these people are charged; a run that costs more than what is left is not started.",
        unset="this run is counted by itself",
        more="Runs add up by Renyi divergences, which allows to choose each after looking at the others: "
        "docs/tuning.md. Shared by runs that go on side by side.",
    )
    privacy_ledger_epsilon: float | None = option(
        None,
        "Budget of a privacy_ledger that begins with this run, for everything that will ever be charged to it.",
        unset="that of the ledger",
        more="Its delta is the run's.",
    )
    privacy_ledger_entry: str | None = option(
        None,
        "Name of the entry in the privacy_ledger that the runs of a tuning share: it is charged once for all of them.",
        unset="an entry of its own",
        more="With tuned_runs only; `hf-dpopt tune` sets it.",
    )


@dataclass
class EvaluationOptions:
    """Private evaluation set: for `--eval_data_privacy private`, which releases loss, accuracy and F1 with noise."""

    eval_target_epsilon: float | None = option(
        None,
        "Privacy budget of the people in the evaluation set, over all evaluations; the noise is calibrated to it.",
        more="The set is another one than the training set: to somebody who is in both, the epsilons add up.",
    )
    eval_target_delta: float | None = option(
        None, "Its delta.", unset="as for target_delta, n the number of evaluation records"
    )
    eval_times: int | None = option(
        None,
        "Evaluations that eval_target_epsilon is shared out over: the fewer, the less noise. More are refused.",
        unset="those that eval_strategy asks for, and one at the end",
        more="An evaluation of the same weights again costs nothing: it gives the same answer.",
    )
    eval_loss_bound: float | None = option(
        None,
        "Losses of single evaluation records above count as this; declared, not looked up in the data.",
        unset="5 ln(labels) for classification, ln(vocabulary) for language models",
    )


@dataclass
class RecipeOptions:
    """Recipe: what is chosen where nothing was said."""

    recipe: str = option(
        "auto",
        "auto chooses batch, learning rate and warm-up for target_epsilon where they were left at their defaults, "
        "from public numbers alone; none leaves them.",
        more="It processes no more records than num_train_epochs says, and keeps model, optimizer, physical batch "
        "and whatever was set; a value that equals its default counts as not set. With max_steps or "
        "gradient_accumulation_steps the batch stays; with noise_multiplier everything does. What was chosen stands "
        "in the log, the ledger and the statement.",
        choices=("auto", "none"),
    )
    trained_head: bool = option(
        False,
        "Declare that the head of the model was trained before: the outlook then judges the steps by what they add to "
        "it. glue.py sets it where it trains the head first.",
        more="On public records, or by a private run on these ones that earlier_runs names. It changes what the log "
        "says and nothing else; it stands in the ledger and the statement, and a run that goes on keeps it.",
    )


@dataclass
class NoiseOptions:
    """Noise: how it is drawn, and how the noise of different steps is correlated."""

    noise_mechanism: str = option(
        "gaussian",
        "How noise is correlated over steps: gaussian is independent noise, DP-SGD; nu_dpftrl, blt, banded, tree and "
        "others are in docs/mechanisms.md; auto compares them for this run and takes one.",
    )
    noise_kwargs: dict[str, Any] | str | None = option(
        None,
        "Options of the noise mechanism as JSON, such as '{\"num_buffers\": 3}'.",
        unset="tuned",
        more="Those of each mechanism are in docs/mechanisms.md; backend, block and offload are for every stream of "
        "correlated noise.",
    )
    noise_restart_every: int | None = option(None, "Steps after which correlated noise starts anew.", unset="never")
    noise_at_changes: str = option(
        "auto",
        "Correlated noise where a preconditioner or the clipping norm changes: carry_on goes on, restart starts anew, "
        "by_phase has a stream for each kind of phase; auto takes the one with the least predicted error.",
        more="None of them needs more noise for the change itself: docs/changing_scales.md.",
        choices=get_args(NoiseAtChanges),
    )
    noise_rng: str = option(
        "secure", "secure: ChaCha20 (RFC 8439). fast: a statistical generator, labelled.", choices=get_args(NoiseRng)
    )
    amplification_samples: int = option(
        AMPLIFICATION_SAMPLES,
        "Samples that verify a bound on epsilon before the first step, where the computed one is loose: balls_in_bins "
        "with correlated noise. 0 takes the computed bound.",
        more="A false verification has probability at most 0.001 over the samples, for each start of a run. Takes "
        "seconds to minutes.",
    )
    unsafe_fixed_noise_key: str | None = option(
        None,
        "64 hex digits. For tests only: the run is stamped NOT PRIVATE, epsilon is inf.",
        more="They replace the operating system's randomness.",
        repr=False,
    )


@dataclass
class PreconditionerOptions:
    """Preconditioner: what happens to a record's gradient before the clip."""

    preconditioner: str = option(
        "none",
        "What divides a record's gradient before the clip: delayed preconditioners (dp2_*), made of the noisy "
        "gradients of earlier steps, or adadps, made of public_dataset. Costs no privacy, but for one_query.",
        more="quantile: the clipping norm follows a quantile of the norms, found privately at the same epsilon; "
        "clipping_norm is the first one. subspace: records are clipped in the span of public gradients; a "
        "convex head is trained by AdaGrad there. one_query: made of the second moment of all records' gradients at "
        "the start, one private query that epsilon includes.",
    )
    preconditioner_kwargs: dict[str, Any] | str | None = option(
        None,
        'Its options as JSON: \'{"delay": 200, "clipping_norm": 5}\' for a delayed preconditioner, '
        "'{\"quantile\": 0.5}' for quantile.",
        more="The delay of a delayed preconditioner, the steps of SGD from which it is made, is 200 unless it is "
        "given.",
    )


@dataclass
class AfterNoiseOptions:
    """Postprocessing: what is made of the noisy gradient. Nothing here costs privacy."""

    max_grad_norm: float = option(
        0.0, "Clip of the noisy mean gradient; 0 is off. Not the privacy clip (clipping_norm)."
    )
    filter: str | None = option(
        None,
        "Low-pass filter of the noisy gradients: a preset (momentum, first_order_v1, second_order ..), "
        "butterworth:ORDER:CUTOFF, chebyshev:ORDER:CUTOFF:RIPPLE, 'b=0.1;a=-0.9', adaptive:TAPS[:EVERY], which is "
        "estimated anew every so many steps, or adaptive_as_printed:TAPS[:EVERY], the same without the check of its "
        "weights. In Adam it takes the place of the first moment.",
        unset="none",
    )
    filter_kwargs: dict[str, Any] | str | None = option(
        None,
        'Options of the filter as JSON: \'{"dtype": "bfloat16"}\' keeps its buffers in half the memory.',
        unset="float32 buffers",
    )
    public_batch_size: int = option(32, "Records of public_dataset in one public gradient.")
    public_mirror_descent: str | None = option(
        None,
        "Mix gradients of public_dataset in (PDA-DPMD): cosine and linear go from the private gradient to the public "
        "one over the run.",
        choices=("cosine", "linear"),
    )
    average_iterate: str | None = option(
        None,
        "Weights that the run ends with: their uniform average over all steps, over the second half (tail), or an "
        "exponential one over about the last tenth.",
        unset="the last ones",
        choices=("uniform", "tail", "exponential"),
    )
    ball_radius: float | None = option(None, "Keep the trained weights within this distance of where they began.")


@dataclass
class UserOptions:
    """Users: for `--privacy_unit user`, where a person with many records is protected as a whole."""

    user_id_column: str | None = option(
        None, "Column of train_dataset that tells users apart; the model does not see it."
    )
    records_per_user: int | None = option(
        None,
        "Records of a user in one step, at most, chosen anew in each. With users only.",
        unset=f"{RECORDS_PER_USER}",
        more="At least 1. A `PrivacyConfig` for users has to name it.",
    )
    user_weighting: str = option(
        "constant",
        "How a user's records add up before the clip: each with weight 1 / records_per_user (constant), or their "
        "mean.",
        choices=get_args(UserWeighting),
    )
    local_training: dict[str, Any] | str | None = option(
        None,
        "Federated style: train on each user's records by SGD and release how far the weights moved. Its options as "
        'JSON: \'{"learning_rate": 0.5, "batch_size": 16, "epochs": 1, "steps": 20}\'.',
        unset="users give gradients",
        more="learning_rate has to be given; batch_size is 16, epochs 1 and steps as many as they take unless given.",
    )
    local_users_at_once: int = option(
        1, "Users trained side by side (torch.func.vmap); changes memory and speed, not the law."
    )


@dataclass
class EngineOptions:
    """Engine and files: how it is computed, checked and logged, and where keys lie."""

    clipping_engine: str = option(
        "auto",
        "How clipped sums are computed; the result is the same. book_keeping: one backward. two_pass: two, for "
        "gradient checkpointing with full finetuning. auto chooses and says why.",
        choices=("auto", "book_keeping", "two_pass"),
    )
    explain_clipping: bool = option(
        False, "Log for every trained parameter how its norms are computed and what decides it."
    )
    skip_self_check: bool = option(
        False, "Do not compare the clipped sum with a naive loop at start-up; the report says so."
    )
    log_unprivatized: bool = option(
        False, "Print the exact training loss, clip fraction and batch size to the console, marked. NOT PRIVATE."
    )
    private_state_dir: str | None = option(
        None, "Secret noise and sampling keys, never inside output_dir.", unset="the user's state directory"
    )
    journal_limit: float = option(
        4.0,
        "GB that the journal of releases may fill before a checkpoint is saved, which empties it. A run that is "
        "killed goes on from it without paying twice; 0 keeps none.",
        more="4 bytes a trained coordinate and step, in output_dir/_journal, never uploaded. A limit that fewer than "
        "ten steps fill keeps none, with a warning.",
    )


@dataclass
class HeadOptions:
    """Convex head: in `HeadTrainingArguments` and `hf-dpopt plan-head` only."""

    head_radius: float | None = option(None, "The weights of the head stay in a ball of this radius. Public.")
    feature_norm: float | None = option(
        None, "Features are shortened to this norm. Public: sqrt(hidden size) after a tanh."
    )
    l2: float = option(0.0, "Strength of l2 regularisation.")
    decay: float = option(0.0, "Step t has learning_rate t^-decay; in [0, 1).")


GROUPS = (
    PrivacyOptions,
    TuningOptions,
    LedgerOptions,
    EvaluationOptions,
    RecipeOptions,
    NoiseOptions,
    PreconditionerOptions,
    AfterNoiseOptions,
    UserOptions,
    EngineOptions,
)
OPTIONS: dict[str, dataclasses.Field] = {
    field.name: field for group in (*GROUPS, HeadOptions) for field in dataclasses.fields(group)
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
