"""Private numbers of training beside the exact ones, on SST-2: what `--log_private_metrics` prints and what it hides.

    python benchmarks/private_metrics.py --data DIR --model DIR --output docs/private_metrics.json

Linear head on means over the tokens of a layer of a frozen model, batches of 1,024, epsilon 8. The exact numbers are those of the same units in the same
steps, taken where the noisy ones are made: the loss before its cut, the share of clipped units, quantiles of the norms.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer
from transformers.modeling_outputs import SequenceClassifierOutput

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hf_dpopt import DPTrainer, DPTrainingArguments
from hf_dpopt.clipping.measures import Measures
from hf_dpopt.report.facts import collect_versions

BATCH, STEPS = 1024, 198  # three passes


class Spy:
    """Exact losses and norms of the units since the last line, and the lines with the numbers of both kinds."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []
        self.lines: list[dict[str, float]] = []

    def total_of(self, measures: Measures, losses_U: torch.Tensor, squares: Any) -> torch.Tensor:
        """Stand in for `Measures.total_of`."""
        self.losses.append(losses_U.detach().double().cpu())
        self.norms.append(
            torch.stack(list(squares.values())).sum(dim=0).double().sqrt().cpu() / measures.clipping_norm
        )
        return TOTAL_OF(measures, losses_U, squares)

    def log(self, trainer: Any, logs: dict[str, float], start_time: float | None = None) -> None:
        """Stand in for `DPTrainer.log`."""
        before = len(trainer.state.log_history)
        LOG(trainer, logs, start_time)
        line = trainer.state.log_history[before]
        if "private_loss" in line:
            losses, norms = torch.cat(self.losses), torch.cat(self.norms)
            self.lines.append(
                {
                    "step": line["step"],
                    **{name: value for name, value in line.items() if name.startswith("private_")},
                    "loss": float(losses.mean()),
                    "clip_fraction": float((norms > 1).double().mean()),
                    "norm_p50": float(norms.quantile(0.5)),
                    "norm_p90": float(norms.quantile(0.9)),
                }
            )
            self.losses, self.norms = [], []


TOTAL_OF, LOG = Measures.total_of, DPTrainer.log


class Head(nn.Module):
    """A linear classifier of features."""

    def __init__(self, width: int):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(width, 2)

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> SequenceClassifierOutput:
        """Logits, (B, 2)."""
        return SequenceClassifierOutput(logits=self.linear(features))


@torch.no_grad()
def features_of(args: argparse.Namespace, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Means over tokens of a layer of the frozen model, (N, H), of norm 1, and labels, (N,); kept in the folder."""
    kept = folder / f"features_{args.layers}.pt"
    if kept.exists():
        return tuple(torch.load(kept))
    rows = list(csv.DictReader((Path(args.data) / "train.tsv").open(), delimiter="\t", quoting=csv.QUOTE_NONE))
    tokenizer, model = AutoTokenizer.from_pretrained(args.model), AutoModel.from_pretrained(args.model).eval()
    model.encoder.layer = model.encoder.layer[: args.layers]
    texts = [row["sentence"] for row in rows]
    found: Any = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(texts[i]))
    for first in range(0, len(rows), 256):
        some = order[first : first + 256]
        batch = tokenizer([texts[i] for i in some], padding=True, truncation=True, max_length=66, return_tensors="pt")
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (model(**batch).last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)
        for i, vector in zip(some, nn.functional.normalize(mean), strict=True):
            found[i] = vector
    made = torch.stack(found), torch.tensor([int(row["label"]) for row in rows])
    torch.save(list(made), kept)
    return made


def losses_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of single records, (B,)."""
    return nn.functional.cross_entropy(outputs.logits, labels, reduction="none")


def run(args: argparse.Namespace, share: float, logging_steps: int, folder: Path) -> list[dict[str, float]]:
    """Train once, and give the lines of the log."""
    spy, (features, labels) = Spy(), features_of(args, folder)
    records = [{"features": x, "labels": y} for x, y in zip(features, labels, strict=True)]
    name = f"{share}_{logging_steps}"
    training = DPTrainingArguments(
        output_dir=str(folder / f"out_{name}"), private_state_dir=str(folder / f"keys_{name}"), use_cpu=True,
        target_epsilon=args.epsilon, target_delta=1e-5, expected_batch_size=BATCH, max_steps=STEPS, learning_rate=2e-2,
        per_device_train_batch_size=BATCH, logging_steps=logging_steps, save_strategy="no", report_to="none",
        disable_tqdm=True, advisor="none", log_private_metrics=share, remove_unused_columns=False, journal_limit=0.0,
        private_metrics_kwargs={"loss_bound": args.loss_bound},
    )  # fmt: skip
    with (
        mock.patch.object(Measures, "total_of", lambda *a: spy.total_of(*a)),
        mock.patch.object(DPTrainer, "log", lambda *a: spy.log(*a)),
    ):
        trainer = DPTrainer(Head(features.size(1)), training, train_dataset=records, per_example_loss_func=losses_of)
        trainer.train()
    return spy.lines


def summary(lines: list[dict[str, float]]) -> dict[str, float]:
    """Median relative errors over the lines (absolute ones of the share of clipped units)."""
    found = {"lines": len(lines)}
    for name in ("loss", "norm_p50", "norm_p90"):
        found[name] = statistics.median(abs(line[f"private_{name}"] / line[name] - 1) for line in lines)
    found["worst_loss"] = max(abs(line["private_loss"] / line["loss"] - 1) for line in lines)
    errors = [abs(line["private_clip_fraction"] - line["clip_fraction"]) for line in lines]
    return {**found, "clip_fraction": statistics.median(errors)}


def main() -> None:
    """Run all settings, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of SST-2: train.tsv, dev.tsv")
    parser.add_argument("--model", required=True, help="folder of the frozen model")
    parser.add_argument("--layers", type=int, default=2, help="of the model, whose features the head reads")
    parser.add_argument("--loss_bound", type=float, default=3.466)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.02, 0.01, 0.05])
    parser.add_argument("--logging_steps", type=int, nargs="+", default=[10, 1])
    parser.add_argument("--folder", type=Path, help="work folder; features are kept there")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for share in args.shares:
        for logging_steps in args.logging_steps:
            lines = run(args, share, logging_steps, folder)
            kept = lines if logging_steps > 1 else []
            rows.append({"share": share, "logging_steps": logging_steps, **summary(lines), "of_lines": kept})
            print({key: value for key, value in rows[-1].items() if key != "of_lines"}, flush=True)
            facts = {
                "epsilon": args.epsilon,
                "batch": BATCH,
                "steps": STEPS,
                "layers": args.layers,
                "loss_bound": args.loss_bound,
                "versions": collect_versions(),
            }
            args.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
