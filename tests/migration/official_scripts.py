"""Runs the official example scripts with the two names changed: `python -m tests.migration.official_scripts`.

The scripts are not part of this project: HF_DPOPT_EXAMPLES names a folder that holds transformers' `pytorch` examples,
HF_DPOPT_TRL one that holds TRL's `trl/scripts` (TRL as it is installed is taken otherwise). Each is read, its names are
changed, and it is run as a program on small local data; what came out goes to docs/official_scripts.json, from which
docs/support.md has its table.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import runpy
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "official_scripts.json"
SECONDS = 420  # for one run

# name in the script -> (module, name that takes its place)
NAMES = {
    "Trainer": ("hf_dpopt", "DPTrainer"),
    "TrainingArguments": ("hf_dpopt", "DPTrainingArguments"),
    "Seq2SeqTrainer": ("hf_dpopt", "DPSeq2SeqTrainer"),
    "Seq2SeqTrainingArguments": ("hf_dpopt", "DPSeq2SeqTrainingArguments"),
    **{f"{kind}{what}": ("dp_trl" if kind == "KTO" else "hf_dpopt", f"DP{kind}{what}")
       for kind in ("SFT", "DPO", "Reward", "KTO") for what in ("Trainer", "Config")},
}  # fmt: skip
PRIVATE = (
    "--target_epsilon", "8", "--max_steps", "2", "--per_device_train_batch_size", "4", "--expected_batch_size", "8",
    "--report_to", "none", "--use_cpu", "True", "--save_strategy", "no", "--output_dir", "out",
)  # fmt: skip
EXACT, ANOTHER, REFUSED, FAILED = (
    "private and exact", "another unit, asked for", "refused, and the way out works", "does not run",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Way:
    """A way out of a refusal: what it says, arguments that are added, edits of the script, another script."""

    says: str
    arguments: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()
    instead: str | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """A script, what it is run with, and the ways out of its refusal, if it is one.

    Args:
        task: in words.
        script: below the folder of the examples.
        arguments: beside `PRIVATE`.
        refusal: what the refusal says; None for a script that runs as it is.
        ways: each is run.
        note: what is special.
        repairs: what keeps the script from running anywhere, without this project too.
    """

    task: str
    script: str
    arguments: tuple[str, ...]
    refusal: str | None = None
    ways: tuple[Way, ...] = ()
    note: str = ""
    repairs: tuple[tuple[str, str], ...] = ()


def _files(name: str, ending: str) -> tuple[str, ...]:
    return ("--train_file", f"{name}_train.{ending}", "--validation_file", f"{name}_validation.{ending}", "--do_train")


def _model(name: str) -> tuple[str, ...]:
    return ("--model_name_or_path", name)


BLOCK = Way("protect blocks: `--privacy_unit block`", ("--privacy_unit", "block"))
LINES = Way("protect lines: `--line_by_line`", ("--line_by_line",))
GROUPED = """            lm_datasets = tokenized_datasets.map(
                group_texts,
                batched=True,
                num_proc=data_args.preprocessing_num_workers,
                load_from_cache_file=not data_args.overwrite_cache,
                desc=f"Grouping texts in chunks of {block_size}",
            )
"""
DOCUMENTS = Way(
    "protect documents: one row each, cut and padded, in place of `group_texts`",
    edits=(
        (GROUPED, "            lm_datasets = tokenized_datasets\n"),
        ("output = tokenizer(examples[text_column_name])",
         "output = tokenizer(examples[text_column_name], truncation=True)"),
        ("data_collator=default_data_collator,",
         "data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),"),
        ("tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, **tokenizer_kwargs)",
         "tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, pad_token='!', **tokenizer_kwargs)"),
    ),
)  # fmt: skip
QUESTIONS = Way(
    "protect questions: keep their ids, `--privacy_unit user --user_id_column example_id`",
    ("--privacy_unit", "user", "--user_id_column", "example_id", "--records_per_user", "4"),
    edits=(
        (
            '        # Let\'s label those examples!\n        tokenized_examples["start_positions"] = []\n',
            '        tokenized_examples["example_id"] = [examples["id"][i] for i in sample_mapping]\n'
            '        tokenized_examples["start_positions"] = []\n',
        ),
    ),
)
SPANS = dataclasses.replace(QUESTIONS, says=f"other models: `run_qa.py`, and {QUESTIONS.says}", instead="run_qa")
MASKED = Way("another objective: `run_mlm.py --line_by_line`", ("--line_by_line",), instead="run_mlm")
RECONSTRUCTED = Way(
    "the loss of each image: `per_example_loss_func`, seven lines",
    edits=(
        (
            "def collate_fn(examples):",
            """def reconstruction(outputs, labels, inputs):
    pixels, masked = inputs["pixel_values"], inputs["bool_masked_pos"]
    errors = (pixels - outputs.reconstruction).abs()
    side, patch = int(masked.shape[1] ** 0.5), pixels.shape[-1] // int(masked.shape[1] ** 0.5)
    mask = masked.reshape(-1, 1, side, side).repeat_interleave(patch, 2).repeat_interleave(patch, 3)
    return (errors * mask).sum(dim=(1, 2, 3)) / (mask.sum(dim=(1, 2, 3)) + 1e-5) / pixels.shape[1]


