"""Pickles between ranks, whose reader makes nothing but values: no function of a stranger's runs.

A plain pickle may name any function and its arguments, so whoever reaches a rank's port could run
code there. Readers here know plain values, tensors, numpy's arrays, nodes of torch's pytrees, named
tuples, enumerations, dataclasses that only hold their fields, and what somebody has named by
``torch.serialization.add_safe_globals``, as ``torch.load`` does. Senders refuse the rest.

Numpy's own makers are not among them: they take addresses and lists of fields, by which a pickle
would reach any memory. Arrays and numbers travel as bytes, and have neither objects nor fields.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import re
import sys
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from sparsepipe import errors

REMEDY = (
    "hand on tensors, plain values, named tuples or dataclasses without methods that run when they "
    "are made or filled, such as __post_init__; name "
    "another class by torch.serialization.add_safe_globals([it]) where your script begins, or "
    "register it by torch.utils._pytree.register_pytree_node"
)


class Unsendable(Exception):
    """A value that cannot be sent, and a remedy."""

    def __init__(self, what: str, *, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy


class Unreadable(Exception):
    """A pickle that names what is no value."""


_REDUCTIONS: Mapping[str, Any] = {
    **{f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "max", "min")},
    **{function.__name__: function for function in (sum, max, min)},
}
"""Functions that ``self.log`` takes as ``reduce_fx``; a pickle cannot call them."""


class _Maker:
    """A function of ours that a pickle may call; it has no attributes that one could set."""

    __slots__ = ()

    @override
    def __reduce__(self) -> str:
        return next(name for name, maker in _MAKERS.items() if maker is self)


class _Reduction(_Maker):
    def __call__(self, name: str) -> Any:
        return _REDUCTIONS[name]


class _Array(_Maker):
    """Makes an array, or a number of numpy's, of its bytes."""

    def __call__(self, data: bytes, kind: str, shape: tuple[int, ...] | None, order: Any) -> Any:
        if type(data) is not bytes or type(kind) is not str or not _NUMPY_KIND.fullmatch(kind):
            raise Unreadable(f"an array of {kind!r} is no value that ranks send")
        made: Any = np.ndarray(shape or (), np.dtype(kind), bytearray(data), order=order)
        return made[()] if shape is None else made


_NUMPY_KIND = re.compile(r"[<>|=](?:[biufcSU]\d+|[mM]8(?:\[\w+\])?)")
"""What ``dtype.str`` is of numbers, text and times: neither objects nor fields."""
_MAKERS: Mapping[str, _Maker] = {"_ARRAY": _Array(), "_REDUCTION": _Reduction()}
_ARRAY, _REDUCTION = _MAKERS.values()


_PLAIN: frozenset[Any] = frozenset(
    (
        *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset),
        *(range, slice, object, types.SimpleNamespace),
        *(collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID),
        *(pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath, pathlib.WindowsPath),
        *(torch.device, torch.Size, torch.finfo, torch.iinfo, errors._rebuild),
    )
)
_INERT = (torch.dtype, torch.memory_format, _Maker)
"""Kinds of objects that a pickle can neither change nor use to reach others."""
_known: dict[tuple[str, str], Any] = {}


def is_plain(named: Any) -> bool:
    """Whether a class, or a function that makes objects, makes nothing but values."""
    try:
        if named in _PLAIN or named in torch.serialization.get_safe_globals():
            return True
    except TypeError:  # it cannot be hashed
        return False
    if not isinstance(named, type):
        return isinstance(named, _INERT)
    return (
        named in pytree.SUPPORTED_NODES
        or (issubclass(named, enum.Enum) and bool(named.__members__))  # else it would make classes
        or issubclass(named, errors.SparsePipeError)
        or _is_named_tuple(named)
        or _only_holds_fields(named)
    )


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and kind.__bases__ == (tuple,) and hasattr(kind, "_fields")


_RUN_BY_READERS = (
    *("__new__", "__init__", "__post_init__", "__setstate__", "__setattr__", "__setitem__"),
    *("append", "extend", "add", "__del__"),
)
"""Methods that a pickle runs, or the end of an object that it has made."""


def _only_holds_fields(kind: type) -> bool:
    """Whether it is a dataclass that does nothing of its own when it is made and filled."""
    if not dataclasses.is_dataclass(kind):
        return False
    found = (getattr(kind, name, None) for name in _RUN_BY_READERS)
    codes = (made.__code__ for made in found if isinstance(made, types.FunctionType))
    return all(code.co_filename in ("<string>", dataclasses.__file__) for code in codes)


class Pickler(pickle.Pickler):
    """Writes what :class:`Unpickler` reads.

    Raises:
        Unsendable: it would not read a value.
    """

    @override
    def reducer_override(self, obj: Any) -> Any:
        for name, function in _REDUCTIONS.items():
            if obj is function:
                return _REDUCTION, (name,)
        if type(obj) is np.ndarray or isinstance(obj, np.generic):
            return _ARRAY, _of_array(obj)
        makes = isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType)
        if isinstance(obj, np.dtype) or (makes and not is_plain(obj)):
            named = obj if makes else type(obj)
            name = f"{named.__module__}.{named.__qualname__}"
            raise Unsendable(f"what cannot be pickled safely: {name}", remedy=REMEDY)
        return NotImplemented


def _of_array(array: Any) -> tuple[Any, ...]:
    kind = array.dtype.str
    if not _NUMPY_KIND.fullmatch(kind) or array.dtype.fields:
        raise Unsendable(f"what cannot be pickled safely: an array of {array.dtype}", remedy=REMEDY)
    if isinstance(array, np.generic):
        return array.tobytes(), kind, None, "C"
    order = "F" if array.flags.fnc else "C"
    return array.tobytes(order), kind, array.shape, order


