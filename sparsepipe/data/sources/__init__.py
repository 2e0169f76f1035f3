"""Sources of point clouds: a user's folder, and the layouts of published data sets."""

from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.points import Split
from sparsepipe.data.sources.base import Source
from sparsepipe.data.sources.folders import ClassFolder, ShapeFolder, shape_folder
from sparsepipe.data.sources.npz import NpzBundle
from sparsepipe.data.sources.off_tree import GeneratedShapes, OffTree
from sparsepipe.data.sources.resampled import NormalResampled

__all__ = [
    "CacheSettings",
    "ClassFolder",
    "GeneratedShapes",
    "NormalResampled",
    "NpzBundle",
    "OffTree",
    "ShapeFolder",
    "Source",
    "Split",
    "shape_folder",
]
