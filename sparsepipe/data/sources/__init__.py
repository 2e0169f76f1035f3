"""Sources of point clouds: a user's folder, and the layouts of published data sets."""

from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.points import Split
from sparsepipe.data.sources.listed import ClassFolder, PointSource, shape_folder
from sparsepipe.data.sources.modelnet import GeneratedShapes, NormalResampled, OffTree
from sparsepipe.data.sources.npz import NpzBundle

__all__ = [
    "CacheSettings",
    "ClassFolder",
    "GeneratedShapes",
    "NormalResampled",
    "NpzBundle",
    "OffTree",
    "PointSource",
    "Split",
    "shape_folder",
]
