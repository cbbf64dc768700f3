"""The command line: what a run would cost, what a run did, and whether its folder may be published."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_dpopt.cli.head import plan_head
from hf_dpopt.cli.mechanisms import mechanism_facts, mechanisms_table
from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex.statement import disagreements, read_head_report
from hf_dpopt.huggingface.workload import MAX_SCHEDULED_STEPS
from hf_dpopt.noise import MECHANISMS
from hf_dpopt.noise.strategies import Workload, momentum_workload
from hf_dpopt.plan.compare import ComparedNoise, compare_mechanisms
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan, make_plan
from hf_dpopt.plan.users import UserPlans, plan_for_users
from hf_dpopt.report.facts import RunFacts
from hf_dpopt.report.noise_plots import plot_comparison, pyplot
from hf_dpopt.report.release_scan import scan_for_secrets
from hf_dpopt.report.report import FOLDER, LEDGER, STATEMENT, is_of_this_release, read_report
from hf_dpopt.report.statement import render_statement, round_up
from hf_dpopt.run.keys import PrivateState, default_private_dir
from hf_dpopt.run.ledger import Ledger
from hf_dpopt.sampling import SAMPLERS

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Differentially private finetuning.",
)

PLOTTED_EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)

OutputDir = Annotated[Path, typer.Argument(help="The output_dir of a private run.")]


def main() -> None:
    """Entry point of `hf-dpopt`; a wrong setting ends it with one line on stderr and exit code 2."""
    try:
        app()
    except DPConfigError as error:
        sys.stderr.write(f"hf-dpopt: {' '.join(str(error).split())}\n")
        sys.exit(2)


@app.command()
def plan(
    num_examples: Annotated[
        int, typer.Option("--num-examples", "--num_examples", "-n", help="Records in the training set.")
    ],
    batch_size: Annotated[
        int, typer.Option("--batch-size", "--batch", "-b", help="Expected records per optimizer step.")
    ],
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the whole run.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Or passes over the data, counted as the Trainer does.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget: the noise is computed.")] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option("--noise-multiplier", "--noise_multiplier", help="Or the noise: epsilon is computed."),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="At most 1/n. Default: min(n^-1.1, 1/(10 n)) rounded down to one digit.")
    ] = None,
    allow_large_delta: Annotated[
        bool,
        typer.Option("--allow-large-delta", "--allow_large_delta", help="Accept a delta above 1/n."),
    ] = False,
    sampling: Annotated[str, typer.Option(help=f"auto, {', '.join(SAMPLERS)}.")] = "auto",
    adjacency: Annotated[str, typer.Option(help="auto, add_or_remove_one, zero_out or replace_one.")] = "auto",
    noise_mechanism: Annotated[
        str, typer.Option("--noise-mechanism", "--noise_mechanism", help=f"auto, {', '.join(MECHANISMS)}.")
    ] = "gaussian",
    noise_kwargs: Annotated[
        str | None, typer.Option("--noise-kwargs", "--noise_kwargs", help="Options of the mechanism, as JSON.")
    ] = None,
    users: Annotated[
        int | None, typer.Option(help="Users in the training set: they are protected, and ways to train compared.")
    ] = None,
    records_per_user: Annotated[
        int, typer.Option("--records-per-user", "--records_per_user", help="Of a user, that take part; with --users.")
    ] = 16,
    optimizer: Annotated[str, typer.Option(help="adamw (any adaptive one) or sgd.")] = "adamw",
    momentum: Annotated[float, typer.Option(help="Of SGD; noise is tuned for it.")] = 0.0,
    schedule: Annotated[str, typer.Option(help="Learning rate: constant, or linear down to 0.")] = "linear",
    num_parameters: Annotated[
        int, typer.Option("--num-parameters", "--num_parameters", help="Trained coordinates, for memory and time.")
    ] = 10**6,
    compare: Annotated[
        bool | None, typer.Option(help="Also compare all mechanisms. Default: if epsilon is given, without --json.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for plots of the comparison (PNG and SVG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Noise and epsilon of a run, before it is started, and which noise suits it. No data is read."""
    config = PrivacyConfig(
        target_epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        target_delta=delta,
        allow_large_delta=allow_large_delta,
        expected_batch_size=batch_size,
        sampling=sampling,  # type: ignore[arg-type]  # PrivacyConfig says which names there are
        adjacency=adjacency,  # type: ignore[arg-type]
        noise_mechanism=noise_mechanism,
        noise_kwargs=_json(noise_kwargs),
    )
    check_count("num_parameters", num_parameters)
    if plots is not None:
        pyplot()  # what cannot be drawn is found before anything is computed
    num_steps = _num_steps(batch_size, num_examples, steps, epochs)
    if users is not None:
        compared = plan_for_users(
            config,
            num_users=users,
            records_per_user=records_per_user,
            records_per_step=batch_size,
            num_steps=num_steps,
        )
        both = {"by_users": compared.by_users.public_dict(), "by_records": compared.by_records.public_dict()}
        typer.echo(_as_json(both) if as_json else _users_text(compared))
        return
    sizes = {
        "num_examples": num_examples,
        "num_steps": num_steps,
        "workload": (workload := _workload(num_steps, optimizer, momentum, schedule)),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make_plan(config, **sizes)  # type: ignore[arg-type]
        rows = _compared(config, made, sizes, wanted=bool(plots) or (compare if compare is not None else not as_json))
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        sys.stderr.write(f"hf-dpopt: warning: {message}\n")
    if as_json:
        listed = {"mechanisms": [mechanism_facts(row, num_parameters) for row in rows]} if rows else {}
        typer.echo(_as_json(made.public_dict() | listed))
    else:
        _show(made, rows, num_parameters)
    if plots is not None and rows:
        by_epsilon = {target: _compared(config, None, sizes, target=target) for target in PLOTTED_EPSILONS}
        for path in plot_comparison(rows, plots, workload=workload, by_epsilon=by_epsilon):
            sys.stderr.write(f"hf-dpopt: wrote {path}\n")


def _as_json(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=2, sort_keys=True)


def _show(made: PrivacyPlan, rows: list[ComparedNoise], num_parameters: int) -> None:
    console = Console()
    console.print(_table(made))
    if rows:
        # the table does not fit into the 80 columns of a pipe
        Console(width=max(console.width, 132)).print(mechanisms_table(rows, num_parameters))


def _users_text(compared: UserPlans) -> str:
    lines = [
        f"{label}: {plan.config.expected_batch_size} {kind} a step of {plan.num_examples}, noise multiplier "
        f"{plan.noise_multiplier:.4g}, noise in the mean gradient {noise:.3g} clipping norms of a {kind[:-1]}; "
        f"epsilon {plan.epsilon():.4g} at delta {plan.delta:g} for a user"
        for label, plan, kind, noise in (
            ("users sampled", compared.by_users, "users", compared.noise_by_users),
            ("records sampled", compared.by_records, "records", compared.noise_by_records),
        )
    ]
    return "\n".join([*lines, compared.advice()])


@app.command()
def report(output_dir: OutputDir) -> None:
    """Print the privacy statement of a run, and check it against the ledger. Exit code 1 if they disagree."""
    head = read_head_report(output_dir)
    if head is not None:
        text = (output_dir / FOLDER / STATEMENT).read_text(encoding="utf-8")
        problems, agreed = disagreements(output_dir, head), f"one run, digest {head['ledger_digest']}"
    else:
        facts = read_report(output_dir)
        text = render_statement(facts)
        problems = _disagreements(output_dir, facts, text)
        agreed = f"{facts.steps_charged} steps, digest {facts.ledger_digest}"
    typer.echo(text)
    for problem in problems:
        sys.stderr.write(f"hf-dpopt: {problem}\n")
    if problems:
        raise typer.Exit(1)
    typer.echo(f"The ledger agrees: {agreed}.")


@app.command()
def scan(
    output_dir: OutputDir,
    private_state_dir: Annotated[
        Path | None, typer.Option(help="Where the run kept its keys, if that was not the default.")
    ] = None,
) -> None:
    """Look for keys, generator states, un-noised values and credentials in a folder; exit code 1 on a finding."""
    directory = private_state_dir or default_private_dir(output_dir)
    secrets = PrivateState(directory, forbidden=output_dir).secrets() if directory.is_dir() else []
    findings = scan_for_secrets(output_dir, secrets)
    for finding in findings:
        typer.echo(str(finding))
    known = f"{len(secrets)} keys of {directory}" if secrets else f"no keys (there are none left in {directory})"
    typer.echo(f"{len(findings)} finding(s) in {output_dir}; looked for {known} and for un-noised values.")
    if findings:
        raise typer.Exit(1)


app.command("plan-head")(plan_head)


def _json(text: str | None) -> dict[str, Any]:
    try:
        return {} if text is None else json.loads(text)
    except ValueError:
        raise DPConfigError(
            f"--noise-kwargs {text} is not JSON. Use --noise-kwargs '{{\"num_buffers\": 3}}'."
        ) from None


def _workload(num_steps: int, optimizer: str, momentum: float, schedule: str) -> Workload:
    """What the optimizer makes of the gradients."""
    if optimizer not in ("adamw", "sgd"):
        raise DPConfigError(f"--optimizer {optimizer} is unknown. Use adamw (for any adaptive one) or sgd.")
    if optimizer == "adamw" and momentum:
        raise DPConfigError("--momentum is that of SGD: add --optimizer sgd. Noise for AdamW is tuned without it.")
    if schedule not in ("constant", "linear"):
        raise DPConfigError(f"--schedule {schedule} is unknown. Use constant or linear.")
    scheduled = schedule == "linear" and 1 < num_steps <= MAX_SCHEDULED_STEPS
    sizes = [(num_steps - t) / num_steps for t in range(num_steps)] if scheduled else None
    return dataclasses.replace(momentum_workload(num_steps, momentum, sizes), adaptive=optimizer == "adamw")


def _compared(
    config: PrivacyConfig,
    made: PrivacyPlan | None,
    sizes: dict[str, Any],
    *,
    wanted: bool = True,
    target: float | None = None,
) -> list[ComparedNoise]:
    """All mechanisms at the budget of the config, or at another one."""
    if not wanted or config.target_epsilon is None:
        return []
    if made is not None and made.compared:
        return list(made.compared)
    asked = dataclasses.replace(
        config, noise_mechanism="auto", noise_kwargs={}, target_epsilon=target or config.target_epsilon
    )
    try:
        return compare_mechanisms(asked, **sizes)
    except DPConfigError as error:
        if made is None:
            return []  # a budget of the plot that nothing can keep
        sys.stderr.write(f"hf-dpopt: warning: mechanisms are not compared: {error}\n")
        return []


def _num_steps(batch_size: int, num_examples: int, steps: int | None, epochs: float | None) -> int:
    """Optimizer steps of the run; epochs are converted as `Trainer` does."""
    if (steps is None) == (epochs is None):
        given = "neither" if steps is None else "both"
        raise DPConfigError(f"{given} of --steps and --epochs given. Give exactly one, such as --epochs 3.")
    if steps is not None:
        check_count("num_steps", steps)
        return steps
    assert epochs is not None
    if not 0 < epochs < math.inf:
        raise DPConfigError(f"--epochs {epochs} is not a number of passes. Use a finite number > 0, such as 3.")
    return math.ceil(epochs * -(-num_examples // batch_size))


def _table(made: PrivacyPlan) -> Table:
    """The plan for people."""
    table = Table(title="Private run", show_header=False)
    replaced = made.epsilon_replace_one()
    rows: dict[str, Any] = {
        "epsilon": f"{round_up(made.epsilon())} ({made.adjacency})",
        "epsilon if one record is swapped": "no analysis is known" if replaced is None else round_up(replaced),
        "delta": f"{made.delta:g}",
        "noise multiplier": f"{made.noise_multiplier:.6g}",
        "noise": made.config.noise_mechanism,
        "sampling": made.describe_sampling(),
        "optimizer steps": made.num_steps,
        "accountant": made.public_dict()["accountant"],
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _disagreements(output_dir: Path, facts: RunFacts, text: str) -> list[str]:
    """What in a run's folder contradicts its report."""
    folder = output_dir / FOLDER
    problems = []
    statement = folder / STATEMENT
    if not statement.is_file():
        problems.append(f"{statement} is missing.")
    elif is_of_this_release(facts) and statement.read_text(encoding="utf-8") != text:
        problems.append(f"{statement} was edited.")
    ledger = Ledger.read(folder / LEDGER)
    if ledger.digest() != facts.ledger_digest:
        went_on = ledger.num_charged > facts.steps_charged and facts.ledger_digest in ledger.path.read_text()
        problems.append(
            f"the ledger went on after the report: {ledger.num_charged} steps charged now, {facts.steps_charged} then."
            if went_on
            else f"the ledger's digest is {ledger.digest()}, the report names {facts.ledger_digest}: one was replaced."
        )
    elif ledger.num_charged != facts.steps_charged:
        problems.append(f"the ledger has charged {ledger.num_charged} steps, the report says {facts.steps_charged}.")
    return problems


if __name__ == "__main__":
    main()
