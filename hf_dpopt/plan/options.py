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
        unset="min(n^-1.1, 1/(10 n)) rounded down to one digit, which reveals n to one digit",
        more="In (0, 0.5]. The default 1e-6 stands for 50,001 to 100,000 records, 9e-7 for 100,001 to 111,111.",
    )
    allow_large_delta: bool = option(
        False,
        "Accept a target_delta above 1/n, which would allow a run to publish one record outright; the privacy "
        "statement reports it.",
    )
    earlier_runs: list[str] | None = option(
        None,
        "Folders (output_dir) of private runs on the same records that this run builds on, such as a head that was "
        "trained first. target_epsilon and the statement then cover all of them together.",
        unset="none: this run's epsilon adds to theirs",
        more="Same records, unit and adjacency. Composed exactly, below the sum of the epsilons.",
    )
    noise_multiplier: float | None = option(
        None,
        "Noise stddev / sensitivity, instead of target_epsilon; epsilon follows from it.",
        more="From 1e-9 to 1e9. 0 adds no noise, for comparisons: NOT PRIVATE, epsilon is infinite.",
    )
    clipping_norm: float = option(
        1.0,
        "Bound on the L2 norm of one record's gradient.",
        more="From 1e-10 to 1e10, the range in which float32 norms are reliable.",
    )
    clipping: str = option(
        "flat",
        "How the gradient of a record is bounded.",
        more="flat: one norm over all parameters. per_layer: one norm per layer. automatic: normalised instead of "
        "clipped.",
        choices=get_args(ClippingName),
    )
    expected_batch_size: int | None = option(
        None,
        "Records per optimizer step on average, over all devices.",
        unset="per_device_train_batch_size * gradient_accumulation_steps * world size",
        more="At least 1. The noised sum is divided by this public number, never by the size drawn.",
    )
    sampling: str = option(
        "auto",
        "How logical batches are drawn; auto takes the sampling that the noise needs (truncated_poisson for "
        "independent noise).",
        more="truncated_poisson: Poisson sampling with a cap on the batch size, at almost no cost. fixed_order: one "
        "secret order, without amplification. cyclic_poisson: groups of records take turns, for banded noise. "
        "balls_in_bins: every record is in one secret batch of the epoch, for noise with coefficients >= 0. "
        "capped_poisson: for users; samples and clips records, from at most records_per_user rows of each user, the "
        "same in all steps; expected_batch_size counts records. The others sample users if users are the unit.",
    )
    adjacency: str = option(
        "auto",
        "Which datasets the guarantee compares; auto takes the first of these that has a proof for the sampler.",
        more="add_or_remove_one: one record more or less. zero_out: one record without gradient, dataset size public. "
        "replace_one: one record swapped, which doubles the sensitivity.",
        choices=("auto", "add_or_remove_one", "zero_out", "replace_one"),
    )
    privacy_unit: str = option(
        "example",
        "What is protected as a whole: one record, all rows of one user, or one block (a row that may hold several "
        "documents or part of one). With users, expected_batch_size counts users.",
        more="Neighbouring datasets then differ in one whole user.",
        choices=get_args(PrivacyUnit),
    )
    rows_are_records: bool = option(
        False,
        "Declare that every row is a whole record, although rows look like blocks or windows of text (one length, no "
        "padding; shared text). The privacy statement repeats it.",
    )
    log_private_metrics: float | None = option(
        None,
        "Share of every step's budget for noisy numbers in the log, such as 0.02: private_loss, "
        "private_clip_fraction, private_norm_p50 and _p90 (in clipping norms). Epsilon stays the same; the noise of "
        "the gradients grows by 1 / sqrt(1 - share).",
        unset="none",
        more="In (0, 1). They are released with the gradient as one vector: docs/private_metrics.md.",
    )
    private_metrics_kwargs: dict[str, Any] | str | None = option(
        None,
        'Options of these numbers, JSON: \'{"loss_bound": 2, "loss_share": 0.5, "norm_thresholds": [0.5, 1, 2]}\'. '
        "Losses of single records are cut at loss_bound.",
        unset="loss_bound 5 ln(labels) for classification, ln(vocabulary) for language models",
        more="loss_bound is public: do not choose it from the data. Other losses and `PrivacyConfig` need it.",
    )
    eval_data_privacy: str = option(
        "undeclared",
        "Whose data the evaluation set is; repeated in the privacy statement. Evaluation data is not protected, "
        "unless it is private.",
        more="private: metrics are released with noise, under a separate budget (eval_target_epsilon).",
        choices=("undeclared", "public", "not_protected", "private"),
    )
    data_dependent_preprocessing: str = option(
        "not declared",
        "Preprocessing that was fitted to the training data (vocabulary, filters); for the report.",
    )


@dataclass
class TuningOptions:
    """Tuning: several runs, of which the best is released. `hf-dpopt tune` sets these options."""

    tuned_runs: float | None = option(
        None,
        "Mean of the secret random number of runs that this run is one of. Only the best is released; target_epsilon "
        "and the statement cover all of them together.",
        unset="no tuning",
        more="Above 1. All runs draw their hyperparameters from one distribution: docs/tuning.md.",
    )
    tuned_shape: float = option(
        1.0,
        "Distribution of that number: 1 is geometric, 0 logarithmic (cheaper and more spread), inf Poisson.",
    )


