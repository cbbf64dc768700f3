"""The folders of a run by its arguments, and the one place where faults of their disks become errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from hf_dpopt.common.disk_faults import find_fault
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError, DPStorageError
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.run.keys import default_private_dir, private_dir
from hf_dpopt.run.run_log import Found, RunLog, find_run

Method = TypeVar("Method", bound=Callable[..., Any])
NOTHING = "Nothing is charged."


def found_by(args: DPTrainingArguments) -> Found:
    """All records of the run of these arguments; nothing is written."""
    output_dir = Path(str(args.output_dir))
    return find_run(output_dir, private_dir(args.private_state_dir, output_dir, is_read=True))


def open_log(args: DPTrainingArguments) -> RunLog:
    """The log of the run of these arguments, for writing, under its locks."""
    output_dir = Path(str(args.output_dir))
    return RunLog.open(output_dir, private_dir(args.private_state_dir, output_dir))


def explains_storage_faults(method: Method) -> Method:
    """Raise `DPStorageError` for a disk that fails in a method of the trainer; other errors pass."""

    @functools.wraps(method)
    def explained(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (DPConfigError, DPBudgetExceeded):
            raise
        except Exception as error:
            places = _places(self.args) if hasattr(self, "args") else {}
            fault = find_fault(error, places.values()) if places else None
            if fault is None:
                raise
            charged = _charged(places["output_dir"], places["private_state_dir"])
            again = "again" if charged == NOTHING else "with --resume_from_checkpoint True"
            raise DPStorageError(
                f"{fault.describe(places)}. {charged} {fault.remedy}, then run the same command {again}."
            ) from error

    return cast(Method, explained)


def _places(args: Any) -> dict[str, Path]:
    """Option -> folder or file that a run writes to."""
    ledger = {} if args.privacy_ledger is None else {"privacy_ledger": Path(args.privacy_ledger)}
    keys = args.private_state_dir or default_private_dir()
    return {**ledger, "private_state_dir": Path(keys).expanduser(), "output_dir": Path(args.output_dir)}


def _charged(output_dir: Path, private_state_dir: Path) -> str:
    """Say what a run is charged for, as its log and its ledger lie on the disk."""
    try:
        known = find_run(output_dir, private_state_dir).known
    except (DPConfigError, OSError):
        return "What was charged before stays charged."
    steps, evaluations = (0, {}) if known is None else (known.num_charged, known.evaluations)
    if not steps and not evaluations:
        return NOTHING
    also = f" and {len(evaluations)} private evaluation{'s' * (len(evaluations) > 1)}" if evaluations else ""
    return f"{steps} steps{also} are charged, and stay so."
