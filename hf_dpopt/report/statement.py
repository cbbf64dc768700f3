"""The privacy statement in plain words: the promise, what it covers, and what would make it false."""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterable
from typing import Any

from hf_dpopt.accounting.delta import default_delta, sizes_with_default
from hf_dpopt.accounting.meaning import no_protection
from hf_dpopt.preclip import PRECLIPS
from hf_dpopt.randomness.cipher import describe_stream
from hf_dpopt.report.facts import RunFacts
from hf_dpopt.report.meaning import meaning_section
from hf_dpopt.report.tuned import dataset_rows, describe_tuning, invalidates, tuning_rows
from hf_dpopt.sampling import SAMPLERS

STAMP = "NOT PRIVATE"

_ADJACENCY = {
    "add_or_remove_one": "one of them has one {unit} more than the other (`add_or_remove_one`)",
    "zero_out": "one {unit} of one of them is replaced by an empty one that contributes nothing (`zero_out`)",
    "replace_one": "one {unit} is swapped for any other (`replace_one`)",
}

_UNIT = {
    "example": (
        "One *example* is protected: one row of the training set, one list index after all preprocessing. A person "
        "with several rows, or a text cut into several rows, is not protected as a whole."
    ),
    "block": (
        "One *block* is protected: one row of the training set, a block or a window of text that may hold several "
        "documents, while a document may lie in several blocks. No document and no person is protected as a whole: "
        "what somebody wrote may be in many blocks, and k blocks cost about k times the epsilon."
    ),
    "user": (
        "One *user* is protected: all rows of the training set that carry one user id{column}, however many they "
        "are. {way} A "
        "person with several ids, or whose rows carry the id of somebody else, is protected id by id and not as a "
        "whole; what others wrote about a person is theirs."
    ),
}

_NAMED = {
    "example": "single *examples* (rows of the training set)",
    "user": "whole *users* (all rows with one user id)",
    "block": "single *blocks* (rows that may hold text of several documents, or a part of one)",
}

_DECLARED = (
    "The rows look like blocks or windows of text: {seen}. The user declared that each of them is a whole record "
    "(`rows_are_records`); if that is not so, no record is protected as this statement says."
)

_CHOSEN = (
    "In each step in which a user takes part, at most {records_per_user} of their rows are chosen, at random and "
    "anew; "
    "the others do not take part in that step, but all may have taken part in the end. "
)

_CAPPED = (
    "At most {records_per_user} rows of each user take part, chosen at random before the first step; a run that goes "
    "on from "
    "an older checkpoint, or trains again, chooses anew, and both are charged. Rows are sampled and clipped one by "
    "one, and a "
    "user with many in one step is accounted for."
)

_LOCAL = (
    "The model is trained on the chosen rows of each user; how far its weights moved is clipped once, and forgotten."
)

_WEIGHTING = {
    "constant": "The gradients of the chosen rows are added with weight 1 / {records_per_user}, and the sum is "
    "clipped once.",
    "mean": "The mean of the gradients of the chosen rows is clipped once.",
}

_SEEN = (
    "The guarantee holds against somebody who sees everything that was released, at every step, and who knows this "
    "code, the public seeds and all other records. Treated as public, and so not protected: the number of records, "
    "the batch size, the number of steps, the noise multiplier, the clipping norm, the architecture, the tokenizer "
    "and all hyperparameters. {size}"
)

_SIZE = (
    "The promise compares what is computed from two training sets under the same settings, those of the table. The "
    "settings themselves are not hidden: n is printed, and the sampling rate, noise that was calibrated to a budget, "
    "the default delta and the steps of an epoch follow from it."
)

_SIZE_DIFFERS = (
    " The two sets have n and n + 1 or n - 1 {units}, so that n is a number that was declared, and no secret that is "
    "kept: to somebody who knows all the others, the exact n alone tells whether one more is there."
)

_COVERED = (
    "All weights at every step, and so every checkpoint and adapter; the state of the optimizer and of filters behind "
    "the noise; the learning rate; the norm of the noisy gradient; the ledger and this report. All of it may be "
    "published: it was computed from noised gradients only."
)

