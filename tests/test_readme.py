"""Every code block of the README runs as printed, and so does every block of docs/ that says so.

The info string behind a fence may hold, after the language:

* ``no-run``: not run; the block itself says why in a comment ``# not run by the tests: <reason>``.
* ``run``: run (only needed in docs/, where blocks are not run unless they say so).
* ``env:NAME=VALUE``: set in the environment of this block, for example to shorten a long run.
* ``timeout:SECONDS``: instead of 240.

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

REPO = Path(__file__).resolve().parents[1]
README = REPO / "README.md"
LANGUAGES = {"python": [sys.executable, "-c"], "bash": ["bash", "-euo", "pipefail", "-c"]}
REASON = re.compile(r"^\s*# not run by the tests: \S.{8,}$", re.MULTILINE)
NOT_LINKED = {".git", "runs", "build", "dist"}
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block of a Markdown file."""

    file: Path
    line: int
    info: tuple[str, ...]
    code: str

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""

    @property
    def environment(self) -> dict[str, str]:
        return dict(word.removeprefix("env:").split("=", 1) for word in self.info if word.startswith("env:"))

    @property
    def timeout(self) -> float:
        return next((float(word.removeprefix("timeout:")) for word in self.info if word.startswith("timeout:")), 240.0)

    def unknown_words(self) -> list[str]:
        known = re.compile(r"no-run|run|env:[A-Za-z_]\w*=\S*|timeout:\d+")
        return [word for word in self.info[1:] if not known.fullmatch(word)]


def blocks_of(file: Path) -> list[Block]:
    """All fenced blocks, in order; an indented fence (in a list) loses its indentation."""
    text = file.read_text(encoding="utf-8")
    blocks = []
    for match in FENCE.finditer(text):
        code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 1
        blocks.append(Block(file, line, tuple(match["info"].split()), code))
    return blocks


def runnable(file: Path) -> list[Block]:
    """The blocks of a file that the tests execute."""
    blocks = [block for block in blocks_of(file) if block.language in LANGUAGES]
    if file == README:
        return [block for block in blocks if "no-run" not in block.info]
    return [block for block in blocks if "run" in block.info]


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
    command: Sequence[str] = [*LANGUAGES[block.language], block.code]
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
                if page == README and block.language in ("", "sh", "shell", "console", "py", "pycon"):
                    complaints.append(f"{where}: say ```bash or ```python, or ```text if it is no code")
            elif block.unknown_words():
                complaints.append(f"{where}: unknown {block.unknown_words()}")
            elif "no-run" in block.info and not REASON.search(block.code):
                complaints.append(f"{where}: a no-run block needs a line '# not run by the tests: <reason>'")
    assert not complaints, "\n".join(complaints)


SAMPLE = """# Title
```bash env:GREETING=hello timeout:20
echo "$GREETING" > note.txt
```
1. step
   ```python
   assert open("note.txt").read() == "hello\\n"
   ```
```text
not code
```
```bash no-run
# not run by the tests: it would delete everything
rm -rf /
```
```bash
false | cat
```
"""


def test_the_runner_runs_in_order_and_notices_failures(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(SAMPLE)
    shell, python, text, skipped, failing = blocks_of(page)
    assert [block.line for block in (shell, python, text, skipped, failing)] == [2, 6, 9, 12, 16]
    assert run_block(shell, tmp_path).returncode == 0
    assert run_block(python, tmp_path).returncode == 0  # sees the file and the indentation is gone
    assert run_block(failing, tmp_path).returncode != 0  # also in the middle of a pipe
    assert text.language not in LANGUAGES
    assert REASON.search(skipped.code) and not REASON.search(failing.code)
    assert runnable(page) == []  # not the README: blocks run only if they ask for it
    assert Block(page, 1, ("bash", "no_run"), "").unknown_words() == ["no_run"]
