"""The notebooks: stored without outputs, whole as code, and they run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIGURES = {"tour": 5, "partition_explorer": 4, "table2": 5}
"""Pictures that they draw, where somebody has counted."""

SWEEPS = {
    "table2": (
        "experiment=table2", "scale=smoke", "trial=one_device,largest_batch", "data.resolution=32",
        "network=dense,sparse_p025",
        "data.source.train_per_class=1", "data.source.test_per_class=1",
    ),
}  # fmt: skip
"""Whose runs they look at, where they look at runs: a few, made before they run."""


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_of(notebook: nbformat.NotebookNode) -> list[str]:
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return [re.sub(r"^%.*", "", source, flags=re.MULTILINE) for source in cells]


def named(path: Path) -> str:
    return path.stem


def test_there_are_notebooks() -> None:
    assert set(FIGURES) <= {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_outputs_are_stripped(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs, "clear all outputs before a commit"
            assert cell.execution_count is None
        assert not cell.metadata, "of whoever ran it last"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_code_is_python_that_fits_a_page(path: Path) -> None:
    notebook = read(path)
    assert notebook.cells[0].source.startswith("# "), "a title"
    for source in code_of(notebook):
        ast.parse(source)
        assert max(map(len, source.splitlines()), default=0) <= 100


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_what_is_imported_is_there(path: Path) -> None:
    imports = [
        node
        for source in code_of(read(path))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert imports
    exec(compile(ast.Module(body=imports, type_ignores=[]), str(path), "exec"), {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert not [t for t in targets if not t.startswith("http") and not (path.parent / t).exists()]


def sweep(place: Path, *overrides: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparsepipe", "-m", *overrides],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", found)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    if path.stem in SWEEPS:
        sweep(tmp_path, *SWEEPS[path.stem])
    notebook = read(path)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=place).execute()
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == FIGURES.get(path.stem, len(pictures)) > 0
