"""Where point clouds come from: one class for each layout."""

from sparsepipe.data.sources.base import CacheSettings, Source, Split
from sparsepipe.data.sources.npz import NpzBundle

__all__ = ["CacheSettings", "NpzBundle", "Source", "Split"]
