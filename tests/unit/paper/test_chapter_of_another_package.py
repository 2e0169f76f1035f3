"""A chapter of reports that another package adds: the example of docs/extending.md."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsepipe.errors import ConfigError
from sparsepipe.launch.job import run_job
from sparsepipe.paper import chapters
from tests.support.command_line import composed
from tests.support.reported_runs import leave

TEXT = (Path(__file__).parents[3] / "docs" / "extending.md").read_text(encoding="utf-8")
(TOML,) = re.findall(r"```toml\n(\[project\.entry-points.*?)```", TEXT, re.DOTALL)
(EXAMPLE,) = re.findall(r"```python\n((?:(?!```).)*?CHAPTER = .*?)```", TEXT, re.DOTALL)


@pytest.fixture(autouse=True)
def _look_again() -> Iterator[None]:
    chapters._points.cache_clear()
    yield
    chapters._points.cache_clear()


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """As pip would leave the package."""
    (tmp_path / "width_study.py").write_text(EXAMPLE, encoding="utf-8")
    info = tmp_path / "width_study-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: width_study\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{chapters.GROUP}]\nwidth_study = {target}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_the_example_is_short_and_registers_itself() -> None:
    assert len(EXAMPLE.splitlines()) <= 30
    assert f'"{chapters.GROUP}"' in TOML
    assert 'width_study = "width_study:CHAPTER"' in TOML


def test_a_report_has_the_chapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, "width_study:CHAPTER")
    told = {"name": "width_study", "study.exhibit": "width_study", "study.cell.width": 0.25}
    leave(tmp_path / "outputs", "a", **told, **{"test/accuracy": 0.80})
    leave(tmp_path / "outputs", "b", **told, **{"test/accuracy": 0.82, "seed": 1})
    made = run_job(composed("task=report", "task.exhibits=[width_study]")).path
    with (made / "width_study.csv").open(encoding="utf-8") as stream:
        small, large = csv.DictReader(stream)
    assert float(small["ours"]) == pytest.approx(81)
    assert float(small["compared"]) == pytest.approx(-0.5)
    assert large["status"] == "missing"
    command = "sparsepipe -m experiment=width_study model.width=0.25,1.0"
    assert command in (made / "report.md").read_text(encoding="utf-8")
    assert (made / "width_study.png").exists()
    assert "A Study of Widths" in (made / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("target", ["width_study:MISSING", "absent:CHAPTER", "width_study:PRINTED"])
def test_what_is_no_chapter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    installed(tmp_path, monkeypatch, target)
    with pytest.raises(ConfigError, match="width_study") as refused:
        _ = chapters.CHAPTERS["width_study"]
    assert target in str(refused.value)
    assert "remedy" in str(refused.value)
