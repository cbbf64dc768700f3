#!/usr/bin/env python
"""Train a linear head on a frozen model and release only its final weights: epsilon stops growing with the steps.

    python recipes/linear_probe.py                        # no arguments: the embedded job, offline
    python recipes/linear_probe.py --model_name_or_path <dir> --train_file train.tsv --validation_file dev.tsv \
        --target_epsilon 2 --feature_norm 20 --head_radius 1 --l2 0.4 --max_steps 20000

The loss of a linear head is convex, and its weights stay in a ball: then the privacy loss of the LAST weights reaches
a plateau (Altschuler and Talwar 2022, arXiv:2205.13710), as long as nothing of the way there is seen. Features of the
training records are computed once and kept in the private folder of the run; a run that is killed is started again
with the same --output_dir and goes on where it was. Data, labels and models are those of `glue.py`.

With --preconditioner subspace --public_file public.tsv the head is trained by AdaGrad in the span of gradients of
public records (Kairouz et al. 2021, arXiv:2008.06570), and epsilon is that of all its steps.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from recipes import flags

    flags.refuse_unknown(sys.argv[1:])  # before the imports below, which take seconds

import numpy as np
import torch
from transformers import DataCollatorWithPadding, EvalPrediction

from hf_dpopt import DPConfigError
from hf_dpopt.convex import (
    MAX_NOISE_RADII,
    HeadPlan,
    HeadRun,
    HeadTrainingArguments,
    SubspaceHeadConfig,
    SubspaceHeadPlan,
    attach_head,
    check_convex_arguments,
    clip_features,
    compute_features,
    find_head,
    head_takes_bias,
    make_head_plan,
    make_subspace_plan,
    recorded_head_plan,
)
from recipes import models, options, running
from recipes.glue import (
    SOURCES,
    DataTrainingArguments,
    ModelArguments,
    evaluation_splits,
    load_data,
    metrics_of,
    tokenize,
)
from recipes.glue_model import load_model
from recipes.public_first import SPLIT

logger = logging.getLogger("recipes.linear_probe")

EMBEDDED: dict[str, Any] = {
    "target_epsilon": 2.0,
    "target_delta": 1e-5,
    "expected_batch_size": 1024,
    "max_steps": 20_000,
    "feature_norm": 8.0,
    "head_radius": 2.0,
    "l2": 0.05,
    "max_seq_length": 40,
    "eval_data_privacy": "public",
    "data_dependent_preprocessing": "none: the labels are declared, and the tokenizer comes from public text",
}

DECLARED = ("eval_data_privacy", "data_dependent_preprocessing")
OF_GLUE = {  # flag -> what to do instead
    "non_private": "Use --noise_multiplier 0, which runs without noise.",
    "push_to_hub": "Load the model from output_dir, and push that.",
    "label_smoothing_factor": "Leave it out.",
    "do_predict": "Load the model from output_dir, in a pipeline.",
}


def main(argv: list[str]) -> None:
    """Features, head, evaluation of the final weights."""
    start = time.monotonic()
    model_args, data_args, training_args = parse(argv)
    running.set_up(training_args)  # the seed is of layers that the model does not come with: frozen, and public

    data = load_data(model_args, data_args, training_args)
    if data.labels is None:
        raise DPConfigError("The labels are numbers, and a convex head is softmax regression. Use glue.py instead.")
    model_args.ignore_mismatched_sizes = True  # the head starts anew
    tokenizer, model = load_model(model_args, data)
    model.float()  # features of one record must not depend on others by rounding, either
    head = model.get_submodule(find_head(model))
    splits = tokenize(data, tokenizer, model, data_args, training_args)
    config = training_args.head_config(len(splits["train"]), has_bias=head_takes_bias(model))
    recorded = recorded_head_plan(training_args.output_dir, training_args.private_state_dir)
    make_plan: Any = make_subspace_plan if isinstance(config, SubspaceHeadConfig) else make_head_plan
    plan = make_plan(config, num_examples=len(splits["train"]), recorded=recorded)
    logger.info(announcement(plan))
    if isinstance(plan, HeadPlan):
        warn_of_large_noise(plan, len(data.labels) * (head.in_features + head_takes_bias(model)))

    run = HeadRun(
        plan,
        output_dir=training_args.output_dir,
        private_state_dir=training_args.private_state_dir,
        declared={name: getattr(training_args, name) for name in DECLARED},
    )
    collate = DataCollatorWithPadding(tokenizer)
    progress = None if training_args.disable_tqdm else "features"

    def records_of(split: Any, cache: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, batch_size = split.remove_columns("label"), training_args.per_device_train_batch_size
        features = compute_features(model, inputs, collate, batch_size=batch_size, cache=cache, progress=progress)
        return clip_features(features, config.feature_norm, config.bias_feature), torch.tensor(split["label"])

    weights = run.train(
        *records_of(splits["train"], run.private_folder),
        len(data.labels),
        public=records_of(splits[SPLIT], None) if SPLIT in splits else None,
        progress=not training_args.disable_tqdm,
    )
    attach_head(model, weights, config.bias_feature)
    publish(run, model, tokenizer, len(data.labels), training_args)
    results = {}
    if training_args.do_eval:
        measure = metrics_of(data_args.task_name, is_regression=False)
        for name, split in evaluation_splits(splits).items():
            results |= evaluate(model, split, collate, measure, name)
    print(running.result_text(summary(plan, data.description, model_args, results, splits, training_args, start)))


def parse(argv: list[str]) -> tuple[ModelArguments, DataTrainingArguments, HeadTrainingArguments]:
    """Flags, as `options.read_flags` reads them.

    Raises:
        DPConfigError: for values that are wrong, do not fit together, or have no theorem.
    """
    model_args, data_args, training_args, embedded = options.read_flags(
        argv, (ModelArguments, DataTrainingArguments), sources=SOURCES, embedded_defaults=EMBEDDED,
        run_name="linear_probe", training_class=HeadTrainingArguments,
    )  # fmt: skip
    assert isinstance(training_args, HeadTrainingArguments)
    running.check_evaluates_exactly(training_args)
    in_subspace = training_args.preconditioner == "subspace"
    alone = ("warm_start_epsilon", "prompt", "label_words", *(() if in_subspace else ("public_file",)))
    given = vars(model_args) | vars(data_args) | vars(training_args)
    if named := [name for name in alone if given[name] is not None]:
        raise DPConfigError(f"{' and '.join(named)}: for glue.py alone. Leave out what is named.")
    for name, fix in OF_GLUE.items():
        if given[name]:
            raise DPConfigError(f"{name} is a flag of glue.py. {fix}")
    if not training_args.do_train:
        raise DPConfigError(
            "Without do_train there is nothing to do. Evaluate a trained model with glue.py --do_eval."
        )
    if training_args.resume_from_checkpoint:
        raise DPConfigError("There are no checkpoints. A run that was killed goes on when it is started again.")
    check_convex_arguments(training_args, lora_r=model_args.lora_r)
    if in_subspace:
        check_public_of_subspace(data_args)
    config = training_args.head_config(10**9)  # values out of range end here
    if not isinstance(config, SubspaceHeadConfig):
        config.sgd(config.expected_batch_size, 1.0, 0.5)  # full batches allow the most
    others = copy.copy(training_args)  # the subspace of a head has options of its own, which were checked above
    others.preconditioner, others.preconditioner_kwargs = "none", None
    options.check(model_args, data_args, others, embedded=embedded)
    return model_args, data_args, training_args


def check_public_of_subspace(data_args: DataTrainingArguments) -> None:
    """Refuse a subspace without public records, and settings of another use of them."""
    if data_args.public_file is None:
        raise DPConfigError(
            "A subspace is one of gradients of public records, and there are none. Add --public_file, or leave "
            "preconditioner out."
        )
    if data_args.public_learning_rate is not None or data_args.public_epochs != 1.0:
        raise DPConfigError(
            "public_learning_rate and public_epochs are for ordinary training on public records, by glue.py. Leave "
            "them out."
        )


def announcement(plan: HeadPlan | SubspaceHeadPlan) -> str:
    """What is going to run."""
    if not plan.is_private:
        return "NOT PRIVATE: the noise is off."
    if isinstance(plan, SubspaceHeadPlan):
        return (
            f"AdaGrad in a public subspace, {plan.accounting}: epsilon {plan.epsilon():.4g} at delta {plan.delta:g} "
            f"(add_or_remove_one); noise multiplier {plan.noise_multiplier:.4g}."
        )
    spent, free = plan.spent, plan.free_steps()
    bound = "plain composition" if spent.horizon is None else f"the last {spent.horizon:,} steps"
    plateau = "" if free is None else f" Steps beyond {free:,} are free."
    return (
        f"Final weights only: epsilon {spent.epsilon:.4g} at delta {plan.delta:g} (add_or_remove_one), by {bound}; "
        f"noise multiplier {plan.sgd.noise_multiplier:.4g}.{plateau}"
    )


def warn_of_large_noise(plan: HeadPlan, num_weights: int) -> None:
    """Warn before training that the noise leaves little to learn."""
    radii = plan.noise_over_radius(num_weights)
    if radii is not None and radii > MAX_NOISE_RADII:
        logger.warning(
            "Noise alone would carry the %s weights %.1f times as far as --head_radius lets them. Beyond %g times it "
            "may cost accuracy, beyond 30 most of it. Give --l2 (from 0.001 to 0.01 times feature_norm^2, the more "
            "the fewer records), a smaller --learning_rate or a larger --head_radius; or fewer steps, more records, "
            "a larger epsilon.", f"{num_weights:,}", radii, MAX_NOISE_RADII,
        )  # fmt: skip


def publish(run: HeadRun, model: Any, tokenizer: Any, num_labels: int, training_args: HeadTrainingArguments) -> None:
    """The model with its head, the tokenizer, and a card that is the privacy statement; then the run is over."""
    folder = Path(training_args.output_dir)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    run.finish(num_labels)
    statement = (folder / "privacy" / "statement.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text(f"---\nlibrary_name: transformers\n---\n\n{statement}", encoding="utf-8")


def evaluate(model: Any, split: Any, collate: Any, measure: Any, name: str) -> dict[str, float]:
    """Metrics of the model as it was saved, which does not shorten features."""
    logits, labels = map(torch.cat, zip(*models.outputs(model.eval(), list(split), collate, 256), strict=True))
    ending = "_mm" if name.endswith("_mismatched") else ""
    metrics = measure(EvalPrediction(predictions=logits.numpy(), label_ids=labels.numpy()))
    return {f"{key}{ending}": value for key, value in metrics.items()}


def summary(
    plan: HeadPlan | SubspaceHeadPlan,
    description: str,
    model_args: ModelArguments,
    results: dict[str, float],
    splits: dict[str, Any],
    training_args: HeadTrainingArguments,
    start: float,
) -> list[tuple[str, str]]:
    """The last lines of a run: what was run, what came out, what it cost."""
    lines = [("what was run", f"a linear head on {model_args.model_name_or_path} (frozen) on {description}")]
    if results:
        (validation, *_) = evaluation_splits(splits).values()
        lines.append(("majority class", f"{np.bincount(validation['label']).max() / len(validation):.1%} accuracy"))
        lines.append(("evaluation", ", ".join(f"{k} {v:.4f}" for k, v in results.items() if running.is_score(k))))
    statement = Path(training_args.output_dir) / "privacy" / "statement.md"
    lines.append(("privacy", f"{announcement(plan)} (statement: {statement})"))
    return [*lines, *running.closing_lines(training_args, start)]


def run(argv: list[str]) -> int:
    """Exit status of a run; see `running.run`."""
    return running.run(argv, main)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
