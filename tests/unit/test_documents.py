"""What the documents promise: links lead somewhere, code runs, commands exist."""

from __future__ import annotations

import contextlib
import io
import re
import tomllib
from pathlib import Path

import pytest
import torch

from sparsepipe.schedule import Plan

ROOT = Path(__file__).parents[2]
PIPELINES = ROOT / "docs" / "pipeline.md"
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "outputs/*.md", "experiments/**/*.md")
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    missing = [
        target
        for target in targets
        if not target.startswith("http") and not (document.parent / target).exists()
    ]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_named_in_text_exist(document: Path) -> None:
    named = re.findall(
        r"`((?:docs|conf|benchmarks|sparsepipe|tests)/[\w/.]+\.\w+)`", document.read_text()
    )
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_directories_that_a_command_takes_from_variables_may_have_spaces(document: Path) -> None:
    assert not re.findall(r'(?<!")\b[\w.]+\.root=\$\w+', document.read_text())


def test_extras_are_installed_from_the_checkout() -> None:
    """No index has the package. Versions are those of the other packages there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    told = [
        command
        for document in DOCUMENTS
        for command in re.findall(r"pip install [^`\n]*", document.read_text())
    ]
    found = [
        re.fullmatch(r"pip install -c constraints\.txt -e (?:\.|'\.\[(\w+)\]')", c) for c in told
    ]
    assert None not in found, told
    assert {each[1] for each in found if each and each[1]} == set(
        project["optional-dependencies"]
    ) - {"dev"}


def test_code_of_the_page_on_sparse_layers_runs() -> None:
    page = (ROOT / "docs" / "backends.md").read_text()
    blocks = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "print(" in block
    ]
    assert blocks
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "backends.md", "exec"), {})
        promised = re.findall(r"print\(.*\)\s+# (.+)", block)
        assert printed.getvalue().splitlines() == promised


def test_layers_are_numbered_as_the_document_on_pipelines_says() -> None:
    """Its example cuts before the first convolution of 512 channels."""
    document = PIPELINES.read_text()
    (code,) = re.findall(r'^python -c "(.*)"$', document, re.MULTILINE)
    printed = io.StringIO()
    # Without memory: initial weights would take seconds.
    with contextlib.redirect_stdout(printed), torch.device("meta"):
        exec(compile(code, "pipeline.md", "exec"), {})
    assert "parallel.plan.cuts=[24]" in document
    assert re.search(r"^\s*\(24\): Conv3d\(256, 512", printed.getvalue(), re.MULTILINE)
    assert "  (51): Linear(" in printed.getvalue()
    assert "(52)" not in printed.getvalue()


def test_the_plan_file_of_the_document_is_one() -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", PIPELINES.read_text(), re.DOTALL)
    stages = Plan.from_json(shown).stages
    assert [(stage.layers, len(stage.devices)) for stage in stages] == [((0, 23), 2), ((24, 51), 1)]


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= targets
    assert not [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)]
