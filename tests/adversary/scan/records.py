"""Records for a head: token ids, pictures or sounds of unlike lengths with their labels, and the stock collators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    default_data_collator,
)
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from tests.adversary.scan.tiny_configs import EOS, IMAGE, ORDINARY, PAD, VOCABULARY

TOKENS = (17, 5, 11, 8)  # of the records, no two alike: every batch pads
FRAMES = (34, 10, 22, 16)
SAMPLES = (8000, 5600, 7200, 6400)  # x-vectors want fifteen frames of 320 at least
IGNORED = -100
TEXT = ("CausalLM", "MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering",
        "NextSentencePrediction", "MultipleChoice", "Seq2SeqLM", "ImageTextToText", "MultimodalLM")  # fmt: skip
PICTURES = ("ImageClassification", "VideoClassification")
SOUNDS = ("AudioClassification", "AudioFrameClassification", "AudioXVector", "CTC", "SpeechSeq2Seq")


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run is given beside the model.

    Args:
        records: one dictionary each.
        collator: as a user of that head would take it.
        tokenizer: for text; None for the rest.
        what: a word for the table.
    """

    records: list[dict[str, Any]]
    collator: Callable[[list[dict[str, Any]]], Any]
    tokenizer: Any
    what: str


def padding_side(model_type: str) -> str:
    """The side the tokenizer of that model pads on."""
    name = TOKENIZER_MAPPING_NAMES.get(model_type)
    try:
        return (
            getattr(getattr(transformers, name, None), "padding_side", "right") if isinstance(name, str) else "right"
        )
    except ImportError:  # the tokenizer needs a library that is not here
        return "right"


