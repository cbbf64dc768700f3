"""recipes/stackoverflow.py: its layouts, words, metrics, and whole runs on little text."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import lzma
import math
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, BertTokenizer, GPT2LMHeadModel

from hf_dpopt import DPConfigError
from recipes import stackoverflow, stackoverflow_files
from recipes.stackoverflow_data import (
    BEGIN,
    END,
    SPECIAL,
    UNKNOWN,
    Collator,
    NextWords,
    Pieces,
    Tags,
    Vocabulary,
    read_names,
)
from recipes.stackoverflow_files import open_source, parse_example
from recipes.stackoverflow_model import TagModel, tag_losses, tag_metrics, word_metrics
from recipes.stackoverflow_synthetic import example
from tests.helpers.ranks import launch
from tests.recipes.texts import words

pytestmark = pytest.mark.slow

ROWS = [
    {"user": f"u{i % 6}", "tokens": text, "tags": tags, "score": i * 300}
    for i, (text, tags) in enumerate(
        [("how do i sort a list", "python|list"), ("a pointer is null", "c"), ("what is a class ?", "python")] * 8
    )
]


# --- layouts ---------------------------------------------------------------------------------------------------------


def _sqlite(path: Path, rows: list[dict] = ROWS, num_train: int = 18) -> Path:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        for i, row in enumerate(rows):
            split = "train" if i < num_train else "heldout"
            features = {k: v for k, v in row.items() if k != "user"}
            connection.execute("INSERT INTO examples VALUES (?, ?, ?)", (split, row["user"], example(features)))
        connection.execute(
            "CREATE TABLE client_metadata AS SELECT client_id, split_name, COUNT(*) AS num_examples FROM examples "
            "GROUP BY client_id, split_name"
        )
    return path


def _h5(path: Path, rows: list[dict] = ROWS) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for user in sorted({row["user"] for row in rows}):
            mine = [row for row in rows if row["user"] == user]
            group = file.create_group(f"examples/{user}")
            for name in mine[0].keys() - {"user", "score"}:
                group.create_dataset(name, data=[row[name].encode() for row in mine])
    return path


def test_a_serialized_example_is_read():
    """Written out by hand; floats, and integers that are not packed, are fields of other kinds."""
    feature = b"\x0a\x0e\x0a\x06tokens\x12\x04\x0a\x02\x0a\x00"[:-2] + b"\x0a\x00"
    packed = b"\x0a\x10\x0a\x05score\x12\x07\x1a\x05\x0a\x03\xf0\xa2\x04"
    single = b"\x0a\x0b\x0a\x03one\x12\x04\x1a\x02\x08\x05"
    real = b"\x0a\x12\x0a\x06weight\x12\x08\x12\x06\x0a\x04\x00\x00\x00\x3f"
    entries = feature + packed + single + real
    assert parse_example(b"\x0a" + bytes([len(entries)]) + entries) == {"tokens": b"", "score": 70000, "one": 5}
    assert parse_example(example({"tokens": "größe", "score": 70000})) == {"tokens": "größe".encode(), "score": 70000}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.h5", None, "is not a file"),
        ("broken.sqlite", b"no database at all, but long enough" * 40, "does not have the layout"),
        ("broken.h5", b"no HDF5 at all", "broken.h5 is not a complete HDF5 file"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DPConfigError, match=message):
        next(open_source(tmp_path / name, "train", tmp_path).rows())


@pytest.mark.parametrize("kept", [1, 20, -2, -20])
def test_an_example_that_is_cut_off_is_refused(tmp_path, kept):
    path = _sqlite(tmp_path / "cut.sqlite")
    with sqlite3.connect(path) as connection:
        whole = connection.execute("SELECT serialized_example_proto FROM examples WHERE rowid = 3").fetchone()[0]
        connection.execute("UPDATE examples SET serialized_example_proto = ? WHERE rowid = 3", (whole[:kept],))
    with pytest.raises(DPConfigError, match="cut.sqlite: an example of the user 'u.' is not a complete"):
        list(open_source(path, "train", tmp_path).rows())


# --- conversion ------------------------------------------------------------------------------------------------------


def test_an_interrupted_conversion_continues(tmp_path, monkeypatch):
    """Killed while the third file is written: two are read, the rest is made, and all records are there once."""
    monkeypatch.setattr(stackoverflow_files, "ROWS_PER_FILE", 40)
    monkeypatch.setattr(stackoverflow_files, "ROWS_AT_ONCE", 7)
    rows = made_up_rows(150)
    path, encoder = _sqlite(tmp_path / "a.sqlite", rows, 150), NextWords(Vocabulary(tuple(KNOWN)), "tokens", 20)
    whole = stackoverflow_files.convert(path, "train", encoder, "user", folder=tmp_path / "whole")
    encoded: list[int] = []

    class Killed(NextWords):
        def encode(self, rows):
            if len(encoded) == 14:
                raise KeyboardInterrupt
            encoded.append(len(rows))
            return super().encode(rows)

        def __repr__(self):
            return repr(encoder)

    killed = Killed(encoder.vocabulary, "tokens", 20)
    with pytest.raises(KeyboardInterrupt):
        stackoverflow_files.convert(path, "train", killed, "user", folder=tmp_path / "parts")
    kept = sorted(file.name for file in (tmp_path / "parts").rglob("*.arrow"))
    assert kept == ["00000.arrow", "00001.arrow"]
    encoded.clear()
    found = stackoverflow_files.convert(path, "train", killed, "user", folder=tmp_path / "parts")
    assert sum(encoded) == 70 and found.to_list() == whole.to_list()
    encoded[:] = [0] * 14  # nothing is encoded again
    assert stackoverflow_files.convert(path, "train", killed, "user", folder=tmp_path / "parts").num_rows == 150


def test_how_many_records_the_users_have_is_not_printed(tmp_path, capfd):
    path = _sqlite(tmp_path / "rows.sqlite", ROWS * 12, 281)
    words = NextWords(Vocabulary(("the", "is", "i")), "tokens", 5)
    assert len(stackoverflow_files.convert(path, "train", words, "user")) == 281
    printed = capfd.readouterr()
    assert "converting rows.sqlite: 100%" in printed.err and "281" not in printed.out + printed.err


def test_a_conversion_belongs_to_file_task_and_limit(tmp_path):
    path = _sqlite(tmp_path / "a.sqlite", made_up_rows(90), 80)
    words = NextWords(Vocabulary(tuple(KNOWN)), "tokens", 20)
    convert = functools.partial(stackoverflow_files.convert, path, user_column="user")
    assert len(convert("train", words)) == 80 and len(convert("heldout", words)) == 10
    assert len(convert("train", words, limit=33)) == 33 and len(convert("train", words, limit=99)) == 80
    shorter = convert("train", dataclasses.replace(words, max_words=3))
    assert max(map(len, shorter["input_ids"])) == 4
    fewer = convert("train", dataclasses.replace(words, vocabulary=Vocabulary(("the",))))
    assert {i for ids in fewer["input_ids"] for i in ids} == {BEGIN, END, UNKNOWN, len(SPECIAL)}
    _sqlite(tmp_path / "b.sqlite", made_up_rows(50), 50).replace(path)
    assert len(convert("train", words)) == 50
    assert (tmp_path / "a.sqlite.converted").stat().st_mode & 0o077 == 0


def test_a_file_that_ends_early_is_refused(tmp_path):
    path = _sqlite(tmp_path / "a.sqlite", made_up_rows(30), 30)
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM examples WHERE rowid > 20")
    with pytest.raises(DPConfigError, match="ends after 20 of 30 rows"):
        stackoverflow_files.convert(path, "train", NextWords(Vocabulary(("the",)), "tokens", 20), "user")
    with pytest.raises(DPConfigError, match="holds no examples of the split 'nothing'"):
        stackoverflow_files.convert(path, "nothing", NextWords(Vocabulary(("the",)), "tokens", 20), "user")
    assert sorted(tmp_path.iterdir()) == [path]


# --- the benchmark ---------------------------------------------------------------------------------------------------

KNOWN = ["the", ".", "one-liner", "<URL>", "don't", "c#", "größe", "\u540d\u524d", "in-vocabulary", "``", "\ufffd"]


def made_up_rows(num_rows: int) -> list[dict]:
    """Rows as the benchmark stores them: hyphens, apostrophes, URLs, unicode, runs of blanks, empty texts, no words."""
    rng = np.random.default_rng(0)
    unknown = ["my_var", "One-Liner", "<url>", "größen", "naïve", "don`t", "", "\u00a0", "x\ty", "the."]
    tags = ["python", "c#", "vb . net", "sql-server", "r", "unheard-of"]
    rows = []
    for i in range(num_rows):
        words = [str(w) for w in rng.choice(KNOWN + unknown, int(rng.integers(0, 26)))]
        title = " ".join(map(str, rng.choice(KNOWN + unknown, int(rng.integers(0, 5)))))
        names = "|".join(rng.choice(tags, int(rng.integers(0, 4)), replace=False))
        rows.append({"user": f"{i % 37:05}", "tokens": " ".join(words), "title": title, "tags": names, "score": i})
    return rows


def reference_sentence(tokens: str, vocabulary: list[str], longest: int) -> list[str]:
    """The next-word records of TensorFlow Federated's `stackoverflow_word_prediction`, character by character."""
    words, word = [], ""
    for character in tokens:
        if character == " ":
            words.append(word)
            word = ""
        else:
            word += character
    words.append(word)
    out = ["<begin>"]
    for position in range(min(longest, len(words))):
        out.append(words[position] if words[position] in vocabulary else "<unknown>")
    if len(out) - 1 < longest:
        out.append("<end>")
    return out


