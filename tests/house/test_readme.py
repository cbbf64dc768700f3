"""Every code block of the README runs as printed, and so does every block of docs/ that says so.

A comment ``<!-- test: ... -->`` on the line above a fence, which no page shows, may hold:

* ``no-run: <reason>``: not run, and why.
* ``run``: run (only needed in docs/, where blocks are not run unless they say so).
* ``env:NAME=VALUE``: set in the environment of this block, for example to shorten a long run.
* ``timeout:SECONDS``: instead of 240.
* ``replace:WORD=OTHER``: in the code, such as a model of the hub by one on this machine.

The blocks of one file run in order, each in a process of its own, in one temporary folder that has links to the files
of the checkout: what a block writes, the next one finds, and the checkout stays clean.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
README = REPO / "README.md"
LANGUAGES = {"python": [sys.executable, "-c"], "bash": ["bash", "-euo", "pipefail", "-c"]}
NOT_LINKED = {".git", "runs", "build", "dist"}
FENCE = re.compile(
    r"(?:^ *<!-- test: (?P<test>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$",
    re.DOTALL | re.MULTILINE,
)
OPTION = re.compile(r"run|env:[A-Za-z_]\w*=\S*|timeout:\d+|replace:\S+=\S+")


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block of a Markdown file."""

    file: Path
    line: int
    language: str
    test: str
    code: str

    @property
    def is_left_out(self) -> bool:
        return self.test.startswith("no-run")

    def values(self, option: str) -> list[str]:
        return [word.partition(":")[2] for word in self.test.split() if word.startswith(f"{option}:")]

    @property
    def environment(self) -> dict[str, str]:
        return dict(value.split("=", 1) for value in self.values("env"))

    @property
    def timeout(self) -> float:
        return float(next(iter(self.values("timeout")), 240))

    def complaint(self) -> str | None:
        """What is wrong with the comment above it."""
        if self.is_left_out:
            return None if re.fullmatch(r"no-run: \S.{8,}", self.test) else "say why: <!-- test: no-run: reason -->"
        unknown = [word for word in self.test.split() if not OPTION.fullmatch(word)]
        return f"unknown {unknown}" if unknown else None


def blocks_of(file: Path) -> list[Block]:
    """All fenced blocks, in order; an indented fence (in a list) loses its indentation."""
    text = file.read_text(encoding="utf-8")
    blocks = []
    for match in FENCE.finditer(text):
        code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start("language")) + 1
        blocks.append(Block(file, line, match["language"].strip(), match["test"] or "", code))
    return blocks


def runnable(file: Path) -> list[Block]:
    """The blocks of a file that the tests execute."""
    blocks = [block for block in blocks_of(file) if block.language in LANGUAGES]
    if file == README:
        return [block for block in blocks if not block.is_left_out]
    return [block for block in blocks if block.test and not block.is_left_out]


def pages() -> list[Path]:
    """The README and docs/, as far as they exist."""
    return ([README] if README.exists() else []) + sorted((REPO / "docs").glob("*.md"))


def parameters() -> list:
    """One parameter per block; the blocks of one page share a worker, which runs them in order."""
    return [
        pytest.param(
            block,
            id=f"{page.name}:{block.line}",
            marks=[pytest.mark.xdist_group(page.name), *([] if page == README else [pytest.mark.slow])],
        )
        for page in pages()
        for block in runnable(page)
    ]


def run_block(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a block in ``folder`` with the checkout's package and this interpreter's programs first."""
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH", "")])),
        "HF_HUB_OFFLINE": "1",
    }
    environment |= block.environment
    code = block.code
    for word, other in (value.split("=", 1) for value in block.values("replace")):
        assert word in code, f"replace:{word}: not in the block"
        code = code.replace(word, other)
    command: Sequence[str] = [*LANGUAGES[block.language], code]
    return subprocess.run(
        command, cwd=folder, env=environment, timeout=block.timeout, text=True, errors="replace", capture_output=True
    )


@pytest.fixture(scope="module")
def workspaces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A working folder per page, filled with links to the top level of the checkout."""
    folders = {}
    for page in pages():
        folders[page.name] = folder = tmp_path_factory.mktemp(page.stem)
        for entry in REPO.iterdir():
            if entry.name not in NOT_LINKED and not entry.name.startswith((".venv", "__pycache__")):
                (folder / entry.name).symlink_to(entry)
    return folders


@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", parameters())
def test_block_runs(block: Block, workspaces: dict[str, Path]) -> None:
    result = run_block(block, workspaces[block.file.name])
    assert result.returncode == 0, (
        f"{block.file.name}, line {block.line}: exit code {result.returncode}\n{block.code}\n"
        f"--- stdout\n{result.stdout[-4000:]}\n--- stderr\n{result.stderr[-4000:]}"
    )

    if "eval_accuracy" in block.code:
        assert float(result.stdout.split()[-1]) > 0.95, "the README promises a model that has learnt"


def test_no_block_escapes_the_tests() -> None:
    """A README block is run, or says why not; and no misspelt word switches the running off."""
    if not README.exists():
        pytest.skip("there is no README.md yet")
    complaints = []
    for page in pages():
        for block in blocks_of(page):
            where = f"{page.name}, line {block.line}"
            if block.language not in LANGUAGES:
                if (
                    " " in block.language
                    or page == README
                    and block.language in ("", "sh", "shell", "console", "py", "pycon")
                ):
                    complaints.append(f"{where}: say ```bash or ```python, or ```text if it is no code")
            elif complaint := block.complaint():
                complaints.append(f"{where}: {complaint}")
    assert not complaints, "\n".join(complaints)
