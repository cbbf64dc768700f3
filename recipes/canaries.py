#!/usr/bin/env python
"""Attack a run of one's own: canaries among the training records of `clm.py`, and a bound on epsilon.

    python recipes/canaries.py make --model_name_or_path gpt2 --train_file train.csv \
        --output_file train_canaries.jsonl --secret_file canaries.json
    accelerate launch recipes/clm.py --model_name_or_path gpt2 --train_file train_canaries.jsonl --output_dir out ...
    python recipes/canaries.py score --secret_file canaries.json --trained out --initial gpt2

Canaries are texts of random tokens, each in or out of the file by a draw of probability 1/2 that stands in the secret
file alone: keep it where nothing trains, and look at no draw before the scores are written. The training flags that
say what a record is (columns, block_size ..) are given to `make`, and used again by `score`. The
canaries that take part are records like the others: they enter n, and the claim is about the run with them.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from recipes import flags

    flags.refuse_unknown(sys.argv[1:])  # before the imports below, which take seconds

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, PreTrainedModel, PreTrainedTokenizerBase

from hf_dpopt import DPConfigError
from hf_dpopt.audit.bounds import lower_bounds
from hf_dpopt.common.extras import import_extra
from hf_dpopt.report.report import CANARIES, FOLDER, REPORT, add_audit, read_report
from recipes import clm, models, running
from recipes.clm_data import choose_block_size, find_kind, tokenize
from recipes.options import ModelArguments, Parser, flag
from recipes.tables import TEXT_EXTENSIONS, Table, check_columns, read_table

COMMANDS = ("make", "score")
FEWEST = 20
VERSION = 1
ADAPTER = "adapter_config.json"
DRAWS = secrets.SystemRandom()
Row = dict[str, Any]


@dataclass
class MakeArguments:
    """Which canaries, and where they go."""

    output_file: Path = flag(MISSING, "Training file with the canaries that take part: .jsonl or .jsonl.gz.")
    secret_file: Path = flag(MISSING, "All canaries and who takes part. Keep it out of reach of training.")
    num_canaries: int = flag(1000, "Half of them take part, on average.")
    num_tokens: int = flag(16, "Random tokens in each text of a canary.")
    user_id_column: str | None = flag(None, "Users are protected: the column of their ids. Every canary is a user.")


@dataclass
class ScoreArguments:
    """Which model is attacked, and by which canaries."""

    secret_file: Path = flag(MISSING, "Written by make.")
    trained: str = flag(MISSING, "output_dir of the run.")
    initial: str | None = flag(None, "Model before training: scores are then by how much a loss fell.")
    scores_file: Path | None = flag(None, "Also write the scores: score,included.")
    delta: float | None = flag(None, "Of the bound. Default: that of the run's report.")
    confidence: float = flag(0.95, "Of the bounds.")


@dataclasses.dataclass(frozen=True)
class Secret:
    """Content of a secret file.

    Attributes:
        flags: data arguments of `clm.py`.
        num_rows: rows of the training file, canaries included.
        rows: the canaries.
        included: whether each takes part.
    """

    flags: dict[str, Any]
    num_rows: int
    rows: list[Row]
    included: list[bool]


def main(argv: list[str]) -> None:
    """Run one of the two commands.

    Raises:
        DPConfigError: for settings and files that are wrong.
    """
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__)  # what the two commands take: canaries.py make --help
        return
    if not argv or argv[0] not in COMMANDS:
        raise DPConfigError(f"{argv[0] if argv else 'Nothing'!r} is no command. Use {' or '.join(COMMANDS)}.")
    if argv[0] == "make":
        _make(argv[1:])
    else:
        _score(argv[1:])


# --- make ------------------------------------------------------------------------------------------------------------


def _make(argv: list[str]) -> None:
    classes = (MakeArguments, clm.ModelArguments, clm.DataTrainingArguments)
    args, model_args, data_args = Parser(classes, allow_abbrev=False).parse_args_into_dataclasses(argv)
    if args.num_canaries < FEWEST or args.num_tokens < 1:
        raise DPConfigError(
            f"num_canaries={args.num_canaries} of {args.num_tokens} tokens show nothing. Use {FEWEST} or more, of 1 "
            "or more tokens."
        )
    if args.secret_file.exists():
        raise DPConfigError(f"secret_file={args.secret_file} is there, and draws are made once. Name a new file.")
    if data_args.train_file is None:
        raise DPConfigError("Canaries are put among the records of a file. Give --train_file.")
    if model_args.model_name_or_path is None and model_args.tokenizer_name is None:
        raise DPConfigError("Canaries are made of a model's tokens. Give --model_name_or_path.")
    table = read_table(data_args.train_file, kinds=TEXT_EXTENSIONS, option="train_file")
    words = words_of(models.load_tokenizer(model_args))
    kind = find_kind({"train": table}, data_args)
    # a row with nothing in it, of the same types as the first one, but for the columns that are read
    empty = {name: type(values[0])() if values[0] is not None else None for name, values in table.columns.items()}
    rows = [
        empty | {column: " ".join(DRAWS.choices(words, k=args.num_tokens)) for column in kind.columns}
        for _ in range(args.num_canaries)
    ]
    if args.user_id_column is not None:
        _name_users(table, rows, args.user_id_column)
    included = [bool(secrets.randbits(1)) for _ in rows]
    everything = mix(table, [row for row, is_in in zip(rows, included, strict=True) if is_in])
    secret = Secret(vars(data_args), len(everything), rows, included)
    _write_secret(args.secret_file, secret)  # before the file: one without the other's draws is of no use
    write_rows(args.output_file, everything)
    print(
        f"{len(rows)} canaries, each among the {len(table)} records of {args.output_file} with probability 1/2; who "
        f"is, stands in {args.secret_file} alone. Train {model_args.model_name_or_path} on the new file."
    )


def words_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of the tokens that canaries are made of: printable ones with a letter or digit.

    Raises:
        DPConfigError: if there are hardly any.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ids = [i for i in sorted(tokenizer.get_vocab().values()) if i not in special]
    texts = [tokenizer.decode([i]).strip() for i in ids]
    words = sorted({text for text in texts if text.isprintable() and any(map(str.isalnum, text)) and "�" not in text})
    if len(words) < 20:
        raise DPConfigError(
            f"The tokenizer has {len(words)} tokens of letters or digits, too few for texts that are in no other "
            "record. Use that of the model that is trained."
        )
    return words


def mix(table: Table, rows: Sequence[Row]) -> list[Row]:
    """The rows of a table in their order, and others between them at places that were drawn."""
    names, num = list(table.columns), len(table) + len(rows)
    theirs = set(DRAWS.sample(range(num), len(rows)))
    own = iter(zip(*table.columns.values(), strict=True))
    others = iter(rows)
    return [next(others) if place in theirs else dict(zip(names, next(own), strict=True)) for place in range(num)]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write JSON lines.

    Raises:
        DPConfigError: for a file of another name, and for one that is there.
    """
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise DPConfigError(f"output_file={path}: must end in .jsonl or .jsonl.gz. Give another name.")
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")
    try:
        with path.open("xb") as file:
            file.write(gzip.compress(content) if path.suffix == ".gz" else content)
    except FileExistsError:
        raise DPConfigError(f"output_file={path} is there, and may hold other canaries. Name a new file.") from None


