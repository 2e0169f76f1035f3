"""Parameters of classes and functions, read from their source files without importing them.

Importing a network or a callback imports torch and Lightning, which takes seconds; checking its
arguments needs its signature only. What source cannot show for certain (decorators that change a
signature, metaclasses, modules that are compiled) is left to an import.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import importlib.util
import operator
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

_IMPORTED = frozenset({*sys.stdlib_module_names, "typing_extensions"})
"""Packages that are cheap to import, so that their types are looked up in earnest."""
_PLAIN_BASES = frozenset({"ABC", "Generic", "Protocol", "object"})
"""Base classes that take no arguments."""
_HARMLESS = frozenset({"classmethod", "final", "override", "runtime_checkable", "staticmethod"})
"""Decorators that leave a signature as it is."""
_MOST_STEPS = 40
"""Imports followed from one module to the next, and bases from one class to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of a callable.

    Args:
        types: type hint by name; ``Any`` where there is none.
        required: those without a default.
        open: any further keyword is taken as well.
    """

    types: Mapping[str, Any]
    required: tuple[str, ...]
    open: bool


class Unreadable(Exception):
    """Source does not show what was looked for."""


class _Opaque:
    """Stands for every class that is not imported: a value is never one of its instances."""


class _ImportedName(NamedTuple):
    module: str
    name: str | None
    """None: the module itself."""


_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Binding = _Function | ast.ClassDef | ast.expr | _ImportedName


@dataclass(frozen=True, eq=False, slots=True)
class _Module:
    name: str
    search: Sequence[str] | None
    names: Mapping[str, _Binding]
    stars: Sequence[str]
    """Modules of which all names are imported."""


_Found = tuple[_Module, _Binding] | _Module


def source_parameters(target: str) -> Parameters:
    """Reads the parameters of a class or function from its source.

    Raises:
        Unreadable: only an import can show them, or that there is no such thing.
    """
    module, definition = _definition(target)
    if isinstance(definition, ast.ClassDef):
        return _class_parameters(module, definition)
    if isinstance(definition, _Function):
        is_method = any(_last_name(each) == "classmethod" for each in definition.decorator_list)
        return _function_parameters(module, definition, num_bound=int(is_method))
    if isinstance(definition, ast.Call) and _last_name(definition) == "partial":
        return _partial_parameters(module, definition)
    raise Unreadable(target)


def has_attribute_in_source(target: str, attribute: str) -> bool:
    """Whether a class has this attribute, or a module sets it of one of its functions.

    Raises:
        Unreadable: the source is not found.
    """
    module, definition = _definition(target)
    if isinstance(definition, ast.ClassDef):
        lines = (entry for _, each in _with_bases(module, definition) for entry in each.body)
        return any(name == attribute for line in lines for name, _ in _bindings(line, ""))
    return isinstance(definition, _Function) and f"{definition.name}.{attribute}" in module.names


def _definition(target: str) -> tuple[_Module, _Binding]:
    """Finds the longest part of the name that is a module, then what it holds."""
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = _module(".".join(parts[:length]))
        if module is None:
            continue
        found = _follow(module, parts[length])
        for name in parts[length + 1 :]:
            found = _member(found, name)
        if isinstance(found, _Module):
            break
        _require_imports(found[0])
        return found
    raise Unreadable(target)


def _member(found: _Found, name: str) -> _Found:
    if isinstance(found, _Module):
        return _follow(found, name)
    module, definition = found
    if isinstance(definition, ast.ClassDef):
        for owner, each in _with_bases(module, definition):
            for entry in each.body:
                if isinstance(entry, _Function) and entry.name == name:
                    return owner, entry
    raise Unreadable(name)


def _follow(module: _Module, name: str, *, steps: int = _MOST_STEPS) -> _Found:
    """The definition that a name of a module refers to, through imports of other modules."""
    if not steps:
        raise Unreadable(name)
    binding = module.names.get(name)
    if isinstance(binding, _ImportedName):
        origin = _module(binding.module)
        if origin is None:
            raise Unreadable(binding.module)
        return origin if binding.name is None else _follow(origin, binding.name, steps=steps - 1)
    if binding is not None:
        if isinstance(binding, ast.Name) and binding.id != name:  # another name for the same
            return _follow(module, binding.id, steps=steps - 1)
        return module, binding
    for star in module.stars:
        origin = _module(star)
        if origin is not None and origin is not module:
            try:
                return _follow(origin, name, steps=steps - 1)
            except Unreadable:
                continue
    below = _module(f"{module.name}.{name}") if module.search else None
    if below is None:
        raise Unreadable(f"{module.name}.{name}")
    return below


# Modules.


def _module(name: str) -> _Module | None:
    """The source of a module; None where there is no such module or no source."""
    spec = _spec(name)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        changed = Path(spec.origin).stat().st_mtime_ns
        search = tuple(spec.submodule_search_locations or ())
        return _parse(name, spec.origin, search, changed)
    except (OSError, SyntaxError, ValueError):
        return None


def _spec(name: str) -> ModuleSpec | None:
    """Finds a module as an import would, but imports none of the packages it is in."""
    top, *below = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # such as that of __main__
        return None
    for length in range(2, len(below) + 2):
        if spec is None or spec.submodule_search_locations is None:
            return None
        full_name = ".".join(name.split(".")[:length])
        spec = PathFinder.find_spec(full_name, list(spec.submodule_search_locations))
    return spec


@functools.lru_cache(maxsize=256)
def _parse(name: str, path: str, search: tuple[str, ...], changed: int) -> _Module:
    del changed  # part of the cache's key: a file that was written anew is read anew
    tree = ast.parse(Path(path).read_bytes())
    package = name if search else name.rpartition(".")[0]
    names: dict[str, _Binding] = {}
    stars: list[str] = []
    for statement in _statements(tree.body):
        for bound, binding in _bindings(statement, package):
            if bound == "*":
                assert isinstance(binding, _ImportedName)
                stars.append(binding.module)
            else:
                names[bound] = binding
    return _Module(name, search, names, stars)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements; those of a first branch come last, so that they win over the others."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _statements(statement.orelse)
            yield from _statements(statement.body)
        elif isinstance(statement, ast.Try):
            yield from (
                each for handler in statement.handlers for each in _statements(handler.body)
            )
            yield from _statements([*statement.body, *statement.orelse])
        else:
            yield statement


def _bindings(statement: ast.stmt, package: str) -> Iterator[tuple[str, _Binding]]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name, statement
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            top = alias.name.partition(".")[0]
            yield alias.asname or top, _ImportedName(alias.name if alias.asname else top, None)
    elif isinstance(statement, ast.ImportFrom):
        origin = _origin(statement, package)
        for alias in statement.names:
            yield alias.asname or alias.name, _ImportedName(origin, alias.name)
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        yield ast.unparse(statement.targets[0]), statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield ast.unparse(statement.target), statement.value


def _origin(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    parts = package.split(".")
    kept = parts[: len(parts) - statement.level + 1]
    return ".".join([*kept, statement.module] if statement.module else kept)


def _require_imports(module: _Module) -> None:
    """Leaves a module that needs a package which is not installed to an import, which names it."""
    for binding in module.names.values():
        if isinstance(binding, _ImportedName):
            top = binding.module.partition(".")[0]
            if top not in _IMPORTED and top not in sys.modules and _spec(top) is None:
                raise Unreadable(top)


# Signatures.


def _function_parameters(module: _Module, function: _Function, *, num_bound: int) -> Parameters:
    """Parameters after the first ``num_bound``, such as ``self``."""
    _refuse_decorators(function)
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    named = [
        (each, position < num_required)
        for position, each in enumerate(positional)
        if position >= max(num_bound, len(arguments.posonlyargs))
    ]
    named += [
        (each, default is None)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return Parameters(
        types={each.arg: _type(module, each.annotation) for each, _ in named},
        required=tuple(each.arg for each, is_required in named if is_required),
        open=arguments.kwarg is not None,
    )


def _partial_parameters(module: _Module, call: ast.Call) -> Parameters:
    """The parameters that ``functools.partial(function, ...)`` leaves open."""
    found = _follow_expression(module, call.args[0])
    owner, function = found if isinstance(found, tuple) else (found, None)
    if not isinstance(function, _Function):
        raise Unreadable(ast.unparse(call))
    whole = _function_parameters(owner, function, num_bound=len(call.args) - 1)
    given = {each.arg for each in call.keywords}
    required = tuple(name for name in whole.required if name not in given)
    return dataclasses.replace(whole, required=required)


def _refuse_decorators(definition: _Function | ast.ClassDef) -> None:
    for decorator in definition.decorator_list:
        if _last_name(decorator) not in _HARMLESS:
            raise Unreadable(definition.name)


def _class_parameters(module: _Module, definition: ast.ClassDef) -> Parameters:
    """The parameters of the constructor."""
    for owner, each in _with_bases(module, definition):
        methods = {entry.name: entry for entry in each.body if isinstance(entry, _Function)}
        if "__new__" in methods or any(_last_name(key.value) != "ABCMeta" for key in each.keywords):
            raise Unreadable(each.name)
        if "__init__" in methods:
            return _function_parameters(owner, methods["__init__"], num_bound=1)
        if _is_dataclass(each):
            return _dataclass_parameters(owner, each)
        _refuse_decorators(each)
    return Parameters(types={}, required=(), open=False)


def _with_bases(
    module: _Module, definition: ast.ClassDef, *, steps: int = _MOST_STEPS
) -> Iterator[tuple[_Module, ast.ClassDef]]:
    """A class and the classes it inherits from, nearest first."""
    yield module, definition
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in definition.bases]
    bases = [base for base in bases if _last_name(base) not in _PLAIN_BASES]
    if len(bases) > 1 or not steps:
        raise Unreadable(definition.name)
    for base in bases:
        found = _follow_expression(module, base)
        if isinstance(found, _Module) or not isinstance(found[1], ast.ClassDef):
            raise Unreadable(definition.name)
        yield from _with_bases(found[0], found[1], steps=steps - 1)


def _is_dataclass(definition: ast.ClassDef) -> bool:
    return any(_last_name(each) == "dataclass" for each in definition.decorator_list)


def _dataclass_parameters(module: _Module, definition: ast.ClassDef) -> Parameters:
    types: dict[str, Any] = {}
    required: dict[str, bool] = {}
    for owner, each in reversed([*_with_bases(module, definition)]):
        if not _is_dataclass(each):
            continue
        for entry in each.body:
            if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
                continue
            if _last_name(entry.annotation) in ("ClassVar", "KW_ONLY"):
                continue
            options = _field_options(entry.value)
            name = entry.target.id
            if ast.unparse(options.get("init", ast.Constant(True))) == "False":
                continue
            types[name] = _type(owner, entry.annotation)
            required[name] = not options.keys() & {"default", "default_factory"}
    return Parameters(
        types=types,
        required=tuple(name for name, is_required in required.items() if is_required),
        open=False,
    )


def _field_options(value: ast.expr | None) -> dict[str, ast.expr]:
    """Arguments of ``field(...)``; a plain value is a default."""
    if isinstance(value, ast.Call) and _last_name(value.func) == "field":
        return {each.arg: each.value for each in value.keywords if each.arg}
    return {} if value is None else {"default": value}


def _last_name(node: ast.expr) -> str:
    if isinstance(node, (ast.Call, ast.Subscript)):
        return _last_name(node.func if isinstance(node, ast.Call) else node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _follow_expression(module: _Module, node: ast.expr) -> _Found:
    if isinstance(node, ast.Name):
        return _follow(module, node.id)
    if isinstance(node, ast.Attribute):
        return _member(_follow_expression(module, node.value), node.attr)
    raise Unreadable(ast.unparse(node))


# Type hints.


def _type(module: _Module, node: ast.expr | None) -> Any:
    """A type hint as an object; ``Any`` where it cannot be read."""
    try:
        return Any if node is None else _evaluate(module, node)
    except (AttributeError, NameError, SyntaxError, TypeError, ValueError, Unreadable):
        return Any


def _evaluate(module: _Module, node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return _evaluate(module, ast.parse(node.value, mode="eval").body)
        return type(None) if node.value is None else node.value
    if isinstance(node, ast.BinOp):
        return operator.or_(_evaluate(module, node.left), _evaluate(module, node.right))
    if isinstance(node, ast.Subscript):
        return _subscripted(module, _evaluate(module, node.value), node.slice)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _named_type(module, node)
    raise Unreadable(ast.unparse(node))


def _subscripted(module: _Module, base: Any, index: ast.expr) -> Any:
    if base is Any or (isinstance(base, type) and issubclass(base, _Opaque)):
        return Any  # of which nothing is checked
    if base is typing.Annotated and isinstance(index, ast.Tuple):
        first, *notes = index.elts
        return typing.Annotated[_evaluate(module, first), *(_note(module, each) for each in notes)]
    return operator.getitem(base, _arguments(module, index, literal=base is typing.Literal))


def _arguments(module: _Module, node: ast.expr, *, literal: bool) -> Any:
    if isinstance(node, ast.Tuple):
        return tuple(_arguments(module, each, literal=literal) for each in node.elts)
    if isinstance(node, ast.List):
        return [_arguments(module, each, literal=literal) for each in node.elts]
    if literal:
        return ast.literal_eval(node)
    if isinstance(node, ast.Constant) and node.value is Ellipsis:
        return Ellipsis
    return _evaluate(module, node)


def _note(module: _Module, node: ast.expr) -> Any:
    """An annotation of ``Annotated``, such as limits of a number."""
    if not isinstance(node, ast.Call):
        return _evaluate(module, node)
    make = _evaluate(module, node.func)
    values = [eval(ast.unparse(each), {"__builtins__": {}}) for each in node.args]
    return make(*values)


def _named_type(module: _Module, node: ast.Name | ast.Attribute) -> Any:
    imported = _cheap(module, node)
    if imported is not None:
        return imported
    found = _follow_expression(module, node)
    if isinstance(found, _Module):
        raise Unreadable(found.name)
    owner, definition = found
    if isinstance(definition, ast.ClassDef):
        return type(definition.name, (_Opaque,), {"__module__": owner.name})
    if isinstance(definition, ast.expr):
        return _evaluate(owner, definition)
    raise Unreadable(ast.unparse(node))


def _cheap(module: _Module, node: ast.expr) -> Any:
    """The object of a name from the standard library or a loaded module; None for others."""
    if isinstance(node, ast.Attribute):
        owner = _cheap(module, node.value)
        return None if owner is None else getattr(owner, node.attr)
    if not isinstance(node, ast.Name):
        return None
    binding = module.names.get(node.id)
    if binding is None:
        return getattr(builtins, node.id, None)
    if not isinstance(binding, _ImportedName):
        return None
    found = sys.modules.get(binding.module)
    if found is None and binding.module.partition(".")[0] in _IMPORTED:
        found = importlib.import_module(binding.module)
    if found is None or binding.name is None:
        return found
    return getattr(found, binding.name, None)
