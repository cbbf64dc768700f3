"""The command line: what a run would cost, what a run did, and whether its folder may be published.

Here are the commands and their flags. What a command does is imported when it runs, so that help is printed at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_dpopt.cli.flags import (
    AsJson,
    Epochs,
    Finetuning,
    NumExamples,
    OutputDir,
    PrivateStateDir,
    Steps,
    check_folder,
    check_path,
    flag,
    takes,
)
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.common.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes cut the names of flags short, and take longer
    context_settings={"token_normalize_func": lambda word: word.replace("_", "-")},
)


def main() -> None:
    """Entry point of `hf-dpopt`; a wrong setting or a failing disk ends it with one line on stderr and exit code 2."""
    try:
        app()
    except (DPConfigError, DPBudgetExceeded) as error:
        _end(str(error))
    except OSError as error:
        place = error.filename2 or error.filename
        _end(f"{place or 'a file'} could not be read or written: {error.strerror or error}. Name another place.")


def _end(message: str) -> None:
    sys.stderr.write(f"hf-dpopt: {' '.join(message.split())}\n")
    sys.exit(2)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"hf-dpopt {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Differentially private finetuning."""


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def train(
    file: Annotated[Path | None, typer.Argument(help="A YAML file: `job`, and flags of its script.")] = None,
    flags: Annotated[list[str] | None, typer.Argument(help="Flags override the file; --help lists all.")] = None,
    example: Annotated[str | None, typer.Option(help="Print a commented file, such as chat, to begin with.")] = None,
) -> None:
    """Train from one file. Paths in it are relative to the current folder.

    hf-dpopt train --example chat > config.yaml; hf-dpopt train config.yaml --target_epsilon 3
    """
    from hf_dpopt.cli import train as training

    if example is not None:
        training.print_example(example)
    elif str(file).startswith("-"):
        raise DPConfigError(
            f"{file}: the only option before the file is --example. Name the file first: `hf-dpopt train config.yaml "
            f"{file} ..`."
        )
    elif file is not None:
        training.train(file, flags or [])
    else:
        raise DPConfigError("`file`: missing. Name one; `hf-dpopt train --example chat > config.yaml` writes one.")


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def synth(
    file: Annotated[Path, typer.Argument(help="Private rows: csv, tsv, jsonl, json or parquet.")],
    flags: Annotated[list[str] | None, typer.Argument(help="As of recipes/synthetic.py; --help lists all.")] = None,
) -> None:
    """Make synthetic rows: of texts, or of a table with --schema.

    hf-dpopt synth patients.csv --schema schema.json --model_name_or_path FOLDER --target_epsilon 8
    """
    from hf_dpopt.cli import train as training

    if str(file).startswith("-"):
        raise DPConfigError(f"{file}: an option. Name the file first: `hf-dpopt synth patients.csv {file} ..`.")
    training.run_script("synthetic", [str(file), *(flags or [])])


@app.command()
def demo(
    output_dir: Annotated[
        Path, typer.Argument(help="A new folder, for statement, ledger and demo.json.", callback=check_path)
    ] = Path("hf_dpopt_demo"),
    seed: Annotated[int, typer.Option(help="Of the made-up records and the first weights.")] = 0,
) -> None:
    """Ask a private and a stock model for planted secrets."""
    from hf_dpopt.huggingface.demo import run

    run(output_dir, seed=seed)


