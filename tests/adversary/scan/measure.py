"""One model class: made tiny, trained for a few steps by the real `DPTrainer`, and what came of it."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from tests.adversary import harness
from tests.adversary.scan.classes import ModelClass, takes_labels
from tests.adversary.scan.records import TOKENS, Data, data_for
from tests.adversary.scan.tiny_configs import tiny_config
from tests.helpers import tiny

CLIPPING_NORM = 1e-3  # far below the gradients, so that every record is clipped and none can hide
MAX_PARAMETERS = {2: 300_000_000, 1: 30_000_000}  # by the strength of the shrinking
NUM = len(TOKENS)
LEVELS = (2, 1)
PRECISIONS = (torch.float64, torch.float32)
TASKS = {
    "CausalLM": "CAUSAL_LM", "SequenceClassification": "SEQ_CLS", "TokenClassification": "TOKEN_CLS",
    "QuestionAnswering": "QUESTION_ANS", "Seq2SeqLM": "SEQ_2_SEQ_LM",
}  # fmt: skip
CLASSIFIERS = (
    "ImageClassification",
    "VideoClassification",
    "AudioClassification",
    "MultipleChoice",
    "NextSentencePrediction",
)
NO_LOSS = "No per-record loss is known"
NOT_ADAPTED = re.compile(
    r"(^|\.)(router|gate|.*experts?|lm_head|classifier|score|qa_outputs|.*embed.*|.*predictions.*)(\.|$)"
)


@dataclasses.dataclass
class Outcome:
    """What came of one way to train.

    Args:
        verdict: "exact", "breaks" (a record moved the sum by more than promised), "refused" (before a step was
            charged), "stopped" (refused in a step) or "error" (an error that is no refusal).
        reason: of what is not exact.
        ratio: the most that one of the records moved the sum, in clipping norms.
        least: the least.
    """

    verdict: str
    reason: str = ""
    ratio: float | None = None
    least: float | None = None


def measure(model: ModelClass) -> dict[str, Any] | None:
    """The row of a class; None for one that takes no labels."""
    start = time.perf_counter()
    row: dict[str, Any] = {"head": model.head}
    try:
        model_class, config_class = model.load()
        if not takes_labels(model_class):
            return None
    except ImportError as error:
        return row | {"verdict": "not runnable", "reason": first_sentence(error)}
    row |= _verdicts(_Subject(model, model_class, config_class))
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def _verdicts(subject: _Subject) -> dict[str, Any]:
    if not subject.build():
        return {"verdict": "not runnable", "reason": subject.problem}
    subject.choose_data()
    full = subject.private_run(lora=False)
    row: dict[str, Any] = {"verdict": full.verdict} | _facts(full)
    row |= {"records": subject.data.what} if subject.data else {}
    if full.verdict == "exact":
        return row | subject.facts()
    if subject.data is None and full.verdict != "refused":
        return row | {"verdict": "not runnable", "reason": subject.problem or "the scan makes no records of this head"}
    stock = subject.stock_run() if subject.data else ""
    if stock:
        return row | {"verdict": "not runnable", "reason": f"the stock Trainer: {stock}", "private": full.reason}
    if full.verdict != "breaks" and subject.data is not None:
        lora = subject.private_run(lora=True)
        row["lora"] = {"verdict": lora.verdict} | _facts(lora)
    return row | subject.facts()


def _facts(outcome: Outcome) -> dict[str, Any]:
    values = {"reason": outcome.reason, "ratio": outcome.ratio, "least": outcome.least}
    return {name: value for name, value in values.items() if value not in ("", None)}


def first_sentence(error: BaseException) -> str:
    """The kind of an error that is no refusal, and its first sentence."""
    text = " ".join(str(error).split())
    text = re.split(r"(?<=[a-z)\]])\. |\. Worst tensor|: [\w.]+\.[\w.]+|: \d", text)[0][:200].rstrip(".")
    return text if isinstance(error, harness.REFUSALS) else f"{type(error).__name__}: {text}"


class _Subject:
    """A class on its way through the scan."""

    def __init__(self, model: ModelClass, model_class: Any, config_class: Any):
        self.model, self.model_class = model, model_class
        own = getattr(model_class, "config_class", None)  # of a composite's text half, the text config
        self.config_class = own or config_class
        self.level, self.dtype = LEVELS[0], PRECISIONS[0]
        self.data: Data | None = None
        self.loss: Any = None
        self.problem = ""

    def config(self) -> Any:
        config = tiny_config(self.config_class, self.level)
        if self.model.head == "CausalLM" and hasattr(config, "is_decoder") and not config.is_encoder_decoder:
            config.is_decoder = True  # encoders that also come as decoders
        return config

    def fresh(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.model_class._from_config(self.config())
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):  # some heads have a rate that no config names
                module.p = 0.0
        return model

    def build(self) -> bool:
        """Whether the class can be made tiny; `level` is the strongest shrinking that works."""
        for level in LEVELS:
            self.level = level
            try:
                if self._fits():
                    return True
            except Exception as error:  # whatever a config of unlike sizes ends in
                self.problem = self.problem or first_sentence(error)
        return False

    def _fits(self) -> bool:
        """Whether the model of this level is small enough.

        Raises:
            Exception: whatever a config whose sizes do not fit each other ends in.
        """
        with torch.device("meta"):
            size = sum(p.numel() for p in self.model_class._from_config(self.config()).parameters())
        if size > MAX_PARAMETERS[self.level]:
            self.problem = self.problem or f"{size / 1e6:.0f} million parameters at the least"
        return size <= MAX_PARAMETERS[self.level]

    def choose_data(self) -> None:
        """The first records, shrinking and precision with which the model has a finite loss and a backward."""
        first = self.level
        for level in LEVELS[LEVELS.index(first) :]:
            self.level = level
            try:
                if level != first and not self._fits():
                    continue
            except Exception:
                continue
            for dtype in PRECISIONS:
                for data in self._offered():
                    self.data = self.data or data
                    if self._works(data, dtype):
                        self.data, self.dtype = data, dtype
                        return
        self.level = first

    def _offered(self) -> list[Data]:
        try:
            return list(
                data_for(self.model.head, self.model.model_type, self.config(), self.model_class.main_input_name)
            )
        except Exception as error:
            self.problem = first_sentence(error)
            return []

    def _works(self, data: Data, dtype: torch.dtype) -> bool:
        try:
            model = self.fresh().to(dtype).train()
            batch = data.collator(data.records)
            loss = model(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}).loss
            loss.backward()
            return bool(loss.isfinite())
        except Exception:
            return False

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {} if self.level == LEVELS[0] else {"shrinking": "mild"}
        facts |= {} if self.dtype == PRECISIONS[0] else {"precision": "float32"}
        facts |= {"loss": "own"} if self.loss is not None else {}
        tokenizer = self.data.tokenizer if self.data else None
        return facts | ({"padding": "left"} if getattr(tokenizer, "padding_side", "") == "left" else {})

    def private_run(self, *, lora: bool) -> Outcome:
        """The private run; in float32 where the self-check of a model that rounds to it inside asks too much.

        A head whose loss is not known is given one where that is one cross entropy per record.
        """
        outcome = self._private_run(lora)
        if NO_LOSS in outcome.reason and self.model.head in CLASSIFIERS:
            self.loss = classified
            outcome = self._private_run(lora)
        is_rounding = outcome.verdict == "refused" and "Self-check" in outcome.reason
        if self.dtype == PRECISIONS[0] and (is_rounding or outcome.verdict == "error"):
            self.dtype = PRECISIONS[1]
            again = self._private_run(lora)
            if again.verdict == "exact":
                return again
            self.dtype = PRECISIONS[0]
        return outcome

    def _private_run(self, lora: bool) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            model = self.fresh().to(self.dtype)
            try:
                model = with_lora(model, self.model.head) if lora else model
            except Exception as error:
                return Outcome("not runnable", f"peft: {first_sentence(error)}")
            try:
                ratios = self._influences(model, Path(folder))
            except Exception as error:
                return _failure(error, Path(folder))
        outcome = Outcome("exact", ratio=round(max(ratios), 6), least=round(min(ratios), 6))
        if not max(ratios) <= 1 + harness.SLACK:
            outcome.verdict, outcome.reason = "breaks", f"one record moved the sum by {max(ratios):.6g} clipping norms"
        return outcome

    def _influences(self, model: nn.Module, folder: Path) -> list[float]:
        """How far each record moves the sum: one step with all of them, then one without each."""
        data = self.data or Data([{"record": i} for i in range(NUM)], lambda rows: {}, None, "")
        everyone = list(range(NUM))
        trainer = tiny.trainer(
            folder / "run", model=model, train_dataset=data.records, data_collator=_Cast(data.collator, self.dtype),
            processing_class=data.tokenizer, max_steps=NUM + 1, expected_batch_size=2, clipping_norm=CLIPPING_NORM,
            per_device_train_batch_size=16, learning_rate=0.0, noise_multiplier=1.0, optim="sgd",
            logging_strategy="no", log_level="error", per_example_loss_func=self.loss, skip_self_check=False,
        )  # fmt: skip
        with harness.forced_draws(lambda step: [i for i in everyone if i != step - 2]) as seen:
            trainer.train()
        assert len(seen) == NUM + 1, f"{len(seen)} steps ran"
        return [distance(seen[0], without) / CLIPPING_NORM for without in seen[1:]]

    def stock_run(self) -> str:
        """What stops the stock Trainer on the same model and records; empty if nothing does."""
        assert self.data is not None
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, max_steps=1, per_device_train_batch_size=NUM, use_cpu=True, report_to="none", disable_tqdm=True,
                save_strategy="no", remove_unused_columns=False, optim="sgd", logging_strategy="no", log_level="error",
            )  # fmt: skip
            try:
                Trainer(
                    self.fresh().to(self.dtype), arguments, train_dataset=self.data.records,
                    data_collator=_Cast(self.data.collator, self.dtype), processing_class=self.data.tokenizer,
                ).train()  # fmt: skip
            except Exception as error:
                return first_sentence(error)
        return ""


def _failure(error: Exception, folder: Path) -> Outcome:
    charged = ""
    try:
        harness.assert_nothing_charged(folder)
    except AssertionError:
        charged = "in a step: "
    if isinstance(error, harness.REFUSALS):
        return Outcome("stopped" if charged else "refused", charged + first_sentence(error))
    return Outcome("error", charged + first_sentence(error))


class _Cast:
    """A collator whose numbers have the precision of the model."""

    def __init__(self, collator: Any, dtype: torch.dtype):
        self.collator, self.dtype = collator, dtype

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Any:
        batch = self.collator(rows)
        for name, value in batch.items():
            if value.is_floating_point():
                batch[name] = value.to(self.dtype)
        return batch


def classified(outputs: Any, labels_B: torch.Tensor) -> torch.Tensor:
    """Cross entropy by record, as a user would pass it for a head that is not known."""
    return torch.nn.functional.cross_entropy(outputs.logits, labels_B.view(-1), reduction="none")


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Euclidean distance of two sums."""
    return float(torch.stack([(ours[name] - theirs[name]).square().sum() for name in ours]).sum().sqrt())


def with_lora(model: nn.Module, head: str) -> nn.Module:
    """LoRA on every linear layer but embeddings and heads; in a mixture of experts on the attention alone."""
    import peft
    from transformers.pytorch_utils import Conv1D

    is_mixture = any(re.search("expert|router", name) for name, _ in model.named_parameters())
    # peft refuses the output projection of a Mamba, and gates of an attention without the layers it takes them for
    is_mamba = any("mamba" in f"{path} {type(m).__name__}".lower() for path, m in model.named_modules())
    targets = [
        name
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D)
        and not NOT_ADAPTED.search(name)
        and (not is_mixture or (re.search("attn|attention", name) and not name.endswith("gate_proj")))
        and not (is_mamba and name.endswith("out_proj"))
    ]
    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, task_type=TASKS.get(head))
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # B starts at zero, where nothing that flows through A can be seen
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return adapted
