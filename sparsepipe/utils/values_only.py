"""Torch's files, read as values: tensors, numpy's arrays and numbers, plain values; no code runs.

Torch's own reader can be allowed numpy's makers of arrays. They take lists of fields and addresses
of objects, by which a file would reach any memory; here others stand in for them, under their
names, that make arrays of numbers from bytes and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

_NUMBERS = re.compile(r"[<>=|]?[biufc]\d+")


def load_values(path: Path, *, mmap: bool = False) -> Any:
    """What a file holds, on the CPU.

    Raises:
        Exception: it is broken, or holds more than values.
    """
    with numpy_allowed():
        return without_stand_ins(
            torch.load(path, map_location="cpu", weights_only=True, mmap=mmap or None)
        )


@contextmanager
def numpy_allowed() -> Iterator[None]:
    """Within, ``torch.load`` with ``weights_only`` reads numpy's arrays and numbers, too.

    They are of this file's classes, until :func:`without_stand_ins` has replaced them.
    """
    makers = {"scalar": _scalar, "_reconstruct": _reconstruct}
    packages = ("numpy._core", "numpy.core")
    named = [(f, f"{p}.multiarray.{name}") for p in packages for name, f in makers.items()]
    kinds = [(_Array, "numpy.ndarray"), (_Type, "numpy.dtype")]
    with torch.serialization.safe_globals([*named, *kinds]):
        yield


def without_stand_ins(value: Any) -> Any:
    """A value with numpy's own objects in its containers, which are changed."""
    return _replaced(value, {})


def _replaced(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, _Type):
        return value.type
    if isinstance(value, _Array):
        return value.view(np.ndarray)
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) not in known:
        known[id(value)] = value
        if type(value) is tuple:
            known[id(value)] = tuple(_replaced(item, known) for item in value)
        elif not isinstance(value, tuple):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in list(pairs):
                value[key] = _replaced(item, known)
    return known[id(value)]


class _Type:
    """Stands for a dtype, of numbers."""

    __slots__ = ("type",)

    def __init__(self, code: str, *_: Any) -> None:
        if type(code) is not str or not _NUMBERS.fullmatch(code):
            raise UnpicklingError(f"arrays of {code!r} are not read, only of numbers")
        self.type: np.dtype[Any] = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, *fields = state
        if order not in ("<", ">", "=", "|") or any(each is not None for each in fields[:3]):
            raise UnpicklingError("arrays with fields are not read, only those of numbers")
        self.type = self.type.newbyteorder(order)


class _Array(np.ndarray[Any, np.dtype[Any]]):
    """An array of numbers, whose shape a file cannot choose without its bytes."""

    def __new__(cls, *_: Any) -> _Array:
        raise UnpicklingError("an array is read with its bytes only")

    @override
    def __setstate__(self, state: tuple[Any, ...], /) -> None:
        _, shape, kind, fortran, data = state
        super().__setstate__((1, shape, _checked(kind, data), fortran, data))

    @override
    def __reduce__(self) -> Any:
        return self.view(np.ndarray).__reduce__()


def _reconstruct(*_: Any) -> NDArray[Any]:
    return np.ndarray.__new__(_Array, (0,))


def _scalar(kind: _Type, data: bytes) -> Any:
    return np.ndarray((), _checked(kind, data), data)[()]


def _checked(kind: Any, data: Any) -> np.dtype[Any]:
    if type(kind) is not _Type or type(data) is not bytes:
        raise UnpicklingError("arrays are read from bytes only")
    return kind.type