@pytest.mark.parametrize("layout", ["h5", "sqlite", "sqlite.lzma"])
def test_records_of_next_words_are_those_of_the_benchmark(tmp_path, layout):
    rows = made_up_rows(1000)
    counts = tmp_path / "stackoverflow.word_count"
    counts.write_text("".join(f"{word} {900 - i}\n" for i, word in enumerate([*KNOWN, "beyond-the-size"])))
    vocabulary = Vocabulary.read(counts, len(KNOWN))
    if layout == "h5":
        path = _h5(tmp_path / "stackoverflow_train.h5", rows)
        rows = sorted(rows, key=lambda row: row["user"])  # stable: groups of a file come in the order of their names
    else:
        path = _sqlite(tmp_path / "stackoverflow.sqlite", rows, len(rows))
    if layout == "sqlite.lzma":
        path.with_suffix(".sqlite.lzma").write_bytes(lzma.compress(path.read_bytes()))
        path = path.with_suffix(".sqlite.lzma")
    found = stackoverflow_files.convert(path, "train", NextWords(vocabulary, "tokens", 20), "user")
    by_user: dict[str, list[list[str]]] = {}
    for ids, user in zip(found["input_ids"], found["user"], strict=True):
        by_user.setdefault(user, []).append([(*SPECIAL, *vocabulary.words)[i] for i in ids])
    expected: dict[str, list[list[str]]] = {}
    for row in rows:
        expected.setdefault(row["user"], []).append(reference_sentence(row["tokens"], KNOWN, 20))
    assert by_user == expected
    assert {len(ids) for ids in found["input_ids"]} == set(range(3, 22))  # from one word, the empty one, to 20


