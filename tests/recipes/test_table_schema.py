"""`recipes/table_schema.py`: a schema that the user writes, records made to fit it, rows as text and back."""

from __future__ import annotations

import json

import pytest

from hf_dpopt import DPConfigError
from recipes.table_schema import Column, Schema
from recipes.tables import Table
from tests.recipes.conftest import SCHEMA, schema_of


def test_a_row_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schema = schema_of(SCHEMA | {"note": {"type": "text"}})
    row = (23, None, "Köln, Porz", "no", 'said "no",\ntwice')
    assert schema.write(row) == (
        r'{"age":23,"weight":null,"city":"Köln, Porz","sick":"no","note":"said \"no\",\ntwice"}'
    )


def test_half_a_character_is_not_text(tmp_path, monkeypatch):
    """A model may sample one: the file of the rows could not be written, once all was spent."""
    monkeypatch.chdir(tmp_path)
    schema = schema_of({"note": {"type": "text"}})
    assert schema.parse(r'{"note":"a\ud83d\ude00"}') == ("a\U0001f600",)
    assert [schema.parse(text) for text in (r'{"note":"a\ud83d"}', '{"no', "")] == [None] * 3  # or is cut off
    with pytest.raises(DPConfigError, match="row 1: 'note' is missing, or is not"):
        schema.rows(Table("t", {"note": ["a\ud83d"]}))


def test_a_record_is_made_to_fit_by_itself(tmp_path, monkeypatch):
    """Clipped to a range, missing where that may be: what a row becomes depends on no other row."""
    monkeypatch.chdir(tmp_path)
    schema = schema_of(SCHEMA)
    given = [[" 31", "-1e5", "Ulm", "no"], ["20.0", "heavy", "Bonn", "yes"], [25, None, "Ulm", "no"]]
    fitted = [(29, 50.0, "Ulm", "no"), (20, None, "Bonn", "yes"), (25, None, "Ulm", "no")]

    def rows(some: list) -> list:
        return schema.rows(Table("t", dict(zip(SCHEMA, zip(*some, strict=True), strict=True))))

    assert rows(given) == fitted
    assert [rows([row]) for row in given] == [[row] for row in fitted]
    for bad in ("25.5", "True", "", None, "nan"):
        with pytest.raises(DPConfigError, match="row 2: 'age' is missing, or is not what the schema says"):
            rows([given[0], [bad, "60", "Ulm", "no"]])


@pytest.mark.parametrize(
    ("values", "given", "fitted"),
    [
        ([True, False], ["true", "FALSE", True, "False"], [True, False, True, False]),
        ([1, 2.5], ["1.0", 2.5, 1, "2.50"], [1, 2.5, 1, 2.5]),
        ([0, 1, "a"], ["TRUE", '"a"', "A"], [None, None, None]),
        ([True, False], ["1.0", 0, "null"], [None, None, None]),
        (["1.0", 1], ["1.0", "1", 1.0, 1], ["1.0", 1, "1.0", 1]),
        (["01", "None", "Bonn"], ["1", None, "bonn", "01"], [None, None, None, "01"]),
    ],
)
def test_categories_are_found_as_other_programs_write_them(values, given, fitted):
    """pandas writes 1.0 for the integers of a column with gaps; spreadsheets write TRUE. Strings are as they are."""
    column = Column("sick", "category", optional=True, values=tuple(values))
    found = [column.fit(one) for one in given]
    assert found == fitted and [*map(type, found)] == [*map(type, fitted)]


def test_a_schema_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA), encoding="utf-8-sig")
    assert Schema.of_file(str(path)).names == list(SCHEMA)


def test_every_column_has_a_histogram(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schema = schema_of(SCHEMA | {"few": {"type": "integer", "min": 1, "max": 3}, "note": {"type": "text"}})
    assert schema.sizes == {"age": 10, "weight": 11, "city": 3, "sick": 2, "few": 3, "note": 15}
    cells = schema.cells(
        [(20, 50.0, "Bonn", "no", 1, ""), (29, 80.0, "Ulm", "yes", 3, "w " * 300), (21, None, "Ulm", "no", 2, "a")]
    )
    assert cells == {
        "age": [0, 9, 1], "weight": [0, 9, 10], "city": [0, 2, 2], "sick": [0, 1, 0], "few": [0, 2, 1], "note": [0, 14, 0],
    }  # fmt: skip
