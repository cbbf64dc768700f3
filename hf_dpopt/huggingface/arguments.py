"""`DPTrainingArguments`: `TrainingArguments` plus what a private run needs to know."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.training_args import OptimizerNames

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import MECHANISMS
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.preclip import PRECLIPS
from hf_dpopt.sampling import SAMPLERS

RECORDS_PER_USER = 16  # by default


@dataclass
class DPTrainingArguments(TrainingArguments):
    """`TrainingArguments` with a privacy budget.

    Everything of `TrainingArguments` keeps its meaning, except:

    * `per_device_train_batch_size` is the physical batch: it changes memory and speed, never the result. The logical
      batch is `expected_batch_size`; where that is absent it is `per_device_train_batch_size *
      gradient_accumulation_steps * world_size`, so command lines keep their effective batch.
    * `max_grad_norm` clips the *noisy mean* gradient and is 0 (off) by default. The clip that privacy needs is
      `clipping_norm`.

    Raises:
        DPConfigError: when a `DPTrainer` is made from values that cannot be private; see
            `hf_dpopt.huggingface.refusals`.
    """

    _VALID_DICT_FIELDS = [  # JSON on a command line
        *TrainingArguments._VALID_DICT_FIELDS,
        "noise_kwargs",
        "preconditioner_kwargs",
    ]

    max_grad_norm: float = field(
        default=0.0,
        metadata={"help": "Clip of the noisy mean gradient; 0 is off. Not the privacy clip (clipping_norm)."},
    )
    target_epsilon: float | None = field(
        default=None,
        metadata={"help": "Privacy budget of the whole run; the noise is calibrated to it. Usual: 1 to 8."},
    )
    target_delta: float | None = field(
        default=None,
        metadata={
            "help": "Delta, at most 1/n (n records, or users). Default: min(n^-1.1, 1/(10 n)) rounded down to one "
            "digit, which tells n to one digit."
        },
    )
    allow_large_delta: bool = field(
        default=False,
        metadata={
            "help": "Accept a target_delta above 1/n, which a run that publishes a record outright would keep; the "
            "privacy statement says so."
        },
    )
    noise_multiplier: float | None = field(
        default=None,
        metadata={"help": "Noise stddev / sensitivity, instead of target_epsilon; epsilon is what results."},
    )
    clipping_norm: float = field(default=1.0, metadata={"help": "Bound on the L2 norm of one record's gradient."})
    clipping: str = field(
        default="flat",
        metadata={"help": "How a record is bounded.", "choices": ["flat", "per_layer", "automatic"]},
    )
    clipping_engine: str = field(
        default="auto",
        metadata={
            "help": "How clipped sums are computed; the result is the same. book_keeping: one backward. two_pass: "
            "two, for gradient checkpointing with full finetuning. auto chooses and says why.",
            "choices": ["auto", "book_keeping", "two_pass"],
        },
    )
    explain_clipping: bool = field(
        default=False,
        metadata={"help": "Log for every trained parameter how its norms are computed and what decides it."},
    )
    expected_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Records per optimizer step on average, over all devices. Default: per_device_train_batch_size * "
            "gradient_accumulation_steps * world size."
        },
    )
    sampling: str = field(
        default="auto",
        metadata={
            "help": "How logical batches are formed; auto is what the noise is made for (truncated_poisson for "
            "independent noise).",
            "choices": ["auto", *SAMPLERS],
        },
    )
    adjacency: str = field(
        default="auto",
        metadata={
            "help": "Which datasets the guarantee compares; auto is the first of these that the sampler has a proof "
            "for.",
            "choices": ["auto", "add_or_remove_one", "zero_out", "replace_one"],
        },
    )
    privacy_unit: str = field(
        default="example",
        metadata={
            "help": "What is protected as a whole: one record, everything that one user wrote, or one block: a row "
            "that may hold several documents or a part of one. With users, expected_batch_size counts users.",
            "choices": ["example", "user", "block"],
        },
    )
    rows_are_records: bool = field(
        default=False,
        metadata={
            "help": "Every row is a whole record, though rows look like blocks or windows of text (one length, "
            "nothing padded; text shared by neighbours). The privacy statement repeats it."
        },
    )
    user_id_column: str | None = field(
        default=None, metadata={"help": "Column of train_dataset that tells users apart; the model does not see it."}
    )
    records_per_user: int | None = field(
        default=None,
        metadata={
            "help": "Records of a user in one step, at most, chosen anew in each. With users only. Default: 16."
        },
    )
    user_weighting: str = field(
        default="constant",
        metadata={
            "help": "How a user's records add up before the clip: each with weight 1 / records_per_user (constant), "
            "or "
            "their mean.",
            "choices": ["constant", "mean"],
        },
    )
    local_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Federated style: train on each user's records by SGD with this rate, and release how far the "
            "weights moved. Default: users give gradients."
        },
    )
    local_batch_size: int | None = field(default=None, metadata={"help": "Records of a local step. Default: 16."})
    local_epochs: int | None = field(
        default=None, metadata={"help": "Passes over the records of a user in a round. Default: 1."}
    )
    local_steps: int | None = field(
        default=None, metadata={"help": "Local steps of a user in a round, at most. Default: as local_epochs says."}
    )
    local_users_at_once: int = field(
        default=1,
        metadata={"help": "Users trained side by side (torch.func.vmap); changes memory and speed, not the law."},
    )
    noise_mechanism: str = field(
        default="gaussian",
        metadata={
            "help": "How noise is correlated over steps; auto compares them for this run and takes one. "
            + " ".join(f"{name}: {family.summary}." for name, family in MECHANISMS.items()),
            "choices": [*MECHANISMS, "auto"],
        },
    )
    noise_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Options of the noise mechanism as JSON, such as '{\"num_buffers\": 3}'. Default: tuned."},
    )
    noise_restart_every: int | None = field(
        default=None, metadata={"help": "Steps after which correlated noise starts anew. Default: never."}
    )
    noise_rng: str = field(
        default="secure",
        metadata={"help": "secure: AES-CTR. fast: a statistical generator, labelled.", "choices": ["secure", "fast"]},
    )
    preconditioner: str = field(
        default="none",
        metadata={
            "help": "What divides a record's gradient before the clip: delayed preconditioners (dp2_*), made of the "
            "noisy gradients of earlier steps, or adadps, made of public_dataset. Costs no privacy.",
            "choices": list(PRECLIPS),
        },
    )
    preconditioner_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Its options as JSON, such as "
            '\'{"clipping_norm": 5, "learning_rate_ratio": 3, "factored": true}\'.'
        },
    )
    clipping_quantile: float | None = field(
        default=None,
        metadata={
            "help": "Let the clipping norm follow this quantile of the norms, found privately at the same epsilon: "
            "0.5 is their median. clipping_norm is the first one. Default: it stays."
        },
    )
    dp2_delay: int | None = field(
        default=None, metadata={"help": "Steps of SGD from which a delayed preconditioner is made. Default: 200."}
    )
    optim: str = field(
        default=TrainingArguments.optim,  # type: ignore[arg-type]
        metadata={
            "help": "The optimizer: transformers' names, and those that know the noise (dp_*).",
            "choices": [*(str(name.value) for name in OptimizerNames), *OPTIMIZERS],
        },
    )
    filter: str | None = field(
        default=None,
        metadata={
            "help": "Low-pass filter of the noisy gradients: a preset (momentum, first_order_v1, second_order ..), "
            "butterworth:ORDER:CUTOFF, chebyshev:ORDER:CUTOFF:RIPPLE, 'b=0.1;a=-0.9' or adaptive:TAPS[:EVERY], which "
            "is estimated anew every so many steps. In Adam it takes the place of the first moment. Default: none."
        },
    )
    filter_dtype: str = field(
        default="float32",
        metadata={
            "help": "What the filter keeps its buffers in; bfloat16 takes half the memory.",
            "choices": ["float32", "bfloat16"],
        },
    )
    public_batch_size: int = field(default=32, metadata={"help": "Records of public_dataset in one public gradient."})
    public_mirror_descent: str | None = field(
        default=None,
        metadata={
            "help": "Mix gradients of public_dataset in (PDA-DPMD): cosine and linear go from the private gradient to "
            "the public one over the run.",
            "choices": ["cosine", "linear"],
        },
    )
    average_iterate: str | None = field(
        default=None,
        metadata={
            "help": "Weights that the run ends with: their uniform average over all steps, over the second half "
            "(tail), or an exponential one. Default: the last ones.",
            "choices": ["uniform", "tail", "exponential"],
        },
    )
    ball_radius: float | None = field(
        default=None, metadata={"help": "Keep the trained weights within this distance of where they began."}
    )
    private_state_dir: str | None = field(
        default=None,
        metadata={
            "help": "Secret noise and sampling keys, never inside output_dir. Default: the user's state directory."
        },
    )
    log_unprivatized: bool = field(
        default=False,
        metadata={
            "help": "Print the exact training loss, clip fraction and batch size to the console, marked. NOT PRIVATE."
        },
    )
    eval_data_privacy: str = field(
        default="undeclared",
        metadata={
            "help": "Whose data the evaluation set is; repeated in the privacy statement, evaluation data is not "
            "protected.",
            "choices": ["undeclared", "public", "not_protected"],
        },
    )
    data_dependent_preprocessing: str = field(
        default="not declared",
        metadata={
            "help": "What was fitted on the training data before training (vocabulary, filters); for the report."
        },
    )
    skip_self_check: bool = field(
        default=False,
        metadata={"help": "Do not compare the clipped sum with a naive loop at start-up; the report says so."},
    )
    unsafe_fixed_noise_key: str | None = field(
        default=None,
        metadata={"help": "64 hex digits. For tests only: the run is stamped NOT PRIVATE, epsilon is inf."},
    )

    def __post_init__(self) -> None:
        asked = self.optim
        if asked in OPTIMIZERS:  # transformers' enumeration has no place for more
            self.optim = "adamw_torch"
        super().__post_init__()
        self.optim = asked if asked in OPTIMIZERS else self.optim
        if isinstance(self.filter, str) and self.filter.strip().lower() == "none":
            self.filter = None

    def privacy_config(self, expected_batch_size: int) -> PrivacyConfig:
        """The privacy side of these arguments, checked."""
        names = {f.name for f in dataclasses.fields(PrivacyConfig)} - {"expected_batch_size", "local_training"}
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise DPConfigError(
                "Neither target_epsilon nor noise_multiplier is set, so there is no privacy to train with. Add "
                "--target_epsilon 8 (or a smaller number); to train without privacy use the stock Trainer."
            )
        if self.user_id_column is not None and self.privacy_unit != "user":
            raise DPConfigError(
                f"user_id_column={self.user_id_column!r} is for privacy_unit='user', and the unit is "
                f"{self.privacy_unit!r}: a person's rows would be protected one by one. Add --privacy_unit user, or "
                "leave user_id_column out."
            )
        values = {name: getattr(self, name) for name in names}
        for name in ("noise_kwargs", "preconditioner_kwargs"):
            values[name] = values[name] or {}
        values["local_training"] = self._local_training()
        if self.privacy_unit == "user" and self.records_per_user is None:
            values["records_per_user"] = RECORDS_PER_USER
        if self.clipping_quantile is not None:
            values |= self._with_quantile(values["preconditioner_kwargs"])
        if self.dp2_delay is not None:
            values["preconditioner_kwargs"] = self._with_delay(values["preconditioner_kwargs"])
        return PrivacyConfig(expected_batch_size=expected_batch_size, **values)

    def preconditioner_name(self) -> str:
        """The one that runs: `clipping_quantile` is short for one, too."""
        by_quantile = self.clipping_quantile is not None and self.preconditioner == "none"
        return "quantile" if by_quantile else self.preconditioner

    def _with_quantile(self, options: Any) -> dict[str, Any]:
        if self.preconditioner not in ("none", "quantile"):
            raise DPConfigError(
                f"clipping_quantile goes with records as they are, and preconditioner is {self.preconditioner!r}. Use "
                "one of them."
            )
        return {
            "preconditioner": "quantile",
            "preconditioner_kwargs": {**options, "quantile": self.clipping_quantile},
        }

    def _local_training(self) -> dict[str, Any] | None:
        check_count("local_users_at_once", self.local_users_at_once)
        given = {name: getattr(self, f"local_{name}") for name in ("learning_rate", "batch_size", "epochs", "steps")}
        given = {name: value for name, value in given.items() if value is not None}
        if given and "learning_rate" not in given:
            raise DPConfigError(
                f"local_{next(iter(given))} is for local training, which needs a learning rate of its own. Add "
                "--local_learning_rate 0.1, or leave it out."
            )
        return given or None

    def _with_delay(self, options: Any) -> dict[str, Any]:
        if not self.preconditioner.startswith("dp2"):
            raise DPConfigError(
                f"dp2_delay={self.dp2_delay} is for delayed preconditioners, and preconditioner is "
                f"{self.preconditioner!r}. Add --preconditioner dp2_rmsprop, or leave dp2_delay out."
            )
        if "delay" in options:
            raise DPConfigError("dp2_delay and the delay of preconditioner_kwargs are the same. Give one of them.")
        return {**options, "delay": self.dp2_delay}

    def optimizer_name(self) -> str | None:
        """The optimizer of ours that runs, or None for one of transformers'; a filter turns AdamW into ours."""
        name = str(getattr(self.optim, "value", self.optim))
        if name in OPTIMIZERS:
            return name
        return "dp_adamw" if self.filter is not None and name in ("adamw_torch", "adamw_torch_fused") else None

    def to_dict(self) -> dict[str, Any]:
        """As `TrainingArguments.to_dict`, without what must not reach logs: the test key and the place of the keys."""
        values = super().to_dict()
        for secret in ("unsafe_fixed_noise_key", "private_state_dir"):
            values[secret] = None if getattr(self, secret) is None else f"<{secret.upper()}>"
        return values

    def __str__(self) -> str:
        """The values of `to_dict`: scripts print their arguments, and the generated one would show the secrets."""
        lines = "".join(f"{name}={value},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__


@dataclass(repr=False)
class DPSeq2SeqTrainingArguments(DPTrainingArguments, Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` with the fields of `DPTrainingArguments`."""