def reference_bag(tokens: str, title: str, vocabulary: list[str]) -> list[float]:
    """The features of TensorFlow Federated's `stackoverflow_tag_prediction`: shares of all known words."""
    counts = [0] * len(vocabulary)
    for word in (tokens + " " + title).split():
        for i, known in enumerate(vocabulary):
            counts[i] += word == known
    return [count / sum(counts) if sum(counts) else 0.0 for count in counts]


@pytest.mark.parametrize("layout", ["h5", "sqlite"])
def test_records_of_tags_are_those_of_the_benchmark(tmp_path, layout):
    """The weights of the linear model are the features' places, so that its outputs are features and tags."""
    rows = sorted(made_up_rows(1000), key=lambda row: row["user"])
    path = _h5(tmp_path / "a.h5", rows) if layout == "h5" else _sqlite(tmp_path / "a.sqlite", rows, len(rows))
    (tmp_path / "stackoverflow.tag_count").write_text(json.dumps({"r": 1, "c#": 9, "vb . net": 5, "python": 20}))
    tags = read_names(tmp_path / "stackoverflow.tag_count", "tags_file", 3)
    assert tags == ("python", "c#", "vb . net")
    vocabulary = Vocabulary(tuple(KNOWN))
    data = stackoverflow_files.convert(path, "train", Tags(vocabulary, "tokens", tags, "tags"), "user")
    model = TagModel(len(vocabulary), len(KNOWN))
    with torch.no_grad():
        model.words.weight[len(SPECIAL) :] = torch.eye(len(KNOWN))
    batch = Collator(3)(data.remove_columns("user").to_list())
    expected = torch.tensor([reference_bag(row["tokens"], row["title"], KNOWN) for row in rows])
    labels = batch.pop("labels")
    torch.testing.assert_close(model(**batch).logits, expected)
    assert labels.tolist() == [[float(tag in row["tags"].split("|")) for tag in tags] for row in rows]
    assert expected.sum(dim=1).min() == 0 and labels.sum(dim=0).min() > 100


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("the 9\n\n<URL> 8\nc#\nthe 3\n", ("the", "<URL>", "c#")),
        ("vb . net\t7\nms sql 12\n", ("vb . net", "ms sql")),
        ('["b", "a", "b"]', ("b", "a")),
        ('{"b": 1, "a": 2, "c": 1}', ("a", "b", "c")),
        ('{ 7\n" 5', ("{", '"')),
    ],
    ids=["counts", "blanks in names", "JSON list", "JSON counts", "braces are words"],
)
def test_lists_of_names(tmp_path, content, names):
    (tmp_path / "names").write_text(content)
    assert read_names(tmp_path / "names", "tags_file", 100) == names
    assert read_names(tmp_path / "names", "tags_file", 1) == names[:1]


