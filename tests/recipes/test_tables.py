"""Every file format gives the same table; damaged files are named with their line."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hf_dpopt import DPConfigError
from recipes.tables import check_columns, columns_in, read_table

ROWS = [
    {"sentence": 'a "quoted" film, with commas', "label": "1"},
    {"sentence": "naïve — 電影\u2028still the same line", "label": "0"},
    {"sentence": "", "label": "1"},
]


def write(path: Path, text: str) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_bytes(text.encode())
    return path


def as_text(kind: str, rows: list[dict[str, Any]], end: str = "\n") -> str:
    if kind == "csv":
        import io

        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator=end)
        writer.writeheader()
        writer.writerows(rows)
        return buffer.getvalue()
    if kind == "tsv":
        return end.join(["\t".join(rows[0]), *("\t".join(row.values()) for row in rows)]) + end
    if kind == "json":
        return json.dumps(rows, ensure_ascii=False, indent=1)
    if kind == "json-data":
        return json.dumps({"data": rows})
    return end.join(json.dumps(row, ensure_ascii=False) for row in rows) + end


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("kind, suffix", [("csv", "csv"), ("tsv", "tsv"), ("json", "json"), ("json-data", "json"),
                                          ("jsonl", "jsonl"), ("jsonl", "json")])  # fmt: skip
def test_round_trip(tmp_path: Path, kind: str, suffix: str, end: str, mark: str, packed: str) -> None:
    path = write(tmp_path / f"train.{suffix}{packed}", mark + as_text(kind, ROWS, end))
    table = read_table(path)
    assert table.columns == {"sentence": [r["sentence"] for r in ROWS], "label": [r["label"] for r in ROWS]}
    assert len(table) == 3


def test_one_json_record_is_a_table(tmp_path: Path) -> None:
    assert read_table(write(tmp_path / "a.json", '{"sentence": "x", "label": 1}')).columns["label"] == [1]


def test_tsv_keeps_quotes_and_lone_carriage_returns(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "a.tsv", 'sentence\tlabel\n" unbalanced\t1\nno end\rhere\t0\n\n'))
    assert table.columns["sentence"] == ['" unbalanced', "no end\rhere"]
    assert table.where(1).endswith("a.tsv, line 3")


def test_csv_lines_are_counted_through_quoted_newlines(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "a.csv", 'sentence,label\n"two\nlines",1\nnext,0\n'))
    assert table.columns["sentence"] == ["two\nlines", "next"]
    assert [table.where(row).split(", ")[1] for row in range(2)] == ["line 2", "line 4"]


def test_long_fields_are_read(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "a.csv", "sentence,label\n" + "x" * 200_000 + ",1\n"))
    assert len(table.columns["sentence"][0]) == 200_000


def test_cola_has_no_header(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "train.tsv", "gj04\t1\t\tFine.\nbc01\t0\t*\tFine not.\n"))
    assert table.columns["sentence"] == ["Fine.", "Fine not."]
    assert table.columns["label"] == ["1", "0"]


DAMAGED = {
    "missing": ("nowhere/a.tsv", None, "does not exist. Check the path"),
    "extension": ("a.parquet", "x", "Convert or rename it"),
    "no extension": ("train", "x", "Convert or rename it"),
    "empty": ("a.tsv", "", "Name a file with at least one record"),
    "header only": ("a.csv", "sentence,label\n", "Name a file with at least one record"),
    "empty list": ("a.json", "[]", "Name a file with at least one record"),
    "ragged": (
        "a.tsv",
        "sentence\tlabel\nx\t1\nx\ty\t1\n",
        "line 3: 3 fields where the first line has 2. Remove stray",
    ),
    "ragged csv": ("a.csv", 'sentence,label\n"a\nb",1\nx\n', "line 4: 1 fields where the first line has 2"),
    "semicolons": ("a.csv", "sentence;label\nx, y;1\n", "one column name with ';' in it.*read_csv.*sep=';'"),
    "tabs in a csv": ("a.csv", "sentence\tlabel\nx\t1\n", r"one column name with '\\t' in it.*a .tsv file by tabs"),
    "open quote": ("a.csv", 'sentence,label\nx,1\n"y,1\n', "line 3: not valid csv .* Fix the quotes"),
    "twice": ("a.tsv", "label\tlabel\n1\t1\n", "the columns 1 and 2 share a name. Give each a"),
    "jsonl": ("a.jsonl", '{"label": 1}\n{"label": \n', "line 2: not valid JSON .* Fix or remove that line"),
    "json": ("a.json", '[{"label": 1},\n{"label"}]', "line 2: not valid JSON .* Fix that line"),
    "json value": ("a.json", "3", "Write a list of objects"),
    "json of objects": ("a.json", '{"Meier": {"age": 3}, "Wolf": {"age": 4}}', "holds objects in an object. Write a"),
    "json row": ("a.jsonl", '{"label": 1}\n[1]\n', "line 2: a list, not an object"),
    "json keys": ("a.jsonl", '{"label": 1, "a": 2}\n{"label": 1}\n', "line 2: keys differ .* 'a'. Give all records"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(tmp_path: Path, case: str) -> None:
    name, text, mend = DAMAGED[case]
    path = tmp_path / name
    if text is not None:
        write(path, text)
    with pytest.raises(DPConfigError, match=mend):
        read_table(path)


@pytest.mark.parametrize(
    "first", ["43,Meier", ",Meier", "2020-01-02,Meier", f"{'long ' * 9},Meier", "x,Meier", "Wolf,Ulm"]
)
def test_a_record_in_place_of_names_is_not_shown(tmp_path: Path, first: str) -> None:
    table = read_table(write(tmp_path / "a.csv", f"{first}\n44,Ulm\n45,Meier\n"))
    with pytest.raises(DPConfigError, match=r"a.csv: the first line .* is not shown: its field [12] does") as error:
        check_columns(table, {"text": ""}, "")
    assert not [value for value in first.split(",") if value and f"{value!r}" in str(error.value)]


def test_names_are_shown_with_their_place(tmp_path: Path) -> None:
    for name, content, shown in (
        ("a.CSV", "age,_id,Größe\n1,2,3\n", "'age', '_id', 'Größe' (its first line)"),
        ("a.jsonl", '{"1": 2}\n', "'1'"),
    ):
        assert columns_in(read_table(write(tmp_path / name, content))) == shown


def test_broken_bytes_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"sentence\tlabel\n" + b"x\t1\n" * 1000)
    for name, content, mend in (
        ("a.tsv.gz", whole[:-20], "Fetch or compress it again"),
        ("b.tsv.gz", b"sentence\tlabel\nx\t1\n", "Fetch or compress it again"),
        ("c.tsv", b"sentence\tlabel\n\xff\xfe\t1\n", "Convert it, e.g. with iconv"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DPConfigError, match=mend):
            read_table(tmp_path / name)
    with pytest.raises(DPConfigError, match="Name a readable file"):
        (tmp_path / "d.tsv").mkdir()
        read_table(tmp_path / "d.tsv")
