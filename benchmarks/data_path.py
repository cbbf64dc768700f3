"""Time of a LoRA step and of the start-up, beside another checkout of this project, in turns.

Everything counts: reading, collation, checks, clipping, noise, the ledger, the optimizer. Two processes stand beside each
other and take one step each by turns, so that what else the machine does hits both. They draw the same batches, under a
fixed key, for the size of a Poisson batch moves a step by more than what is looked for. SST-2 on a RoBERTa of
six layers, 768 wide, rank 8; once from stored columns with the stock collator, once from a list with a collator of one's
own, which sees one record at a time.

    python benchmarks/data_path.py --against ../before --output docs/data_path.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
WARM_UP = 2


def records(num: int) -> list[dict[str, Any]]:
    """Rows as long as sentences of SST-2, made up."""
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = (torch.empty(num).exponential_(1 / 22, generator=generator) + 4).clamp(max=66).int().tolist()
    return [
        {"input_ids": torch.randint(5, 50_000, (n,), generator=generator).tolist(), "label": i % 2}
        for i, n in enumerate(lengths)
    ]


def run(source: str, num_steps: int, num_records: int) -> None:
    """Trains with this package; prints the seconds of the start-up and of each step, and waits for a line before each."""
    import datasets
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        DataCollatorWithPadding,
        PreTrainedTokenizerFast,
        RobertaConfig,
        RobertaForSequenceClassification,
        TrainerCallback,
    )

    from hf_dpopt import DPTrainer, DPTrainingArguments

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 1, "<unk>": 3}, unk_token="<unk>")), pad_token="<pad>"
    )
    known = DataCollatorWithPadding(tokenizer)
    config = RobertaConfig(
        vocab_size=50_265, hidden_size=768, num_hidden_layers=6, num_attention_heads=12, pad_token_id=1
    )
    model = get_peft_model(RobertaForSequenceClassification(config), LoraConfig(task_type="SEQ_CLS", r=8))
    rows = records(num_records)
    begun: list[float] = []
    steps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if begun:
                steps.append(time.perf_counter() - begun[-1])
            else:
                print(json.dumps({"start_up": time.perf_counter() - begin}), flush=True)
            print(json.dumps({"step": steps[-1] if steps else None}), flush=True)
            sys.stdin.readline()  # its turn
            begun.append(time.perf_counter())

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            print(json.dumps({"step": time.perf_counter() - begun[-1]}), flush=True)

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DPOPT_PRIVATE_DIR"] = f"{folder}/keys"
        trainer = DPTrainer(
            model,
            DPTrainingArguments(
                output_dir=f"{folder}/out", per_device_train_batch_size=32, expected_batch_size=64,
                max_steps=num_steps, report_to="none", disable_tqdm=True, save_strategy="no", use_cpu=True,
                noise_multiplier=1.0, target_delta=1e-6, logging_strategy="no", remove_unused_columns=False,
                unsafe_fixed_noise_key="5a" * 32,
            ),
            train_dataset=datasets.Dataset.from_list(rows) if source == "stored" else rows,
            data_collator=known if source == "stored" else lambda some: dict(known(some)),
            callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()


class _Trainer:
    """A process that trains with one checkout, step by step."""

    def __init__(self, checkout: Path, source: str, num_steps: int, num_records: int):
        command = [
            sys.executable, __file__, "--once", source, "--num_steps", str(num_steps), "--num_records", str(num_records),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, env=environment, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.start_up = self._next("start_up")
        self._next("step")

    def _next(self, name: str) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(f'{{"{name}"'):
                return json.loads(line)[name]
        raise RuntimeError("The training process ended. Run it by hand: --once stored.")

    def step(self) -> float:
        """Seconds of the next step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._next("step")


def in_turns(against: Path, source: str, num_steps: int, num_records: int) -> dict[str, Any]:
    """Both checkouts by turns; the ratio of each pair of steps."""
    import scipy.stats

    pair = {name: _Trainer(checkout, source, num_steps, num_records) for name, checkout in
            (("here", REPO), ("there", against))}  # fmt: skip
    found: dict[str, list[float]] = {"here": [], "there": []}
    for i in range(num_steps):
        for name in ("here", "there") if i % 2 == 0 else ("there", "here"):
            found[name].append(pair[name].step())
    ratios = [a / b for a, b in zip(found["here"][WARM_UP:], found["there"][WARM_UP:], strict=True)]
    half = float(scipy.stats.t.ppf(0.975, len(ratios) - 1)) * statistics.stdev(ratios) / len(ratios) ** 0.5
    mean = statistics.mean(ratios)
    return {
        "source": source,
        "step_seconds": {name: statistics.median(steps[WARM_UP:]) for name, steps in found.items()},
        "start_up_seconds": {name: trainer.start_up for name, trainer in pair.items()},
        "ratio_of_steps": mean,
        "interval_95": [mean - half, mean + half],
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="the other checkout")
    parser.add_argument("--num_steps", type=int, default=20)
    parser.add_argument("--num_records", type=int, default=67_349)
    parser.add_argument("--sources", nargs="+", choices=["stored", "list"], default=["stored", "list"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--once", choices=["stored", "list"], help="time this checkout once and print JSON")
    args = parser.parse_args()
    if args.once:
        run(args.once, args.num_steps, args.num_records)
        return
    if args.against is None:
        parser.error("name the other checkout: --against ../before")
    import torch
    import transformers

    report = {
        "command": "python benchmarks/data_path.py --against <checkout before>",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
        "cores": os.cpu_count(),
        "num_records": args.num_records,
        "results": [
            in_turns(args.against.resolve(), source, args.num_steps, args.num_records)
            for source in args.sources
        ],
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
