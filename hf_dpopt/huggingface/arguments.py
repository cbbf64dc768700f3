"""`DPTrainingArguments`: `TrainingArguments` plus what a private run needs to know."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

from transformers import Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS
from transformers.training_args import OptimizerNames

from hf_dpopt.common.checks import check_choice
from hf_dpopt.common.errors import DPConfigError, shown
from hf_dpopt.common.log import logger
from hf_dpopt.huggingface.values import check_json, check_types
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.options import RECORDS_PER_USER, RunOptions
from hf_dpopt.run.dataset_ledger import DatasetBudget

PRIVATE_PLACES = ("private_state_dir", "privacy_ledger")
SECRET_WORDS = ("token", "key", "keys", "apikey", "password", "passwd", "secret", "credentials")  # last words of names
VOCABULARY = tuple(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "image"))


@dataclass
class DPTrainingArguments(RunOptions, TrainingArguments):
    """`TrainingArguments` with a privacy budget. Its options are described in `hf_dpopt.plan.options`.

    Everything of `TrainingArguments` keeps its meaning, except:

    * `per_device_train_batch_size` bounds the memory of a physical batch: it changes speed, never the result. No
      physical batch has more tokens than that many copies of the longest record. On a CPU the number of records
      varies: fewer long ones at a time, more short ones, which is faster there. The logical batch is
      `expected_batch_size`; where that is absent it is `per_device_train_batch_size * gradient_accumulation_steps *
      world_size`, so command lines keep their effective batch.
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
        "private_metrics_kwargs",
        "local_training",
    ]

    optim: str = field(
        default=TrainingArguments.optim,  # type: ignore[arg-type]
        metadata={
            "help": "The optimizer: transformers' names, and those that know the noise (dp_*).",
            "choices": [*(str(name.value) for name in OptimizerNames), *OPTIMIZERS],
        },
    )

    def __post_init__(self) -> None:
        check_types(self)  # transformers computes with them at once
        self.adam_beta1, self.adam_beta2 = float(self.adam_beta1), float(self.adam_beta2)  # torch takes no integers
        if self.deepspeed:  # transformers would ask for the package first
            raise DPConfigError(
                f"deepspeed={shown(self.deepspeed)}: takes the backward and the optimizer over, with them clip and "
                "noise. Leave deepspeed out; use accelerate launch, with --fsdp where a GPU does not hold the model."
            )
        check_json(self)
        if self.output_dir is not None and Path(self.output_dir).is_file():
            raise DPConfigError(f"output_dir={self.output_dir}: is a file. Name a folder.")
        asked = self.optim
        check_choice("optim", getattr(asked, "value", asked), [*OPTIMIZERS, *(name.value for name in OptimizerNames)])
        if asked in OPTIMIZERS:  # transformers' enumeration has no place for more
            self.optim = "adamw_torch"
        super().__post_init__()
        self.optim = asked if asked in OPTIMIZERS else self.optim

    def privacy_config(self, expected_batch_size: int) -> PrivacyConfig:
        """The privacy side of these arguments, checked."""
        names = {f.name for f in dataclasses.fields(PrivacyConfig)} - {"expected_batch_size"}
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise DPConfigError(
                "Neither target_epsilon nor noise_multiplier is set, so there is no privacy to train with. Add "
                "--target_epsilon 8 (or a smaller number); to train without privacy use the stock Trainer."
            )
        if self.user_id_column is not None and self.privacy_unit != "user":
            raise DPConfigError(
                f"user_id_column={self.user_id_column!r} is for privacy_unit='user', and the unit is "
                f"{self.privacy_unit!r}. Add --privacy_unit user, or leave user_id_column out."
            )
        if self.privacy_unit == "user" and not self.user_id_column:
            raise DPConfigError(
                "privacy_unit='user' needs to know whose records are whose. Name the column of train_dataset that "
                "holds the user ids: --user_id_column author."
            )
        values = {name: getattr(self, name) for name in names}
        if self.privacy_unit == "user" and self.records_per_user is None:
            values["records_per_user"] = RECORDS_PER_USER
        return PrivacyConfig(expected_batch_size=expected_batch_size, **values)

    def dataset_budget(self) -> DatasetBudget | None:
        """The ledger of the dataset that the run is charged to; None for none."""
        for name in ("privacy_ledger_epsilon", "privacy_ledger_entry"):
            if self.privacy_ledger is None and (value := getattr(self, name)) is not None:
                raise DPConfigError(
                    f"{name}={shown(value)} is for a ledger. Add --privacy_ledger FILE, or leave it out."
                )
        if self.privacy_ledger_entry is not None and self.tuned_runs is None:
            raise DPConfigError(
                f"privacy_ledger_entry={shown(self.privacy_ledger_entry)} is shared by the runs of a tuning, of which "
                "one is released. Leave it out: every run that is released has an entry of its own."
            )
        if self.privacy_ledger is None:
            return None
        return DatasetBudget(self.privacy_ledger, self.privacy_ledger_epsilon, self.privacy_ledger_entry)

    def optimizer_name(self) -> str | None:
        """The optimizer of ours that runs, or None for one of transformers'; a filter turns AdamW into ours."""
        name = str(getattr(self.optim, "value", self.optim))
        if name in OPTIMIZERS:
            return name
        return "dp_adamw" if self.filter is not None and name in ("adamw_torch", "adamw_torch_fused") else None

    def to_dict(self) -> dict[str, Any]:
        """Dictionary of the arguments, with placeholders for what must not reach logs."""
        return without_secrets(super().to_dict())

    def __str__(self) -> str:
        """The values of `to_dict`: scripts print their arguments, and the generated one would show the secrets."""
        lines = "".join(f"{name}={value},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        named = (vars(base).get("_VALID_DICT_FIELDS", ()) for base in cls.__mro__)  # TRL's configurations have more
        cls._VALID_DICT_FIELDS = list(dict.fromkeys(name for names in named for name in names))
        if "__repr__" not in vars(cls):
            cls.__repr__ = DPTrainingArguments.__repr__  # type: ignore[method-assign]  # else one is generated

    def __getstate__(self) -> dict[str, Any]:
        """State for a pickle, which reaches checkpoints and the hub: without secrets.

        A child process that `multiprocessing` starts here receives its pickle through a pipe, so it gets everything.
        """
        return dict(vars(self)) if get_spawning_popen() is not None else without_secrets(vars(self))

    def __copy__(self) -> DPTrainingArguments:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> DPTrainingArguments:
        made = memo[id(self)] = copy.copy(self)
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


def without_secrets(value: Any) -> Any:
    """Return arguments with a placeholder, `<NAME>`, for each token, key and private place, at any depth."""
    if not isinstance(value, Mapping):
        return type(value)(map(without_secrets, value)) if type(value) in (list, tuple) else value
    return {
        name: f"<{str(name).upper()}>"
        if is_secret(name) and not isinstance(inner, Mapping | None)
        else without_secrets(inner)
        for name, inner in value.items()
    }


def is_secret(name: Any) -> bool:
    """Whether the value of an argument must not be published; new options of transformers are found by their names."""
    last = str(name).lower().rpartition("_")[2]
    return name in PRIVATE_PLACES or (last in SECRET_WORDS and name not in VOCABULARY)


def check_no_statement(output_dir: str | None) -> None:
    """Refuse to train without privacy in the folder of a private run.

    Raises:
        DPConfigError: if it holds a statement, which would stand beside a model of another training.
    """
    if output_dir is not None and (Path(output_dir) / "privacy" / "statement.md").is_file():
        raise DPConfigError(
            f"output_dir={output_dir}: holds the privacy statement of another run, and this one trains without "
            "privacy. Choose another output_dir."
        )


class RefuseStockTraining(TrainerCallback):
    """Refuse to train without privacy in the folder of a private run, or with arguments of one.

    Arguments do not see the trainer that reads them, and every field and property that stock training reads is also
    read elsewhere: by evaluation, `to_dict` or `dataclasses.replace`. Callbacks are told when training begins, and a
    Trainer, whatever its class, makes those of `DEFAULT_CALLBACKS`; `DPTrainerMixin` removes this one from its own.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_no_statement(args.output_dir)
        if not isinstance(args, DPTrainingArguments):
            return
        budget = "target_epsilon" if args.target_epsilon is not None else "noise_multiplier"
        if (value := getattr(args, budget)) is None:
            logger.warning("NOT PRIVATE: a stock trainer trains, and no privacy budget is set.")
            return
        raise DPConfigError(
            f"{budget}={shown(value)}: this trainer has no DPTrainerMixin and would train without privacy. Use "
            "DPTrainer or class MyDPTrainer(DPTrainerMixin, MyTrainer), or transformers.TrainingArguments."
        )


_others = [one for one in DEFAULT_CALLBACKS if getattr(one, "__name__", "") != RefuseStockTraining.__name__]
DEFAULT_CALLBACKS[:] = [*_others, RefuseStockTraining]  # type: ignore[list-item]  # once, though imported again


@dataclass
class DPSeq2SeqTrainingArguments(DPTrainingArguments, Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` with the fields of `DPTrainingArguments`."""
