"""What a report's files hold, read back by other means."""

from __future__ import annotations

import base64
import csv
import html
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sparsepipe.paper.chapters import CHAPTERS
from sparsepipe.paper.printed import CITATION, CITATION_OF_DEPTH
from sparsepipe.plots import style
from sparsepipe.report.documents import FilledChapter, fill, write_report
from sparsepipe.report.measurements import plain_rows
from tests.support.picture_checks import has_colour, pixels, texts_outside
from tests.support.report_cases import fitting, run, training
from tests.unit.paper.test_chapters import fitting8, refused, simulated

TABLE2 = [
    training("dense", 32, epoch_s=40),
    training("sparse", 32, epoch_s=25, test=0.84, seed=0),
    training("sparse", 32, epoch_s=25, test=0.88, seed=1, git_commit="def456789012345-dirty"),
    training("sparse", 32, ranks=4, epoch_s=30),
    fitting("dense", 32, batch=60),
]
TABLE1 = [
    run("table1", "table1", measured_device="Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
        flops_per_s=1.9e11, copied_bytes_per_s=1.5e10, threads_per_rank=2),
    run("table1", "table1", measured_device="NVIDIA GeForce RTX 2080 Ti",
        flops_per_s=9.1e12, copied_bytes_per_s=3e11, hardware_accelerator="cuda"),
]  # fmt: skip
FIG8 = [fitting8("sparse", 32), fitting8("sparse", 50), refused("dense", 100)]
FIG9 = [simulated("dp", 5, 0.8), simulated("hete_mp", 5, 0.4), simulated("paper_mp", 8, 0.4)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[FilledChapter]]:
    directory = tmp_path_factory.mktemp("report")
    given = {"table2": TABLE2, "fig8": FIG8, "fig9": FIG9}
    chapters = write_report(
        directory, "Ours & theirs", [(CHAPTERS[name], rows) for name, rows in given.items()]
    )
    return directory, chapters