@pytest.mark.parametrize(("content", "message"), [("\n", "is empty"), ('{"a": 1', "line 1 is not valid JSON")])
def test_bad_lists_are_refused(tmp_path, content, message):
    (tmp_path / "names").write_text(content)
    with pytest.raises(DPConfigError, match=message):
        read_names(tmp_path / "names", "tags_file", 100)


# --- words and metrics -----------------------------------------------------------------------------------------------

VOCABULARY = Vocabulary(("a", "is", "how", "list", "null", "class"))


class Fixed(torch.nn.Module):
    """Says the same word everywhere."""

    def __init__(self, word: int):
        super().__init__()
        self.weight, self.word = torch.nn.Parameter(torch.zeros(1)), word

    def forward(self, input_ids, attention_mask):
        logits = torch.zeros(*input_ids.shape, 10)
        logits[..., self.word] = 2.0
        return type("Outputs", (), {"logits": logits})


def test_words_that_do_not_count_and_the_mean_over_users():
    """Unknown words, ends and padding are no targets of the accuracy; a user with one text weighs as one with three."""
    texts = ["a list", "a pointer a", "a a a", "null"]
    ids = NextWords(VOCABULARY, "text", 8).encode([{"text": text} for text in texts])
    data = Dataset.from_dict({"user": ["x", "y", "y", "x"], **ids})
    found = word_metrics(Fixed(4), data, "user", Collator(), size=3)
    # x: a, list, null -> 1 of 3; y: a, a, a, a, a -> 5 of 5 (the pointer does not count)
    assert found["accuracy"] == pytest.approx(6 / 8)
    assert found["user_accuracy"] == pytest.approx((1 / 3 + 1) / 2)
    right, wrong = math.log(math.exp(2) + 9) - 2, math.log(math.exp(2) + 9)
    x, y = [right, wrong, wrong, wrong, wrong], [right, wrong, right, wrong, right, right, right, wrong]
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(x + y)), rel=1e-5)
    assert found["user_perplexity"] == pytest.approx(math.exp((np.mean(x) + np.mean(y)) / 2), rel=1e-5)