@dataclass
class LedgerOptions:
    """Dataset ledger: one budget for all runs on the same people."""

    privacy_ledger: str | None = option(
        None,
        "File in which all runs on these people are charged; a run that costs more than remains is not started.",
        unset="this run is counted alone",
        more="Runs compose by Renyi divergences, so each may depend on the results of the others: docs/tuning.md. "
        "Concurrent runs may share it.",
    )
    privacy_ledger_epsilon: float | None = option(
        None,
        "Total budget of a privacy_ledger that this run creates.",
        unset="as in the ledger",
        more="Its delta is the run's.",
    )
    privacy_ledger_entry: str | None = option(
        None,
        "Entry in the privacy_ledger that all runs of a tuning share: it is charged once.",
        unset="one entry per run",
        more="With tuned_runs only; `hf-dpopt tune` sets it.",
    )


@dataclass
class EvaluationOptions:
    """Private evaluation set: for `--eval_data_privacy private`, which releases loss, accuracy and F1 with noise."""

    eval_target_epsilon: float | None = option(
        None,
        "Privacy budget of the people in the evaluation set, over all evaluations; the noise is calibrated to it.",
        more="For a person who is in the training set as well, the epsilons add up.",
    )
    eval_target_delta: float | None = option(
        None, "Delta of eval_target_epsilon.", unset="as for target_delta, with n evaluation records"
    )
    eval_times: int | None = option(
        None,
        "Number of evaluations that share eval_target_epsilon: fewer mean less noise, more are refused.",
        unset="those of eval_strategy, and one at the end",
        more="Evaluating the same weights again costs nothing and gives the same answer.",
    )
    eval_loss_bound: float | None = option(
        None,
        "Losses of single evaluation records are cut at this bound; do not choose it from the data.",
        unset="5 ln(labels) for classification, ln(vocabulary) for language models",
    )


@dataclass
class RecipeOptions:
    """Advisor: chooses settings that were left at their defaults."""

    recipe: str = option(
        "auto",
        "auto chooses batch, learning rate and warm-up for target_epsilon from public numbers, if they have their "
        "default values; none leaves them.",
        more="Model, optimizer, physical batch and passes stay. With max_steps or gradient_accumulation_steps the "
        "batch stays, with noise_multiplier everything: docs/choosing.md.",
        choices=("auto", "none"),
    )
    trained_head: bool = option(
        False,
        "Declare that the head was trained before; the outlook then expects fewer steps. glue.py sets it if it trains "
        "the head first.",
        more="On public records, or by a private run in earlier_runs. It only changes the log. Ledger and statement "
        "repeat it, and a resumed run keeps it.",
    )


@dataclass
class NoiseOptions:
    """Noise: how it is drawn, and correlated over steps."""

    noise_mechanism: str = option(
        "gaussian",
        "How noise is correlated over steps: gaussian is independent noise (DP-SGD); nu_dpftrl, blt, banded, tree and "
        "others are in docs/mechanisms.md; auto compares them for this run and takes one.",
    )
    noise_kwargs: dict[str, Any] | str | None = option(
        None,
        "Options of the noise mechanism as JSON, such as '{\"num_buffers\": 3}'.",
        unset="tuned",
        more="See docs/mechanisms.md. backend, block and offload work with every correlated noise.",
    )
    noise_restart_every: int | None = option(None, "Restart correlated noise after so many steps.", unset="never")
    noise_at_changes: str = option(
        "auto",
        "Correlated noise when a preconditioner or the clipping norm changes: carry_on continues, restart starts "
        "anew, by_phase has a stream for each kind of phase; auto takes the least predicted error.",
        more="The change itself needs no extra noise: docs/changing_scales.md.",
        choices=get_args(NoiseAtChanges),
    )
    noise_rng: str = option(
        "secure",
        "secure: ChaCha20 (RFC 8439). fast: a statistical generator; the report says so.",
        choices=get_args(NoiseRng),
    )
    amplification_samples: int = option(
        AMPLIFICATION_SAMPLES,
        "Samples that verify a tighter bound on epsilon before the first step (balls_in_bins with correlated noise). "
        "0 takes the computed bound.",
        more="A false verification has probability at most 0.001 over the samples, for each start of a run. Takes "
        "seconds to minutes.",
    )
    unsafe_fixed_noise_key: str | None = option(
        None,
        "Noise key for tests, 64 hex digits: NOT PRIVATE, epsilon is infinite.",
        repr=False,
    )


