"""Sources of point clouds, one class for each layout of files."""

from sparsepipe.data.points import Split
from sparsepipe.data.sources.base import CacheSettings, Source
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
