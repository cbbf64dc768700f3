"""`recipes/synthetic.py` as a user meets it: one command from a file to rows, card, statement and scores."""

from __future__ import annotations

import csv
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from transformers import AutoTokenizer, RobertaModel

pytest.importorskip("trl", reason="TRL is in the test extra: pip install '.[test]'")

from hf_dpopt import DPConfigError
from hf_dpopt.report.report import read_report
from hf_dpopt.run.dataset_ledger import DatasetLedger
from hf_dpopt.verify import FAILED, verify
from recipes import synthetic
from recipes.histogram import FOLDER
from recipes.synthetic_scores import (
    distance,
    distinct,
    frontier_area,
    mauve,
    ngrams,
    private_scores,
    public_scores,
)
from recipes.synthetic_text import (
    LENGTHS,
    Controls,
    Rows,
    TextRows,
    embed,
    find_clusters,
    finished,
    interval,
    length_cell,
    resample,
)
from recipes.tables import Table
from tests.recipes.conftest import SYNTHETIC, as_words, refusal, save_gpt2, save_roberta

WORDS = ["mill", "river", "eagle", "cheap", "far", "bread", "green", "tall"]


def text(i: int) -> str:
    return " ".join(WORDS[(i * k + k) % 8] for k in range(1, 3 + i % 6)) + "."