def tokenizer(side: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is numbers; it is there to pad."""
    words = {"[PAD]": PAD, **{str(i): i for i in range(VOCABULARY) if i != PAD}}
    model = Tokenizer(WordLevel(words, unk_token="[PAD]"))
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", padding_side=side, model_input_names=names
    )  # fmt: skip


def data_for(head: str, model_type: str, config: Any, main_input: str = "pixel_values") -> Iterator[Data]:
    """Records for a model of that head, the plainest kind first; nothing where the scan knows no records.

    Args:
        head: what the class is for, see `ModelClass`.
        model_type: decides the side that is padded.
        config: of the model.
        main_input: what the model calls its pictures or sounds.
    """
    generator = torch.Generator().manual_seed(3)
    num_labels = max(int(getattr(config, "num_labels", 2) or 2), 1)
    if head in TEXT:
        text = _text(head, padding_side(model_type), num_labels, generator, bool(config.is_encoder_decoder))
        for row in text.records if model_type == "paligemma" else ():  # as its processor: a prompt, and its answer
            row["token_type_ids"] = [int(t > 1) for t in range(len(row["input_ids"]))]
        yield text
        if head in ("ImageTextToText", "MultimodalLM", "Seq2SeqLM"):
            yield _captions(config, generator)
    if head in PICTURES:
        yield _pictures(head, config, num_labels, generator, main_input)
    if head in SOUNDS:
        sounds = list(_sounds(head, config, num_labels, generator))
        yield from [data for data in sounds if main_input in data.records[0]] or sounds


def _text(head: str, side: str, num_labels: int, generator: torch.Generator, has_decoder: bool) -> Data:
    def ids(length: int) -> list[int]:
        return [*torch.randint(ORDINARY, VOCABULARY, (length - 1,), generator=generator).tolist(), EOS]

    pads, records = tokenizer(side), []
    for i, length in enumerate(TOKENS):
        row: dict[str, Any] = {"input_ids": ids(length)}
        if head == "MultipleChoice":
            row = {"input_ids": [row["input_ids"], ids(length - 2)], "label": i % 2}
            row["attention_mask"] = [[1] * len(choice) for choice in row["input_ids"]]
        elif head in ("SequenceClassification", "NextSentencePrediction"):
            row["labels"] = i % min(num_labels, 2)
        elif head == "QuestionAnswering":
            row |= {"start_positions": i % 3, "end_positions": 3 + i % 2}
        elif head == "TokenClassification":
            row["labels"] = [(i + t) % num_labels for t in range(length)]
        elif head == "MaskedLM":
            row["labels"] = [token if t % 3 == 0 else IGNORED for t, token in enumerate(row["input_ids"])]
        elif head != "CausalLM" and (head == "Seq2SeqLM" or has_decoder):
            row["labels"] = ids(length // 2 + 2)
        else:
            row["labels"] = list(row["input_ids"])
        records.append(row)
    if head == "MultipleChoice":
        return Data(records, DataCollatorForMultipleChoice(pads), pads, "choices")
    if head in ("SequenceClassification", "NextSentencePrediction", "QuestionAnswering"):
        return Data(records, DataCollatorWithPadding(pads), pads, "text")
    if head != "CausalLM" and (head == "Seq2SeqLM" or has_decoder):
        return Data(records, DataCollatorForSeq2Seq(pads), pads, "text")
    return Data(records, DataCollatorForTokenClassification(pads), pads, "text")


def found(config: Any, *names: str, default: Any = None) -> Any:
    """The first of the attributes that the config, or one inside it, has."""
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return next((value for c in inner if (value := found(c, *names)) is not None), default)


def _picture(config: Any, generator: torch.Generator) -> torch.Tensor:
    size = found(config, "image_size", "crop_size", default=IMAGE)
    size = size if isinstance(size, (list, tuple)) else (size, size)
    channels = found(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    return torch.randn((channels, *size[:2]), generator=generator)


def _pictures(head: str, config: Any, num_labels: int, generator: torch.Generator, name: str) -> Data:
    records = []
    for i in range(len(TOKENS)):
        made = _picture(config, generator)
        if head == "VideoClassification":
            made = torch.stack([made] * int(found(config, "num_frames", "frames_per_clip", default=4)))
        records.append({name: made, "labels": i % num_labels})
    return Data(records, default_data_collator, None, "video" if head == "VideoClassification" else "pictures")


def _captions(config: Any, generator: torch.Generator) -> Data:
    """A picture and the text to say of it."""
    text = _text("CausalLM", "right", 2, generator, False)
    for row in text.records:
        row["pixel_values"] = _picture(config, generator)
        if config.is_encoder_decoder:
            del row["input_ids"]
    return Data(text.records, Padded(), None, "pictures and text")


class Padded:
    """Pads every column at its first dimension: ids and sounds with zeros and a mask, labels with -100.

    Args:
        has_mask: False for records of one length, which a model may want without.
    """

    def __init__(self, has_mask: bool = True):
        self.has_mask = has_mask

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = {}
        for name in rows[0]:
            values = [torch.as_tensor(row[name]) for row in rows]
            if values[0].dim() == 0 or name == "pixel_values":
                batch[name] = torch.stack(values)
                continue
            fill = IGNORED if name == "labels" else 0
            batch[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
            if self.has_mask and name in ("input_ids", "input_values", "input_features"):
                masks = [torch.ones(len(value), dtype=torch.long) for value in values]
                batch["attention_mask"] = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        return batch


def _heard(config: Any, num_samples: int) -> int:
    """Frames that the convolutions of a wav2vec2-like model make of so many samples."""
    for kernel, stride in zip(getattr(config, "conv_kernel", ()), getattr(config, "conv_stride", ()), strict=True):
        num_samples = (num_samples - kernel) // stride + 1
    return num_samples


def _sounds(head: str, config: Any, num_labels: int, generator: torch.Generator) -> Iterator[Data]:
    def labels(i: int, frames: int) -> Any:
        if head == "AudioFrameClassification":
            return torch.nn.functional.one_hot(torch.arange(frames) % num_labels, num_labels)
        if head in ("CTC", "SpeechSeq2Seq"):
            return torch.randint(ORDINARY, VOCABULARY, (2 + i % 2,), generator=generator)
        return i % num_labels

    mels = int(
        found(
            config,
            "num_mel_bins",
            "feature_projection_input_dim",
            "input_feat_per_channel",
            "input_dim",
            "n_mels",
            default=16,
        )
    )
    raw = [torch.randn(n, generator=generator) for n in SAMPLES]
    yield Data(
        [{"input_values": x, "labels": labels(i, _heard(config, len(x)))} for i, x in enumerate(raw)],
        Padded(),
        None,
        "sounds",
    )
    frames = [torch.randn(n, mels, generator=generator) for n in FRAMES]
    yield Data(
        [{"input_features": x, "labels": labels(i, len(x))} for i, x in enumerate(frames)], Padded(), None, "sounds"
    )
    length = int(found(config, "max_source_positions", default=64)) * 2  # Whisper hears half a minute, padded
    whole = [torch.randn(mels, length, generator=generator) for _ in FRAMES]
    yield Data(
        [{"input_features": x, "labels": labels(i, 0)} for i, x in enumerate(whole)], Padded(False), None, "sounds"
    )  # fmt: skip
    length = int(found(config, "max_length", default=64))
    seen = [torch.randn(length, mels, generator=generator) for _ in FRAMES]
    yield Data(
        [{"input_values": x, "labels": labels(i, 0)} for i, x in enumerate(seen)], Padded(False), None, "sounds"
    )  # fmt: skip
