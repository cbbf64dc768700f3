"""Models, batches and the ways to a clipped gradient that the benchmarks compare. Opacus is optional.

Every way takes one physical batch to the gradients that an optimizer would be given: forward, backward, clipping.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import FlatClipping
from hf_dpopt.records.losses import RecordLosses

CLIPPING_NORM = 0.1


@dataclasses.dataclass(frozen=True)
class Shape:
    """An architecture by name with the physical batch it is measured at."""

    family: str
    width: int
    layers: int
    vocabulary: int
    batch: int
    tokens: int
    tied: bool = True
    inner: int = 0  # columns of a llama's MLP

    def model(self) -> nn.Module:
        heads = max(2, self.width // 64)
        if self.family == "llama":
            return LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=self.vocabulary, hidden_size=self.width, num_hidden_layers=self.layers,
                    num_attention_heads=heads // 2, num_key_value_heads=max(1, heads // 8),
                    intermediate_size=self.inner, max_position_embeddings=self.tokens, tie_word_embeddings=False,
                    use_cache=False, bos_token_id=1, eos_token_id=2,
                )
            )  # fmt: skip
        if self.family == "roberta":
            return RobertaForSequenceClassification(
                RobertaConfig(
                    vocab_size=self.vocabulary, hidden_size=self.width, num_hidden_layers=self.layers,
                    num_attention_heads=heads, intermediate_size=4 * self.width, type_vocab_size=1,
                    max_position_embeddings=self.tokens + 2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                )
            )  # fmt: skip
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=self.vocabulary, n_embd=self.width, n_layer=self.layers, n_head=heads,
                n_positions=self.tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                tie_word_embeddings=self.tied, use_cache=False, bos_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip

    @property
    def lora_targets(self) -> list[str]:
        targets = {"roberta": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}
        return targets[self.family]


SHAPES = {
    "roberta-256x4": Shape("roberta", 256, 4, 8192, 16, 128),
    "gpt2-256x4": Shape("gpt2", 256, 4, 8192, 8, 256),
    "roberta-768x6": Shape("roberta", 768, 6, 50265, 8, 128),
    "gpt2-768x6": Shape("gpt2", 768, 6, 50257, 4, 128),
    "gpt2-768x6-T512": Shape("gpt2", 768, 6, 50257, 2, 512),
    "gpt2-768x6-T1024": Shape("gpt2", 768, 6, 50257, 1, 1024),
    "roberta-large": Shape("roberta", 1024, 24, 50265, 32, 256),
    "gpt2": Shape("gpt2", 768, 12, 50257, 16, 512),
    "gpt2-medium": Shape("gpt2", 1024, 24, 50257, 8, 512),
    "gpt2-large": Shape("gpt2", 1280, 36, 50257, 4, 512),
    "llama-256x4": Shape("llama", 256, 4, 8192, 8, 128, inner=896),
    "llama-8b": Shape("llama", 4096, 32, 128256, 4, 1024, inner=14336),
}


class Case:
    """One model, finetuned one way, with its batch."""

    def __init__(
        self, shape: Shape, finetuning: str, *, device: str = "cpu", bf16: bool = False, checkpointing: bool = False
    ):
        self.shape, self.device, self.bf16 = shape, device, bf16
        with torch.device(device):
            self.model = shape.model().train()
        if shape.family == "gpt2":  # transformers finds no loss by that class's name: it warns, and a compiled model
            self.model.loss_type = "ForCausalLM"  # falls back to eager where it would
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if finetuning == "lora":
            from peft import LoraConfig, get_peft_model

            if checkpointing:
                self.model.enable_input_require_grads()
            if shape.family == "llama":
                self.model.to(torch.bfloat16 if bf16 else torch.float32)  # frozen weights; adapters stay float32
            head = ["classifier"] if shape.family == "roberta" else None
            config = LoraConfig(
                r=8, target_modules=shape.lora_targets, modules_to_save=head, fan_in_fan_out=shape.family == "gpt2"
            )
            self.model = get_peft_model(self.model, config)
        size = (shape.batch, shape.tokens)
        ids = torch.randint(5, shape.vocabulary, size, device=device)
        labels = torch.randint(0, 2, size[:1], device=device) if shape.family == "roberta" else ids
        self.batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def losses(self, batch: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.bf16):
            return RecordLosses(self.model)(self.batch if batch is None else batch)

    def release(self) -> None:
        """What `optimizer.zero_grad` does."""
        for p in self.trained.values():
            p.grad = None

    # --- ways --------------------------------------------------------------------------------------------------------

    def stock(self, share: float = 1.0) -> Callable[[], None]:
        """The non-private way; `share` multiplies the loss where gradients of several batches are accumulated."""
        return self._plain(self.model, share)

    def stock_compiled(self, share: float = 1.0, compiler: str = "inductor") -> Callable[[], None]:
        """The same through `torch.compile`, for the one shape of the batch."""
        return self._plain(torch.compile(self.model, backend=compiler, dynamic=False), share)

    def _plain(self, model: Any, share: float) -> Callable[[], None]:
        def step() -> None:
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.bf16):
                loss = model(**self.batch).loss
            (loss if share == 1 else loss * share).backward()

        return step

    def _engine(self, name: str) -> Callable[[], None]:
        engine = make_engine(self.model, FlatClipping(clipping_norm=CLIPPING_NORM), name)

        def step() -> None:
            clipped = engine.empty_sum()
            engine.add_clipped_sum(clipped, self.losses, self.shape.batch)
            for name, total in clipped.result().items():
                engine.parameters[name].grad = total

        return step

    def book_keeping(self) -> Callable[[], None]:
        return self._engine("book_keeping")

    def two_pass(self) -> Callable[[], None]:
        return self._engine("two_pass")

    def _explicit_positions(self) -> dict[str, torch.Tensor]:
        """What Opacus needs to be told: positions and token types that are not broadcast."""
        ids = self.batch["input_ids"]
        first = 2 if self.shape.family == "roberta" else 0
        positions = torch.arange(first, first + ids.size(1), device=self.device).repeat(ids.size(0), 1)
        more = {"token_type_ids": torch.zeros_like(ids)} if self.shape.family == "roberta" else {}
        return {**self.batch, "position_ids": positions, **more}

    def opacus_hooks(self) -> Callable[[], None]:
        from opacus.grad_sample import GradSampleModule

        GradSampleModule(self.model, strict=False, loss_reduction="sum")
        batch = self._explicit_positions()

        def step() -> None:
            self.losses(batch).sum().backward()
            with torch.no_grad():
                squares = [p.grad_sample.flatten(1).square().sum(1) for p in self.trained.values()]
                factors = (CLIPPING_NORM / torch.stack(squares).sum(0).sqrt()).clamp(max=1)
                for p in self.trained.values():
                    p.grad = torch.einsum("b,b...->...", factors, p.grad_sample)
                    p.grad_sample = None

        return step

    def opacus_ghost(self) -> Callable[[], None]:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        module = GradSampleModuleFastGradientClipping(
            self.model, strict=False, loss_reduction="sum", max_grad_norm=CLIPPING_NORM, use_ghost_clipping=True
        )
        batch = self._explicit_positions()

        def step() -> None:
            module.enable_hooks()
            losses = self.losses(batch)
            losses.sum().backward(retain_graph=True)
            factors = module.get_clipping_coef()
            module.disable_hooks()
            self.release()
            (factors * losses).sum().backward()

        return step


WAYS = ("stock", "book_keeping", "two_pass", "opacus_hooks", "opacus_ghost")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(case: Case, step: Callable[[], None]) -> float:
    case.release()
    synchronize(case.device)
    start = time.perf_counter()
    step()
    synchronize(case.device)
    return time.perf_counter() - start


def peak_mib(case: Case, step: Callable[[], None]) -> float:
    """MiB that a step needs beyond the model: in a fresh process, for the numbers of others stay in the peak."""
    if case.device == "cuda":
        step()
        case.release()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    gc.collect()
    before = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again here: building the model needed more than a step does
    for _ in range(2):
        case.release()
        step()
    peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return (peak - before) / 2**20


def versions() -> dict[str, Any]:
    import platform

    import transformers

    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    try:
        import opacus

        found["opacus"] = opacus.__version__
    except ImportError:
        pass
    return found
