"""Tables as they are read in a terminal."""

import csv

import pytest

from sparsepipe.utils.files import markdown_table, read_csv, write_csv


def test_numbers_are_aligned_to_the_right_and_words_to_the_left():
    table = markdown_table(("layer", "ms"), [("Conv3d", "1.5"), ("ReLU", "12.25")])
    assert table.splitlines() == [
        "| layer  |    ms |",
        "| ------ | ----: |",
        "| Conv3d |   1.5 |",
        "| ReLU   | 12.25 |",
    ]


@pytest.mark.parametrize(
    ("cell", "number"),
    [
        *((cell, True) for cell in ("7", "-7", "1,234.5", "4e+05", "1.5E-3", "12 %", "12%")),
        *((cell, True) for cell in ("3.2x", "", "-", " 5 ", ".5", "+1")),
        *((cell, False) for cell in ("7-1", "1-1-1", "word", "1.2.3", "e5", "x", "4 GPUs", "1/2")),
    ],
)
def test_what_counts_as_a_number(cell, number):
    rule = markdown_table(("head",), [(cell,)]).splitlines()[1]
    assert rule.endswith(": |") is number


def test_csv_can_be_read_back(tmp_path):
    rows = [{"plan": "7-1", "note": 'a, "b"'}, {"plan": "8", "note": ""}]
    path = write_csv(tmp_path / "deep" / "rows.csv", rows)
    with path.open(newline="") as file:
        assert list(csv.DictReader(file)) == rows


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"predicted\nchair\n", "no column actual"),
        (b"", "no column actual"),
        (b"actual\n\xff\n", "not text in UTF-8"),
        (b"actual\n" + b"a" * 200_000, "field larger than"),
    ],
)
def test_a_table_has_the_columns_that_are_needed(tmp_path, content, why):
    (tmp_path / "table.csv").write_bytes(content)
    with pytest.raises(ValueError, match=why):
        read_csv(tmp_path / "table.csv", "actual")


def test_cells_stay_text_whatever_a_row_lacks_or_has_too_many(tmp_path):
    (tmp_path / "table.csv").write_text('actual,shapes\n"a,b"\nc,01,more\n')
    found = read_csv(tmp_path / "table.csv", "actual", "shapes")
    assert found == [{"actual": "a,b", "shapes": ""}, {"actual": "c", "shapes": "01"}]