class _NamesClass(Exception):
    """A pickle names a class, so that it is to be read with care."""


class _Unpickler(pickle.Unpickler):
    """Reads what names no class. Without one, nothing in a pickle can be called or changed."""

    def __init__(self, stream: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    @override
    def persistent_load(self, pid: Any) -> Tensor:
        found: Tensor = self._tensors[pid]
        return found

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        found = _known.get((module_name, global_name))
        if not isinstance(found, _INERT):
            raise _NamesClass
        return found


class _CarefulUnpickler(pickle._Unpickler):
    """Looks at each object that a pickle makes and fills, which takes ten times as long.

    It calls only what the pickle has named, never an object that it has made, and sets no special
    attributes, such as ``__array_interface__``, by which numpy would reach any memory.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, stream: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors
        self._named: list[Any] = []

    @override
    def persistent_load(self, pid: Any) -> Tensor:
        found: Tensor = self._tensors[pid]
        return found

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        found = _find(module_name, global_name)
        self._named.append(found)
        return found

    def _check_made(self, arguments: int) -> None:
        maker = self.stack[-1 - arguments]
        if not any(maker is named for named in self._named):
            raise Unreadable(f"a {type(maker).__name__} is called, which makes no value")
        if maker is types.SimpleNamespace and arguments and self.stack[-1]:
            raise Unreadable("a namespace is made of arguments")

    def _check_filled(self) -> None:
        made, state = self.stack[-2:]
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        names = [name for part in parts if isinstance(part, dict) for name in part]
        if any(made is named for named in self._named) or isinstance(made, np.ndarray | np.generic):
            raise Unreadable(f"a {type(made).__name__} is filled")
        if special := [name for name in names if str(name).startswith("__")]:
            raise Unreadable(f"a {type(made).__name__} is filled with {special[0]}")


def _checked(code: bytes, check: Callable[[_CarefulUnpickler], None]) -> None:
    do = _CarefulUnpickler.dispatch[code[0]]

    def checked(reader: _CarefulUnpickler) -> None:
        check(reader)
        do(reader)

    _CarefulUnpickler.dispatch[code[0]] = checked


_checked(pickle.REDUCE, lambda reader: reader._check_made(1))
_checked(pickle.NEWOBJ, lambda reader: reader._check_made(1))
_checked(pickle.NEWOBJ_EX, lambda reader: reader._check_made(2))
_checked(pickle.BUILD, _CarefulUnpickler._check_filled)


def read(data: bytes | memoryview, tensors: Sequence[Tensor] = ()) -> Any:
    """What :class:`Pickler` has written.

    Args:
        data: the pickle.
        tensors: take the places of the numbers that the pickler has put for them.

    Raises:
        Unreadable: the pickle names or does something else than to make values.
    """
    try:
        return _Unpickler(io.BytesIO(data), tensors).load()
    except _NamesClass:
        return _CarefulUnpickler(io.BytesIO(data), tensors).load()


def _find(module_name: str, global_name: str) -> Any:
    found = _known.get((module_name, global_name))
    if found is None:
        found = _found(module_name, global_name)
        if not is_plain(found):
            raise Unreadable(f"{module_name}.{global_name} is no value that ranks send")
        _known[module_name, global_name] = found
    return found


def _found(module_name: str, name: str) -> Any:
    """What goes by a name, without a module's being imported or a function's being called."""
    if (found := sys.modules.get(module_name)) is None:
        raise Unreadable(f"{module_name} is not imported on this rank")
    for part in name.split("."):
        if part not in (there := getattr(found, "__dict__", {})):
            raise Unreadable(f"{module_name}.{name} is not known on this rank")
        found = there[part]
    return found


def dumps(value: Any) -> bytes:
    """A value as bytes, with its tensors.

    Raises:
        Unsendable: it holds what :func:`loads` would not read.
    """
    tensors: list[Tensor] = []
    stream = io.BytesIO()
    _WithTensors(stream, tensors).dump(value)
    content = io.BytesIO()
    if tensors:
        torch.save(tensors, content)
    return len(content.getbuffer()).to_bytes(8, "little") + content.getvalue() + stream.getvalue()


def loads(data: bytes) -> Any:
    """The value that :func:`dumps` was given; tensors lie where they did.

    Raises:
        Unreadable: the bytes are not of :func:`dumps`.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    tensors = torch.load(io.BytesIO(data[8:end]), weights_only=True) if end > 8 else []
    if not isinstance(tensors, list) or not all(isinstance(each, Tensor) for each in tensors):
        raise Unreadable("there is something else than tensors in their place")
    return read(data[end:], tensors)


class _WithTensors(Pickler):
    """Puts numbers for tensors, wherever in an object they are."""

    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream, protocol=5)
        self._tensors = tensors
        self._index: dict[int, int] = {}
        self._objects: list[Tensor] = []  # as long as they live, their numbers are theirs

    @override
    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._index:
            self._index[id(obj)] = len(self._tensors)
            self._tensors.append(_without_rest(obj))
            self._objects.append(obj)
        return self._index[id(obj)]


def _without_rest(tensor: Tensor) -> Tensor:
    """The tensor with memory of its own, where it is a part of a larger storage.

    ``torch.save`` writes whole storages, and cannot read one again that ends within a number, as
    that of a received tensor may.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return tensor
    if tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