def test_tags_are_recalled_and_their_losses_are_of_one_post():
    posts = [("how is a list", "b|c"), ("null", "a"), ("?", "none")]
    encoder = Tags(VOCABULARY, "tokens", tuple("abcdefg"), "tags")
    ids = encoder.encode([{"tokens": text, "tags": tags} for text, tags in posts])
    data = Dataset.from_dict({"user": ["x", "x", "y"], **ids})
    assert data["tags"][0] == [1, 2] and data["input_ids"][2] == []
    model = TagModel(len(VOCABULARY), 7)
    with torch.no_grad():
        model.bias.weight[1] = 3.0
        model.bias.weight[0] = -3.0
        model.bias.weight[2] = 1.0
    found = tag_metrics(model, data, "user", Collator(7), size=2)
    assert (
        found["recall_at_5"] == pytest.approx(2 / 3) == found["user_recall_at_5"]
    )  # all tags of all posts: b, c, not a
    batch = Collator(7)(data.remove_columns("user").to_list())
    labels = batch.pop("labels")
    losses = tag_losses(model(**batch), labels)
    assert losses.shape == (3,)
    assert losses[2].item() == pytest.approx(sum(math.log1p(math.exp(z)) for z in (-3, 3, 1, 0, 0, 0, 0)), rel=1e-5)


# --- pretrained models -----------------------------------------------------------------------------------------------


@torch.no_grad()
def reference_words(model, tokenizer, words: list[str]) -> list[str]:
    """What a model says at the place of every word, given all words before: token after token, until the next begins."""
    said = []
    for k in range(len(words)):
        ids = [tokenizer.eos_token_id] + [i for w in words[:k] for i in tokenizer(f" {w}")["input_ids"]]
        text, start = "", len(ids)
        while len(ids) < start + 12:
            following = int(model(torch.tensor([ids])).logits[0, -1].argmax())
            token = tokenizer.convert_ids_to_tokens(following)
            if len(ids) > start and (token.startswith("\u0120") or following == tokenizer.eos_token_id):
                break
            ids.append(following)
            text = tokenizer.decode(ids[start:])
        said.append(text)
    return said


@pytest.fixture(scope="module")
def trained_gpt2(gpt2_dir, tmp_path_factory):
    """A tiny GPT-2 that has learned some of the sentences, so that it is right about words of several pieces."""
    tokenizer, model = AutoTokenizer.from_pretrained(gpt2_dir), GPT2LMHeadModel.from_pretrained(gpt2_dir).float()
    tokenizer.pad_token = tokenizer.eos_token
    texts = [" the mill by the river is cheap", " the millstones lie by the riverside", " a one-liner isn't cheap ."]
    batch = tokenizer([f"{tokenizer.eos_token}{text}{tokenizer.eos_token}" for text in texts], return_tensors="pt",
                      padding=True)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("trained")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("known", [None, ("the", "mill", "riverside", "isn't", "cheap", "a")], ids=["all", "known"])
def test_the_accuracy_of_pieces_is_that_of_words(trained_gpt2, known):
    """A word is right if the pieces that the model would say make up that word, and no longer one."""
    tokenizer = AutoTokenizer.from_pretrained(trained_gpt2)
    model = GPT2LMHeadModel.from_pretrained(trained_gpt2).eval()
    texts = ["the mill by the river is cheap", "the mill by the riverside", "a one-liner isn't cheap .", "the millstone",
             "a mill isn't a  größe", ""]  # fmt: skip
    pieces = Pieces(tokenizer, known and Vocabulary(known), "tokens", 5, 60)
    data = Dataset.from_dict({"user": list("xxyyzz"), **pieces.encode([{"tokens": text} for text in texts])})
    found = word_metrics(model, data, "user", Collator(), 4, pieces)
    right, counted = dict.fromkeys("xyz", 0), dict.fromkeys("xyz", 0)
    for user, text in zip("xxyyzz", texts, strict=True):
        words = text.split(" ")[:5]
        for word, said in zip(words, reference_words(model, tokenizer, words), strict=True):
            if known is None or word in known:
                counted[user] += 1
                right[user] += said == f" {word}"
    assert 0 < sum(right.values()) < sum(counted.values())
    assert found["accuracy"] == pytest.approx(sum(right.values()) / sum(counted.values()))
    assert found["user_accuracy"] == pytest.approx(np.mean([right[u] / counted[u] for u in "xyz" if counted[u]]))


