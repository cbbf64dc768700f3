"""The command line: what a run would cost, what a run did, and whether its folder may be published.

Here are the commands and their flags. What a command does is imported when it runs, so that help is printed at once.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer

from hf_dpopt.cli.flags import (
    AllowLargeDelta,
    AsJson,
    BatchSize,
    Delta,
    Epsilon,
    MaybeBatchSize,
    NoiseMultiplier,
    NumExamples,
    OutputDir,
    check_folder,
    check_path,
    flag,
)
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.plan.options import AMPLIFICATION_SAMPLES, RECORDS_PER_USER

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
        typer.echo(f"hf-dpopt {importlib.metadata.version('hf_dpopt')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Differentially private finetuning."""


@app.command()
def plan(
    ctx: typer.Context,
    num_examples: NumExamples,
    expected_batch_size: MaybeBatchSize = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the whole run.")] = None,
    epochs: Annotated[
        float | None,
        typer.Option("--epochs", "--passes", help="Or passes over the data, counted as the Trainer does."),
    ] = None,
    target_epsilon: Epsilon = None,
    noise_multiplier: NoiseMultiplier = None,
    target_delta: Delta = None,
    allow_large_delta: AllowLargeDelta = False,
    sampling: Annotated[str, flag("sampling")] = "auto",
    adjacency: Annotated[str, flag("adjacency")] = "auto",
    noise_mechanism: Annotated[str, flag("noise_mechanism")] = "gaussian",
    noise_kwargs: Annotated[str | None, flag("noise_kwargs")] = None,
    noise_restart_every: Annotated[int | None, flag("noise_restart_every")] = None,
    noise_at_changes: Annotated[str, flag("noise_at_changes")] = "auto",
    preconditioner: Annotated[str, flag("preconditioner")] = "none",
    preconditioner_kwargs: Annotated[str | None, flag("preconditioner_kwargs")] = None,
    amplification_samples: Annotated[int, flag("amplification_samples")] = AMPLIFICATION_SAMPLES,
    users: Annotated[
        int | None, typer.Option(help="Users in the training set: they are protected, and ways to train compared.")
    ] = None,
    records_per_user: Annotated[int, flag("records_per_user", says_default=False)] = RECORDS_PER_USER,
    optimizer: Annotated[str, typer.Option(help="adamw (any adaptive one) or sgd.")] = "adamw",
    momentum: Annotated[float, typer.Option(help="Of SGD; noise is tuned for it.")] = 0.0,
    schedule: Annotated[str, typer.Option(help="Learning rate: constant, or linear down to 0.")] = "linear",
    num_parameters: Annotated[
        str | None,
        typer.Option("--num-parameters", "--trained", help="Trained coordinates (0.3M), for advice, memory and time."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Weights of the model, frozen ones included, such as 125M.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name or folder of the model, for the command line; roberta-base, gpt2 ..")
    ] = None,
    task: Annotated[str | None, typer.Option(help="GLUE task, or e2e, for the command line.")] = None,
    finetuning: Annotated[str | None, typer.Option(help="full, lora or head. Default: by what is trained.")] = None,
    objective: Annotated[
        str, typer.Option(help="classification, or generation (a loss on tokens).")
    ] = "classification",
    records_per_second: Annotated[float | None, typer.Option(help="A measured rate, for the hours of advice.")] = None,
    compare: Annotated[
        bool | None, typer.Option(help="Also compare all mechanisms. Default: if epsilon is given, without --json.")
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Folder for plots of the privacy profile, and of the comparison (PNG and SVG).", callback=check_folder
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a run: noise, epsilon, and which noise suits it. Without a batch: advice which to take. No data is read."""
    given = dict(locals())
    from hf_dpopt.cli import advising

    trained = None if num_parameters is None else advising.parse_count(num_parameters)
    request = advising.Request(
        num_examples=num_examples, epsilon=target_epsilon, delta=target_delta, passes=epochs, trained=trained,
        weights=None if weights is None else advising.parse_count(weights), finetuning=finetuning,
        objective="generation" if task == "e2e" else objective, records_per_second=records_per_second,
        model=model, task=task,
    )  # fmt: skip
    if expected_batch_size is None:
        advising.refuse_without_batch(ctx, given)
        advising.show_advice(request, as_json=as_json)
        return
    from hf_dpopt.cli import planning

    num_steps = planning.steps_of_run(num_examples, expected_batch_size, steps=steps, epochs=epochs)
    if users is not None:
        planning.plan_users(
            planning.config_of(given), num_steps, users=users, records_per_user=records_per_user, as_json=as_json
        )
        return
    planning.plan_run(
        given,
        num_steps,
        planning.Training(optimizer=optimizer, momentum=momentum, schedule=schedule, num_parameters=trained or 10**6),
        request=request,
        compare=compare if compare is not None else not as_json or plots is not None,
        plots=plots,
        as_json=as_json,
    )


@app.command()
def report(output_dir: OutputDir) -> None:
    """Print a run's privacy statement, and check it by the ledger. Exit code 1 if they disagree."""
    from hf_dpopt.cli.folders import show_report

    if not show_report(output_dir):
        raise typer.Exit(1)


@app.command()
def verify(
    path: Annotated[
        Path, typer.Argument(help="The output_dir of a private run, or its folder privacy.", callback=check_path)
    ],
    strict: Annotated[bool, typer.Option(help="Take what could not be checked for a failure.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
    mark_card: Annotated[
        bool, typer.Option(help="If all is verified, say so in the metadata of the model card beside it.")
    ] = False,
) -> None:
    """Check a run's claim by accountants of others. Needs no data, keys or torch.

    Exit code 0: verified. 1: a check failed, or was not made with --strict. 2: no report. 3: no check failed, and no
    independent computation supports epsilon.
    """
    from hf_dpopt.cli.verification import show_verification

    code = show_verification(path, is_strict=strict, as_json=as_json, marks_card=mark_card)
    if code:
        raise typer.Exit(code)


@app.command()
def audit(
    target_epsilon: Epsilon = None,
    noise_multiplier: NoiseMultiplier = None,
    target_delta: Delta = None,
    expected_batch_size: MaybeBatchSize = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 32,
    canaries: Annotated[int, typer.Option(help="Records (or users) whose gradients are known.")] = 1000,
    noise_mechanism: Annotated[str | None, flag("noise_mechanism", says_default=False)] = None,
    noise_kwargs: Annotated[str | None, flag("noise_kwargs")] = None,
    sampling: Annotated[str | None, flag("sampling", says_default=False)] = None,
    adjacency: Annotated[str | None, flag("adjacency", says_default=False)] = None,
    preconditioner: Annotated[str | None, flag("preconditioner", says_default=False)] = None,
    preconditioner_kwargs: Annotated[str | None, flag("preconditioner_kwargs")] = None,
    privacy_unit: Annotated[str | None, flag("privacy_unit", says_default=False)] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            help="Take noise, sampling, clip and budget from the report of this run, and write beside it.",
            callback=check_path,
        ),
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option(
            help="Bound epsilon from canaries of one's own: CSV with the columns score and included.",
            callback=check_path,
        ),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of the lower bounds.")] = 0.95,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot of the attack within the claim (PNG, SVG).", callback=check_path)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Attack a run of canaries in this installation. Prints lower bounds on epsilon, and tests of the noise.

    Takes seconds and no data. Without options: 1,000 canaries, 32 steps of 250, epsilon 4 at delta 1e-5. Exit code 0:
    no test failed. 1: one did, or the claim is refuted. 2: a wrong setting.
    """
    given = dict(locals())
    from hf_dpopt.cli.auditing import settings_of, show_audit, show_scores, significance_of

    significance = significance_of(confidence)
    if scores is not None:
        code = show_scores(
            scores, delta=target_delta, epsilon=target_epsilon, significance=significance, as_json=as_json
        )
    else:
        code = show_audit(
            settings_of(given), num_canaries=canaries, num_steps=steps, significance=significance, plot=plot,
            as_json=as_json, like=like,
        )  # fmt: skip
    if code:
        raise typer.Exit(code)


@app.command()
def scan(
    output_dir: OutputDir,
    private_state_dir: Annotated[
        Path | None,
        typer.Option(help="Where the run kept its keys, if that was not the default.", callback=check_path),
    ] = None,
) -> None:
    """Look for keys and un-noised results in a folder. Generator states, too; exit code 1 if something is found."""
    from hf_dpopt.cli.folders import show_findings

    if show_findings(output_dir, private_state_dir):
        raise typer.Exit(1)


@app.command()
def doctor(
    output_dir: OutputDir,
    private_state_dir: Annotated[
        Path | None,
        typer.Option(help="Where the run kept its keys, if that was not the default.", callback=check_path),
    ] = None,
    fix: Annotated[
        bool, typer.Option(help="Move torn checkpoints aside, remove what killed runs left, and locks of nobody.")
    ] = False,
) -> None:
    """Say what a folder holds of a run, and what it has cost. Exit code 1 if something is wrong."""
    from hf_dpopt.cli.doctor import show_health

    if not show_health(output_dir, private_state_dir, fix=fix):
        raise typer.Exit(1)


@app.command()
def plan_tuning(
    num_examples: NumExamples,
    epsilon: Epsilon = None,
    delta: Delta = None,
    batch_size: MaybeBatchSize = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of a run.")] = None,
    epochs: Annotated[
        float | None, typer.Option("--epochs", "--passes", help="Or passes over the data. Default: 3.")
    ] = None,
    runs: Annotated[
        list[float] | None, typer.Option(help="Mean number of runs; more than once for several. Default: 2 to 100.")
    ] = None,
    shape: Annotated[
        list[float] | None, typer.Option(help="Shape of its law (0, 1, inf ..); more than once for several.")
    ] = None,
    sampling: Annotated[str, flag("sampling")] = "auto",
    finetuning: Annotated[str | None, typer.Option(help="full, lora or head. Default: lora.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan the best of a random number of runs. Prints noise and epsilon of each; no data is read."""
    from hf_dpopt.cli import advising, tuning

    request = advising.Request(
        num_examples=num_examples, epsilon=epsilon, delta=delta, passes=epochs, trained=None, weights=None,
        finetuning=finetuning, objective="classification", records_per_second=None,
    )  # fmt: skip
    if steps is not None and epochs is not None:
        raise DPConfigError("Both --steps and --epochs are given. Give one of them, such as --epochs 3.")
    tuning.show_tuning_plans(
        request, batch_size=batch_size, steps=steps, sampling=sampling, means=runs, shapes=shape, as_json=as_json
    )


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
    shape: Annotated[float, flag("tuned_shape", "--shape")] = 1.0,
    minimize: Annotated[bool, typer.Option(help="The best score is the smallest.")] = False,
    private_state_dir: Annotated[
        Path | None, typer.Option(help="Folder for runs and keys, which nobody may look at.", callback=check_path)
    ] = None,
    privacy_ledger: Annotated[str | None, flag("privacy_ledger")] = None,
    privacy_ledger_epsilon: Annotated[float | None, flag("privacy_ledger_epsilon")] = None,
) -> None:
    """Train a random number of private runs, and release the best. Nothing of the others is released.

    Exit code 1: no run gave a score, and nothing was released. A tuning that was interrupted goes on where it was.
    """
    given = dict(locals())
    from hf_dpopt.cli.tune import run_tuning

    if not run_tuning(**given):
        raise typer.Exit(1)


@app.command()
def ledger(
    path: Annotated[Path, typer.Argument(help="A --privacy_ledger.", callback=check_path)],
    as_json: Annotated[bool, typer.Option("--json", help="Print what it says as JSON.")] = False,
) -> None:
    """Print what all runs on the same people have spent."""
    from hf_dpopt.cli.ledgers import show_ledger

    show_ledger(path, as_json=as_json)


@app.command()
def plan_head(
    num_examples: NumExamples,
    expected_batch_size: BatchSize,
    num_steps: Annotated[int, typer.Option("--steps", help="Steps of the whole run.")],
    head_radius: Annotated[float, flag("head_radius")],
    feature_norm: Annotated[float, flag("feature_norm")],
    target_epsilon: Epsilon = None,
    noise_multiplier: NoiseMultiplier = None,
    target_delta: Delta = None,
    allow_large_delta: AllowLargeDelta = False,
    learning_rate: Annotated[float | None, typer.Option(help="Default: half of what is allowed.")] = None,
    l2: Annotated[float, flag("l2")] = 0.0,
    num_weights: Annotated[
        int | None, typer.Option(help="Labels x (features + 1 for a bias): how far noise carries them.")
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Folder for plots of both bounds on epsilon against the steps (PNG and SVG).", callback=check_folder
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a linear head of which only the final weights leave. Noise, epsilon, and from where on steps are free."""
    given = dict(locals())
    from hf_dpopt.cli.head import show_head

    show_head(given, num_examples=num_examples, num_weights=num_weights, as_json=as_json, plots=plots)


if __name__ == "__main__":
    main()
