"""Pickles for messages between ranks; the reader builds values, but runs no code of the sender.

A plain pickle may call any function, so whoever reaches a rank's port could run code there. These
pickles name no functions: numbers, text and plain containers are written as pickle does, tensors as
indices into a table that is sent along, and other values as descriptions of plain values (pickle's
persistent ids), from which only the functions of :data:`_MAKERS` build something. Senders refuse
values that have no description.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import io
import pathlib
import pickle
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from sparsepipe.errors import SparsePipeError

_REMEDY = (
    "pass tensors, plain values, named tuples or dataclasses, or register the class with "
    "torch.utils._pytree.register_pytree_node where your script begins"
)


@dataclasses.dataclass(eq=False)
class Unsendable(Exception):
    """Raised for a value that cannot be sent: ``what`` describes it."""

    what: str
    remedy: str


class UnreadableMessage(Exception):
    """Raised for a pickle that does anything other than build values."""


_NATIVE = frozenset(
    (type(None), bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset)
)
"""Types that pickle writes without naming them."""
_ARGUMENTS: Mapping[type, Callable[[Any], tuple[Any, ...]]] = {
    complex: lambda value: (value.real, value.imag),
    range: lambda value: (value.start, value.stop, value.step),
    slice: lambda value: (value.start, value.stop, value.step),
    torch.Size: lambda value: (tuple(value),),
    torch.device: lambda value: (str(value),),
    collections.OrderedDict: lambda value: (list(value.items()),),
    collections.defaultdict: lambda value: (value.default_factory, dict(value)),
    collections.deque: lambda value: (list(value), value.maxlen),
    collections.Counter: lambda value: (dict(value),),
    datetime.timedelta: lambda value: (value.days, value.seconds, value.microseconds),
    **{kind: lambda value: value.__reduce__()[1] for kind in (datetime.date, datetime.datetime)},
    **{kind: lambda value: (str(value),) for kind in (pathlib.PosixPath, pathlib.PurePosixPath)},
}
"""By class, functions that return the arguments from which the class rebuilds a value."""
_CLASSES = {kind.__name__: kind for kind in (*_NATIVE, *_ARGUMENTS)}
_TORCH = (torch.dtype, torch.memory_format, torch.layout)
REDUCTIONS: Mapping[str, Any] = {
    **{f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "max", "min")},
    **{function.__name__: function for function in (sum, max, min)},
}
"""Functions that ``self.log`` takes as ``reduce_fx``."""
_NUMPY_KIND = re.compile(r"[<>|=](?:[biufcSU]\d+|[mM]8(?:\[\w+\])?)")
"""Matches ``dtype.str`` of numbers, text and times. Arrays of objects or with fields could reach
memory beyond their own bytes."""


def _description(value: Any) -> tuple[Any, ...]:
    """Describes a value: a key of :data:`_MAKERS`, and arguments, which are pickled in turn."""
    kind = type(value)
    named = kind.__module__, kind.__qualname__  # of a class that the reader must know
    reductions = [name for name, function in REDUCTIONS.items() if value is function]
    found: tuple[Any, ...] = ()
    shown = value if isinstance(value, type) or callable(value) else kind
    refused = f"{getattr(shown, '__module__', '')}.{getattr(shown, '__qualname__', shown)}"
    array = kind is np.ndarray or isinstance(value, np.generic)
    if array and _NUMPY_KIND.fullmatch(value.dtype.str) and not value.dtype.fields:
        order = "F" if value.flags.fnc else "C"
        shape = None if isinstance(value, np.generic) else value.shape
        found = "array", value.tobytes(order), value.dtype.str, shape, order
    elif kind in _ARGUMENTS:
        found = "made", kind.__name__, _ARGUMENTS[kind](value)
    elif isinstance(value, _TORCH):
        found = "torch", str(value).removeprefix("torch.")
    elif kind is type and value in (*_NATIVE, *_ARGUMENTS):
        found = "class", value.__name__
    elif reductions:
        found = "reduction", reductions[0]
    elif isinstance(value, enum.Enum) and value.name in kind.__members__:
        found = "member", *named, value.name
    elif isinstance(value, SparsePipeError):
        found = "error", *named, value.message, value.remedy
    elif kind in pytree.SUPPORTED_NODES and not pytree.is_constant_class(kind):
        found = "node", *named, *pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        found = "named tuple", *named, tuple(value)
    elif dataclasses.is_dataclass(kind) and not hasattr(kind, "__del__"):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(kind)}
        if getattr(value, "__dict__", {}).keys() <= fields.keys():
            found = "dataclass", *named, fields
    if not found:
        refused = f"an array of dtype {value.dtype}" if array else refused
        raise Unsendable(f"a value that cannot be pickled safely: {refused}", remedy=_REMEDY)
    return found


def _known_class(module_name: str, name: str, needed: type = object) -> Any:
    """Looks up a subclass of ``needed`` by its name, without importing or calling anything."""
    found: Any = sys.modules.get(module_name)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type) or not issubclass(found, needed):
        raise UnreadableMessage(f"{module_name}.{name}, a class unknown on this rank")
    return found


def _make_array(data: bytes, kind: str, shape: tuple[int, ...] | None, order: Any) -> Any:
    if type(data) is not bytes or type(kind) is not str or not _NUMPY_KIND.fullmatch(kind):
        raise UnreadableMessage(f"{kind!r} is not a kind of array that ranks send")
    made: Any = np.ndarray(shape or (), np.dtype(kind), bytearray(data), order=order)
    return made[()] if shape is None else made


def _make_dataclass(module_name: str, name: str, fields: Mapping[str, Any]) -> Any:
    kind = _known_class(module_name, name)
    names = {each.name for each in dataclasses.fields(kind)}
    if hasattr(kind, "__del__") or fields.keys() != names:
        raise UnreadableMessage(f"{module_name}.{name} has different fields on this rank")
    made = object.__new__(kind)  # without its __init__ and __post_init__
    for field, value in fields.items():
        object.__setattr__(made, field, value)
    return made


_MAKERS: Mapping[str, Callable[..., Any]] = {
    "array": _make_array,
    "made": lambda name, arguments: _CLASSES[name](*arguments),
    "class": _CLASSES.__getitem__,
    "torch": {name: v for name, v in vars(torch).items() if isinstance(v, _TORCH)}.__getitem__,
    "reduction": REDUCTIONS.__getitem__,
    "member": lambda module, name, member: _known_class(module, name, enum.Enum)[member],
    "error": lambda module, name, message, remedy: _known_class(module, name, SparsePipeError)(
        message, remedy=remedy
    ),
    "node": lambda module, name, children, context: pytree.SUPPORTED_NODES[
        _known_class(module, name)
    ].unflatten_fn(children, context),
    "named tuple": lambda module, name, values: tuple.__new__(
        _known_class(module, name, tuple), values
    ),
    "dataclass": _make_dataclass,
}


class Pickler(pickle.Pickler):
    """Writes pickles for :func:`read`; raises an ``Unsendable`` for a value without a description.

    Attributes:
        number: returns a tensor's index in the table that is sent along; to be set before use.
    """

    number: Callable[[Tensor], int]

    @override
    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _NATIVE:
            return None
        return self.number(obj) if isinstance(obj, Tensor) else _description(obj)


class _Described(Exception):
    """Raised for a pickle that holds descriptions, which :class:`_CarefulReader` has to read."""


class _Reader(pickle.Unpickler):
    """Reads pickles of plain values and tensors, and cannot call or change anything."""

    tensors: Sequence[Tensor]

    @override
    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not int:
            raise _Described
        return self.tensors[pid]

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise UnreadableMessage(f"the message names {module_name}.{global_name}, which is not data")


class _CarefulReader(pickle._Unpickler):
    """Builds values from their descriptions. It is ten times slower than :class:`_Reader`, since it
    is pickle's reader in Python, without the instructions that name, call or fill something.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: do
        for code, do in pickle._Unpickler.dispatch.items()
        if bytes([code])
        not in (
            *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.BUILD, pickle.INST),
            *(pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4),
        )
    }

    tensors: Sequence[Tensor]

    @override
    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is int:
            return self.tensors[pid]
        maker, *arguments = pid
        return _MAKERS[maker](*arguments)


