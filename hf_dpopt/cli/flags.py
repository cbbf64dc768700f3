"""Flags of the command line that are options of a training run: the same words, the same choices."""

from __future__ import annotations

import inspect
import tempfile
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from hf_dpopt.common.errors import DPConfigError, shown
from hf_dpopt.plan.options import OPTIONS, HeadOptions, RunOptions, help_of

Command = TypeVar("Command", bound=Callable[..., None])

SHORT = {
    "target_epsilon": ("--epsilon",),
    "target_delta": ("--delta",),
    "expected_batch_size": ("--batch-size", "--batch", "-b"),
}
TYPES = typing.get_type_hints(RunOptions) | typing.get_type_hints(HeadOptions)


def flag(name: str, *, says_default: bool = True) -> Any:
    """The flag of the option `name`.

    Args:
        name: name of the option and of the flag. Underscores and dashes are the same to the command line.
        says_default: whether the option's default is that of the flag.
    """
    text = help_of(name)
    said = str(text) if says_default else text.says
    choices = OPTIONS[name].metadata.get("choices", ())
    if any(choice not in said for choice in choices):
        said = f"{said} One of: {', '.join(choices)}."
    return typer.Option(*SHORT.get(name, ()), f"--{name.replace('_', '-')}", help=said)


def takes(*names: str, has_defaults: bool = True) -> Callable[[Command], Command]:
    """Give a command, which takes any keywords, the flags of these options.

    Args:
        names: names of options.
        has_defaults: whether a flag that is not given has the option's default, or None.
    """

    def with_flags(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        for name in names:
            default = OPTIONS[name].default if has_defaults else None
            kind = Annotated[_type_of(name) | None, flag(name, says_default=has_defaults)]  # type: ignore[valid-type]
            own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
        command.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in own}
        return command

    return with_flags


def _type_of(name: str) -> type:
    """Number or switch; anything else is a text to the command line, JSON and choices among them."""
    hints = {*typing.get_args(TYPES[name]), TYPES[name]}
    return next((kind for kind in (bool, int, float) if kind in hints), str)


def check_path(path: Path | None) -> Path | None:
    """Refuse what no file can be called; whether there is one is for the command to say.

    Raises:
        typer.BadParameter: for a name that is too long, goes round in links, or has a zero byte.
    """
    try:
        if path is not None:
            path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise typer.BadParameter(f"{shown(str(path))} cannot be looked at: {why}.") from None
    return path


def check_folder(path: Path | None) -> Path | None:
    """Make the folder, and refuse one that cannot be made or written to, before anything is computed.

    Raises:
        DPConfigError: for a file, a name below one, or a place that cannot be written to.
    """
    path = check_path(path)
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
    except OSError as error:
        raise DPConfigError(
            f"{shown(str(path))} cannot be made or written to as a folder ({error.strerror}). Name another one."
        ) from None
    return path


NumExamples = Annotated[int, typer.Option("--num-examples", "-n", help="Records in the training set.")]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps of a run.")]
Epochs = Annotated[
    float | None, typer.Option("--epochs", "--passes", help="Or passes over the data, counted as the Trainer does.")
]
Finetuning = Annotated[str | None, typer.Option(help="full, lora or head. Default: lora, or a head for few records.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OutputDir = Annotated[Path, typer.Argument(help="The output_dir of a private run.", callback=check_path)]
PrivateStateDir = Annotated[
    Path | None, typer.Option(help="Where the run keeps its keys, if not in the default folder.", callback=check_path)
]
