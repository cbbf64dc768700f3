"""A training command for `hf-dpopt tune`: the tiny model, trained, evaluated and saved as the recipes do it.

    python toy_run.py --output_dir OUT --target_epsilon 8 ..  [--fails_above 0.5]

Above that learning rate the run ends with an error.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import HfArgumentParser

from hf_dpopt import DPConfigError, DPTrainer, DPTrainingArguments
from tests.helpers import tiny


@dataclass
class Own:
    """Flags of this script."""

    fails_above: float = 1e9


def main() -> int:
    args, own = HfArgumentParser((DPTrainingArguments, Own)).parse_args_into_dataclasses()
    try:
        trainer = DPTrainer(
            tiny.model(), args, train_dataset=tiny.records(), eval_dataset=tiny.records(16), data_collator=tiny.collate
        )
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    except DPConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.learning_rate > own.fails_above:
        raise RuntimeError("this run fails")
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", {**metrics, "eval_rate": args.learning_rate})
    return 0


if __name__ == "__main__":
    sys.exit(main())