@dataclass
class PreconditionerOptions:
    """Preconditioner: maps each record's gradient before it is clipped."""

    preconditioner: str = option(
        "none",
        "Divide each record's gradient before the clip: dp2_* by statistics of earlier noised gradients, adadps of "
        "public_dataset. Costs no privacy, except one_query.",
        more="quantile: the clipping norm follows a quantile of the norms, found privately at the same epsilon; "
        "clipping_norm is its start. subspace: records are clipped in the span of public gradients; a convex head is "
        "trained by AdaGrad there. one_query: the second moment of all records' gradients at the start, a private "
        "query that epsilon includes.",
    )
    preconditioner_kwargs: dict[str, Any] | str | None = option(
        None,
        'Its options as JSON: \'{"delay": 200, "clipping_norm": 5}\' for a delayed preconditioner, '
        "'{\"quantile\": 0.5}' for quantile.",
        more="delay is the number of SGD steps that a dp2_* preconditioner is made from; 200 by default.",
    )


@dataclass
class AfterNoiseOptions:
    """Post-processing: maps the noised gradient, at no privacy cost."""

    max_grad_norm: float = option(
        0.0, "Clip of the noised mean gradient; 0 is off. Not the privacy clip (clipping_norm)."
    )
    filter: str | None = option(
        None,
        "Low-pass filter of the noised gradients: a preset (momentum, first_order_v1, second_order ..), "
        "butterworth:ORDER:CUTOFF, chebyshev:ORDER:CUTOFF:RIPPLE, 'b=0.1;a=-0.9', adaptive:TAPS[:EVERY] (estimated "
        "again every so many steps) or adaptive_as_printed:TAPS[:EVERY] (without the check of its weights). In Adam "
        "it replaces the first moment.",
        unset="none",
    )
    filter_kwargs: dict[str, Any] | str | None = option(
        None,
        'Options of the filter as JSON: \'{"dtype": "bfloat16"}\' halves the memory of its buffers.',
        unset="float32 buffers",
    )
    public_batch_size: int = option(32, "Records of public_dataset in one public gradient.")
    public_mirror_descent: str | None = option(
        None,
        "Mix in gradients of public_dataset (PDA-DPMD), from all private to all public over the run.",
        choices=("cosine", "linear"),
    )
    average_iterate: str | None = option(
        None,
        "Final weights: the uniform average over all steps, over the second half (tail), or an exponential average "
        "over about the last tenth.",
        unset="the last weights",
        choices=("uniform", "tail", "exponential"),
    )
    ball_radius: float | None = option(None, "Keep the trained weights within this distance of their start.")


@dataclass
class UserOptions:
    """Users: for `--privacy_unit user`, which protects all rows of a person together."""

    user_id_column: str | None = option(None, "Column of train_dataset with the user ids; the model does not see it.")
    records_per_user: int | None = option(
        None,
        "Maximum number of records of a user in one step, chosen anew in each.",
        unset=f"{RECORDS_PER_USER}",
        more="At least 1. Required in a `PrivacyConfig` for users.",
    )
    user_weighting: str = option(
        "constant",
        "Sum of a user's records before the clip: each with weight 1 / records_per_user (constant), or their mean.",
        choices=get_args(UserWeighting),
    )
    local_training: dict[str, Any] | str | None = option(
        None,
        "Federated style: train on each user's records by SGD and release the clipped model delta. Its options as "
        'JSON: \'{"learning_rate": 0.5, "batch_size": 16, "epochs": 1, "steps": 20}\'.',
        unset="off",
        more="learning_rate is required; the defaults are batch_size 16, epochs 1, and all steps of the epochs.",
    )
    local_users_at_once: int = option(
        1, "Users trained in parallel (torch.func.vmap); changes memory and speed, not the result."
    )


@dataclass
class EngineOptions:
    """Engine and files: computation, checks, log and keys."""

    clipping_engine: str = option(
        "auto",
        "How clipped sums are computed; the result is the same. book_keeping: one backward pass. two_pass: two, for "
        "gradient checkpointing with full finetuning. auto chooses and logs why.",
        choices=("auto", "book_keeping", "two_pass"),
    )
    explain_clipping: bool = option(False, "Log how the norms of every trained parameter are computed, and why.")
    skip_self_check: bool = option(
        False, "Skip the comparison of the clipped sum with a loop over records at start-up; the report says so."
    )
    log_unprivatized: bool = option(
        False, "Print exact training loss, clip fraction and batch size to the console, marked. NOT PRIVATE."
    )
    private_state_dir: str | None = option(
        None, "Private folder: noise and sampling keys, never inside output_dir.", unset="the user's state directory"
    )
    journal_limit: float = option(
        4.0,
        "Size in GB at which the journal is emptied by a checkpoint. A killed run resumes from it without paying "
        "twice; 0 keeps none.",
        more="4 bytes per trained coordinate and step, in output_dir/_journal, never uploaded. A limit below ten "
        "steps keeps none, with a warning.",
    )


@dataclass
class HeadOptions:
    """Convex head: in `HeadTrainingArguments` and `hf-dpopt plan-head` only."""

    head_radius: float | None = option(None, "Radius of the ball that the weights of the head stay in. Public.")
    feature_norm: float | None = option(
        None, "Norm that features are shortened to. Public: sqrt(hidden size) after a tanh."
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
