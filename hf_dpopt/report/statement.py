"""The privacy statement in plain words: the promise, what it covers, and what would make it false."""

from __future__ import annotations

import dataclasses
import decimal
import functools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from hf_dpopt.accounting.best_of_runs import RunCount
from hf_dpopt.accounting.delta import default_delta, sizes_with_default
from hf_dpopt.accounting.profile import no_protection
from hf_dpopt.preclip import PRECLIPS
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.report.facts import RunFacts
from hf_dpopt.report.meaning import SHOWN_GROUPS, attacker_sentence, percent
from hf_dpopt.sampling import SAMPLERS

STAMP = "NOT PRIVATE"
LARGEST_SHOWN_EPSILON = 100.0  # beyond, a number would only look like one


@dataclasses.dataclass(frozen=True)
class StatementView:
    """All that the templates of statement and model card print. Public values only.

    Attributes:
        facts: the facts of the run.
        plan: its plan, as `PlanRecord.to_json` gives it.
        unit, elements: words for one unit of privacy, and for the elements that batches are drawn from.
        num_units: records or users that are protected one by one.
        sizes_of_delta: numbers of units whose default delta is that of the run; None where it is no default.
        number_of_runs: law of the number of runs of a tuning; empty without one.
        preclip_options: options of the preconditioner.
        is_known_preclip: whether it is one of the package.
        advised: options that were chosen for the user.
        sampling: sentence about the batches.
        noise_stream: sentence about the generator of the noise.
    """

    facts: RunFacts
    plan: Mapping[str, Any]
    unit: str
    elements: str
    num_units: int
    sizes_of_delta: tuple[int, int] | None
    number_of_runs: str
    preclip_options: str
    is_known_preclip: bool
    advised: Mapping[str, str]
    sampling: str
    noise_stream: str

    @classmethod
    def of(cls, facts: RunFacts) -> StatementView:
        """Collect the values of a run."""
        plan = facts.plan
        law, num_units, preclip = dict(plan["sampler"]), _num_units(plan), plan.get("preclip") or {}
        unit = "record" if plan["privacy_unit"] == "example" else plan["privacy_unit"]
        return cls(
            facts,
            plan,
            unit,
            elements=_sampled_elements(plan),
            num_units=num_units,
            sizes_of_delta=sizes_with_default(num_units) if facts.delta == default_delta(num_units) else None,
            number_of_runs=RunCount.read(plan["tuned"]).describe() if "tuned" in plan else "",
            preclip_options=", ".join(f"{n} {v}" for n, v in preclip.items() if n != "name" and v is not None),
            is_known_preclip=preclip.get("name") in {spec.name for spec, _ in PRECLIPS.values()},
            advised={n: f"{v:g}" if isinstance(v, float) else str(v) for n, v in plan.get("advised", {}).items()},
            sampling=SAMPLERS[law.pop("name")](**law).describe(unit),
            noise_stream=ChaCha20Gaussian.description,
        )


def render_statement(facts: RunFacts) -> str:
    """Return the statement as Markdown. Its first line says so if the run guarantees nothing, or protects nobody.

    Epsilons are rounded up, so the text never claims more than the accountant proved.
    """
    return fill_joined("report/statement.md.j2", **vars(StatementView.of(facts)))


def fill(template: str, **values: Any) -> str:
    """Fill in a template of the package; a value that it lacks is an error."""
    return _templates().get_template(template).render(values)


def fill_joined(template: str, **values: Any) -> str:
    """Fill in a template; each paragraph, row and list item is a line then, and empty paragraphs are left out."""
    text = re.sub(r"(?<=\S)\n *(?!- |\||\s)", " ", fill(template, **values))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@functools.cache
def _templates() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1]), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    filters: dict[str, Callable[..., str]] = {
        "g": lambda value, digits=6: f"{value:.{digits}g}", "share": lambda value: f"{value:.2%}", "up": round_up,
        "plain": plain, "quoted": lambda text: f"`{plain(text)}`", "word": _word, "shown": _shown, "bounded": _bounded,
        "percent": percent,
    }  # fmt: skip
    found.filters |= filters
    found.globals |= {
        "stamp": STAMP, "inf": math.inf, "exp": math.exp, "no_protection": no_protection,
        "attacker_sentence": attacker_sentence, "shown_groups": SHOWN_GROUPS,
    }  # fmt: skip
    return found


def round_up(value: float, digits: int = 5) -> str:
    """The value rounded up to that many significant digits; ``infinity`` for infinity."""
    if math.isinf(value):
        return "infinity"
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{float(context.create_decimal_from_float(value)):.{digits}g}"


def plain(text: str) -> str:
    """The user's text on one line, unable to open an HTML comment (they mark the section of a model card) or code."""
    return " ".join(text.replace("`", "'").replace("<", "(").replace(">", ")").replace("|", "/").split())


def _num_units(plan: dict[str, Any]) -> int:
    """Number of records or users that are protected one by one."""
    users = plan.get("users")
    if users is None or users["sampled"] != "records":
        return plan["num_examples"]
    return max(1, plan["num_examples"] // users["records_per_user"])


def _sampled_elements(plan: dict[str, Any]) -> str:
    """Name of the elements that batches are drawn from."""
    users = plan.get("users")
    if users is None:
        return "records"
    return "places for records" if users["sampled"] == "records" else users["sampled"]


def _bounded(value: float | str) -> str:
    epsilon = float(value)  # infinity is spelt "inf" in JSON
    return f"{epsilon:.4g}" if epsilon <= LARGEST_SHOWN_EPSILON and math.isfinite(epsilon) else "above 100"


def _shown(value: float | str) -> str:
    return "infinity" if float(value) == math.inf else f"{float(value):.4g}"


def _word(text: str) -> str:
    return "".join(c for c in str(text) if c.isalnum() or c in " ()-_")
