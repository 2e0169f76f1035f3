"""House rules that the import contracts cannot express."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sparsepipe"
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_distributed_is_used_in_runtime_only(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] == "runtime":
        pytest.skip("the room that may")
    users = {n for n in imported(ast.parse(path.read_text())) if n.startswith("torch.distributed")}
    assert not users, f"{path} uses {sorted(users)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_stays_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 330, "one idea a file: split it"
