"""Flags of the command line that are options of a training run: the same words, the same choices."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_dpopt.common.errors import DPConfigError, shown
from hf_dpopt.plan.options import OPTIONS, help_of


def flag(name: str, *short: str, says_default: bool = True) -> Any:
    """The flag of the option `name`.

    Args:
        name: name of the option and of the flag. Underscores and dashes are the same to the command line.
        short: other names.
        says_default: whether the option's default is that of the flag.
    """
    text = help_of(name)
    shown = str(text) if says_default else text.says
    choices = OPTIONS[name].metadata.get("choices", ())
    if any(choice not in shown for choice in choices):
        shown = f"{shown} One of: {', '.join(choices)}."
    return typer.Option(*short, f"--{name.replace('_', '-')}", help=shown)


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
BatchSize = Annotated[int, flag("expected_batch_size", "--batch-size", "--batch", "-b", says_default=False)]
MaybeBatchSize = Annotated[
    int | None, flag("expected_batch_size", "--batch-size", "--batch", "-b", says_default=False)
]
Epsilon = Annotated[float | None, flag("target_epsilon", "--epsilon")]
NoiseMultiplier = Annotated[float | None, flag("noise_multiplier")]
Delta = Annotated[float | None, flag("target_delta", "--delta")]
AllowLargeDelta = Annotated[bool, flag("allow_large_delta")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")]
OutputDir = Annotated[Path, typer.Argument(help="The output_dir of a private run.", callback=check_path)]