def collate_fn(examples):""",
        ),
        (
            "        data_collator=collate_fn,",
            "        data_collator=collate_fn,\n        per_example_loss_func=reconstruction,",
        ),
    ),
)
CHOSEN = Way("learn the chosen answers: `sft.py`", instead="sft")
TRL = ("--bf16", "False", "--gradient_checkpointing", "False")

CASES: dict[str, Case] = {
    "run_glue": Case(
        "text classification", "text-classification/run_glue.py",
        (*_files("sst2", "csv"), *_model("bert"), "--do_eval", "--max_seq_length", "32"),
        note="the script logs training records: see migrate.md",
    ),
    "run_clm": Case(
        "causal language modelling", "language-modeling/run_clm.py",
        (*_files("wiki", "txt"), *_model("gpt2"), "--do_eval", "--block_size", "32"),
        "look like blocks", (BLOCK, DOCUMENTS),
    ),
    "run_mlm": Case(
        "masked language modelling", "language-modeling/run_mlm.py",
        (*_files("wiki", "txt"), *_model("bert"), "--max_seq_length", "32"), "look like blocks", (BLOCK, LINES),
    ),
    "run_ner": Case(
        "named entities", "token-classification/run_ner.py", (*_files("ner", "json"), *_model("bert")),
    ),
    "run_qa": Case(
        "question answering", "question-answering/run_qa.py",
        (*_files("squad", "json"), *_model("bert"), "--max_seq_length", "60", "--doc_stride", "16"),
        "cut from one example", (QUESTIONS, BLOCK), "`Trainer` is changed in `trainer_qa.py`, where it is subclassed",
    ),
    "run_qa_beam_search": Case(
        "question answering, beam search", "question-answering/run_qa_beam_search.py",
        (*_files("squad", "json"), *_model("xlnet_spans"), "--max_seq_length", "60", "--doc_stride", "16"),
        "tokens in the first dimension", (SPANS,), note="with XLNet alone",
    ),
    "run_translation": Case(
        "translation", "translation/run_translation.py",
        (*_files("translation", "json"), *_model("t5"), "--source_lang", "en", "--target_lang", "de",
         "--max_source_length", "32", "--max_target_length", "32"),
    ),
    "run_summarization": Case(
        "summarisation", "summarization/run_summarization.py",
        (*_files("pairs", "json"), *_model("bart"), "--text_column", "text", "--summary_column", "summary",
         "--max_source_length", "32", "--max_target_length", "32"),
    ),
    "run_classification": Case(
        "text classification", "text-classification/run_classification.py",
        (*_files("sst2", "csv"), *_model("bert"), "--text_column_names", "sentence", "--label_column_name", "label",
         "--max_seq_length", "32"),
        note="the script logs training records: see migrate.md",
    ),
    "run_swag": Case(
        "multiple choice", "multiple-choice/run_swag.py",
        (*_files("swag", "csv"), *_model("bert"), "--max_seq_length", "32"),
    ),
    "run_plm": Case(
        "permutation language modelling", "language-modeling/run_plm.py",
        (*_files("wiki", "txt"), *_model("xlnet"), "--max_seq_length", "32"),
        "tokens in the first dimension", (MASKED,), note="this copy misspells `processing_class=`, which was put right",
        repairs=(("processing_classtokenizer=", "processing_class="),),
    ),
    "run_fim": Case(
        "fill in the middle", "language-modeling/run_fim.py", (*_files("wiki", "txt"), *_model("gpt2"), "--block_size", "32"),
        "look like blocks", (BLOCK,), note="this copy takes a layer for its weights, which was put right",
        repairs=(("original_embeddings = model.get_input_embeddings()", "original_embeddings = model.get_input_embeddings().weight"),),
    ),
    "run_seq2seq_qa": Case(
        "question answering, generated", "question-answering/run_seq2seq_qa.py",
        (*_files("squad", "json"), *_model("t5"), "--max_seq_length", "60"),
        note="`Seq2SeqTrainer` is changed in `trainer_seq2seq_qa.py`, where it is subclassed",
    ),
    "run_image_classification": Case(
        "image classification", "image-classification/run_image_classification.py",
        ("--train_dir", "images", *_model("vit"), "--do_train", "--remove_unused_columns", "False",
         "--label_column_name", "label"),
    ),
    "run_mim": Case(
        "masked image modelling", "image-pretraining/run_mim.py",
        ("--dataset_name", "images", *_model("vit"), "--do_train", "--remove_unused_columns", "False", "--image_size", "16",
         "--patch_size", "8", "--encoder_stride", "8", "--mask_patch_size", "8", "--image_column_name", "image"),
        "No per-record loss is known", (RECONSTRUCTED,),
    ),
    "run_xnli": Case(
        "text classification", "text-classification/run_xnli.py",
        (*_model("bert"), "--language", "en", "--do_train", "--max_seq_length", "32"),
        note="its dataset is read from a local folder; the script logs training records: see migrate.md",
    ),
    "sft": Case(
        "TRL, supervised", "sft.py", (*_model("gpt2"), "--dataset_name", "answers", *TRL, "--eos_token", "<|endoftext|>"),
        note="with `DPSFTTrainer` and `DPSFTConfig`",
    ),
    "dpo": Case(
        "TRL, preferences", "dpo.py", (*_model("gpt2"), "--dataset_name", "preferences", *TRL),
        note="with `DPDPOTrainer` and `DPDPOConfig`",
    ),
    "reward": Case(
        "TRL, rewards", "reward.py", (*_model("gpt2"), "--dataset_name", "preferences", *TRL),
        note="with `DPRewardTrainer` and `DPRewardConfig`",
    ),
    "kto": Case(
        "TRL, desirable answers", "kto.py", (*_model("gpt2"), "--dataset_name", "desirable", *TRL),
        "estimates a divergence", (CHOSEN,),
    ),
}  # fmt: skip


def find_script(case: Case) -> Path | None:
    """Where the script of a case lies, or None."""
    if case.script.count("/"):
        root = os.environ.get("HF_DPOPT_EXAMPLES")
        path = Path(root) / "pytorch" / case.script if root else None
    else:
        root = os.environ.get("HF_DPOPT_TRL")
        spec = importlib.util.find_spec("trl") if root is None else None
        folder = Path(root) / "trl" if root else Path(spec.origin).parent if spec and spec.origin else None
        path = folder / "scripts" / case.script if folder else None
    return path if path is not None and path.is_file() else None


def with_names(source: str) -> str:
    """The script with `NAMES` imported from where they are private; nothing else is changed."""
    lines = source.splitlines(keepends=True)
    imports = [
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom) and n.module in ("transformers", "trl")
    ]
    for node in sorted(imports, key=lambda n: -n.lineno):
        changed = [a.name for a in node.names if a.name in NAMES and a.asname is None]
        if not changed:
            continue
        indent = " " * node.col_offset
        kept = [a.name if a.asname is None else f"{a.name} as {a.asname}" for a in node.names if a.name not in changed]
        new = [f"{indent}from {node.module} import {', '.join(kept)}\n"] if kept else []
        new += [f"{indent}from {NAMES[name][0]} import {NAMES[name][1]} as {name}\n" for name in changed]
        lines[node.lineno - 1 : node.end_lineno] = new
    return "".join(lines)


def _place(case: Case, way: Way | None, folder: Path) -> Path:
    """The script and what lies beside it, with the names changed, in a folder of its own."""
    found = find_script(case)
    assert found is not None, case.script
    target = folder / "script"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    beside = found.parent.glob("*.py") if case.script.count("/") else [found]
    for path in beside:
        source = with_names(path.read_text(encoding="utf-8"))
        edits = (*case.repairs, *(way.edits if way is not None else ())) if path == found else ()
        for old, new in edits:
            assert source.count(old) >= 1, f"the script has changed: {old!r} is not in it"
            source = source.replace(old, new)
        (target / path.name).write_text(source, encoding="utf-8")
    return target / found.name


def _child(script: Path, arguments: list[str], folder: Path, answer: Any) -> None:
    """Runs the script as a program; everything it prints goes to a file."""
    os.chdir(folder)
    with open("log.txt", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _keep_caches_here(folder)
    sys.argv = [str(script), *arguments]
    sys.path[:0] = [str(script.parent), str(folder)]
    try:
        runpy.run_path(str(script), run_name="__main__")
        answer.put({"ran": True})
    except BaseException as error:
        traceback.print_exc()
        answer.put({"ran": False, "error": type(error).__name__, "says": str(error)})


def _keep_caches_here(folder: Path) -> None:
    """The caches of datasets and metrics, and the one dataset that a script knows by the name of its metric."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    load = datasets.load_dataset
    datasets.load_dataset = lambda path, *args, **kwargs: load({"xnli": "xnli_data"}.get(path, path), *args, **kwargs)


