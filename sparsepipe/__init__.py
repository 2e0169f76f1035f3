"""SparsePipe: sparse 3D convolutional networks, trained in parallel."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsepipe.runs.model import load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    """Imports ``load`` on first use, since it needs torch, which takes seconds to import."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("sparsepipe.runs.model").load


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # from which notebooks complete names
