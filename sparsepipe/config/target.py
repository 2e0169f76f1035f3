"""Nodes of the configuration with ``_target_``: the callable, its parameters and arguments."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.machinery
import importlib.util
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic_core import PydanticCustomError

from sparsepipe.errors import ConfigError, SparsePipeError
from sparsepipe.utils.extensions import build_node, imported

_PLAIN_BASES = ("ABC", "Protocol", "object")
_MOST_STEPS = 20
"""Largest number of imports and base classes that :func:`names_in_source` follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of a callable.

    Args:
        types: type hint by name; ``Any`` for a parameter without a hint.
        required: names without a default.
        open: whether the callable takes any further keyword arguments (``**kwargs``).
    """

    types: Mapping[str, Any]
    required: tuple[str, ...]
    open: bool


@dataclass(frozen=True, slots=True)
class Target:
    """A callable by its dotted name, with the arguments that the configuration gives it."""

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, node: Any) -> Self:
        """Parses a mapping with ``_target_``; raises a ValueError for other values."""
        if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
            raise PydanticCustomError(
                "node", "should be a mapping with a _target_, as in the files of its group"
            )
        return cls(node["_target_"], {k: v for k, v in node.items() if k != "_target_"})

    def to_dict(self) -> dict[str, Any]:
        return {"_target_": self.path, **self.arguments}

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments except Hydra's instructions, such as ``_partial_``, and nodes to build."""
        return {
            key: value
            for key, value in self.arguments.items()
            if not key.startswith("_") and not (isinstance(value, Mapping) and "_target_" in value)
        }

    @property
    def parameters(self) -> Parameters:
        """The parameters of the callable; raises a ConfigError if it cannot be imported."""
        return parameters_of(self.path)

    def get(self, name: str, default: Any = None) -> Any:
        """The argument ``name``, or ``default`` if the configuration does not give it."""
        return self.arguments.get(name, default)

    def replace(self, **arguments: Any) -> Target:
        """Returns a copy in which these arguments are added, or replace those of the same name."""
        return Target(self.path, {**self.arguments, **arguments})

    def locate(self) -> Any:
        """Imports the callable; raises a ConfigError if it cannot be imported."""
        return imported(self.path)

    def build(self, **given: Any) -> Any:
        """Calls the callable with the arguments of this target, after building those that are nodes
        themselves, and with ``given``, which takes precedence.
        """
        try:
            return build_node(self.to_dict(), **given)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, SparsePipeError):
                    raise cause from None
                cause = cause.__cause__
            raise ConfigError(
                f"{self.path} cannot be built: {error}",
                remedy="correct its arguments; `sparsepipe --cfg job` prints them",
            ) from error

    def build_with(self, **offered: Any) -> Any:
        """Like :meth:`build`; also passes ``offered`` arguments that are accepted but not set."""
        target = self.parameters
        taken = {key: value for key, value in offered.items() if target.open or key in target.types}
        return self.build(**{k: v for k, v in taken.items() if k not in self.arguments})


def parameters_of(path: str) -> Parameters:
    """Imports a callable and reads its signature."""
    found: Any = imported(path)
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return Parameters(types={}, required=(), open=True)  # builtins have no signature
    kinds = inspect.Parameter
    named = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    while isinstance(found, functools.partial):
        found = found.func  # a partial has no hints of its own
    # Hints of a dataclass are read from its fields, each in the module of the class that has it.
    plain = inspect.isclass(found) and not dataclasses.is_dataclass(found)
    try:
        source = inspect.unwrap(found.__init__ if plain else found)
        hints = typing.get_type_hints(source, include_extras=True)
    except Exception:
        hints = {}  # hints that only a type checker can resolve: types are not checked
    return Parameters(
        types={name: hints.get(name, Any) for name in named},
        required=tuple(name for name, value in named.items() if value.default is kinds.empty),
        open=any(p.kind is kinds.VAR_KEYWORD for p in signature.parameters.values()),
    )


def names_in_source(path: str) -> set[str] | None:
    """Names of a callable's parameters, read from its source; None if that does not show all.

    So a misspelt key is reported without importing torch and Lightning, which takes seconds.
    Values are checked once the callable is imported.
    """
    module, _, name = path.rpartition(".")
    names: set[str] = set()
    for _ in range(_MOST_STEPS):  # from an import to its origin, from a class to its base
        file, found = _definition(module, name)
        own = found
        if isinstance(found, ast.ClassDef):
            methods = {each.name: each for each in found.body if isinstance(each, ast.FunctionDef)}
            own = methods.get("__new__") or methods.get("__init__") or found
        if isinstance(found, ast.ImportFrom):
            (name,) = (each.name for each in found.names if (each.asname or each.name) == name)
            package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
            origin = "." * found.level + (found.module or "")
            module = importlib.util.resolve_name(origin, package)
        elif isinstance(found, ast.Assign) and ast.unparse(found.value).startswith("partial("):
            assert isinstance(found.value, ast.Call)
            name = ast.unparse(found.value.args[0])
        elif isinstance(own, ast.FunctionDef) and own.name != "__new__" and not own.args.kwarg:
            listed = [*own.args.posonlyargs, *own.args.args, *own.args.kwonlyargs]
            return names | {each.arg for each in listed}
        elif isinstance(own, ast.ClassDef) and len(own.bases) < 2:
            annotated = (each for each in own.body if isinstance(each, ast.AnnAssign))
            names |= {ast.unparse(each.target) for each in annotated}
            if not own.bases or (name := ast.unparse(own.bases[0])) in _PLAIN_BASES:
                return names
        else:
            return None
    return None


@functools.lru_cache(maxsize=256)
def _definition(module: str, name: str) -> tuple[str, ast.stmt | None]:
    """Finds a module's file, not imported, and the last statement in it that binds ``name``."""
    path, file = None, ""
    for part in module.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, path)
        path, file = (spec.submodule_search_locations, spec.origin or "") if spec else ([], "")
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return file, None
    branches = (inner for each in body if isinstance(each, ast.If) for inner in each.body)
    for node in reversed([*branches, *body]):
        if isinstance(node, ast.ImportFrom):
            bound = [each.asname or each.name for each in node.names]
        elif isinstance(node, ast.Assign):
            bound = [ast.unparse(each) for each in node.targets]
        else:
            bound = [getattr(node, "name", "")]
        if name in bound:
            return file, node
    return file, None