def write(name: str, num: int, start: int = 0) -> None:
    rows = [{"text": text(i), "label": ("food", "place")[i % 2], "person": f"p{i % 20}"} for i in range(num)]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows[start:]))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A language model, an encoder and three files, in the working directory."""
    monkeypatch.chdir(tmp_path)
    save_gpt2(Path("model"), n_positions=192, initializer_range=0.3)
    save_roberta(Path("encoder"), RobertaModel, [text(i) for i in range(40)])
    write("train.jsonl", 60)
    write("test.jsonl", 75, start=60)
    Path("public.txt").write_text("".join(f"{word} {other} and more\n" for word in WORDS for other in WORDS))
    return tmp_path


FLAGS = SYNTHETIC | {
    "model_name_or_path": "model", "train_file": "train.jsonl", "validation_file": "test.jsonl",
    "public_file": "public.txt", "encoder_name_or_path": "encoder", "num_rows": "20", "num_clusters": "4",
    "max_length": "120",
}  # fmt: skip


def words(**changes: str | None) -> list[str]:
    return as_words(FLAGS | changes)


def test_one_command_writes_rows_card_statement_and_scores(folder, capsys):
    assert synthetic.run(words()) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in Path("out/dataset/synthetic.jsonl").open()]
    assert 10 <= len(rows) <= 20 and len({row["text"].casefold() for row in rows}) == len(rows)
    assert {row["label"] for row in rows} <= {"food", "place"} and set(rows[0]) == {"text", "label"}
    claimed = read_report("out").epsilon
    assert 7.5 < claimed <= 8 and f"epsilon {claimed:.3f}" in Path("out/dataset/README.md").read_text()
    assert Path("out/dataset/statement.md").read_bytes() == Path("out/privacy/statement.md").read_bytes()
    assert "the values of the columns label are read from the records" in Path("out/privacy/statement.md").read_text()
    for path in (Path("out"), Path("out") / FOLDER):
        assert not [check for check in verify(path).checks if check.status == FAILED]
    scores = json.loads(Path("out/evaluation.json").read_text())
    assert 0 <= scores["mauve"] <= 1
    assert 0 <= scores["accuracy_of_synthetic"] <= 100 and f"{scores['accuracy_of_synthetic']:.1f} %" in printed


def test_rows_are_written_before_the_scores(folder, monkeypatch):
    """They are paid for: a score that fails must not take them along."""

    def fails(*_):
        raise MemoryError

    monkeypatch.setattr("recipes.synthetic_text.public_scores", fails)
    with pytest.raises(MemoryError):
        synthetic.run(words())
    assert Path("out/dataset/synthetic.jsonl").stat().st_size and Path("out/dataset/statement.md").exists()


def test_a_folder_of_rows_holds_those_of_the_last_run_alone(folder):
    """A lone carriage return ends a row where it is not quoted."""
    args, training_args, *_ = synthetic.parse(words(non_private="true", target_epsilon=None))
    synthetic.write_rows(args, training_args, {"text": ["a"]})
    args.file_format = "csv"
    path = synthetic.write_rows(args, training_args, {"text": ["a\rb", "c"]})
    with path.open(newline="") as file:
        assert [*csv.reader(file)] == [["text"], ["a\rb"], ["c"]]
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(
    ("users", "how"),
    [({}, "covered as replace_one"), ({"privacy_unit": "user", "user_id_column": "person"}, "not covered")],
)
def test_a_cut_is_declared(folder, users, how):
    args, training_args, *_ = synthetic.parse(words(**users))
    args.max_train_samples = 30  # as the embedded job has one, with users, too
    synthetic.declare(args, training_args)
    assert training_args.data_dependent_preprocessing.endswith(f"; cut to the first 30 rows, which is {how}")


def test_exact_comparisons_with_records_stay_private(folder, capsys, monkeypatch, recwarn):
    def warns(*parts: Any) -> float:
        warnings.warn("77 records are different", ConvergenceWarning, stacklevel=2)  # as those of sklearn do
        return mauve(*parts)

    monkeypatch.setattr("recipes.synthetic_text.mauve", warns)
    assert synthetic.run(words()) == 0
    assert not [one for one in recwarn if "77 records" in str(one.message)]
    [private] = Path("keys").glob("work/*/evaluation.json")
    exact = json.loads(private.read_text())
    assert (
        private.stat().st_mode & 0o077 == 0
        and {"accuracy_of_real", "mauve_of_real", "copies_of_whole_records"} <= exact.keys()
    )
    published = "".join(p.read_text(errors="replace") for p in Path("out").rglob("*") if p.suffix in (".json", ".md"))
    printed = capsys.readouterr().out
    assert not [name for name in exact for text in (published, printed) if name.replace("_", " ") in text]
    assert not [name for name in exact if name in published or name in printed]


def test_a_record_moves_no_cell_of_another(folder):
    """Whatever the encoder does with padding: one that pads on the left counts positions from the first column."""
    save_gpt2(Path("left"), n_positions=192, initializer_range=0.3)
    tokenizer = AutoTokenizer.from_pretrained("left", padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained("left")
    texts = [text(i) for i in range(70)]
    alone, beside = embed(texts, "left"), embed([*texts, " ".join(WORDS * 3)], "left")
    assert np.array_equal(alone, beside[: len(texts)])


def test_between_equal_centres_no_last_digit_chooses():
    public_NE = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0)
    with pytest.warns(ConvergenceWarning):
        assert len(find_clusters(public_NE, 8, 42)) == 3


def test_counts_know_what_their_clusters_were_made_of(folder):
    """Counts of other clusters, as many as these, made a wrong table."""
    args, *_ = synthetic.parse(words())
    controls = Controls(("label",), (("food",), ("place",)))

    def meaning(public: list[str], seed: int) -> str:
        return TextRows(args, controls, ([0, 1], []), ["a mill.", "a river."], [], public, seed).meaning

    public = [f"{word} and more" for word in WORDS]
    assert meaning(public, 1) == meaning(public, 1)
    assert len({meaning(public, 1), meaning(public[::-1], 1), meaning(public, 2)}) == 3


def test_users_are_counted_as_a_whole(folder, capsys):
    of_users = {"privacy_unit": "user", "user_id_column": "person", "expected_batch_size": "8"}
    flags = words(**of_users, file_format="csv", bf16="true")
    assert synthetic.run(flags) == 0, capsys.readouterr().err
    plans = [read_report(path).plan for path in (Path("out"), Path("out") / FOLDER)]
    assert [plan["privacy_unit"] for plan in plans] == ["user", "user"]
    assert [plan["num_examples"] for plan in plans] == [20, 20]
    with Path("out/dataset/synthetic.csv").open() as file:
        assert next(csv.reader(file)) == ["text", "label"]


def test_the_same_without_privacy(folder, capsys):
    assert synthetic.run(words(non_private="true", target_epsilon=None)) == 0, capsys.readouterr().err
    assert "NONE (--non_private)" in capsys.readouterr().out
    assert "NOT PRIVATE" in Path("out/dataset/README.md").read_text() and not Path("out/privacy").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"eval_data_privacy": None}, "Add --eval_data_privacy public"),
        ({"control_columns": "kind"}, "no column 'kind' (--control_columns)"),
        ({"text_column": "body"}, "no column 'body' (--text_column)"),
        ({"histogram_share": "1"}, "histogram_share=1.0: must be from 0.001"),
        ({"oversampling": "0.5"}, "oversampling=0.5: must be from 1"),
        ({"num_rows": "0"}, "num_rows=0 is not a positive count"),
        ({"train_file": None}, "train_file: missing"),
        ({"num_rowz": "5"}, "Did you mean --num_rows?"),
        (
            {"privacy_unit": "user"},
            "Name the column of train_dataset that holds the user ids: --user_id_column author.",
        ),
        ({"privacy_unit": "user", "user_id_column": "who"}, "no column 'who' (--user_id_column)"),
        ({"noise_multiplier": "1"}, "Both target_epsilon and noise_multiplier are given"),
        ({"clipping_norm": "-1"}, "clipping_norm=-1"),
        ({"encoder_name_or_path": "nothere"}, "--encoder_name_or_path"),
        ({"control_columns": "text"}, "control_columns=text: text has the texts, and the values"),
        (
            {"privacy_unit": "user", "user_id_column": "person", "control_columns": "person"},
            "control_columns=person: person has the users, and the values",
        ),
        ({"push_to_hub": "true"}, "push_to_hub: the folder has rows and counts"),
        (
            {"privacy_unit": "user", "user_id_column": "person", "max_train_samples": "30"},
            "max_train_samples=30: if one user were removed",
        ),
        ({"expected_batch_size": "61"}, "expected_batch_size=61: a batch of 61 is larger than the dataset"),
        (
            {"privacy_unit": "user", "user_id_column": "person", "expected_batch_size": "21"},
            "expected_batch_size=21: a batch of 21 is larger than the dataset",
        ),
    ],
)
def test_wrong_flags_end_in_one_line_and_charge_nothing(folder, capsys, changes, says):
    assert synthetic.run(words(**changes)) == 2
    [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert says in said and not Path("out").exists()


@pytest.mark.parametrize(
    ("flag", "row", "says"),
    [
        ("train_file", {"text": 5}, "odd.jsonl, line 2: 'text' must be a non-empty string of valid Unicode"),
        ("train_file", {"text": ["a"]}, "odd.jsonl, line 2: 'text' must be a non-empty string of valid Unicode"),
        ("validation_file", {"text": None}, "odd.jsonl, line 2: 'text' must be a non-empty string of valid Unicode"),
        (
            "validation_file",
            {"text": "a \ud800 mill."},
            "odd.jsonl, line 2: 'text' must be a non-empty string of valid Unicode",
        ),
        ("validation_file", {"label": "shop"}, "odd.jsonl, line 2: ('shop',) is not in the training file"),
    ],
)
def test_a_wrong_row_ends_in_one_line_and_charges_nothing(folder, capsys, flag, row, says):
    rows = [{"text": "a mill.", "label": "food"}, {"text": "a mill.", "label": "food"} | row]
    Path("odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert synthetic.run(words(**{flag: "odd.jsonl"})) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and not Path("out").exists()


@pytest.mark.parametrize(
    ("flag", "says"),
    [("validation_file", "The evaluation dataset is the training dataset"), ("public_file", "of the training file")],
)
def test_training_records_are_refused_where_rows_are_read_without_noise(folder, capsys, flag, says):
    """Scores of training records would be exact values of them, and so would clusters of them."""
    rows = [{"text": f"{text(i)} It was visit number {i}.", "label": ("food", "place")[i % 2]} for i in range(60)]
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    copied = [row | {"text": f" {row['text'].replace(' ', '  ')}"} for row in rows[30:]]
    Path("copied.jsonl").write_text("".join(json.dumps(row) + "\n" for row in copied))
    assert synthetic.run(words(train_file="mine.jsonl", **{flag: "copied.jsonl"})) == 2
    assert says in capsys.readouterr().err and not Path("out").exists()


def test_a_first_word_is_the_file_and_no_word_the_embedded_job(folder):
    flags = ["--model_name_or_path", "model", "--use_cpu", "true", "--target_epsilon", "8"]
    args, _, _, is_embedded = synthetic.parse(["data.csv", *flags])
    assert args.train_file == "data.csv" and not is_embedded
    _, training, _, is_embedded = synthetic.parse(["--use_cpu", "true"])
    assert is_embedded and training.target_epsilon == 8.0


def _rows(name: str, **column: list) -> str:
    """The training rows with a column changed or added."""
    rows = [json.loads(line) for line in Path("train.jsonl").open()]
    for key, values in column.items():
        rows = [row | {key: values[i % len(values)]} for i, row in enumerate(rows)]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def _without(folder: str, file: str) -> str:
    Path(folder, file).unlink()
    return folder


def _written(name: str, content: str) -> str:
    Path(name).write_text(content)
    Path(name).chmod(0o600)
    return name


def _stock(folder: str) -> str:
    Path(folder).mkdir()
    _written(f"{folder}/trainer_state.json", json.dumps({"log_history": [{"train_loss": 1.5, "step": 1}]}))
    return folder


def _small() -> str:
    save_gpt2(Path("small"), n_positions=48)
    return "small"


CODES = "50"  # tokens: the longest control codes have 45
USERS = {"privacy_unit": "user", "user_id_column": "person", "expected_batch_size": "8"}
BAD = {  # what is wrong -> how to make it, part of the message
    "codes longer than max_length": (lambda: {"max_length": "20"}, "max_length=20: no record of the train"),
    "no room for a text": (lambda: {"max_length": CODES}, f"max_length={CODES}: control codes and a text of 5 words"),
    "no room in the model": (lambda: {"model_name_or_path": _small()}, "max_length=48: control"),
    "records longer than the model": (
        lambda: {"max_length": "400", "train_file": _rows("long.jsonl", text=[f"{text(3)} " * 60, text(1)])},
        "max_length=400: the model takes 192 tokens",
    ),
    "no weights": (lambda: {"model_name_or_path": _without("model", "model.safetensors")}, "model.safetensors"),
    "no tokenizer": (lambda: {"model_name_or_path": _without("model", "tokenizer.json")}, "its tokenizer has no"),
    "no encoder": (lambda: {"encoder_name_or_path": _without("encoder", "model.safetensors")}, "'encoder' cannot be"),
    "more clusters than texts": (lambda: {"num_clusters": "65"}, "num_clusters=65: there are 64 public texts"),
    "no public text": (lambda: {"public_file": _written("blank.txt", "x\n")}, "there are 1 public texts"),
    "missing user": (lambda: USERS | {"train_file": _rows("u.jsonl", person=[None, *"abcdefghi"])}, "'person'"),
    "users in a column that is read": (
        lambda: USERS | {"user_id_column": "prompt", "train_file": _rows("u.jsonl", prompt=["a", "b"])},
        "user_id_column=prompt: the model reads",
    ),
    "output is a file": (lambda: {"output_dir": _written("file", "x")}, "file"),
    "private folder is a file": (lambda: {"private_state_dir": _written("keys", "x")}, "keys"),
    "packing": (lambda: {"packing": "true"}, "packing"),
    "layers that there are not": (lambda: {"lora_target_modules": "nothing"}, "nothing"),
    "no plan with the counts": (lambda: {"sampling": "balls_in_bins"}, "sampling=balls_in_bins: has no common"),
    "nothing left to train with": (lambda: {"histogram_share": "0.95"}, "histogram_share=0.95: must be from 0.001"),
    "a ledger without room for the training": (
        lambda: {"privacy_ledger": "people.json", "privacy_ledger_epsilon": "4"},
        "privacy_ledger=people.json: counts and training would bring epsilon",
    ),
    "a folder of a run without privacy": (lambda: {"output_dir": _stock("stock")}, "trainer_state.json: un-noised"),
    "no checkpoint": (lambda: {"resume_from_checkpoint": "nothere"}, "resume_from_checkpoint=nothere: there is no"),
    "tuning": (lambda: {"tuned_runs": "5"}, "tuned_runs=5: has no analysis for a run in two parts"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_end_well_is_refused_before_anything_is_charged(folder, capsys, name):
    made, says = BAD[name]
    assert says in refusal(synthetic.run(words(**made())), capsys)


@pytest.mark.parametrize("changes", [{"sampling": "fixed_order"}, {"adjacency": "replace_one"}])
def test_counts_are_of_the_promise_of_the_training(folder, capsys, changes):
    assert synthetic.run(words(**changes)) == 0, capsys.readouterr().err
    adjacencies = [read_report(path).plan["adjacency"] for path in (Path("out"), Path("out") / FOLDER)]
    assert adjacencies[0] == adjacencies[1]


def test_a_ledger_that_begins_has_room_for_the_training(folder, capsys):
    """Its order was chosen for the counts alone, at which the training cost far more, or infinitely much."""
    budget = {"privacy_ledger": "people.json", "privacy_ledger_epsilon": "40"}
    assert synthetic.run(words(**budget)) == 0, capsys.readouterr().err
    ledger = DatasetLedger.read("people.json")
    assert len(ledger.entries) == 2 and 8 < ledger.spent < 16


# --- the parts -------------------------------------------------------------------------------------------------------


def test_every_length_has_one_interval():
    named = {interval(length_cell("w " * num)) for num in range(1, 300)}
    assert len(named) == len(LENGTHS) + 1
    assert interval(length_cell("w " * 5)) == "1 to 5 words" and interval(length_cell("w " * 6)) == "6 to 10 words"
    assert interval(length_cell("w " * 201)) == "more than 200 words"


def test_controls_are_all_combinations_and_too_many_are_refused():
    table = Table("t", {"a": ["x", "y", "x"], "b": [1, 1, 2]})
    controls = Controls.of(table, ["a", "b"])
    assert controls.values == (("x", "1"), ("x", "2"), ("y", "1"), ("y", "2"))
    assert controls.cells(table) == [0, 2, 1]
    assert controls.prompt(2, 0) == "a: y\nb: 1\nlength: 1 to 5 words\ntext:"
    with pytest.raises(DPConfigError, match="have 257 combinations"):
        Controls.of(Table("t", {"id": list(range(257))}), ["id"])
    with pytest.raises(DPConfigError, match="row 1: .*not in the training file"):
        controls.cells(Table("other", {"a": ["z"], "b": [1]}))
    assert Controls.of(table, []).cells(table) == [0, 0, 0]


def test_a_text_that_did_not_end_is_cut_after_its_last_sentence():
    assert finished('One. "Two!" And the th') == 'One. "Two!"'
    assert finished("costs 3.50 at") == "costs 3.50 at"


def test_resampling_gives_the_private_shares_and_no_row_twice():
    rng = np.random.default_rng(0)
    num = 20_000
    labels, clusters = rng.integers(2, size=num), rng.choice(3, num, p=[0.6, 0.3, 0.1])
    kept = resample((labels, np.array([300, 100])), [(clusters, np.array([100, 100, 200]))], 1000, rng)
    assert len(set(kept)) == len(kept) == 1000
    assert np.bincount(labels[kept]).tolist() == [750, 250]
    found = np.bincount(clusters[kept], minlength=3) / 1000
    assert found == pytest.approx([0.25, 0.25, 0.5], abs=0.06)


def test_resampling_takes_what_there_is():
    both = np.array([0, 0])
    assert sorted(resample((both, np.zeros(2)), [(both, np.zeros(1))], 4, np.random.default_rng(0))) == [0, 1]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_cell_without_rows_leaves_its_share_to_others(num_rows):
    """One row was asked for, of the cell that no text had: none was kept."""
    labels, cluster = (np.array([1, 1, 1]), np.array([9, 0, 5])), (np.zeros(3, int), np.array([3]))
    kept = resample(labels, [cluster], num_rows, np.random.default_rng(0))
    assert len(set(kept)) == num_rows


@pytest.mark.parametrize(("num_values", "are_pairs"), [(2, True), (250, True), (251, False)])
def test_texts_are_chosen_by_clusters_of_their_label(folder, monkeypatch, num_values, are_pairs):
    """A model that mixes the labels up: a text of the other one's cluster is left out. Where there are many, clusters alone."""
    args, *_ = synthetic.parse(words(num_rows="60"))
    labels = [str(i) for i in range(num_values)]
    controls, texts = Controls(("label",), tuple((one,) for one in labels)), [WORDS[i % 2] for i in range(400)]
    monkeypatch.setattr(
        "recipes.synthetic_text.embed",
        lambda some, _: np.eye(8, dtype=np.float32)[[WORDS.index(one.split()[0]) for one in some]],
    )
    of_texts = [i % 2 for i in range(400)]  # the label tells the cluster
    data = TextRows(args, controls, (of_texts, []), texts, [], [*WORDS[:4]] * 3, 0)
    assert data.sizes["cluster"] == 4 * (num_values if are_pairs else 1)
    made = Rows([WORDS[i // 2 % 2] for i in range(400)], np.array([i % 2 for i in range(400)]))
    monkeypatch.setattr("recipes.synthetic_text.generate_rows", lambda *_: made)
    monkeypatch.setattr(data, "_scores", lambda rows, *_: (rows, {}))
    counts = {name: np.bincount(cells, minlength=data.sizes[name]) for name, cells in data.cells.items()}
    _, compute_scores = data.make(None, None, counts, 100)
    kept, _ = compute_scores()
    fits = [WORDS.index(one) == cell for one, cell in zip(kept.texts, kept.cells, strict=True)]
    assert len(fits) == 60 and (np.mean(fits) > 0.99 if are_pairs else 0.3 < np.mean(fits) < 0.7)


def test_scores():
    assert distinct(["a b a b"], 2) == pytest.approx(2 / 3)
    assert distance(ngrams(["a b"], 1), ngrams(["a c"], 1)) == 0.5
    same = public_scores(["a b c", "d e"], ["a b c", "d e"])
    assert same["distance_of_lengths"] == same["distance_of_2_grams"] == 0.0
    train = ["one two three four five six seven eight nine", "other"]
    texts = ["x one two three four five six seven eight", "OTHER", "new"]
    identity = np.eye(3, dtype=np.float32)
    found = private_scores(texts, train, identity, identity[:2], identity[:0])
    assert found["copies_of_whole_records"] == pytest.approx(1 / 3)
    assert found["share_with_8_words_of_a_record"] == pytest.approx(1 / 3)
    assert found["nearest_training_record"] == 1.0


def test_mauve_of_two_clusters():
    """Disjoint histograms: the curve is ((1 - w)^5, w^5), with the area (5!)^2 / 10!; equal ones: a square."""
    assert frontier_area(np.array([3, 0]), np.array([0, 9]), num_points=20_001) == pytest.approx(
        math.factorial(5) ** 2 / math.factorial(10), rel=1e-5
    )
    assert frontier_area(np.array([1, 3]), np.array([2, 6])) == pytest.approx(1)
    near, far = np.eye(8, dtype=np.float32)[:2]
    rng = np.random.default_rng(0)
    both = [(centre + rng.normal(scale=0.01, size=(10, 8))).astype(np.float32) for centre in (near, far)]
    assert mauve(both[0], both[1], 0) == pytest.approx(frontier_area(np.array([1, 0]), np.array([0, 1])))
    mixed = np.concatenate([both[0][:5], both[1][:5]])
    assert mauve(mixed, mixed, 0) == pytest.approx(1)
    assert 0.01 < mauve(mixed, both[0], 0) < 0.9


def test_the_frontier_is_that_of_the_authors_package():
    """Values that mauve-text 0.4.0 has for the same histograms."""
    found = [
        frontier_area(np.array(p), np.array(q)) for p, q in (((1, 2, 3, 4), (4, 3, 2, 1)), ((5, 5, 0), (1, 4, 5)))
    ]
    assert found == pytest.approx([0.6538536633533254, 0.2156108668140393], rel=1e-9)