def test_a_tokenizer_that_marks_no_blanks_is_refused():
    with pytest.raises(DPConfigError, match="does not mark where a word begins"):
        Pieces(BertTokenizer(vocab={"[UNK]": 0, "the": 1, "[SEP]": 2, "[PAD]": 3}), None, "tokens", 3, 60)


# --- whole runs ------------------------------------------------------------------------------------------------------


MODEL, run = "", stackoverflow.run  # for test_refusals


def write_files(folder: Path) -> None:
    for name, keep in (("train", range(18)), ("held_out", range(18, 24))):
        lines = [json.dumps({**ROWS[i], "text": ROWS[i]["tokens"], "author": f"{name}{i % 6}"}) for i in keep]
        with gzip.open(folder / f"{name}.jsonl.gz", "wt") as file:
            file.write("\n".join(lines))
    (folder / "words.txt").write_text("a 90\nis 80\nlist 7\nhow 5\n")
    (folder / "tags.txt").write_text("python\nc\n")
    (folder / "other_tags.json").write_text('{"javascript": 9, "html": 5}')
    (folder / "other_words.txt").write_text("zebra 9\n")


def arguments(_: str = "", **changes: str | None) -> list[str]:
    return words({
        "train_file": "train.jsonl.gz", "validation_file": "held_out.jsonl.gz", "user_id_column": "author",
        "text_column": "text", "vocabulary_file": "words.txt", "target_epsilon": "8", "target_delta": "1e-2", "max_steps": "3",
        "expected_batch_size": "3", "records_per_user": "2", "width": "32", "layers": "1", "report_to": "none",
        "disable_tqdm": "true", "use_cpu": "true", "save_strategy": "no", "output_dir": "out", **changes,
    })  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"local_training": '{"learning_rate": 0.3}', "optim": "sgd", "optim_args": "momentum=0.9"},
        {"noise_mechanism": "nu_dpftrl", "local_training": '{"learning_rate": 0.3}'},
        {"sampling": "capped_poisson"},
    ],
    ids=["gradients", "federated", "correlated", "records"],
)
def test_next_words(files, capsys, more):
    assert stackoverflow.run(arguments(**more)) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "accuracy" in shown and "before training" in shown and "unit: user" in shown
    results = json.loads((files / "out" / "all_results.json").read_text())
    assert {"eval_accuracy", "eval_user_accuracy", "eval_perplexity", "eval_user_perplexity"} <= results.keys()
    assert "train_samples" not in results and results["epsilon"] <= 8
    statement = (files / "out" / "privacy" / "statement.md").read_text()
    assert "One *user* is protected" in statement and "(column `author`)" in statement


EVERYTHING = {
    "lora_r": "4", "local_training": '{"learning_rate": 0.1}', "noise_mechanism": "nu_dpftrl",
    "preconditioner": "dp2_rmsprop", "preconditioner_kwargs": '{"delay": 1}', "filter": "first_order_v1",
    "optim": "sgd", "max_steps": "2",
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2])
def test_a_pretrained_model_with_adapters_and_all_stages(files, gpt2_dir, size):
    changes = {**EVERYTHING, "model_name_or_path": gpt2_dir, "width": None, "layers": None}

    def train():
        assert stackoverflow.run(arguments(**changes)) == 0

    launch(train, size, files / "logs")
    results = json.loads((files / "out" / "all_results.json").read_text())
    assert results["epsilon"] <= 8 and 0 <= results["eval_accuracy"] <= 1
    shown = (files / "logs" / "rank-0.log").read_text()
    assert "before training" in shown and "unit: user" in shown and (files / "out" / "adapter_config.json").is_file()