def read(data: bytes | memoryview, tensors: Sequence[Tensor] = ()) -> Any:
    """Returns the value that a :class:`Pickler` wrote, with entries of ``tensors`` for indices.

    Raises:
        UnreadableMessage: the pickle does anything other than build values.
    """
    reader: _Reader | _CarefulReader = _Reader(io.BytesIO(data))
    reader.tensors = tensors
    try:
        return reader.load()
    except _Described:
        reader = _CarefulReader(io.BytesIO(data))
        reader.tensors = tensors
    try:
        return reader.load()
    except (LookupError, TypeError, ValueError) as error:
        raise UnreadableMessage(f"the message's descriptions are not valid: {error!r}") from error


def dumps(value: Any) -> bytes:
    """Returns a value, including its tensors, as bytes."""
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}
    alive: list[Tensor] = []  # an id is valid as long as its object lives

    def number(tensor: Tensor) -> int:
        found = numbers.setdefault(id(tensor), len(tensors))
        if found == len(tensors):
            alive.append(tensor)
            # torch.save writes whole storages, but torch.load cannot read one that ends within an
            # element, as that of a received tensor may.
            part = tensor.layout is torch.strided and type(tensor) is Tensor
            if part and tensor.untyped_storage().nbytes() > tensor.nbytes:
                tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            tensors.append(tensor)
        return found

    stream = io.BytesIO()
    pickler = Pickler(stream, protocol=5)
    pickler.number = number
    pickler.dump(value)
    content = io.BytesIO()
    if tensors:
        torch.save(tensors, content)
    return len(content.getbuffer()).to_bytes(8, "little") + content.getvalue() + stream.getvalue()


def loads(data: bytes) -> Any:
    """Returns the value that :func:`dumps` was given; its tensors are on the same devices."""
    end = 8 + int.from_bytes(data[:8], "little")
    tensors = torch.load(io.BytesIO(data[8:end]), weights_only=True) if end > 8 else []
    if not isinstance(tensors, list) or not all(isinstance(each, Tensor) for each in tensors):
        raise UnreadableMessage("the message's table of tensors holds something other than tensors")
    return read(data[end:], tensors)