def run_once(case: Case, way: Way | None, folder: Path) -> dict[str, Any]:
    """One run: whether it came to its end, else its error; and what the statement says."""
    started = CASES[way.instead] if way is not None and way.instead else case
    shutil.rmtree(folder / "out", ignore_errors=True)
    script = _place(started, way, folder)
    arguments = [*started.arguments, *PRIVATE, *(way.arguments if way is not None else ())]
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    process = context.Process(target=_child, args=(script, arguments, folder, answer))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return {"ran": False, "error": "Timeout", "says": f"longer than {SECONDS} s"}
    result = answer.get() if not answer.empty() else {"ran": False, "error": "died", "says": str(process.exitcode)}
    report = folder / "out" / "privacy" / "report.json"
    if result["ran"] and report.is_file():
        facts = json.loads(report.read_text())
        result |= {"unit": facts["plan"]["privacy_unit"], "self_check": facts["self_check"],
                   "epsilon": facts["epsilon_spent"]}  # fmt: skip
    elif result["ran"]:
        result = {"ran": False, "error": "no report", "says": "the script ended without a private run"}
    return result


def run_case(name: str, folder: Path) -> dict[str, Any]:
    """A row of the table: the script as it is, and each way out if it is refused."""
    case = CASES[name]
    first = run_once(case, None, folder)
    row: dict[str, Any] = {"task": case.task, "note": case.note, "as_it_is": first, "ways": []}
    if first["ran"]:
        row["result"] = EXACT if first["self_check"] == "passed" and case.refusal is None else FAILED
        return row
    row["ways"] = [{"says": way.says, **run_once(case, way, folder)} for way in case.ways]
    refused = case.refusal is not None and re.search(case.refusal, first["says"]) is not None
    if not refused or not row["ways"] or not all(way["ran"] for way in row["ways"]):
        row["result"] = FAILED
    else:
        row["result"] = ANOTHER if BLOCK in case.ways else REFUSED
    return row


