"""Reads files of ``torch.save`` that hold only tensors, numpy arrays and plain values."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch


def load_values(path: Path, *, mmap: bool = False) -> Any:
    """Loads a file onto the CPU; torch refuses all but tensors, numpy arrays and plain values."""
    with numpy_allowed():
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap or None)


def numpy_allowed() -> AbstractContextManager[None]:
    """Context in which ``torch.load`` with ``weights_only`` also reads numpy arrays and numbers.

    Arrays of objects and of records are still refused: their types are not allowed.
    """
    makers: dict[str, Any] = {
        "scalar": np.float64(0).__reduce__()[0],
        "_reconstruct": np.empty(0).__reduce__()[0],
    }
    packages = ("numpy._core", "numpy.core")
    named = [(make, f"{p}.multiarray.{name}") for p in packages for name, make in makers.items()]
    kinds = {type(np.dtype(code)) for code in "?bhilqBHILQefdgFDG"}
    return torch.serialization.safe_globals([*named, np.ndarray, np.dtype, *kinds])