_NOT_RELEASED = (
    "The training data; the keys of the noise and of the sampling; noise buffers; the losses and gradient norms of "
    "single records; which records made up a batch, and how many. They must stay secret. The run writes none of them "
    "below its output folder, and a scan looks for them before anything is saved or pushed."
)

_NOT_COVERED = (
    "The values listed below as released without noise.",
    "The evaluation data: metrics on it are exact. Declared about it: {evaluation}.",
    "What was chosen by looking at the data: preprocessing, tokenizer, vocabulary, label set, class weights, maximum "
    "length, architecture, hyperparameters, removal of duplicates. Declared about it: {preprocessing}.",
    "That the run began: before its first step it refuses records that the model cannot take (token ids, labels and "
    "lengths out of range, missing or unlike columns) and tells whoever holds the data. Its having run says that the "
    "records that were looked at had none of these faults.",
    "Other runs on the same people that do not share this ledger{earlier}; their epsilons add up.",
    "The data the base model was trained on before.",
    "Records given as public (`public_dataset`).",
    "Prompts and predictions when the model is used.",
    "Side channels: time, memory, power, and the rounding of floating-point numbers. The proof is about real numbers "
    "and an ideal random generator.",
    "A compromised machine.",
)

_INVALIDATES = (
    "user code that changes parameters, buffers or gradients outside the optimizer;",
    "resuming with other records than before, or with the same in another order (which is refused where it matters, "
    "unless it moves a few records only);",
    "a noise key that is fixed by hand, known to somebody, or used twice;",
    "publishing what is named under *What is not released*;",
    "deleting, editing or rolling back the ledger;",
    "records whose loss or gradient depends on other records of the batch (shared normalisers, batch statistics, "
    "in-batch negatives, packed rows that hold several units);",
    "a trained tensor that is not clipped and noised;",
    "reading this statement for another unit or relation than the one it names;",
    "one of the configurations that the software refuses, forced in spite of the refusal.",
)


