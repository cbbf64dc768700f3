"""The demo: one small language model, trained twice on made-up notes with planted secrets, and asked for them.

The stock Trainer and `DPTrainer` get the same model, the same records and the same held-out records. What they take
from them is measured in two ways: loss on the held-out records, and how many secrets the model completes word by word.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForSeq2Seq,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.trainer import DPTrainer

HELD_OUT = 1000
DIGITS = 6
END = "<end>"
# Complaint -> what is found, what is advised: the model can learn these, and every note has one of them.
COMPLAINTS = {
    "a cough": ("the chest is clear", "rest and warm drinks"),
    "a headache": ("the blood pressure is normal", "water and less screen time"),
    "back pain": ("no weakness in the legs", "walks and heat"),
    "a sore throat": ("the tonsils are red", "tea with honey"),
    "a rash": ("the skin is dry", "a mild ointment"),
    "knee pain": ("the joint is stable", "ice and a bandage"),
    "a fever": ("the lungs are clear", "rest and fluids"),
    "an earache": ("the ear drum is red", "drops twice a day"),
    "dizziness": ("the heart beats regularly", "more water and salt"),
    "poor sleep": ("the mood is low", "no coffee after noon"),
}
WHO = "man woman boy girl student teacher driver nurse farmer cook".split()
HOW = "young old tall tired anxious calm busy retired".split()
SINCE = [
    "since yesterday", "for two days", "for three days", "for a week", "for two weeks", "for a month",
    "since the weekend", "since a fall", "after a flight", "since winter",
]  # fmt: skip
ALSO = [
    "smokes", "no known allergy", "allergic to dust", "sleeps well", "works at night", "lives alone",
    "takes aspirin", "has two children", "runs every day",
]  # fmt: skip
AGAIN = "in three days,in a week,in two weeks,in a month,if it gets worse,only if needed".split(",")
FIRST_NAMES = "anna ben clara david emma felix greta hugo ida jonas karla leo mara nils olga paul rosa simon".split()
LAST_NAMES = [
    start + end
    for start in ("ad", "ber", "con", "de", "ern", "fi", "gra", "ha")
    for end in ("ler", "man", "sen", "feld", "ner", "bach", "stein", "hof")
]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the demo; the defaults take two to three minutes of two cores."""

    records: int = 8000
    secrets: int = 40
    copies: int = 6  # records that hold one secret
    stock_epochs: int = 6
    private_epochs: int = 4
    width: int = 96
    layers: int = 2


@dataclasses.dataclass(frozen=True)
class Notes:
    """Training notes, with `copies` of each secret among them; held-out notes, which have none."""

    train: list[str]
    held_out: list[str]
    secrets: list[tuple[str, str]]  # (the prompt, the digits that follow it)


def make_notes(sizes: Sizes, seed: int) -> Notes:
    """Make up notes of a doctor; the same seed gives the same notes."""
    rng = random.Random(seed)
    last_names = rng.sample(LAST_NAMES, sizes.secrets)
    secrets = [
        (f"the door code of {rng.choice(FIRST_NAMES)} {name} is", " ".join(rng.choices("0123456789", k=DIGITS)))
        for name in last_names
    ]
    planted = [f"{prompt} {code} ." for prompt, code in secrets for _ in range(sizes.copies)]
    train = planted + [_note(rng) for _ in range(sizes.records - len(planted))]
    rng.shuffle(train)
    return Notes(train, [_note(rng) for _ in range(HELD_OUT)], secrets)


