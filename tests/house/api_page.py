"""Writes docs/api.md from the docstrings of the public names: `python -m tests.house.api_page`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hf_dpopt

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
HEAD = """# Public names

What `from hf_dpopt import ...` gives. Written by `python -m tests.house.api_page` from the docstrings; a test compares.
Other modules may be imported too, and may move with any release.
"""
GROUPS = {
    "Training": (
        "DPTrainer", "DPSeq2SeqTrainer", "DPTrainerMixin", "DPTrainingArguments", "DPSeq2SeqTrainingArguments",
        "DPSFTTrainer", "DPSFTConfig", "DPDPOTrainer", "DPDPOConfig", "DPRewardTrainer", "DPRewardConfig",
    ),
    "Planning": (
        "PrivacyConfig", "make_plan", "PrivacyPlan", "compare_mechanisms",
        "calibrate_noise_multiplier", "advise", "TrainingJob", "Advice",
    ),
    "A loop of one's own": (
        "PrivateRun", "PrivacySpent", "private_step", "make_engine", "clipped_gradient_sum", "Stages", "LowPassFilter",
        "DPAdamBC",
    ),
    "Reports": ("read_report", "RunFacts", "scan_for_secrets"),
    "Errors and warnings": ("DPConfigError", "DPBudgetExceeded", "DPStorageError", "UnsupportedModuleError", "PrivacyWarning"),
}  # fmt: skip
# Sections of a docstring that list things; others are paragraphs under a heading.
LISTS = ("Args", "Attributes", "Raises", "Warns")
SECTION = re.compile(r"^(Args|Attributes|Raises|Warns|Returns|Yields|References|Formal guarantee|Example)s?: ?(.*)$")


def is_ours(thing: Any) -> bool:
    return getattr(thing, "__module__", "").startswith("hf_dpopt.")


class _Text:
    """Shows as it is, where `inspect` would put quotation marks around it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def signature(name: str, thing: Any) -> str:
    """As it is called, one argument a line where they do not fit into one; of settings, those of the class alone."""
    found, note = inspect.signature(thing), ""
    parameters = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    if inspect.isclass(thing) and dataclasses.is_dataclass(thing) and not is_ours(thing.__mro__[-2]):
        base = next((cls for cls in thing.__mro__[1:] if cls.__name__ in hf_dpopt.__all__), None)
        own = {field for cls in thing.__mro__ if is_ours(cls) for field in vars(cls).get("__annotations__", {})}
        own -= {field.name for field in dataclasses.fields(base)} if base else set()
        parameters = [parameter for parameter in parameters if parameter.name in own]
        stock = next(cls for cls in thing.__mro__ if not is_ours(cls))
        others = f"{base.__name__} and of " if base else ""
        note = f"  # and the fields of {others}{stock.__module__.split('.')[0]}.{stock.__name__}"
    shown = found.replace(
        parameters=[p.replace(default=_default(p.default), annotation=_plain(p.annotation)) for p in parameters],
        return_annotation=inspect.Signature.empty if inspect.isclass(thing) else _plain(found.return_annotation),
    )
    text = f"{name}{shown}"
    if len(text + note) > 100 and parameters:
        returns = str(shown.replace(parameters=[])).removeprefix("()")
        text = f"{name}(\n" + "".join(f"    {part},\n" for part in _parts(shown)) + f"){returns}"
    return text + note


def _default(value: Any) -> Any:
    """A default without what is different in every process, such as an address."""
    if value is inspect.Parameter.empty or isinstance(value, (str, int, float, bool, type(None), tuple, dict, list)):
        return value
    return _Text("..." if " at 0x" in repr(value) or "factory" in repr(value) else repr(value))


def _plain(annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return annotation
    return _Text(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def _parts(found: inspect.Signature) -> list[str]:
    parts, star = [], False
    for parameter in found.parameters.values():
        star = star or parameter.kind is inspect.Parameter.VAR_POSITIONAL
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        parts.append(str(parameter))
    return parts


def docstring(thing: Any) -> str:
    """A docstring of Google's style as Markdown."""
    lines, shown = (inspect.getdoc(thing) or "").splitlines(), []
    in_list = in_text = False
    if lines and dataclasses.is_dataclass(thing) and re.match(rf"{getattr(thing, '__name__', '')}\(", lines[0]):
        return ""  # what dataclasses write where there is none
    for line in lines:
        if match := SECTION.match(line):
            in_list, in_text = match[1] in LISTS and not match[2], match[1] not in LISTS
            shown += ["", f"**{match[1]}{':' if match[2] else ''}** {match[2]}".rstrip(), ""][: 2 if match[2] else 3]
        elif in_list and re.match(r" {4}\S", line):
            item = re.match(r" {4}([\w.*, ]+): (.*)$", line)
            shown.append(f"* `{item[1]}`: {item[2]}" if item else f"* {line.strip()}")
        elif in_list and line.strip():
            shown.append(f"  {line.strip()}")
        else:
            in_list = in_list and not line.strip()
            shown.append(re.sub(r"^ {4}(?=\S)", "", line) if in_text else line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(shown)).replace("``", "`").strip()


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class of ours has a docstring for, in the order of the source."""
    if not is_ours(cls):
        return
    for name, value in vars(cls).items():
        thing = value.func if isinstance(value, functools.cached_property) else value
        thing = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)
        # torch puts a wrapped copy of an inherited `step` into the class of the first optimizer that is made
        is_own = getattr(thing, "__qualname__", "").startswith(f"{cls.__qualname__}.")
        if not name.startswith("_") and inspect.isfunction(thing) and is_own and thing.__doc__:
            yield name, value


def entry(name: str) -> str:
    thing = getattr(hf_dpopt, name)
    parts = [f"### `{name}`"]
    bases = [base.__name__ for base in thing.__mro__[1:-1]] if inspect.isclass(thing) else []
    module = f"`{thing.__module__}`" + (f"; a {', '.join(f'`{base}`' for base in bases[:3])}" if bases else "")
    is_error = inspect.isclass(thing) and issubclass(thing, (Exception, Warning))
    parts += [module] if is_error else [module, f"```python\n{signature(name, thing)}\n```"]
    parts.append(docstring(thing))
    for member, value in members(thing) if inspect.isclass(thing) and not is_error else ():
        if isinstance(value, (property, functools.cached_property)):
            parts.append(f"#### `{name}.{member}`\n\n{docstring(value)}")
        else:
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            called = signature(f"{name}.{member}", function)
            parts.append(f"#### `{name}.{member}`\n\n```python\n{called}\n```\n\n{docstring(function)}")
    return "\n\n".join(part for part in parts if part)


def page() -> str:
    """The whole page."""
    parts = [HEAD.strip()]
    for group, names in GROUPS.items():
        parts.append(f"## {group}")
        parts += [entry(name) for name in names]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
