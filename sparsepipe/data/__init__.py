"""Meshes and points in, voxels out.

Names are imported on first use: the processes that sample meshes need numpy and trimesh
only, and would start seconds later with torch and Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsepipe.data.augment import Augment
    from sparsepipe.data.datamodule import ShapeDataModule
    from sparsepipe.data.images import DrawnDigits, ImageDataModule, Mnist
    from sparsepipe.data.points import PointSet
    from sparsepipe.data.sources import GeneratedShapes, NormalResampled, NpzBundle, OffTree
    from sparsepipe.data.voxels import voxelise

__all__ = [
    "Augment",
    "DrawnDigits",
    "GeneratedShapes",
    "ImageDataModule",
    "Mnist",
    "NormalResampled",
    "NpzBundle",
    "OffTree",
    "PointSet",
    "ShapeDataModule",
    "voxelise",
]

_HOMES = {
    "Augment": "augment",
    "DrawnDigits": "images",
    "GeneratedShapes": "sources",
    "ImageDataModule": "images",
    "Mnist": "images",
    "NormalResampled": "sources",
    "NpzBundle": "sources",
    "OffTree": "sources",
    "PointSet": "points",
    "ShapeDataModule": "datamodule",
    "voxelise": "voxels",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
