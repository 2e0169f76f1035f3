"""Where point clouds come from: one class for each layout."""

from sparsepipe.data.sources.base import CacheSettings, Source, Split
from sparsepipe.data.sources.npz import NpzBundle
from sparsepipe.data.sources.off_tree import GeneratedShapes, OffTree
from sparsepipe.data.sources.resampled import NormalResampled

__all__ = [
    "CacheSettings",
    "GeneratedShapes",
    "NormalResampled",
    "NpzBundle",
    "OffTree",
    "Source",
    "Split",
]
