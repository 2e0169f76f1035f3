"""House rules that the import contracts cannot express."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sparsepipe"
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OPEN_TO_ALL = {"errors", "utils"}
NO_ROOMS = {*OPEN_TO_ALL, "__init__", "__main__"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> frozenset[str]:
    """Modules and what is imported of them, and attributes with the names they are read of."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(attribute(node))
    return frozenset(names)


def attribute(node: ast.expr) -> str:
    """``a.b.c``; of what is no plain name only the attributes."""
    if isinstance(node, ast.Attribute):
        return f"{attribute(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


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


def test_a_room_imports_what_the_table_says() -> None:
    rooms = table()
    beyond = {}
    for path in FILES:
        if (room := room_of(path)) not in NO_ROOMS:
            names = {n.split(".")[1] for n in imported(path) if n.startswith("sparsepipe.")}
            beyond[str(path)] = (names & set(rooms)) - rooms[room] - {room}
    assert not {path: names for path, names in beyond.items() if names}


def test_torch_distributed_is_used_in_runtime_only() -> None:
    used = {
        str(path): sorted(n for n in imported(path) if n.startswith("torch.distributed"))
        for path in FILES
        if room_of(path) != "runtime"
    }
    assert not {path: names for path, names in used.items() if names}


def test_files_stay_readable() -> None:
    files = [*FILES, *TESTS, *(ROOT / "benchmarks").rglob("*.py")]
    lines = {str(path): len(path.read_text().splitlines()) for path in files}
    long = {path: count for path, count in lines.items() if count > 600}
    assert not long, "one idea a file: split them"


def test_what_needs_a_cuda_device_has_a_file_of_its_own() -> None:
    """In the directory of its room, and all of the file is marked."""
    needs_device = {"pytest.mark.cuda", "not torch.cuda.is_available()"}
    found: list[str] = []
    for path in TESTS:
        text = path.read_text()
        if path.name.endswith("_cuda.py"):
            place = path.parent.relative_to(ROOT / "tests").parts
            if place != ("integration",) and (len(place), place[0]) != (2, "unit"):
                found.append(f"{path}: move it to its room")
            assigned = [n for n in tree_of(path).body if isinstance(n, ast.Assign)]
            marks = [a.value for a in assigned if ast.unparse(a.targets[0]) == "pytestmark"]
            if not any("pytest.mark.cuda" in ast.unparse(mark) for mark in marks):
                found.append(f"{path}: mark all of the file")
        elif any(words in text for words in needs_device):
            nodes = ast.walk(ast.parse(text))
            if needs_device & {ast.unparse(n) for n in nodes if isinstance(n, ast.expr)}:
                found.append(f"{path}: move what needs a device to a test_*_cuda.py of this room")
    assert not found


def test_no_two_files_import_each_other() -> None:
    """Directly or by way of others; imports within functions and for types count as well."""
    files = {dotted(path): path for path in FILES}
    ahead = {name: needed(tree_of(path), set(files)) for name, path in files.items()}
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
    "_fields", "_value_", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks",
    "_get_iterator", "_current_graph_task_id", "_is_torch_function_enabled",
    "_DisableTorchDispatch", "_Unpickler", "_engine_run_backward",
    "_are_functorch_transforms_active", "_global_backward_hooks", "_global_backward_pre_hooks",
    "_input_metadata", "_saved_target", "_get_current_dispatch_mode",
}  # fmt: skip
"""Private names of torch and others, which have their tests where they are used."""


def test_private_names_of_lightning_are_used_in_one_file_only() -> None:
    trees = {path: tree_of(path) for path in FILES}
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


def test_configuration_is_a_run_spec_outside_config() -> None:
    """No parameter, field or result of that name is an untyped mapping."""
    untyped = re.compile(r"\b(Mapping|MutableMapping|dict)\[str, (Any|object)\]")
    offenders = []
    for path in FILES:
        if room_of(path) == "config":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.arg):
                name, hint = node.arg, node.annotation
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name, hint = node.target.id, node.annotation
            elif isinstance(node, ast.FunctionDef):
                name, hint = node.name, node.returns
            else:
                continue
            words = set(name.strip("_").split("_"))
            named = bool(words & {"config", "conf", "configuration", "spec"})
            if named and hint is not None and untyped.search(ast.unparse(hint)):
                offenders.append(f"{path}:{node.lineno}: {name}")
    assert not offenders, f"take a sparsepipe.config.run_spec.RunSpec: {offenders}"
