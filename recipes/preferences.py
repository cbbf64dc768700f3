#!/usr/bin/env python
"""Learn from preferences with differential privacy: TRL's `dpo.py` and `reward.py` with the two names changed.

The flags are those of TRL's `DPOConfig` or `RewardConfig`, of its `ModelConfig`, and of `DPTrainingArguments`.

    python recipes/preferences.py                    # no arguments: SmolLM2-135M-Instruct, pairs of embedded answers
    python recipes/preferences.py --job reward       # the same pairs, a reward model
    accelerate launch recipes/preferences.py --job dpo --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \
        --train_file pairs.jsonl --validation_file held_out.jsonl --target_epsilon 8 \
        --use_peft --lora_r 8 --lora_target_modules all-linear --output_dir private-dpo

A record is one pair, a line of a file of JSON lines: `prompt`, `chosen` and `rejected`, or the last two alone; each a
string or a list of messages. To protect people who have several lines: `--privacy_unit user --user_id_column person`.
How many held-out pairs the model ranks correctly is printed before and after training.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from recipes import flags, processes

    flags.refuse_unknown(sys.argv[1:])  # before the imports below, which take seconds
    processes.start_requested(sys.argv[1:])

    if importlib.util.find_spec("trl") is None:
        sys.exit("error: recipes/preferences.py needs the package trl. Run: pip install 'hf-dpopt[chat]'")

import torch

from hf_dpopt import DPConfigError, DPDPOConfig, DPDPOTrainer, DPRewardConfig, DPRewardTrainer
from hf_dpopt.records.losses import answer_log_probabilities
from recipes import options, running, sft
from recipes.embedded.chats import read_pairs

from trl import DPOTrainer, RewardTrainer  # isort: skip

JOBS: dict[str, tuple[Any, Any, Any]] = {  # configuration, private trainer, stock trainer
    "dpo": (DPDPOConfig, DPDPOTrainer, DPOTrainer),
    "reward": (DPRewardConfig, DPRewardTrainer, RewardTrainer),
}
LAYOUTS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
EMBEDDED = sft.EMBEDDED | {
    "max_train_samples": 512, "lora_r": 2, "gradient_checkpointing": False, "output_dir": "preferences",
}  # fmt: skip
del EMBEDDED["completion_only_loss"]


@dataclass
class DataArguments(sft.DataArguments):
    """Which job, and which pairs."""

    job: str = options.flag("dpo", "dpo: train the model itself; reward: train a model that scores answers.")


def main(argv: list[str]) -> None:
    """The whole run."""
    start = time.monotonic()
    data_args, training_args, model_args, is_embedded = parse(argv)
    running.set_up(training_args)
    running.check_evaluates_exactly(training_args)
    rows = sft.load_rows(data_args, read_pairs() if is_embedded else None, LAYOUTS)
    sft.set_model(training_args, model_args, is_embedded)

    _, private, stock = JOBS[data_args.job]
    trainer = sft.make_trainer(stock if data_args.non_private else private, training_args, model_args, rows)
    lines = [("model", str(model_args.model_name_or_path)), running.size_line(trainer, "pairs")]
    before = share_ranked_correctly(trainer) if rows["validation"] else None
    running.train(trainer, training_args)
    if before is not None:
        after = share_ranked_correctly(trainer)
        metrics = trainer.evaluate()
        logged = trainer.state.log_history[-1]  # TRL's metrics are logged, not returned
        trainer.save_metrics("eval", metrics | {"eval_ranked_before": before, "eval_ranked_after": after})
        lines.append(("held-out pairs", f"{before:.1%} ranked correctly before, {after:.1%} after"))
        if data_args.job == "dpo":  # a reward is the log ratio to the reference: none before training
            lines.append(("reward accuracy", f"{logged['eval_rewards/accuracies']:.1%}"))
    running.publish(trainer, training_args)
    if trainer.is_world_process_zero():
        lines.append(("privacy", running.privacy_line(trainer)))
        print(running.result_text(lines + running.closing_lines(training_args, start)))


def parse(argv: list[str]) -> tuple[DataArguments, Any, Any, bool]:
    """As `sft.parse`, with the flags of the job.

    Raises:
        DPConfigError: for a flag that there is not, or a value out of range.
    """
    job = job_of(argv)
    always = ["--lora_task_type", "SEQ_CLS"] if job == "reward" else []
    return sft.parse([*always, *argv], DataArguments, JOBS[job][0], EMBEDDED, job)


def job_of(argv: list[str]) -> str:
    """The job that flags, or a file of them, name; it decides which other flags there are.

    Raises:
        DPConfigError: if there is no such job.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--job")
    parser.add_argument("--config")
    given = parser.parse_known_args(argv)[0]
    job = str(given.job or sft.read_config(given.config).get("job", "dpo"))
    if job not in JOBS:
        raise DPConfigError(f"job={job!r} is not a job. Use one of: {', '.join(JOBS)}.")
    return job


@torch.no_grad()
def share_ranked_correctly(trainer: Any) -> float:
    """Share of the held-out pairs whose chosen answer gets the larger reward, or the larger log-probability."""
    model, wins = trainer.model, []
    was_training = model.training
    model.eval()
    for batch in trainer.get_eval_dataloader():
        batch = trainer._prepare_inputs(batch)
        outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        if "completion_mask" in batch:
            is_answer = (batch["completion_mask"] * batch["attention_mask"]).bool()
            scores = answer_log_probabilities(outputs, batch["input_ids"][:, None], is_answer[:, None]).flatten()
        else:
            scores = outputs.logits.flatten()
        chosen, rejected = scores.float().chunk(2)
        wins.append(trainer.accelerator.gather_for_metrics(chosen > rejected))
    model.train(was_training)
    return torch.cat(wins).float().mean().item()


run = functools.partial(running.run, entry=main)  # of a list of flags


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