@pytest.mark.parametrize(("task", "metric"), [("next_word", "eval_accuracy"), ("tags", "eval_recall_at_5")])
def test_the_embedded_job_has_a_synthetic_split(files, capsys, monkeypatch, task, metric):
    monkeypatch.setattr(stackoverflow, "EMBEDDED_SIZE", {"num_users": 90, "rows_per_user": 12})
    flags = {"task": task, "max_steps": "1", "output_dir": "runs/out", "report_to": "none", "disable_tqdm": "true"}
    assert stackoverflow.run([*words(flags), "--use_cpu", "true"]) == 0, capsys.readouterr().err
    assert "by 90 users" in capsys.readouterr().out
    assert metric in json.loads((files / "runs" / "out" / "all_results.json").read_text())
    folder = files / "runs" / "synthetic-stackoverflow"
    source = open_source(folder / "stackoverflow.sqlite", "train", folder)
    rows = list(source.rows())
    sizes = np.unique([row["user"] for row in rows], return_counts=True)[1]
    assert len(rows) == source.count() and len(sizes) == 90 and sizes.min() >= 3 and 6 < sizes.mean() < 60
    vocabulary = Vocabulary.read(folder / "stackoverflow.word_count", 10_000)
    ids = [i for row in rows for i in vocabulary.ids(row["tokens"].split(" "))]
    assert 0.01 < np.mean(np.array(ids) == UNKNOWN) < 0.1


def test_users_in_both_sets_are_told_of(files, caplog, capsys):
    assert stackoverflow.run(arguments(validation_file="train.jsonl.gz")) == 0, capsys.readouterr().err
    assert "Some users are in the training and in the validation set" in caplog.text


def test_public_texts_come_before_privacy(files, capsys):
    (files / "public.txt").write_text("\n".join(row["tokens"] for row in ROWS))
    before = {"public_file": "public.txt", "public_epochs": "40", "max_steps": "1", "learning_rate": "0"}
    assert stackoverflow.run(arguments(**before)) == 0, capsys.readouterr().err
    learned = json.loads((files / "out" / "all_results.json").read_text())["eval_perplexity"]
    assert learned < 4  # of 8 words, before
    assert (
        "trained on 24 records of a file that was declared public" in (files / "out/privacy/statement.md").read_text()
    )


def test_tags_are_learned_with_words_counted_in_public_texts(files, capsys):
    (files / "public.txt").write_text("how is a list\n" * 3)
    more = {"public_file": "public.txt", "vocabulary_file": None, "task": "tags", "tags_file": "tags.txt"}
    assert stackoverflow.run(arguments(**more)) == 0, capsys.readouterr().err
    assert "eval_recall_at_5" in json.loads((files / "out" / "all_results.json").read_text())


def test_a_preconditioner_learns_from_public_texts(files, capsys):
    (files / "public.txt").write_text("\n".join(f"how is a list {i}" for i in range(8)))
    more = {"public_file": "public.txt", "preconditioner": "adadps", "public_batch_size": "8"}
    assert stackoverflow.run(arguments(**more)) == 0, capsys.readouterr().err
    assert "adadps" in (files / "out/privacy/statement.md").read_text()


REFUSED: dict[str, tuple[dict[str, str | None], str]] = {
    "users and a cut": ({"max_train_samples": "5"}, "max_train_samples=5: if one user were removed"),
    "no vocabulary": ({"vocabulary_file": None}, "Words need public ids"),
    "no such vocabulary": ({"vocabulary_file": "nothing.txt"}, "nothing.txt is not a file"),
    "no tags": ({"task": "tags"}, "Give --tags_file"),
    "no tag in the posts": ({"task": "tags", "tags_file": "other_tags.json"}, "none of its 2 tags.*--tags_column"),
    "no word in the texts": ({"vocabulary_file": "other_words.txt"}, "none of its 1 words.*--text_column"),
    "no such column": ({"user_id_column": "writer"}, "no column 'writer'"),
    "tags of a pretrained model": (
        {"model_name_or_path": "gpt2", "task": "tags", "tags_file": "tags.txt"},
        "Leave out",
    ),
    "adapters of no model": ({"lora_r": "8"}, "Add --model_name_or_path"),
    "an odd width": ({"width": "50"}, "multiple of 32"),
    "another unit": ({"privacy_unit": "example"}, "privacy_unit='example': this recipe protects whole users"),
    "no words": ({"max_words": "0"}, "max_words=0"),
    "public passes without public text": ({"public_epochs": "5"}, "Add --public_file"),
}