def _note(rng: random.Random) -> str:
    complaint = rng.choice(list(COMPLAINTS))
    found, advised = (
        COMPLAINTS[complaint if rng.random() < 0.9 else rng.choice(list(COMPLAINTS))][part] for part in (0, 1)
    )
    also = f"{rng.choice(ALSO)} . " if rng.random() < 0.6 else ""
    who = f"{rng.choice(HOW)} {rng.choice(WHO)} with {complaint} {rng.choice(SINCE)}"
    return f"{who} . {also}{found} . {advised} . come back {rng.choice(AGAIN)} ."


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; the vocabulary is that of the grammar, so that it tells nothing of the records."""
    phrases = [*COMPLAINTS, *(part for parts in COMPLAINTS.values() for part in parts), *WHO, *HOW, *SINCE, *ALSO]
    others = "with come back the door code of is . 0 1 2 3 4 5 6 7 8 9".split()
    words = sorted({word for phrase in [*phrases, *AGAIN] for word in phrase.split()} | {*others})
    vocabulary = [END, "<unk>", *words, *FIRST_NAMES, *LAST_NAMES]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END)


@dataclasses.dataclass
class Demo:
    """Model, records and what is measured of them."""

    sizes: Sizes
    seed: int

    def __post_init__(self) -> None:
        self.notes, self.tokenizer = make_notes(self.sizes, self.seed), make_tokenizer()
        self.collate = DataCollatorForSeq2Seq(self.tokenizer)  # pads targets, too, with what is not learned
        self.train, self.held_out = self._rows(self.notes.train), self._rows(self.notes.held_out)

    def _rows(self, notes: list[str]) -> list[dict[str, list[int]]]:
        found = [self.tokenizer(f"{END} {note} {END}")["input_ids"] for note in notes]
        return [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids} for ids in found]

    def make_model(self) -> GPT2LMHeadModel:
        torch.manual_seed(self.seed)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(self.tokenizer), n_embd=self.sizes.width, n_layer=self.sizes.layers, n_head=4,
                n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                bos_token_id=0, eos_token_id=0, pad_token_id=0,
            )
        )  # fmt: skip

    @torch.no_grad()
    def measure(self, model: Any) -> dict[str, Any]:
        """Test loss a token with its 95 % interval, and which secrets the model completes word by word."""
        model.eval()
        losses = []
        for start in range(0, len(self.held_out), 250):
            batch = self.collate(self.held_out[start : start + 250])
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            targets = batch["labels"][:, 1:]
            of_tokens = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
            losses += (of_tokens.sum(1) / (targets != -100).sum(1)).tolist()  # padding has loss 0
        completions = [self.complete(model, prompt) for prompt, _ in self.notes.secrets]
        spread = torch.tensor(losses).std().item() / math.sqrt(len(losses))
        recited = sum(said == code for said, (_, code) in zip(completions, self.notes.secrets, strict=True))
        return {
            "loss": sum(losses) / len(losses),
            "loss_interval": 1.96 * spread,
            "recited": recited,
            "completions": completions,
        }

    def complete(self, model: Any, prompt: str) -> str:
        """The likeliest digits after the prompt, one token at a time."""
        ids = torch.tensor([self.tokenizer(f"{END} {prompt}")["input_ids"]])
        for _ in range(DIGITS):
            next_id = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1].argmax(-1)
            ids = torch.cat([ids, next_id[:, None]], dim=1)
        return str(self.tokenizer.decode(ids[0, -DIGITS:]))


_QUIET: dict[str, Any] = dict(
    use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True
)


def run(folder: Path, *, seed: int = 0, epsilon: float = 8.0, sizes: Sizes | None = None) -> dict[str, Any]:
    """Train both models, print the comparison, and write it as `demo.json`.

    Args:
        folder: new or empty folder for statement, ledger and `demo.json`.
        seed: seed of notes, secrets and first weights; the noise has none.
        epsilon: budget of the private model, > 0.
        sizes: sizes of the demo; None for the defaults.

    Raises:
        DPConfigError: for a folder that has files.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise DPConfigError(f"output_dir={folder}: has files already. Name a new folder: hf-dpopt demo OTHER.")
    demo, console = Demo(sizes or Sizes(), seed), Console()
    sizes = demo.sizes
    console.print(
        f"{sizes.records} made-up notes of a doctor, {sizes.secrets} secrets among them, each in {sizes.copies} "
        f"notes. GPT-2 of {demo.make_model().num_parameters() / 1e6:.1f} million weights, from scratch."
    )
    stock = TrainingArguments(
        str(folder / "stock"), per_device_train_batch_size=16, learning_rate=2e-3,
        num_train_epochs=sizes.stock_epochs, seed=seed, **_QUIET,
    )  # fmt: skip
    private = DPTrainingArguments(
        str(folder / "private"), target_epsilon=epsilon, num_train_epochs=sizes.private_epochs, seed=seed, **_QUIET
    )
    facts: dict[str, Any] = {
        "seed": seed,
        "sizes": dataclasses.asdict(sizes),
        "untrained": demo.measure(demo.make_model()),
    }
    for name, kind, args in (("stock", Trainer, stock), ("private", DPTrainer, private)):
        console.print(f"Training with {kind.__name__} ..")
        begin = time.monotonic()
        trainer: Any = kind(demo.make_model(), args, train_dataset=demo.train, data_collator=demo.collate)
        trainer.train()
        facts[name] = {"seconds": time.monotonic() - begin, **demo.measure(trainer.model)}
    spent = trainer.privacy_spent()
    facts["private"] |= {"epsilon": spent.epsilon, "delta": spent.delta}
    before, after, reached = (facts[name]["loss"] for name in ("untrained", "private", "stock"))
    facts["gain_kept"] = (before - after) / (before - reached)
    (folder / "demo.json").write_text(json.dumps(facts, indent=1) + "\n")
    _print(console, demo, facts, folder)
    return facts


def _print(console: Console, demo: Demo, facts: dict[str, Any], folder: Path) -> None:
    table = Table()
    for heading in ("", "test loss", "secrets recited", "epsilon", "time"):
        table.add_column(heading, justify="right" if heading else "left")
    for key, name in {"untrained": "before training", "stock": "Trainer", "private": "DPTrainer"}.items():
        found = facts[key]
        table.add_row(
            name,
            f"{found['loss']:.3f} +- {found['loss_interval']:.3f}",
            f"{found['recited']} of {len(demo.notes.secrets)}",
            f"{found['epsilon']:.2f}" if "epsilon" in found else "" if key == "untrained" else "infinite",
            f"{found['seconds']:.0f} s" if "seconds" in found else "",
        )
    console.print(table)
    said = zip(demo.notes.secrets, facts["stock"]["completions"], facts["private"]["completions"], strict=True)
    shown = [(prompt, stock, private) for (prompt, code), stock, private in said if stock == code][:3]
    for prompt, stock, private in shown:
        console.print(f'"{prompt}"\n    Trainer:   {stock}  (true)\n    DPTrainer: {private}', highlight=False)
    console.print(
        f"The private model has {facts['gain_kept']:.0%} of the stock model's gain in test loss. Epsilon "
        f"protects one note; the bound for a secret in {demo.sizes.copies} notes is weaker.\n"
        f"Statement: {folder / 'private' / 'privacy' / 'statement.md'}\n"
        f"Check it: hf-dpopt verify {folder / 'private'}",
        highlight=False,
        soft_wrap=True,
    )
