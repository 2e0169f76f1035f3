"""House rules that the import contracts cannot express."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sparsepipe"
FILES = sorted(PACKAGE.rglob("*.py"))
OPEN_TO_ALL = {"errors", "utils"}
NO_ROOMS = {*OPEN_TO_ALL, "__init__", "__main__"}


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


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def table() -> dict[str, set[str]]:
    """What docs/architecture.md lets each room import."""
    allowed: dict[str, set[str]] = {}
    text = (ROOT / "docs" / "architecture.md").read_text()
    for room, may in re.findall(r"^\| `(\w+)(?:/|\.py)` \|.*\| ([^|]*) \|$", text, re.MULTILINE):
        named = set(re.findall(r"`(\w+)`", may))
        allowed[room] = set(allowed) if may == "all above" else named
    return allowed


def test_the_table_names_every_room() -> None:
    assert set(table()) == {room_of(path) for path in FILES} - NO_ROOMS


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_what_the_table_says(path: Path) -> None:
    room = room_of(path)
    if room in NO_ROOMS:
        pytest.skip("no room")
    names = {name.split(".")[1] for name in imported(ast.parse(path.read_text()))
             if name.startswith("sparsepipe.")}  # fmt: skip
    beyond = (names & set(table())) - table()[room] - {room}
    assert not beyond, f"{path} imports {sorted(beyond)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_distributed_is_used_in_runtime_only(path: Path) -> None:
    if room_of(path) == "runtime":
        pytest.skip("the room that may")
    users = {n for n in imported(ast.parse(path.read_text())) if n.startswith("torch.distributed")}
    assert not users, f"{path} uses {sorted(users)}"


@pytest.mark.parametrize(
    "path",
    [*FILES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_a_file_stays_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600, "one idea a file: split it"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_what_needs_a_cuda_device_has_a_file_of_its_own(path: Path) -> None:
    tree = ast.parse(path.read_text())
    words = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute | ast.UnaryOp)}
    names = {ast.unparse(n) for node in tree.body if isinstance(node, ast.Assign)
             and ast.unparse(node.targets[0]) == "pytestmark"
             for n in ast.walk(node.value) if isinstance(n, ast.Attribute)}  # fmt: skip
    if re.fullmatch(r"test_\w+_cuda\.py", path.name):
        place = path.parent.relative_to(ROOT / "tests").parts
        assert place == ("integration",) or (len(place), place[0]) == (2, "unit"), "in its room"
        assert "pytest.mark.cuda" in names, "mark all of the file"
    else:
        assert not words & {"pytest.mark.cuda", "not torch.cuda.is_available()"}, (
            "move the tests that need a device to a test_*_cuda.py of this room"
        )


def test_no_two_files_import_each_other() -> None:
    """Directly or by way of others; imports within functions and for types count as well."""
    files = {dotted(path): path for path in FILES}
    ahead = {name: needed(ast.parse(path.read_text()), set(files)) for name, path in files.items()}
    while leaves := {name for name, needs in ahead.items() if not needs & set(ahead)}:
        ahead = {name: needs for name, needs in ahead.items() if name not in leaves}
    assert not ahead, f"import each other, or are imported by those that do: {sorted(ahead)}"


def needed(tree: ast.AST, files: set[str]) -> set[str]:
    """Modules that are imported; of a package the module that is meant, if one is."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in files else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & files


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


INTERNALS = {"strategies/trainer_internals.py", "strategies/metrics.py"}
NOT_LIGHTNINGS = {
    "_pytree", "_version", "_buffers", "_modules", "_parameters", "_metadata", "_C", "_cdata",
    "_storage_Use_Count", "_foreach_norm", "_opt_called", "_BatchNorm", "_NormBase", "_timeout",
    "_get_default_store", "_get_backend", "_load_from_state_dict", "_exit", "_ncallbacks",
    "_run_exitfuncs", "_processes", "_caches", "_make", "_target_", "_replace", "_asdict",
    "_fields", "_value_",
}  # fmt: skip
"""Private names of torch and others, which have their tests where they are used."""


def test_private_names_of_lightning_are_used_in_one_file_only() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    own = {name for tree in trees.values() for name in defined(tree)}
    internals = {str(path.relative_to(PACKAGE)): path for path in FILES}
    of_lightning = {name for file in INTERNALS for name, _ in private(trees[internals[file]])}
    of_lightning -= NOT_LIGHTNINGS | defined(trees[internals["strategies/metrics.py"]])
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in trees.items()
        if str(path.relative_to(PACKAGE)) not in INTERNALS
        for name, line in private(tree)
        if name not in NOT_LIGHTNINGS and (name in of_lightning or name not in own)
    ]
    assert not found, f"move it to strategies/trainer_internals.py: {found}"


def private(tree: ast.AST) -> list[tuple[str, int]]:
    """Private names that are imported from elsewhere, or read of anything but self, with lines."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                found.append((node.attr, node.lineno))
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("sparsepipe"):
            found += [(alias.name, node.lineno) for alias in node.names]
    return [(n, line) for n, line in found if n.startswith("_") and not n.startswith("__")]


def defined(tree: ast.AST) -> set[str]:
    """Names of functions, classes, attributes and slots that a file defines."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found