class Page(HTMLParser):
    """Tables, links and pictures of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.opened: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "link", "br"):
            self.opened.append(tag)
        given = dict(attrs)
        self.sources += [str(given[name]) for name in ("src", "href") if name in given]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag, "tags are closed in their order"

    def handle_data(self, data: str) -> None:
        if self.opened and {"td", "th"} & set(self.opened):
            self.tables[-1][-1][-1] += data.replace("\n", "")


def test_the_page_needs_nothing_beside_it(written: tuple[Path, list[FilledChapter]]) -> None:
    text = (written[0] / "report.html").read_text()
    page = Page(text)
    assert not page.opened
    assert "<title>Ours &amp; theirs</title>" in text
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "http" not in text
    assert "url(" not in text
    inlined = [source for source in page.sources if not source.startswith("#")]
    assert len(inlined) == 3
    for source in inlined:
        kind, _, content = source.partition(",")
        assert kind == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(content))) as picture:
            picture.verify()
    assert "@media print" in text


def test_the_page_has_ours_beside_the_papers(written: tuple[Path, list[FilledChapter]]) -> None:
    page = Page((written[0] / "report.html").read_text())
    table = page.tables[0]
    heads = table[1]
    assert heads[:7] == ["grid", "devices", "network", "p", "paper", "ours", "paper"]
    (sparse,) = [row for row in table if row[:4] == ["32³", "1", "sparse", "1"]]
    assert sparse[6] == "86.28"
    assert re.sub(r"\s+", " ", sparse[7]) == "86.00 A, B84.00 to 88.00, 2 runs"
    assert all(len(row) == len(heads) for row in table[2:])


def test_the_page_lists_where_figures_were_taken(written: tuple[Path, list[FilledChapter]]) -> None:
    page = Page((written[0] / "report.html").read_text())
    places = next(table for table in page.tables if table[0][1:3] == ["kind", "hardware"])
    assert places[1] == [
        "A", "measured", "2 x Xeon (cpu), 2 cores",
        "python 3.11.7, torch 2.13.0, sparsepipe 0.1.0", "abc123", "4",
    ]  # fmt: skip
    assert places[2][4:] == ["def456789012-dirty", "1"]


def test_markdown_has_the_same(written: tuple[Path, list[FilledChapter]]) -> None:
    text = (written[0] / "report.md").read_text()
    (row,) = re.findall(r"^\| 32³ +\| +1 \| sparse +\| +1 \|(.*)\|$", text, re.MULTILINE)
    cells = [part.strip() for part in row.split("|")]
    assert cells[2:4] == ["86.28", "86.00 (84.00 to 88.00, 2 runs) [A, B]"]
    (number,) = set(re.findall(r"no speedup \[A, (\d+)\]", text))
    assert f"- [{number}] no speedup: 4 ranks share 2 cores" in text
    assert "![Table II" in text
    for name in re.findall(r"\]\((\w+\.png)\)", text):
        assert (written[0] / name).exists()


def test_words_and_bounds_are_distinguished_from_figures(tmp_path: Path) -> None:
    dense = fitting("dense", 32, batch=4, refused_batch=None, limited_by="most")
    rows = [training("sparse", 32), training("sparse", 32, ranks=4), dense]
    write_report(tmp_path, "Some", [(CHAPTERS["table2"], rows)])
    told = "figures are filled in, 3 of them in words or as a bound."
    with (tmp_path / "table2.csv").open(encoding="utf-8") as stream:
        ours = [row["ours"] for row in csv.DictReader(stream) if row["status"] == "there"]
    assert sorted(each for each in ours if not re.fullmatch(r"[\d.]+", each)) == [
        "no speedup", "≥ 4", "≥ 4",
    ]  # fmt: skip
    for name in ("report.md", "report.html"):
        assert f"{len(ours)} of 96 {told}" in (tmp_path / name).read_text(encoding="utf-8")
    write_report(tmp_path, "Some", [(CHAPTERS["table2"], rows[:1])])
    assert "figures are filled in." in (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", ["report.md", "report.html"])
@pytest.mark.parametrize(
    ("names", "general", "of_depth"),
    [
        (["pipeline_depth"], CITATION_OF_DEPTH, False),
        (["table3", "pipeline_depth"], CITATION, True),
        (["table3"], CITATION, False),
    ],
)
def test_each_chapter_says_whose_figures_it_has(
    tmp_path: Path, file: str, names: list[str], general: str, of_depth: bool
) -> None:
    write_report(tmp_path, "Some", [(CHAPTERS[name], []) for name in names])
    text = " ".join(html.unescape((tmp_path / file).read_text(encoding="utf-8")).split())
    begin = 'olumns "paper" show values printed in: '
    start, *others = text.split(begin)[1:]
    assert start.startswith(f"{general}. ")
    assert [other.startswith(f"{CITATION_OF_DEPTH}.") for other in others] == [True] * of_depth


def test_csv_has_a_row_for_each_cell(written: tuple[Path, list[FilledChapter]]) -> None:
    with (written[0] / "table2.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 16 * 6

    def row(**wanted: str) -> dict[str, Any]:
        (found,) = [r for r in rows if all(r[key] == item for key, item in wanted.items())]
        return found

    test = row(grid="32³", devices="1", network="sparse", p="1", quantity="test_accuracy")
    assert (test["paper"], test["paper_source"]) == ("86.28", "printed")
    assert [float(test[key]) for key in ("ours", "ours_least", "ours_most")] == [86, 84, 88]
    assert (test["averaged"], test["status"]) == ("2", "there")
    assert test["commit"] == "abc123; def456789012345-dirty"
    assert (test["compared"], test["comparison"]) == ("", "not"), "of generated shapes"
    lacking = row(grid="50³", devices="4", network="dense", quantity="speedup")
    assert (lacking["status"], lacking["ours"], lacking["compared"]) == ("missing", "", "")
    crowded = row(grid="32³", devices="4", network="sparse", p="1", quantity="speedup")
    assert (crowded["ours"], crowded["note"]) == ("no speedup", "no speedup: 4 ranks share 2 cores")


@pytest.mark.parametrize(
    ("name", "rows"), [("table2", TABLE2), ("fig8", FIG8), ("fig9", FIG9), ("table1", TABLE1)]
)
def test_pictures_show_all_of_it(name: str, rows: list[dict[str, Any]]) -> None:
    for figure in fill(CHAPTERS[name], rows).figures.values():
        assert texts_outside(figure) == []
        assert min(axes.get_window_extent().width for axes in figure.axes) > 2 * style.DPI
        image = pixels(figure)
        assert all(has_colour(image, colour) > 40 for colour in (style.BLUE, style.INK))


def test_a_report_of_the_same_runs_is_the_same(tmp_path: Path) -> None:
    for name in ("first", "again"):
        write_report(tmp_path / name, "Fig. 9", [(CHAPTERS["fig9"], FIG9)])
    first = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert sorted(first) == ["fig9.csv", "fig9_3.png", "report.html", "report.md"]


def test_rows_of_a_ledger_lose_what_they_lack() -> None:
    rows = plain_rows([{"a": None, "b": "[1, 2]", "c": "[open", "d": 0, "e": "{}"}])
    assert rows == [{"b": [1, 2], "c": "[open", "d": 0, "e": {}}]