def _name_users(table: Table, rows: list[Row], column: str) -> None:
    check_columns(table, {column: "user_id_column"}, "Name the one that tells users apart.")
    taken = set(map(str, table.columns[column]))
    for number, row in enumerate(rows):
        row[column] = f"canary-{number}"
        if row[column] in taken:
            raise DPConfigError(f"{table.name} has a user {row[column]!r}. Leave the canaries of earlier audits out.")


def _write_secret(path: Path, secret: Secret) -> None:
    content = {"version": VERSION} | dataclasses.asdict(secret)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False)


# --- score -----------------------------------------------------------------------------------------------------------


def _score(argv: list[str]) -> None:
    (args,) = Parser((ScoreArguments,), allow_abbrev=False).parse_args_into_dataclasses(argv)
    secret = _read_secret(args.secret_file)
    epsilon, delta = _claim(args, secret)
    scores = -_losses(args.trained, secret)
    if args.initial is not None:
        scores += _losses(args.initial, secret)
    if args.scores_file is not None:
        lines = [f"{score!r},{int(is_in)}\n" for score, is_in in zip(scores.tolist(), secret.included, strict=True)]
        args.scores_file.write_text("score,included\n" + "".join(lines), encoding="utf-8")
    found = lower_bounds(scores, secret.included, delta=delta, significance=1 - args.confidence)
    print(f"{len(scores)} canaries, {sum(secret.included)} of them in the training file; losses of {args.trained}")
    if epsilon is not None:
        _write_down(args, len(scores), found, epsilon=epsilon, delta=delta)
    for method, bound in found.items():
        print(f"        epsilon >= {bound:.2f} by {method}, with confidence {args.confidence:.0%}")
    if epsilon is not None:
        is_refuted = found["one_run"] > epsilon
        print(f"{'FAILED: ' * is_refuted}epsilon {epsilon:g} is {'' if is_refuted else 'not '}refuted.")
        if is_refuted:
            sys.exit(1)