@app.command()
@takes(
    "expected_batch_size", "target_epsilon", "noise_multiplier", "target_delta", "allow_large_delta", "sampling",
    "adjacency", "noise_mechanism", "noise_kwargs", "noise_restart_every", "noise_at_changes", "preconditioner",
    "preconditioner_kwargs", "amplification_samples", "tuned_runs", "privacy_unit", "records_per_user",
)  # fmt: skip
def plan(
    ctx: typer.Context,
    num_examples: NumExamples,
    steps: Steps = None,
    epochs: Epochs = None,
    optimizer: Annotated[str, typer.Option(help="adamw (any adaptive one) or sgd.")] = "adamw",
    momentum: Annotated[float, typer.Option(help="Of SGD; noise is tuned for it.")] = 0.0,
    weights: Annotated[str | None, typer.Option(help="Weights of the model, frozen ones included (125M).")] = None,
    finetuning: Finetuning = None,
    objective: Annotated[str, typer.Option(help="classification, or generation (of tokens).")] = "classification",
    compare: Annotated[bool, typer.Option("--compare", help="Also compare all noise mechanisms.")] = False,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Plan a run: noise, epsilon, and which noise suits it. Without a batch: advice which to take. No data is read."""
    given = {**locals(), **options}
    from hf_dpopt.cli import advising

    advising.check_names(given)
    given["weights"] = advising.parse_count(weights)
    if options["expected_batch_size"] is None:
        advising.refuse_without_batch(ctx)
        job = advising.job_of(given)
        advising.check_delta_of(job, allow_large=given["allow_large_delta"])
        advising.show_advice(job, as_json=as_json)
        return
    from hf_dpopt.cli import planning

    num_steps = planning.steps_of_run(num_examples, options["expected_batch_size"], steps=steps, epochs=epochs)
    planning.plan_run(given, num_steps)


@app.command()
def verify(
    path: Annotated[
        Path, typer.Argument(help="The output_dir of a private run, or its folder privacy.", callback=check_path)
    ],
    strict: Annotated[bool, typer.Option(help="Take what could not be checked for a failure.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a run's claim by accountants of others. Needs no data, keys or torch.

    Exit code 0: verified. 1: a check failed, or was not made with --strict. 2: no report. 3: no check failed, and no
    independent computation supports epsilon.
    """
    from hf_dpopt.cli.show import print_json
    from hf_dpopt.verify.verifying import verify as verified

    outcome = verified(path)
    code = outcome.exit_code(is_strict=strict)
    if as_json:
        print_json({"path": str(path), "exit_code": code, **outcome.public_dict()})
    else:
        typer.echo("\n".join([*map(str, outcome.checks), outcome.verdict]))
    _end_with(code)


@app.command()
@takes(
    "target_epsilon", "noise_multiplier", "target_delta", "expected_batch_size", "noise_mechanism", "noise_kwargs",
    "sampling", "adjacency", "preconditioner", "preconditioner_kwargs", "privacy_unit", has_defaults=False,
)  # fmt: skip
def audit(
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 32,
    canaries: Annotated[int, typer.Option(help="Records (or users) whose gradients are known.")] = 1000,
    like: Annotated[
        Path | None,
        typer.Option(
            help="Take noise, sampling, clip and budget from the report of this run, and write beside it.",
            callback=check_path,
        ),
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Attack a run of canaries in this installation. Prints lower bounds on epsilon, and tests of the noise.

    Takes seconds and no data. Without options: 1,000 canaries, 32 steps of 250, epsilon 4 at delta 1e-5. Exit code 0:
    no test failed. 1: one did, or the claim is refuted. 2: a wrong setting.
    """
    from hf_dpopt.cli.audit import show_audit

    _end_with(show_audit(options, num_canaries=canaries, num_steps=steps, as_json=as_json, like=like))


@app.command()
def scan(output_dir: OutputDir, private_state_dir: PrivateStateDir = None) -> None:
    """Look for keys and un-noised results in a folder. Generator states, too; exit code 1 if something is found."""
    from hf_dpopt.cli.folders import show_findings

    _end_with(show_findings(output_dir, private_state_dir) > 0)


@app.command()
def doctor(
    output_dir: OutputDir,
    private_state_dir: PrivateStateDir = None,
) -> None:
    """Say what a folder holds of a run, and what it has cost. Exit code 1 if something is wrong."""
    from hf_dpopt.cli.doctor import show_health

    _end_with(not show_health(output_dir, private_state_dir))


@app.command()
def tune(
    command: Annotated[
        list[str],
        typer.Argument(help="Behind --, the command that trains, evaluates, saves: -- python train.py .."),
    ],
    output_dir: Annotated[Path, typer.Option(help="Folder in which the best run is released.", callback=check_folder)],
    epsilon: Annotated[float, typer.Option(help="Budget of the whole tuning.")],
    space: Annotated[str, typer.Option(help="Options to draw and their laws: JSON, or a file of it.")],
    metric: Annotated[str, typer.Option(help="Score by which the best is chosen, as in eval_results.json.")],
    runs: Annotated[float, typer.Option(help="Mean number of runs; the number itself is secret.")] = 10.0,
    minimize: Annotated[bool, typer.Option(help="The best score is the smallest.")] = False,
    private_state_dir: PrivateStateDir = None,
    privacy_ledger: Annotated[str | None, flag("privacy_ledger")] = None,
    privacy_ledger_epsilon: Annotated[float | None, flag("privacy_ledger_epsilon")] = None,
) -> None:
    """Train a random number of private runs, and release the best. Nothing of the others is released.

    Exit code 1: no run gave a score, and nothing was released. A tuning that was interrupted goes on where it was.
    """
    given = dict(locals())
    from hf_dpopt.cli.tune import run_tuning

    _end_with(not run_tuning(**given))


@app.command()
def ledger(
    path: Annotated[Path, typer.Argument(help="A --privacy_ledger.", callback=check_path)], as_json: AsJson = False
) -> None:
    """Print what all runs on the same people have spent."""
    from hf_dpopt.cli.folders import show_ledger

    show_ledger(path, as_json=as_json)


@app.command()
@takes(
    "expected_batch_size", "head_radius", "feature_norm", "target_epsilon", "noise_multiplier", "target_delta",
    "allow_large_delta", "l2",
)  # fmt: skip
def plan_head(
    num_examples: NumExamples,
    num_steps: Annotated[int, typer.Option("--steps", help="Steps of the whole run.")],
    learning_rate: Annotated[float | None, typer.Option(help="Default: half of what is allowed.")] = None,
    num_weights: Annotated[
        int | None, typer.Option(help="Labels x (features + 1 for a bias): how far noise carries them.")
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Plan a linear head of which only the final weights leave. Noise, epsilon, and from where on steps are free."""
    given = {**locals(), **options}
    from hf_dpopt.cli.plan_head import show_head

    show_head(given)


def _end_with(code: int) -> None:
    if code:
        raise typer.Exit(int(code))


if __name__ == "__main__":
    main()
