"""Pickles between ranks, whose reader makes nothing but values: no function of a stranger's runs.

A plain pickle may name any function and its arguments, so whoever reaches a rank's port could run
code there. Readers here know plain values, tensors, numpy's arrays, nodes of torch's pytrees, named
tuples, enumerations, dataclasses that only hold their fields, and what somebody has named by
``torch.serialization.add_safe_globals``, as ``torch.load`` does. Senders refuse the rest.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import importlib
import io
import pathlib
import pickle
import sys
import types
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from sparsepipe import errors

REMEDY = (
    "hand on tensors, plain values, named tuples or dataclasses without __post_init__; name "
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


_REDUCTIONS = {f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "max", "min")}
"""Functions that ``self.log`` takes as ``reduce_fx``; torch's have no pickle of their own name."""


def _reduction(name: str) -> Any:
    return _REDUCTIONS[name]


_PLAIN: frozenset[Any] = frozenset(
    (
        *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset),
        *(range, slice, object, types.SimpleNamespace),
        *(collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID),
        *(pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath, pathlib.WindowsPath),
        *(torch.device, torch.Size, torch.finfo, torch.iinfo),
        *(np.dtype, np.ndarray, errors._rebuild, max, min, sum, _reduction),
        # What numpy's arrays and numbers name as their makers, wherever a version has these.
        *(np.array(0.0).__reduce__()[0], np.float64(0.0).__reduce__()[0]),
        np.ones(1).__reduce_ex__(5)[0],
    )
)
_SINGLETONS = (torch.dtype, torch.memory_format)
_known: dict[tuple[str, str], Any] = {}


def is_plain(named: Any) -> bool:
    """Whether a class, or a function that makes objects, makes nothing but values."""
    try:
        if named in _PLAIN or named in torch.serialization.get_safe_globals():
            return True
    except TypeError:  # it cannot be hashed
        return False
    if not isinstance(named, type):
        return isinstance(named, _SINGLETONS)
    return (
        named in pytree.SUPPORTED_NODES
        or issubclass(named, enum.Enum | errors.SparsePipeError | np.generic | np.dtype)
        or _is_named_tuple(named)
        or _only_holds_fields(named)
    )


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and kind.__bases__ == (tuple,) and hasattr(kind, "_fields")


def _only_holds_fields(kind: type) -> bool:
    """Whether it is a dataclass that does nothing when it is made; ours may check their fields."""
    if not dataclasses.is_dataclass(kind):
        return False
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return True
    made = getattr(kind.__init__, "__code__", None)
    generated = made is not None and made.co_filename == "<string>"
    return generated and not hasattr(kind, "__post_init__")


class Pickler(pickle.Pickler):
    """Writes what :class:`Unpickler` reads.

    Raises:
        Unsendable: it would not read a value.
    """

    @override
    def reducer_override(self, obj: Any) -> Any:
        for name, function in _REDUCTIONS.items():
            if obj is function:
                return _reduction, (name,)
        makes = isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType)
        if makes and not is_plain(obj):
            name = f"{obj.__module__}.{obj.__qualname__}"
            raise Unsendable(f"what cannot be pickled safely: {name}", remedy=REMEDY)
        return NotImplemented


class Unpickler(pickle.Unpickler):
    """Reads values only.

    Raises:
        Unreadable: the pickle names something else.
    """

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        found = _known.get((module_name, global_name))
        if found is None:
            found = _found(module_name, global_name)
            if not is_plain(found):
                raise Unreadable(f"{module_name}.{global_name} is no value that ranks send")
            _known[module_name, global_name] = found
        return found


def _found(module_name: str, name: str) -> Any:
    package = module_name.partition(".")[0]
    if package not in sys.modules:
        raise Unreadable(f"{module_name} is not imported on this rank")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise Unreadable(f"{module_name}.{name} is not known on this rank") from error
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
    return OnTensors(io.BytesIO(data[end:]), tensors).load()


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


class OnTensors(Unpickler):
    """Puts tensors for the numbers that a pickler has put for them."""

    def __init__(self, stream: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    @override
    def persistent_load(self, pid: Any) -> Tensor:
        found: Tensor = self._tensors[pid]
        return found
