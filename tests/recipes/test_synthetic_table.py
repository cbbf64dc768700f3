"""`recipes/synthetic.py` on tables: a schema that the user writes, rows as text and back, one command to a table."""

from __future__ import annotations

import csv
import itertools
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

pytest.importorskip("trl", reason="TRL is in the test extra: pip install '.[test]'")

from hf_dpopt.report.report import read_report
from hf_dpopt.run.ledger import LEDGER
from hf_dpopt.verify import FAILED, verify
from recipes import synthetic
from recipes.histogram import FOLDER
from recipes.synthetic_table import PROMPT, Fits, TableRows, _matcher
from recipes.synthetic_text import rake, sample
from recipes.table_schema import Column, Schema
from tests.recipes.conftest import CITIES, SCHEMA, SYNTHETIC, as_words, refusal, save_gpt2, schema_of

WEIGHTS = ("61.5", "70.0", "")


def record(i: int) -> list[str]:
    return [str(20 + i % 10), WEIGHTS[i % 3], CITIES[i * 7 % 3], ("no", "yes")[i // 5 % 2]]


def write(name: str, start: int, end: int, header: str = "age,weight,city,sick,person") -> str:
    with Path(name).open("w", newline="") as file:
        csv.writer(file).writerows([header.split(","), *([*record(i), f"p{i % 20}"] for i in range(start, end))])
    return name


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A language model that has learned nothing: the grammar alone makes rows of what it writes."""
    return save_gpt2(tmp_path_factory.mktemp("model"), n_positions=128, initializer_range=0.3)


@pytest.fixture
def folder(tmp_path, monkeypatch, model) -> Path:
    """A schema and two files in the working directory."""
    monkeypatch.chdir(tmp_path)
    FLAGS["model_name_or_path"] = model
    Path("schema.json").write_text(json.dumps(SCHEMA))
    write("train.csv", 0, 60)
    write("test.csv", 60, 85)
    return tmp_path


FLAGS = SYNTHETIC | {
    "train_file": "train.csv", "validation_file": "test.csv", "schema": "schema.json", "label_column": "sick",
    "num_rows": "30", "learning_rate": "1e-4", "max_length": "128",
}  # fmt: skip


def words(**changes: str | None) -> list[str]:
    return as_words(FLAGS | changes)


# --- one command -----------------------------------------------------------------------------------------------------


def test_one_command_makes_a_table_of_the_schema(folder, capsys):
    assert synthetic.run(words()) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    with Path("out/dataset/synthetic.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == list(SCHEMA) and len(rows) == 30
    for age, weight, city, sick in rows:
        assert age.isdigit() and 20 <= int(age) <= 29 and city in CITIES and sick in ("no", "yes")
        assert not weight or 50 <= float(weight) <= 80
    assert len({row[0] for row in rows}) > 1
    scores = json.loads(Path("out/evaluation.json").read_text())
    assert {f"distance_of_{name}_from_held_out_rows" for name in SCHEMA} <= scores.keys()
    pairs = {f"distance_of_sick_and_{name}_from_counts" for name in SCHEMA if name != "sick"}
    assert {name for name in scores if name.endswith("_counts")} == pairs
    assert 0 <= scores["accuracy_of_synthetic"] <= 100
    card = Path("out/dataset/README.md").read_text()
    assert "| distance of sick and age from counts | " in card and "`age`, `weight`, `city`, `sick`" in card
    assert 7.5 < read_report("out").epsilon <= 8
    assert "public schema" in Path("out/privacy/statement.md").read_text()
    for path in (Path("out"), Path("out") / FOLDER):
        assert not [check for check in verify(path).checks if check.status == FAILED]
    [private] = Path("keys").glob("work/*/evaluation.json")
    exact = json.loads(private.read_text())
    assert {"accuracy_of_real", "copies_of_whole_records"} <= exact.keys()
    assert not [name for name in exact if name.replace("_", " ") in card or name in printed or name in scores]


def test_users_and_json_lines_keep_their_types(folder, capsys):
    schema = SCHEMA | {"sick": {"type": "category", "values": [False, True]}}
    Path("schema.json").write_text(json.dumps(schema))
    rows = [dict(zip(SCHEMA, record(i), strict=True), sick=i % 2 == 0, person=i % 20) for i in range(60)]
    Path("train.jsonl").write_text("".join(json.dumps(row | {"age": int(row["age"])}) + "\n" for row in rows))
    of_users = {"privacy_unit": "user", "user_id_column": "person", "expected_batch_size": "8"}
    flags = words(train_file="train.jsonl", validation_file=None, **of_users)

    assert synthetic.run(flags) == 0, capsys.readouterr().err
    made = [json.loads(line) for line in Path("out/dataset/synthetic.jsonl").open()]
    assert len(made) == 30 and all(list(row) == list(schema) for row in made)
    assert {type(row["sick"]) for row in made} == {bool} and {type(row["age"]) for row in made} == {int}
    assert {type(row["weight"]) for row in made} <= {float, type(None)} and {row["city"] for row in made} <= {*CITIES}
    assert read_report("out").plan["num_examples"] == 20


def test_no_row_that_ends_is_one_line_and_keeps_the_model(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        "recipes.synthetic_table.sample", lambda model, tokenizer, prompts, *_: [("{", False)] * len(prompts)
    )
    assert synthetic.run(words(num_rows="2")) == 2
    last = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert last.startswith("error: max_length=128: none of 6 sampled rows ends within it.") and "costs nothing" in last
    assert Path("out/adapter_model.safetensors").exists()


def test_an_interrupted_sampling_ends_in_one_line_and_goes_on_at_no_cost(folder, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    def charged() -> list[bytes]:
        return [Path(name, LEDGER).read_bytes() for name in ("out", f"out/{FOLDER}")]

    with monkeypatch.context() as patch:
        patch.setattr("recipes.synthetic_table.sample", interrupt)
        assert synthetic.run(words()) == 130
    err, before = capsys.readouterr().err, charged()
    assert err.rstrip().splitlines()[-1].startswith("error: interrupted. What was charged stays charged;")
    assert "KeyboardInterrupt" not in err and not Path("out/dataset").exists()
    assert synthetic.run(words(resume_from_checkpoint="True")) == 0, capsys.readouterr().err
    assert Path("out/dataset/synthetic.csv").stat().st_size and charged() == before
    # counts of other ages are none of these
    Path("schema.json").write_text(json.dumps(SCHEMA | {"age": {"type": "integer", "min": 10, "max": 19}}))
    assert synthetic.run(words(resume_from_checkpoint="True")) == 2
    assert "holds the counts of another run (meaning_of_cells: " in capsys.readouterr().err and charged() == before


# --- refusals --------------------------------------------------------------------------------------------------------


def _schema(**changes: Any) -> dict[str, str]:
    Path("odd.json").write_text(json.dumps({name: one for name, one in (SCHEMA | changes).items() if one is not None}))
    return {"schema": "odd.json"}


def _text(text: str) -> dict[str, str]:
    Path("odd.json").write_text(text)
    return {"schema": "odd.json"}


BAD = {  # what is wrong -> how to make it, part of the message
    "no schema": (lambda: {"schema": None, "label_column": None}, '"weight": {"type": "one of integer, number, '),
    "no line of names": (  # its first record would be the draft
        lambda: {"schema": None, "label_column": None, "train_file": write("bare.csv", 1, 60, "20,61.5,Bonn,no,p0")},
        "bare.csv: the first line has to name the columns, and seems to be a record, which is not shown: its field 1",
    ),
    "no such schema": (lambda: {"schema": "nothere.json"}, "schema=nothere.json: cannot be read"),
    "no JSON": (lambda: _text("age: integer"), "schema=odd.json: cannot be read"),
    "no columns": (lambda: _text("[]"), "schema=odd.json: has no columns"),
    "a draft": (lambda: _schema(age={"type": "one of integer"}), "column 'age': type must be one of"),
    "no description": (lambda: _schema(age="integer"), "column 'age': type must be one of"),
    "a column twice": (
        lambda: _text('{"age": {"type": "text"}, "age": {"type": "text"}}'), "a key is there twice among age, age"
    ),
    "no range": (lambda: _schema(age={"type": "integer", "min": 1}), "Give it type, min, max; it may have optional"),
    "another key": (lambda: _schema(sick={"type": "text", "most": 9}), "has the keys type, most. Give it type;"),
    "range upside down": (lambda: _schema(age={"type": "integer", "min": 9, "max": 1}), "'age': min and max must be"),
    "range of fractions": (lambda: _schema(age={"type": "integer", "min": 0.5, "max": 9}), "of type integer"),
    "endless range": (lambda: _text('{"age": {"type": "number", "min": 0, "max": Infinity}}'), "of type number"),
    "exponents": (lambda: _schema(age={"type": "number", "min": 0, "max": 1e-5}), "column 'age': 1e-05 is not a number in"),
    "no number": (lambda: _text('{"a": {"type": "category", "values": [1, NaN]}}'), "column 'a': nan is not a number in"),
    "optional, perhaps": (lambda: _schema(age=SCHEMA["age"] | {"optional": "no"}), "optional must be true or false"),
    "one value twice": (lambda: _schema(sick={"type": "category", "values": [1, "1"]}), "'sick': values must be"),
    "no values": (lambda: _schema(sick={"type": "category", "values": []}), "'sick': values must be"),
    "values of a number": (lambda: _schema(sick={"type": "category", "values": 5}), "'sick': values must be"),
    "values of a string": (lambda: _schema(sick={"type": "category", "values": "yes"}), "'sick': values must be"),
    "a column that there is not": (lambda: _schema(height=SCHEMA["age"]), "no column 'height' (--schema)"),
    "users are published": (
        lambda: _schema(person={"type": "text"}) | {"privacy_unit": "user", "user_id_column": "person"},
        "column 'person' has the users",
    ),
    "an unknown value": (
        lambda: _schema(city={"type": "category", "values": ["Bonn", "Ulm"]}), "train.csv, line 3: 'city' is missing, or"
    ),
    "a missing value": (lambda: _schema(weight={"type": "number", "min": 1, "max": 99}), "line 4: 'weight' is missing"),
    "words for a number": (lambda: _schema(city={"type": "number", "min": 1, "max": 99}), "line 2: 'city' is missing"),
    "no value of a column fits": (
        lambda: _schema(city={"type": "number", "min": 1, "max": 99, "optional": True}), "no value of 'city' is what"
    ),
    "label of numbers": (lambda: {"label_column": "age"}, "label_column=age: must be a category"),
    "a label alone": (
        lambda: _text('{"sick": {"type": "category", "values": ["no", "yes"]}}'), "of a schema with other columns"
    ),
    "more pairs than counts can bear": (
        lambda: _schema(sick={"type": "category", "values": ["no", "yes", *map(str, range(90))]}), "each (now 1012)"
    ),
    "label without a schema": (lambda: {"schema": None, "text_column": "city"}, "label_column=sick: needs a schema"),
    "control columns": (lambda: {"control_columns": "sick"}, "control_columns: is for texts"),
    "public text": (lambda: {"public_file": "test.csv"}, "public_file: is for texts"),
    "no room for a row": (
        lambda: {"max_length": "20"}, """max_length=20: control codes and a row such as '{"age":2""",
    ),
    "nobody said whose": (lambda: {"eval_data_privacy": None}, "Add --eval_data_privacy public"),
    "a ledger without room": (
        lambda: {"privacy_ledger": "people.json", "privacy_ledger_epsilon": "4"}, "privacy_ledger=people.json: counts"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_end_well_is_refused_before_anything_is_charged(folder, capsys, name):
    made, says = BAD[name]
    last = refusal(synthetic.run(words(**made())), capsys)
    assert says in last
    assert not [value for value in ("61.5", "Porz", "p0", "p1") if value in last] or "such as" in last  # of records


def test_training_records_are_no_held_out_rows(folder, capsys):
    """Texts tell rows apart; short rows of few values are alike by nature."""
    schema = {"age": SCHEMA["age"], "note": {"type": "text"}}
    Path("schema.json").write_text(json.dumps(schema))
    rows = [f"{20 + i % 10},came for the {i}th time" for i in range(60)]
    Path("train.csv").write_text("\n".join(["age,note", *rows]))
    Path("test.csv").write_text("\n".join(["age,note", *rows[30:]]))
    assert synthetic.run(words(label_column=None, max_length="128")) == 2
    assert "The evaluation dataset is the training dataset" in capsys.readouterr().err and not Path("out").exists()


def test_ids_are_warned_of_by_what_is_public(folder, caplog, capsys):
    """Not by their values, which a line of a log would then say something exact of."""
    odd = {"case_no": {"type": "text"}, "personId": {"type": "number", "min": 0, "max": 9}}
    odd |= {"income": {"type": "integer", "min": 0, "max": 999_999}, "id": {"type": "category", "values": ["a", "b"]}}
    with Path("train.csv").open("w") as file:
        file.writelines(f"{line}\n" for line in [",".join([*odd, "paid", "age"]), *["7,1,5,a,b,25"] * 60])
    Path("odd.json").write_text(json.dumps(odd | {"paid": {"type": "text"}, "age": SCHEMA["age"]}))
    flags = words(schema="odd.json", label_column=None, validation_file=None, model_name_or_path="nothere")
    for _ in range(2):
        refusal(synthetic.run(flags), capsys)
    [said] = [record.getMessage() for record in caplog.records if "leave it out of the schema" in record.getMessage()]
    assert said.startswith(
        "The schema has 'case_no', 'personId', 'income', with the name of an id, or more numbers than"
    )


@pytest.fixture(scope="module")
def tokenizer(model) -> Any:
    return AutoTokenizer.from_pretrained(model)


LETTERS = [*"aZ0 ,:\"\\{}[]?\n\t'", "\u00fc", "\u6f22", "\U0001f600", "\u2028"]


def any_text(draw: random.Random, least: int = 0) -> str:
    return "".join(draw.choices(LETTERS, k=draw.randint(least, 6)))


def any_column(draw: random.Random) -> dict[str, Any]:
    kind, optional = draw.choice(["text", "category", "integer", "number"]), draw.random() < 0.5
    if kind == "category":
        return {"type": kind, "values": sorted({any_text(draw, 1) for _ in range(3)}), "optional": optional}
    if kind == "text":
        return {"type": kind, "optional": optional}
    size = 2.0 ** draw.randint(-6, 30)
    low, high = round(draw.uniform(-size, size), 4), size  # without an exponent
    ends = [int(low), int(high) + 1] if kind == "integer" else [low, high + 1]
    return {"type": kind, "min": ends[0], "max": ends[1], "optional": optional}


def any_value(draw: random.Random, column: Column) -> Any:
    if column.optional and draw.random() < 0.3:
        return None
    if column.type == "text":
        return any_text(draw, int(column.optional))
    if column.type == "category":
        return draw.choice(column.values)
    value = draw.choice([column.min, column.max, draw.uniform(column.min, column.max)])
    return int(value) if column.type == "integer" else float(value)


@pytest.mark.parametrize("seed", range(150))
def test_row_to_text_to_row_is_the_identity(tmp_path, tokenizer, seed):
    draw = random.Random(seed)
    path = tmp_path / "any.json"
    path.write_text(json.dumps({any_text(draw, 1): any_column(draw) for _ in range(draw.randint(1, 4))}))
    schema = Schema.of_file(str(path))
    row = tuple(any_value(draw, column) for column in schema.columns)
    text = schema.write(row)
    back = schema.parse(text)
    assert back == row and [*map(type, back)] == [*map(type, row)]
    assert all(schema.parse(example) for example in schema.examples)
    if not re.search("e-[0-9]", text):  # of exponents the grammar has none
        ids = tokenizer(f" {text}")["input_ids"]
        assert _matcher(tokenizer, schema).validate_tokens(ids) == len(ids)
    for column, value in zip(schema.columns, row, strict=True):
        assert column.fit(value) == value and 0 <= column.cell(value) < column.num_cells


ARGS = SimpleNamespace(
    schema="s.json", label_column=None, num_rows=8, oversampling=1, sampling_batch_size=4, top_p=1.0, temperature=1.0
)  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_every_row_that_ends_fits_whatever_the_model(tmp_path, tokenizer, model, seed):
    draw = random.Random(seed)
    path = tmp_path / "any.json"
    path.write_text(json.dumps({any_text(draw, 1): any_column(draw) for _ in range(draw.randint(1, 4))}))
    schema = Schema.of_file(str(path))
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_pretrained(model)
    lm.resize_token_embeddings(len(tokenizer) + 7)  # as many models have
    found = sample(lm, tokenizer, [PROMPT] * 16, 120, 128, ARGS, Fits(_matcher(tokenizer, schema)))
    ended = [json.loads(text) for text, has_ended in found if has_ended]
    assert ended or any(column.type in ("text", "number") for column in schema.columns)  # they may go on and on
    for row in ended:
        assert [*row] == schema.names
        for column, value in zip(schema.columns, row.values(), strict=True):
            assert_fits(column, value)


def assert_fits(column: Column, value: Any) -> None:
    if value is None:
        assert column.optional
    elif column.type == "category":
        assert value in column.values
    elif column.type == "text":
        assert isinstance(value, str)
    else:
        assert type(value) in (int, float) and column.min <= value <= column.max
        assert column.type == "number" or float(value).is_integer()


def test_what_is_learned_is_where_a_row_may_go_on_in_several_ways(tmp_path, monkeypatch, tokenizer, model):
    """Against all rows of a small schema, written out."""
    monkeypatch.chdir(tmp_path)
    described = {
        "age": SCHEMA["age"] | {"max": 23},
        "city": SCHEMA["city"],
        "sick": SCHEMA["sick"] | {"optional": True},
    }
    schema = schema_of(described)
    rows = [*itertools.product(range(20, 24), CITIES, ["no", "yes", None])]
    every = [f" {schema.write(row)}" for row in rows]
    tokens = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    data = TableRows(ARGS, schema, rows[:10], [], 0)
    for row, record in zip(rows, data.records(model), strict=False):
        start = tokenizer(PROMPT)["input_ids"]
        ids, labels = (record[name][len(start) :] for name in ("input_ids", "labels"))
        assert (
            record["labels"][: len(start)] == [-100] * len(start)
            and tokenizer.decode(ids[:-1]) == f" {schema.write(row)}"
        )
        assert ids[-1] == tokenizer.eos_token_id and labels[-1] == -100
        for place, (token, label) in enumerate(zip(ids[:-1], labels[:-1], strict=True)):
            before = tokenizer.decode(ids[:place])
            may_be = {one for one in tokens if one and any(text.startswith(before + one) for text in every)}
            assert label == (token if len(may_be) > 1 else -100), (before, may_be)


def test_what_a_model_bars_for_itself_bars_no_value(tmp_path, monkeypatch, tokenizer, model):
    """Three equal values in a row: with the model's own settings, no token would be left in the second column."""
    monkeypatch.chdir(tmp_path)
    schema = schema_of({name: {"type": "category", "values": ["no"], "optional": name == "c"} for name in "abc"})
    lm = AutoModelForCausalLM.from_pretrained(model)
    lm.generation_config.no_repeat_ngram_size = 2
    lm.generation_config.suppress_tokens = tokenizer("null")["input_ids"][:1]
    flat = SimpleNamespace(top_p=1.0, temperature=50.0)
    found = sample(lm, tokenizer, [PROMPT] * 16, 60, 128, flat, Fits(_matcher(tokenizer, schema)))
    assert {text for text, _ in found} == {f'{{"a":"no","b":"no","c":{last}}}' for last in ('"no"', "null")}


def test_the_end_token_in_a_text_is_text(tmp_path, monkeypatch, tokenizer, model):
    monkeypatch.chdir(tmp_path)
    schema = schema_of({"note": {"type": "text"}, "sick": SCHEMA["sick"]})
    end, text = tokenizer.eos_token_id, f"a {tokenizer.eos_token} b"
    [record] = TableRows(ARGS, schema, [(text, "no")], [], 0).records(model)
    assert record["input_ids"].count(end) == 1 and record["input_ids"][-1] == end and end not in record["labels"]
    assert tokenizer.decode([label for label in record["labels"] if label != -100]).startswith(text)


def test_a_tokenizer_that_cannot_write_a_category_is_refused(folder, capsys, tmp_path):
    """Köln is not the longest; its rows would all be cut off after K, once epsilon is charged."""
    made = Tokenizer(models.Unigram([("<unk>", 0.0), *((chr(i), -3.0) for i in range(33, 127)), ("\u2581", -2.0)], 0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="~", unk_token="<unk>").save_pretrained("cut")
    lm = GPT2Config(vocab_size=len(made.get_vocab()), n_positions=256, n_embd=8, n_layer=1, n_head=1, eos_token_id=95)
    GPT2LMHeadModel(lm).save_pretrained("cut")
    last = refusal(synthetic.run(words(model_name_or_path="cut", max_length="250")), capsys)
    assert "schema=schema.json: the tokenizer of the model cannot write" in last and "Köln" in last


def test_a_tokenizer_that_no_grammar_can_read_is_refused(folder, capsys):
    made = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581", -2.0), ("a", -3.0)], 0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="a", unk_token="<unk>").save_pretrained("odd")
    GPT2LMHeadModel(GPT2Config(vocab_size=3, n_embd=8, n_layer=1, n_head=1, eos_token_id=2)).save_pretrained("odd")
    last = refusal(synthetic.run(words(model_name_or_path="odd")), capsys)
    assert last == (
        "error: model_name_or_path=odd: llguidance cannot read its tokenizer (can't determine decoder type). Use another model."
    )


def test_no_rare_value_is_cut_off_by_default(folder):
    assert synthetic.parse(words())[0].top_p == 1


def test_too_few_rows_are_warned_of(tmp_path, monkeypatch, tokenizer, caplog):
    monkeypatch.chdir(tmp_path)
    schema = schema_of(SCHEMA)
    texts = iter([(schema.examples[0], True), ("{", False)] * 4)
    monkeypatch.setattr("recipes.synthetic_table.sample", lambda m, t, prompts, *_: [next(texts) for _ in prompts])
    counts = {name: np.ones(size) for name, size in schema.sizes.items()}
    columns, _ = TableRows(ARGS, schema, [(20, 61.5, "Ulm", "no")], [], 0).make(None, tokenizer, counts, 128)
    assert len(columns[0]) == 4 and "Only 4 of 8 sampled rows end within 128 tokens." in caplog.text


def test_a_number_with_an_exponent_is_learned_and_not_printed(tmp_path, monkeypatch, model, capfd):
    monkeypatch.chdir(tmp_path)
    schema = schema_of({"dose": {"type": "number", "min": 0, "max": 1}, "sick": SCHEMA["sick"]})
    [record] = TableRows(ARGS, schema, [(1e-7, "no")], [], 0).records(model)
    learned = [label for label in record["labels"] if label != -100]
    assert AutoTokenizer.from_pretrained(model).decode(learned).startswith("1e-07")
    assert "".join(capfd.readouterr()) == ""  # the grammar has no exponents, and its library would quote it


@pytest.mark.parametrize("label", [None, "sick", "city"])
def test_a_record_is_in_one_place_of_each_histogram(tmp_path, monkeypatch, label):
    """Of each column, or of each pair with the label: every pair of values has a place of its own."""
    monkeypatch.chdir(tmp_path)
    schema = schema_of({name: one for name, one in SCHEMA.items() if name != "weight"})
    rows = [*itertools.product(range(20, 30), CITIES, ["no", "yes"])]
    data = TableRows(SimpleNamespace(**vars(ARGS) | {"label_column": label}), schema, rows, [], 0)
    of_each = {name: [row[i] for row in rows] for i, name in enumerate(schema.names)}
    if label is not None:
        values = of_each.pop(label)
        of_each = {f"{label}_and_{name}": [*zip(values, found, strict=True)] for name, found in of_each.items()}
    assert data.cells.keys() == data.sizes.keys() == of_each.keys()
    for name, cells in data.cells.items():
        assert len({*zip(cells, of_each[name], strict=True)}) == len({*cells}) == data.sizes[name]
        assert {*cells} == {*range(data.sizes[name])}
    assert [TableRows(data._args, schema, [row], [], 0).cells for row in rows] == [
        {name: [cells[i]] for name, cells in data.cells.items()} for i in range(len(rows))
    ]


def test_rows_are_chosen_by_what_columns_tell_of_the_label(tmp_path, monkeypatch, tokenizer):
    """The model knows nothing of it, as after a few private steps: it samples all pairs equally often."""
    monkeypatch.chdir(tmp_path)
    schema = schema_of({"city": SCHEMA["city"], "sick": SCHEMA["sick"], "age": SCHEMA["age"]})
    every = itertools.cycle(itertools.product(CITIES, ["no", "yes"], range(20, 30)))
    monkeypatch.setattr(
        "recipes.synthetic_table.sample",
        lambda m, t, prompts, *_: [(schema.write(next(every)), True) for _ in prompts],
    )
    args = SimpleNamespace(**vars(ARGS) | {"label_column": "sick", "num_rows": 240, "oversampling": 4})
    train = [(city, "yes" if city == "Bonn" else "no", age) for city in CITIES for age in range(20, 30)] * 50
    data = TableRows(args, schema, train, train, 0)
    rng = np.random.default_rng(0)
    counts = {
        name: (np.bincount(data.cells[name], minlength=size) + rng.normal(0, 9, size)).round().clip(0).astype(int)
        for name, size in data.sizes.items()
    }
    columns, compute_scores = data.make(None, tokenizer, counts, 128)
    told = [(city == "Bonn") == (sick == "yes") for city, sick, _ in zip(*columns, strict=True)]
    assert np.mean(told) > 0.95  # 0.5 of what was sampled
    assert np.mean([sick == "yes" for _, sick, _ in zip(*columns, strict=True)]) == pytest.approx(1 / 3, abs=0.02)
    scores, _ = compute_scores()
    assert scores["accuracy_of_synthetic"] == 100 and scores["distance_of_sick_and_city_from_counts"] < 0.1


def test_pairs_have_one_share_of_the_label_between_them(tmp_path, monkeypatch, tokenizer):
    """The last column would have decided, whose wide pairs lift a rare label: noise below 0 is cut off there."""
    monkeypatch.chdir(tmp_path)
    wide = {"type": "category", "values": [str(i) for i in range(60)]}
    schema = schema_of({"sick": SCHEMA["sick"], "age": SCHEMA["age"], "few": SCHEMA["city"], "wide": wide})
    every = itertools.cycle(itertools.product(["no", "yes"], range(20, 30), CITIES[:1], ["0", "30"]))
    monkeypatch.setattr(
        "recipes.synthetic_table.sample",
        lambda m, t, prompts, *_: [(schema.write(next(every)), True) for _ in prompts],
    )
    args = SimpleNamespace(**vars(ARGS) | {"label_column": "sick", "num_rows": 200, "oversampling": 5})
    train = [("yes" if i % 20 == 0 else "no", 20 + i % 10, CITIES[i % 3], str(i % 60)) for i in range(2000)]
    data, shares_of_yes = TableRows(args, schema, train, [], 0), []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        counts = {
            name: (np.bincount(data.cells[name], minlength=size) + rng.normal(0, 8, size)).round().clip(0).astype(int)
            for name, size in data.sizes.items()
        }
        columns, _ = data.make(None, tokenizer, counts, 128)
        shares_of_yes.append(columns[0].count("yes") / 200)
    assert np.mean(shares_of_yes) == pytest.approx(0.05, abs=0.025)


def test_counts_of_one_label_are_not_those_of_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schema = schema_of({"a": SCHEMA["sick"], "a_and_a": SCHEMA["sick"]})
    of_each = [SimpleNamespace(**vars(ARGS) | {"label_column": label}) for label in ("a", "a_and_a", None)]
    assert len({TableRows(args, schema, [("no", "yes")], [], 0).meaning for args in of_each}) == 3


def test_without_llguidance_its_name_is_said(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    last = refusal(synthetic.run(words()), capsys)
    assert "needs the package llguidance" in last and "tokenizer" not in last


def test_raking_gives_each_column_its_shares():
    rng = np.random.default_rng(0)
    first = rng.integers(2, size=2000)
    second = np.where(rng.random(2000) < 0.7, first, rng.integers(3, size=2000))
    wanted = [np.array([0.8, 0.2]), np.array([0.1, 0.3, 0.6])]
    weights = rake([*zip((first, second), wanted, strict=True)])
    for cells, target in zip((first, second), wanted, strict=True):
        assert np.bincount(cells, weights) / weights.sum() == pytest.approx(target, abs=1e-6)
    weights = rake([(np.array([0, 0, 1]), np.array([0.0, 1.0])), (np.array([0, 1, 1]), np.array([1.0, 0.0]))])
    assert (weights > 0).all() and np.isfinite(weights).all()  # no weights have these shares
