"""Real text that every Python installation carries: the sources of its standard library.

The private task: is this a comment for the people who maintain a function, a sentence of its documentation, or a line
of its code? Code is easy to tell; comments and documentation take knowing how each is written.

The public text, for the tokenizer: the language reference that `help()` prints, docstrings of modules and classes, and
messages. No sentence is in both. The sentences differ a little between Python versions; the rules do not.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import re
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_dpopt import DPConfigError
from recipes.tables import Table

LABELS = ("comment", "docstring", "code")
EVAL_PERCENT = 12
CODE_PERCENT = 23  # of the code lines are kept, which makes the three classes about equally frequent
MIN_WORDS, MAX_WORDS = 4, 60
MIN_SENTENCES = 1000
# Not part of every installation, generated, or read in another way below.
SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "ensurepip",
    "lib-dynload",
    "pydoc_data",
    "encodings",
}
SENTENCE_BORDER = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`'\"(])|\n\s*\n|\n\s*[-*]\s+")
PUBLIC = "public"
CODE = LABELS.index("code")


@dataclass(frozen=True)
class Corpus:
    """Sentences of one Python installation.

    Args:
        train: (sentence, index into `LABELS`); the private records.
        evaluation: the same kind, held out.
        public_text: passages that are in neither.
        train_files, evaluation_files: where each record was found first: who wrote it, for privacy of users.
    """

    train: list[tuple[str, int]]
    evaluation: list[tuple[str, int]]
    public_text: list[str]
    train_files: list[str]
    evaluation_files: list[str]

    @property
    def digest(self) -> str:
        """Ten hexadecimal digits that tell one installation's text from another's."""
        everything = [self.train, self.evaluation, self.public_text]
        return hashlib.sha256(repr(everything).encode()).hexdigest()[:10]

    def tables(self) -> dict[str, Table]:
        """The records for a recipe, with text, label and the file of each."""
        name = f"Python {platform.python_version()}'s standard library"
        parts = {"train": (self.train, self.train_files), "validation": (self.evaluation, self.evaluation_files)}
        return {
            split: Table(
                f"{name} [{split}]",
                {"text": [text for text, _ in records], "label": [LABELS[i] for _, i in records], "file": files},
            )
            for split, (records, files) in parts.items()
        }


def read_corpus(stdlib: Path | None = None) -> Corpus:
    """Reads the sources of the standard library; a pure function of their text.

    A sentence that occurs in several places counts once; one that occurs both as documentation and as a comment has no
    label and is left out. The split is by hash of the sentence, so it depends on no order and no seed.

    Args:
        stdlib: folder to read; by default the standard library of the running interpreter.

    Raises:
        DPConfigError: if the installation carries no sources (a zipped or stripped standard library).
    """
    stdlib = stdlib or Path(sysconfig.get_paths()["stdlib"])
    kinds: dict[str, set[str]] = {}
    spelling: dict[str, str] = {}
    files: dict[str, str] = {}
    for path in _source_files(stdlib):
        for kind, sentence in _sentences_of_file(path):
            key = sentence.casefold()
            kinds.setdefault(key, set()).add(kind)
            spelling.setdefault(key, sentence)
            files.setdefault(key, path.relative_to(stdlib).as_posix())
    labelled = {key: LABELS.index(*found) for key, found in kinds.items() if len(found) == 1 and found != {PUBLIC}}
    labelled = {key: label for key, label in labelled.items() if label != CODE or _bucket(key, "keep") < CODE_PERCENT}
    if len(labelled) < MIN_SENTENCES:
        raise DPConfigError(
            f"Only {len(labelled)} sentences found in the standard library at {stdlib}: its sources are not "
            "installed. Use a Python with sources (any python.org, Debian, conda or pyenv build), or bring data: "
            "--model_name_or_path <folder> --train_file train.tsv --validation_file dev.tsv"
        )
    public = [spelling[key] for key, found in kinds.items() if found == {PUBLIC}]
    public += [passage for passage in _language_reference() if passage.casefold() not in labelled]
    keys: tuple[list[str], list[str]] = ([], [])
    for key in sorted(labelled):
        keys[_bucket(key, "split") < EVAL_PERCENT].append(key)
    train, evaluation = ([(spelling[key], labelled[key]) for key in split] for split in keys)
    train_files, evaluation_files = ([files[key] for key in split] for split in keys)
    return Corpus(train, evaluation, public, train_files, evaluation_files)


def _bucket(key: str, purpose: str) -> int:
    """0 to 99, as good as random but the same everywhere."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{key}".encode()).digest()[:8], "big") % 100