@contextlib.contextmanager
def workplace(shared: Path) -> Iterator[Path]:
    """A folder with all inputs, and an environment without the hub."""
    from tests.migration.script_inputs import make_inputs

    with tempfile.TemporaryDirectory(prefix="official_scripts_") as name:
        folder = Path(name)
        for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
            os.environ[variable] = "1"
        os.environ |= {"HF_DPOPT_PRIVATE_DIR": str(folder / "keys"), "NLTK_DATA": str(folder / "nltk_data"),
                       "HF_DATASETS_CACHE": str(folder / "cache"), "HF_MODULES_CACHE": str(folder / "modules"),
                       "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
        make_inputs(folder, shared)
        yield folder


def versions() -> dict[str, str]:
    """Of the libraries, and what the scripts say and are."""
    known = {name: importlib.metadata.version(name) for name in ("transformers", "trl", "datasets")}
    digest = hashlib.sha256()
    for case in CASES.values():
        path = find_script(case)
        digest.update(path.read_bytes() if path is not None else b"")
    glue = find_script(CASES["run_glue"])
    wanted = re.search(r'check_min_version\("([^"]+)"\)', glue.read_text()) if glue else None
    return known | {"scripts want transformers": wanted.group(1) if wanted else "", "scripts": digest.hexdigest()[:16]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(CASES), help="Run these, and keep the other rows.")
    parser.add_argument("--logs", type=Path, help="Keep what the runs printed here.")
    only = parser.parse_args()
    shared = Path(os.environ.get("HF_DPOPT_SHARED", RESULTS.parents[2] / "shared" / "data"))
    results = json.loads(RESULTS.read_text()) if only.only and RESULTS.exists() else {"scripts": {}}
    import transformers  # noqa: F401  (before the forks, which share what is imported)

    import hf_dpopt  # noqa: F401

    with workplace(shared) as folder:
        for name in only.only or CASES:
            if find_script(CASES[name]) is None:
                print(f"{name}: no script; set HF_DPOPT_EXAMPLES and HF_DPOPT_TRL")
                continue
            row = run_case(name, folder)
            results["scripts"][name] = row
            print(f"{name}: {row['result']}", flush=True)
            if row["result"] == FAILED:
                print(json.dumps(row, indent=1), (folder / "log.txt").read_text()[-3000:], sep="\n", flush=True)
    results["versions"] = versions()
    results["scripts"] = {name: results["scripts"][name] for name in CASES if name in results["scripts"]}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