def _write_down(args: Any, num: int, found: dict[str, float], *, epsilon: float, delta: float) -> None:
    """Put the bounds beside the report, and into the statement."""
    content = {"num_canaries": num, "lower_bounds": found, "claimed_epsilon": epsilon, "delta": delta}
    content |= {"confidence": args.confidence, "passed": found["one_run"] <= epsilon}
    print(f"written to {add_audit(args.trained, CANARIES, content)}, and into the statement beside it")


def _read_secret(path: Path) -> Secret:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != VERSION:
            raise ValueError("of another release")
        secret = Secret(**content)
        if len(secret.rows) != len(secret.included):
            raise ValueError("incomplete")
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise DPConfigError(
            f"secret_file={path} is none that make wrote ({type(error).__name__}: {error}). Give the one of the run."
        ) from error
    return secret


def _claim(args: ScoreArguments, secret: Secret) -> tuple[float | None, float]:
    """Epsilon and delta of the run, as far as it claims any.

    Raises:
        DPConfigError: if the run did not train on the file of these canaries, or there is no delta.
    """
    if not (Path(args.trained) / FOLDER / REPORT).is_file():
        if args.delta is None:
            raise DPConfigError(f"{args.trained} has no report of a private run, so say at which --delta to bound.")
        return None, args.delta
    facts = read_report(args.trained)
    trained_on = facts.plan["num_examples"]
    if facts.plan["privacy_unit"] == "example" and trained_on != secret.num_rows:
        raise DPConfigError(
            f"{args.trained} was trained on {trained_on} records, and the file of these canaries has "
            f"{secret.num_rows}. Give the secret file of that run, and train on all of the file."
        )
    if args.delta not in (None, facts.delta):
        raise DPConfigError(f"delta={args.delta} is not that of the run, {facts.delta:g}. Leave --delta out.")
    return (None if facts.not_private_reasons else facts.epsilon), facts.delta


def _losses(folder: str, secret: Secret) -> np.ndarray:
    """Mean loss of each canary's learned tokens, (M,), in nats: the whole of the attack."""
    data_args = clm.DataTrainingArguments(**secret.flags)
    data_args.separator = clm.unescaped(data_args.separator) or ""
    data_args.prompt_template = clm.unescaped(data_args.prompt_template)
    table = Table("the canaries", {name: [row[name] for row in secret.rows] for name in secret.rows[0]})
    model_args = ModelArguments(model_name_or_path=_base_of(folder) or folder, tokenizer_name=folder)
    tokenizer = models.load_tokenizer(model_args)
    tokenizer.padding_side = "right"
    config = models.load_config(model_args)
    model = _adapted(models.load_weights(AutoModelForCausalLM, model_args, config, dtype=torch.float32), folder)
    models.set_padding(tokenizer, model)
    block_size = choose_block_size(data_args.block_size, tokenizer, model)
    split = tokenize(table, find_kind({"train": table}, data_args), tokenizer, block_size=block_size)
    if split.num_without_target:
        raise DPConfigError("The canaries do not fit into records. Make them with fewer --num_tokens.")
    found = models.outputs(model, list(split.dataset), DataCollatorForSeq2Seq(tokenizer))
    sums_M2 = torch.cat([clm.loss_of_records(logits, labels) for logits, labels in found]).double().numpy()
    return sums_M2[:, 0] / sums_M2[:, 1]


def _base_of(folder: str) -> str | None:
    """The model that adapters in a folder were trained on; None if it holds a whole model."""
    path = Path(folder) / ADAPTER
    return json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"] if path.is_file() else None


def _adapted(model: PreTrainedModel, folder: str) -> Any:
    """The model with the adapters of a folder, if it has any; in evaluation mode."""
    if _base_of(folder) is not None:
        return import_extra("peft", f"The adapter in {folder}").PeftModel.from_pretrained(model, folder).eval()
    return model.eval()


if __name__ == "__main__":
    sys.exit(running.run(sys.argv[1:], main))
