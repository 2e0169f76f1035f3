"""The notebooks: stored without outputs, whole as code, and they run."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIGURES = {"tour": 5, "partition_explorer": 4, "table2": 5}
"""Pictures that they draw."""


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_of(notebook: nbformat.NotebookNode) -> list[str]:
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return [re.sub(r"^%.*", "", source, flags=re.MULTILINE) for source in cells]


def named(path: Path) -> str:
    return path.stem


def test_there_are_notebooks() -> None:
    assert set(FIGURES) == {path.stem for path in NOTEBOOKS}


def test_an_extra_brings_what_the_readme_opens_them_with() -> None:
    """At versions that are pinned: ``jupyter lab`` is a command of the package jupyterlab."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {each.partition(">=")[0] for each in project["optional-dependencies"]["notebooks"]}
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    told = r"`pip install -c constraints.txt -e '\.\[notebooks\]'`, `jupyter (\w+) (\w+)`"
    ((program, directory),) = re.findall(told, readme)
    assert f"jupyter{program}" in needed
    assert ROOT / directory == NOTEBOOKS[0].parent
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert needed <= set(re.findall(r"^([\w.-]+)==", constraints, re.MULTILINE))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), "clear all outputs before a commit"
        assert cell.get("execution_count") is None
        assert not cell.metadata, "of whoever ran it last"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}
    assert notebook.cells[0].source.startswith("# "), "a title"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_code_fits_a_page_and_finds_what_it_imports(path: Path) -> None:
    code = code_of(read(path))
    assert max(len(line) for source in code for line in source.splitlines()) <= 100
    nodes = [node for source in code for node in ast.walk(ast.parse(source))]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports
    exec(compile(ast.Module(body=imports, type_ignores=[]), str(path), "exec"), {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert not [t for t in targets if not t.startswith("http") and not (path.parent / t).exists()]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """notebooks/ of a fresh clone, with recorded ledgers and no runs of one's own."""
    found = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", found)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    return tmp_path / "notebooks"


def pictures_of(notebook: nbformat.NotebookNode, place: Path) -> int:
    """How many it draws, without a word on stderr."""
    where = {"metadata": {"path": str(place)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_it_runs(path: Path, clone: Path) -> None:
    assert pictures_of(read(path), clone) == FIGURES[path.stem]


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "mb_per_s", "model"),
    [({"TITAN Xp": 1}, 5, "eq4"), ({"RTX 2080 Ti": 2, "TITAN V": 3}, 150, "pipedream")],
    ids=["one", "two_kinds"],
)
def test_other_devices_and_links_can_be_explored(
    clone: Path, devices: dict[str, int], mb_per_s: float, model: str
) -> None:
    """Also what the notebook claims of its searches, which it asserts."""
    notebook = read(ROOT / "notebooks" / "partition_explorer.ipynb")
    (asked,) = (cell for cell in notebook.cells if cell.source.startswith("DEVICES = "))
    asked.source = f"DEVICES = {devices}\nBANDWIDTH_MB_PER_S = {mb_per_s}\nMODEL = {model!r}"
    assert pictures_of(notebook, clone) == FIGURES["partition_explorer"]


@pytest.mark.full
def test_a_first_sweep_without_a_finished_run_does_not_hide_the_recorded_ledger(
    clone: Path,
) -> None:
    begun = clone.parent / "outputs" / "table2" / "0123456789ab"
    begun.mkdir(parents=True)
    (begun / "config.yaml").write_text("name: table2\n")
    assert pictures_of(read(ROOT / "notebooks" / "table2.ipynb"), clone) == FIGURES["table2"]