def _source_files(stdlib: Path) -> list[Path]:
    found = (path for path in stdlib.rglob("*.py") if not SKIPPED & set(path.relative_to(stdlib).parts))
    return sorted(path for path in found if not path.name.startswith("_sysconfigdata"))


def parsed(path: Path) -> tuple[str, ast.Module]:
    """Text and syntax tree of a source file; empty if it cannot be parsed."""
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            source = file.read()
            warnings.simplefilter("ignore")  # old escape sequences in docstrings
            return source, ast.parse(source)
    except (OSError, SyntaxError, ValueError):  # ValueError: undecodable bytes, null characters
        return "", ast.parse("")


def _sentences_of_file(path: Path) -> Iterator[tuple[str, str]]:
    """(kind, sentence) for each sentence of one source file."""
    source, tree = parsed(path)
    nodes = list(ast.walk(tree))
    for kind, block in [*_string_blocks(nodes), *(("comment", block) for block in _comment_blocks(source, nodes))]:
        for sentence in split_sentences(block):
            yield kind, sentence
    for line in _code_lines(source, nodes):
        yield "code", line


def _string_blocks(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """(kind, text) of the docstrings and of the other strings that are one line long (messages, help texts)."""
    docstrings = set()
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
                yield PUBLIC if isinstance(node, (ast.Module, ast.ClassDef)) else "docstring", docstring
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if "\n" not in node.value.strip():
                yield PUBLIC, node.value


def _comment_blocks(source: str, nodes: list[ast.AST]) -> Iterator[str]:
    """Texts of the comments; those on adjacent lines and in the same column belong together.

    A comment starts at the first # outside of a string literal. The syntax tree knows where those are, which is faster
    than tokenizing. A comment between the parts of one literal is missed.
    """
    literals = [
        n for n in nodes if isinstance(n, ast.JoinedStr) or isinstance(getattr(n, "value", None), (str, bytes))
    ]
    spans: dict[int, list[tuple[int, int]]] = {}
    for n in literals:
        if not hasattr(n, "lineno"):
            continue
        for line in range(n.lineno, n.end_lineno + 1):
            start = n.col_offset if line == n.lineno else 0
            spans.setdefault(line, []).append((start, n.end_col_offset if line == n.end_lineno else sys.maxsize))
    block: list[str] = []
    expected = (0, 0)
    for line, content in enumerate(source.encode().split(b"\n"), start=1):
        column = content.find(b"#")
        while column >= 0 and any(start <= column < end for start, end in spans.get(line, ())):
            column = content.find(b"#", column + 1)
        if column < 0:
            continue
        if (line, column) != expected and block:
            yield "\n".join(block)
            block = []
        block.append(content[column:].decode().lstrip("#! ").rstrip())
        expected = (line + 1, column)
    if block:
        yield "\n".join(block)


def _code_lines(source: str, nodes: list[ast.AST]) -> Iterator[str]:
    """Statements that fit on one line, and the first lines of the others; without indentation and trailing comment."""
    prose = {n.lineno for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    starts = {n.lineno for n in nodes if isinstance(n, ast.stmt)} - prose
    lines = source.split("\n")
    for number in sorted(starts):
        line = " ".join(lines[number - 1].split("  #")[0].split())
        if MIN_WORDS <= len(re.findall(r"\w+", line)) <= MAX_WORDS:
            yield line


def split_sentences(block: str) -> Iterator[str]:
    """Sentences of a block of text: prose only, code and tables are left out."""
    for piece in SENTENCE_BORDER.split(block):
        sentence = " ".join(piece.split()).strip(" -=#*~")
        words = sentence.split()
        num_plain = sum(word.strip(".,:;()'\"`").isalpha() for word in words)
        if MIN_WORDS <= len(words) <= MAX_WORDS and num_plain >= 0.6 * len(words) and ">>>" not in sentence:
            yield sentence


def _language_reference() -> Iterable[str]:
    """The language reference behind `help()`, in passages about as long as a sentence."""
    from pydoc_data import topics

    for _, text in sorted(topics.topics.items()):
        for paragraph in re.split(r"\n\s*\n", text):
            words = paragraph.split()
            for start in range(0, len(words), 30):
                passage = words[start : start + 30]
                if len(passage) >= MIN_WORDS:
                    yield " ".join(passage)
