"""Writes docs/arguments.md from the options of a run: `python -m tests.plan.arguments_table`."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path

from hf_dpopt.noise import MECHANISMS
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.plan import options
from hf_dpopt.preclip import PRECLIPS
from hf_dpopt.sampling import SAMPLERS

REGISTERED = {"noise_mechanism": [*MECHANISMS, "auto"], "sampling": ["auto", *SAMPLERS], "preconditioner": [*PRECLIPS]}

PAGE = Path(__file__).resolve().parents[2] / "docs" / "arguments.md"
HEAD = """# Arguments

Written by `python -m tests.plan.arguments_table` from `hf_dpopt/plan/options.py`; a test keeps the two together.

`DPTrainingArguments` takes all `TrainingArguments` and the options below: as flags of scripts that use `HfArgumentParser`
(`--target_epsilon 8`), or as keywords (`target_epsilon=8`). Give `target_epsilon` or `noise_multiplier`; everything else has a
default. `PrivacyConfig` and `hf-dpopt plan` use the same names; `plan` also takes dashes.
"""
TABLE = """
| option | value | default | what it does |
|---|---|---|---|
"""
CHANGED = """
## Different from `TrainingArguments`

| option | here |
|---|---|
| `optim` | also takes {optimizers}, which know the noise ([optimizers.md](optimizers.md)) |
| `per_device_train_batch_size` | physical batch: changes memory and speed, never the result. The logical batch is `expected_batch_size` |
| `max_grad_norm` | clips the noised mean gradient; 0 (off) by default. The private clip is `clipping_norm` |
"""
CODE = re.compile(r"`[^`]*`|--\w+(?: '[^']*')?|(?<!\w)'[^']*'|\w+:[A-Z][A-Z:\[\]]+|\b[a-z]\w*_[\w*]*")


def page() -> str:
    """The whole page."""
    parts = [HEAD, CHANGED.format(optimizers=", ".join(f"`{name}`" for name in OPTIMIZERS))]
    parts += [_section(group) for group in (*options.GROUPS, options.HeadOptions)]
    return "".join(parts)


def _section(group: type) -> str:
    title, _, about = (group.__doc__ or "").partition(": ")
    return f"\n## {title}\n\n{about[0].upper()}{about[1:]}\n{TABLE}" + "".join(_rows(group))


def _rows(group: type) -> Iterator[str]:
    kinds = typing.get_type_hints(group)
    for field in dataclasses.fields(group):
        text: options.Help = field.metadata["help"]
        choices = REGISTERED.get(field.name) or field.metadata.get("choices", ())
        value = ", ".join(f"`{name}`" for name in choices) or _kind(kinds[field.name])
        about = " ".join(filter(None, [text.says, text.more]))
        for name in choices:  # a line for each choice that the text explains
            about = re.sub(rf"(^|[.;] ){name}: ", rf"\1<br>`{name}`: ", about).removeprefix("<br>")
        yield f"| `{field.name}` | {value} | {_default(field)} | {_code(about)} |\n"


def _kind(hint: object) -> str:
    """A type in words."""
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    if any(typing.get_origin(kind) is dict for kind in kinds):
        return "JSON"
    if any(typing.get_origin(kind) is list for kind in kinds):
        return "list of strings"
    return {bool: "yes or no", int: "integer", float: "number", str: "string"}[kinds[0]]  # type: ignore[index]


def _default(field: dataclasses.Field) -> str:
    text: options.Help = field.metadata["help"]
    if text.unset is not None:
        return _code(text.unset)
    if field.default is None:
        return "–"
    if isinstance(field.default, bool):
        return "no"
    return f"`{field.default}`" if isinstance(field.default, str) else f"{field.default}"


def _code(text: str) -> str:
    """Names and what is typed as it stands, set as code; nothing else is Markdown."""
    pieces, end = [], 0
    for found in CODE.finditer(text):
        pieces += [text[end : found.start()].replace("*", r"\*"), f"`{found.group().strip('`')}`"]
        end = found.end()
    whole = "".join([*pieces, text[end:].replace("*", r"\*")]).replace("|", r"\|")
    return re.sub(r"docs/`?(\w+)`?\.md", r"[\1.md](\1.md)", whole)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