def render_statement(facts: RunFacts) -> str:
    """Return the statement as Markdown. Its first line says so if the run guarantees nothing, or protects nobody.

    Epsilons are rounded up, so the text never claims more than the accountant proved.
    """
    parts = [
        _stamp(facts),
        "# Privacy statement",
        _promise(facts),
        _numbers(facts),
        ""
        if facts.not_private_reasons
        else meaning_section(facts.meaning, unit_of(facts.plan), facts.plan["adjacency"]),
        "## What is protected",
        f"{_protected(facts.plan)} {_visible(facts.plan)}",
        _DECLARED.format(seen=plain(facts.unit_declared)) if facts.unit_declared else "",
        "## What is covered",
        _COVERED,
        "## What protects the evaluation data" if facts.evaluations else "",
        _evaluations(facts),
        "## What is not released",
        _NOT_RELEASED,
        "## What is not covered",
        _bullets(_not_covered(facts)).format(
            evaluation=_declared(facts.eval_data_privacy),
            preprocessing=_declared(facts.data_dependent_preprocessing),
            earlier=", or later steps of the runs that are named above" if facts.plan.get("earlier_runs") else "",
        ),
        "## What left the run without noise",
        _unnoised(facts),
        "## How the numbers were computed",
        _accounting(facts),
        "## What makes this statement false",
        f"Epsilon is then infinite, whatever the table says:\n\n{_bullets((*invalidates(facts.plan), *_INVALIDATES))}",
        "## What ran",
        _software(facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def round_up(value: float, digits: int = 5) -> str:
    """The value rounded up to that many significant digits; ``infinity`` for infinity."""
    if math.isinf(value):
        return "infinity"
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{float(context.create_decimal_from_float(value)):.{digits}g}"


def _stamp(facts: RunFacts) -> str:
    if not facts.not_private_reasons:
        said = no_protection(facts.epsilon, unit_of(facts.plan))
        return f"**NO PROTECTION:** {said}" if said else ""
    return f"**{STAMP}:** {'; '.join(facts.not_private_reasons)}. Epsilon is infinite. Nothing below is a guarantee."


def _promise(facts: RunFacts) -> str:
    if facts.not_private_reasons:
        return (
            "This run promises nothing. What follows says what it did, so that it can be compared with a private run."
        )
    unit, epsilon = facts.plan["privacy_unit"], facts.epsilon
    weak = _weak_delta(facts)
    relation = _ADJACENCY[facts.plan["adjacency"]].format(unit=unit)
    factor = f" (about {math.exp(epsilon):.3g})" if epsilon < 50 else ""
    return (
        f"{_trained(facts)} with differential privacy for {_NAMED.get(unit, unit)}: "
        f"**epsilon = {round_up(epsilon)}, delta = {facts.delta:g}**. "
        f"Take any two training sets of which {relation}, and the settings below for both. Then whatever somebody "
        f"looks for in all that was computed from the records and released, its probability under one of the sets "
        f"is at most e^epsilon{factor} times that under the other, "
        f"plus delta. {_earlier(facts.plan)}{describe_tuning(facts.plan)}"
        f"The smaller epsilon is, the less anybody can find out about whether a given {unit} was in the "
        f"training set, even knowing all the others. {_planned_or_spent(facts)}{weak}"
    )


def _earlier(plan: dict[str, Any]) -> str:
    """Sentence about the earlier runs that epsilon includes; empty where there were none."""
    runs = plan.get("earlier_runs", ())
    if not runs:
        return ""
    named = ", ".join(f"{sum(run['charged'])} steps (ledger `{plain(run['ledger_digest'][:16])}`)" for run in runs)
    return (
        f"This includes what {len(runs)} earlier run{'s' * (len(runs) > 1)} on these records had released by then: "
        f"{named}; not what they charged later, nor what their own statements list as released without noise. "
    )


def _trained(facts: RunFacts) -> str:
    """Beginning of the promise, by how far the run has come."""
    charged, planned = facts.steps_charged, facts.steps_planned
    if not charged:
        return "No step of this run was charged so far, and nothing was released. The whole plan trains a model"
    if charged < planned:
        return f"{charged} of the {planned} steps of this run were charged so far. The whole plan trains a model"
    return "This model was trained"


def _planned_or_spent(facts: RunFacts) -> str:
    charged, planned = facts.steps_charged, facts.steps_planned
    if charged == planned:
        return f"All {planned} planned steps were charged."
    if charged > planned:
        return (
            f"{charged} steps were charged, more than the {planned} planned, because steps were run again after an "
            "interruption, on a branch or in a second call to train; epsilon covers all of them."
        )
    return (
        f"Epsilon is that of the whole plan of {planned} steps. {charged} of them were charged so far (epsilon "
        f"{round_up(facts.epsilon_spent)} so far); as the moment of stopping may depend on the data, the smaller "
        "number is information and no guarantee."
    )


def _meaning(facts: RunFacts) -> str:
    if facts.not_private_reasons:
        return ""
    return meaning_section(facts.meaning, unit_of(facts.plan), facts.plan["adjacency"])


def _numbers(facts: RunFacts) -> str:
    plan, target = facts.plan, facts.plan["target_epsilon"]
    sample_rate = plan["expected_batch_size"] / plan["num_examples"]
    planned, spent, swapped = facts.epsilon_planned, facts.epsilon_spent, facts.epsilon_replace_one
    if facts.not_private_reasons:
        planned = spent = swapped = math.inf
    rows = {
        f"epsilon claimed (`{plan['adjacency']}`)": round_up(facts.epsilon),
        "epsilon of the plan / of the steps charged": f"{round_up(planned)} / {round_up(spent)}",
        "epsilon asked for (`target_epsilon`)": "none, the noise was given" if target is None else f"{target:g}",
        **tuning_rows(plan),
        **dataset_rows(plan),
        f"epsilon if one {unit_of(plan)} is swapped (`replace_one`)": (
            "no analysis is known for this sampler" if swapped is None else round_up(swapped)
        ),
        "delta": f"{facts.delta:g}{_told_by_delta(facts)}",
        "noise multiplier (noise standard deviation / sensitivity)": f"{plan['noise_multiplier']:.6g}",
        "noise mechanism": _noise(plan),
        "clipping norm C, clipping rule": f"{plan['clipping_norm']:g}, `{plan['clipping']}`",
        "preconditioner before the clip": _preconditioner(plan),
        **_private_metrics(plan),
        "sampler": f"`{plan['sampler']['name']}`",
        f"{_sampled_elements(plan)} n, expected batch size, sampling rate q": (
            f"{plan['num_examples']}, {plan['expected_batch_size']}, {sample_rate:.6g}"
        ),
        "steps planned / charged": f"{facts.steps_planned} / {facts.steps_charged}",
        "trained coordinates, all clipped and noised": f"{facts.num_trainable}",
        **_recipe(plan),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _private_metrics(plan: dict[str, Any]) -> dict[str, str]:
    """Row of the noisy numbers that were released with the gradients; empty where there were none."""
    metrics = plan.get("private_metrics")
    if metrics is None:
        return {}
    units, share = _plural(plan), metrics["share"]
    says = (
        f"mean loss (of single {units}, cut to {metrics['loss_bound']:g}) and counts of {units} by the norm of their "
        "gradient; released in every step with the gradient, noised as one vector, and included in epsilon. They take "
        f"{share:g} of each step's budget (squared signal to noise): the noise of the gradient is "
        f"about {1 / math.sqrt(1 - share) - 1:.2%} larger"
    )
    return {"noisy numbers in the log (`private_...`)": says}


def _recipe(plan: dict[str, Any]) -> dict[str, str]:
    """Rows of the options that were chosen for the user, and of a trained head; empty where there is neither."""
    recipe = dict(plan.get("recipe", {}))
    declared = recipe.pop("trained_head", False)
    rows = {}
    if recipe:
        chosen = {name: f"{v:g}" if isinstance(v, float) else str(v) for name, v in recipe.items()}
        values = ", ".join(f"`{plain(name)}` {plain(value)}" for name, value in chosen.items())
        rows["chosen by `recipe`, from n, epsilon, delta, passes and the size of the model"] = values
    if declared:
        rows["declared by `trained_head`"] = "the head was trained before this run"
    return rows


def _num_units(plan: dict[str, Any]) -> int:
    """Number of records or users that are protected one by one."""
    users = plan.get("users")
    if users is None or users["sampled"] != "records":
        return plan["num_examples"]
    return max(1, plan["num_examples"] // users["records_per_user"])


def _told_by_delta(facts: RunFacts) -> str:
    """Clause about the values of n that share the default delta; empty for a delta of the user's own."""
    num_units = _num_units(facts.plan)
    if facts.delta != default_delta(num_units):
        return ""
    first, last = sizes_with_default(num_units)
    what = f"every n from {first} to {last}" if first < last else f"n = {first} alone"
    return f", the default for {what} ({_plural(facts.plan)})"


def _evaluations(facts: RunFacts) -> str:
    """Paragraph about a private evaluation set; empty where there was none."""
    made = facts.evaluations
    if not made:
        return ""
    relation = _ADJACENCY[made["adjacency"]].format(unit="record")
    return (
        f"Metrics on the evaluation set were released with noise: **epsilon = {round_up(made['target_epsilon'])}, "
        f"delta = {made['delta']:g}** for its single records, over all evaluations (neighbouring sets: {relation}). "
        f"{made['num_charged']} were charged so far (epsilon {round_up(made['epsilon_spent'])}), each one Gaussian "
        f"mechanism of noise multiplier {made['noise_multiplier']:.6g}; ledger `privacy/evaluations.jsonl`, digest "
        f"`{plain(made['digest'])}`. The choice of a checkpoint, or of the moment to stop, by these metrics costs "
        "nothing more. This is another dataset than the training set: to somebody who is in both, both epsilons and "
        "both deltas add up. Files that are evaluated elsewhere, and predictions, are not covered. "
        f"{no_protection(made['target_epsilon'])}"
    )


def _not_covered(facts: RunFacts) -> list[str]:
    """Paragraphs on everything that the statement does not cover; a private evaluation set is spoken of elsewhere."""
    return [text for text in _NOT_COVERED if not (facts.evaluations and text.startswith("The evaluation data:"))]


def _weak_delta(facts: RunFacts) -> str:
    num_units = _num_units(facts.plan)
    if facts.delta < 1 / num_units:
        return ""
    unit = unit_of(facts.plan)
    allowed = ", which was asked for with `allow_large_delta`" if facts.plan.get("allow_large_delta") else ""
    return (
        f" **Delta is not below 1/n = {1 / num_units:.3g}**{allowed}: a run that publishes one {unit} outright, "
        "chosen at random, would keep a promise with such a delta."
    )


def _protected(plan: dict[str, Any]) -> str:
    unit, users = plan["privacy_unit"], plan.get("users")
    if users is None:
        return _UNIT.get(unit, f"One *{unit}* is protected.")
    if users["sampled"] == "records":
        way = _CAPPED
    else:
        way = _CHOSEN + (_LOCAL if "local_training" in users else _WEIGHTING[users["weighting"]])
    column = f" (column {_quoted(users['column'])})" if users.get("column") else ""
    return _UNIT[unit].format(column=column, way=way.format(**users))


def _visible(plan: dict[str, Any]) -> str:
    size = _SIZE + (_SIZE_DIFFERS if plan["adjacency"] == "add_or_remove_one" else "")
    of_units = _SEEN.replace("all other records", f"all other {_plural(plan)}")
    of_units = of_units.format(size=size.format(units=_plural(plan)))
    return of_units.replace("the number of records", f"the number of {_sampled_elements(plan)}")


def unit_of(plan: dict[str, Any]) -> str:
    """Word for one unit of privacy."""
    return "record" if plan["privacy_unit"] == "example" else plan["privacy_unit"]


def _plural(plan: dict[str, Any]) -> str:
    return f"{unit_of(plan)}s"


def _sampled_elements(plan: dict[str, Any]) -> str:
    """Name of the elements that batches are drawn from."""
    users = plan.get("users")
    if users is None:
        return "records"
    return "places for records" if users["sampled"] == "records" else users["sampled"]


def _noise(plan: dict[str, Any]) -> str:
    strategy = plan["noise_strategy"]
    if strategy["name"] == "identity":
        return f"`{plan['noise_mechanism']}`: independent in every step"
    across = {
        "carry_on": "; it goes on where the scales of the preconditioner change",
        "by_phase": "; a stream for each kind of phase of the preconditioner",
    }
    return (
        f"`{plan['noise_mechanism']}`: correlated over the steps (strategy `{plain(strategy['name'])}`); standard "
        f"deviation of the draws / sensitivity of one step {plan['draw_stddev']:.6g}, made for {plan['noise_steps']} "
        f"steps{across.get(plan.get('noise_at_changes', ''), '')}"
    )


def _preconditioner(plan: dict[str, Any]) -> str:
    preclip = plan.get("preclip")
    if preclip is None:
        return "none"
    options = ", ".join(f"{name} {value}" for name, value in preclip.items() if name != "name" and value is not None)
    what = "C bounds a record in its coordinates"
    if preclip.get("variant") == "noise_first" or preclip.get("project") == "after_noise":
        what = "C bounds a record as it is, and it acts after the noise"
    elif preclip.get("project") == "before_clip":
        what += f", which are {preclip['rank']}: those are summed and noised, and gradients lie in their span"
    elif preclip["name"] == "quantile":
        what = (
            "C is only the first clipping norm: it follows that quantile of the norms. How many are within it is "
            "released in every step, with noise of its own, as one coordinate more; the noise of the gradient is "
            "that much larger"
        )
    if plan.get("num_queries", 1) > 1:
        what += f"; {plan['num_queries']} clipped sums in every step, noised as one vector"
    if "opening_noise" in plan:
        what += (
            f"; it is made of one query over all {_sampled_elements(plan)} before the first step (noise multiplier "
            f"{plan['opening_noise']:g}), which epsilon includes, once for every part of the run that began anew"
        )
    made = "it is made of released gradients, released weights and public values alone"
    if "opening_noise" in plan:
        made = "it is made of the answer and public values alone"
    if preclip["name"] not in {spec.name for spec, _ in PRECLIPS.values()}:
        made = "the user declares that it is made of released and public values alone"
    return f"`{plain(preclip['name'])}` ({plain(options)}): {what}; {made}"


def _correlation(plan: dict[str, Any]) -> str:
    if plan["noise_strategy"]["name"] == "identity":
        return ""
    return (
        "Later steps take back part of the noise of earlier ones, so the steps of an uninterrupted run are one "
        "mechanism; a run that goes on from an older checkpoint begins another, with noise of its own, and both are "
        "charged. "
    )


def _unnoised(facts: RunFacts) -> str:
    outputs = (
        "No value computed from training data was released without noise by the trainer. What the script prints or "
        "writes beside it is not seen here."
    )
    if facts.non_private_outputs:
        outputs = (
            "These values were computed from training data and released **without noise**. They are NON-PRIVATE and "
            f"outside the guarantee:\n\n{_bullets(map(_quoted, facts.non_private_outputs))}"
        )
    callbacks = "The user added no callbacks."
    if facts.callbacks:
        names = ", ".join(map(_quoted, facts.callbacks))
        callbacks = f"Callbacks added by the user, which may release more than is known here: {names}."
    after = ", ".join(map(_quoted, facts.after_noise))
    free = f"Made of the noised gradients, at no cost: {after}." if after else ""
    return "\n\n".join(part for part in (outputs, callbacks, free) if part)


def _accounting(facts: RunFacts) -> str:
    plan = facts.plan
    law = dict(plan["sampler"])
    sampler = SAMPLERS[law.pop("name")](**law)
    kind = (
        "cryptographic"
        if facts.secure
        else "statistical and **not** cryptographic: the guarantee assumes that nobody predicts its stream"
    )
    return (
        "Epsilon is computed from the mechanism that ran, for the planned number of steps, as the smallest upper "
        f"bound that applies (here from the accountant `{plain(plan['accountant'])}`). "
        f"{sampler.describe(unit_of(plan))} The "
        "coins of the sampling are secret. A step is charged in the ledger before it runs, and an empty batch is a "
        f"step too. {_correlation(plan)}Charges add up over resumed, branched, crashed and repeated runs; a run stops "
        f"before it exceeds `target_epsilon`.{_lost(facts)}\n\n"
        f"{_unvetted(facts)}"
        f"The noise generator, `{plain(facts.noise_generator)}` ({describe_stream(plan['noise_rng'])}), is {kind}. "
        f"Keys used: {facts.chains}, from "
        f"{'the user' if facts.unsafe else 'the operating system'}. Ledger digest: `{plain(facts.ledger_digest)}`."
    )


def _unvetted(facts: RunFacts) -> str:
    """Paragraph on stages of other authors; empty where all are part of the package."""
    if not facts.unvetted:
        return ""
    return (
        f"**Not vetted**: {_plain_list(facts.unvetted)}. This was registered by the user and is no part of "
        "hf_dpopt, whose proofs (`docs/proofs`) and tests do not cover it. Epsilon holds if what it states of itself "
        "is true.\n\n"
    )


def _plain_list(texts: Iterable[str]) -> str:
    return ", ".join(_quoted(text) for text in texts)


def _lost(facts: RunFacts) -> str:
    if not facts.steps_lost:
        return ""
    steps = "1 of the steps was" if facts.steps_lost == 1 else f"{facts.steps_lost} of the steps were"
    return f" {steps} charged and made no update, for the run was killed before the release was written down."


def _software(facts: RunFacts) -> str:
    versions = ", ".join(f"{plain(name)} {plain(version)}" for name, version in sorted(facts.versions.items()))
    return (
        f"Model `{plain(facts.model_class)}` on {facts.world_size} process(es). Self-check before the first step, "
        "which compares clipped sums with gradients of single records: "
        f"{plain(facts.self_check)}. Versions: {versions}."
    )


def _declared(text: str | None) -> str:
    return _quoted(text) if text else "nothing, so assume that it is not protected"


def _bullets(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def plain(text: str) -> str:
    """The user's text on one line, unable to open an HTML comment (they mark the section of a model card) or code."""
    return " ".join(text.replace("`", "'").replace("<", "(").replace(">", ")").replace("|", "/").split())


def _quoted(text: str) -> str:
    return f"`{plain(text)}`"
