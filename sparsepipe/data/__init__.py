"""Data sources, voxelisation, augmentation and LightningDataModules.

Names are imported on first use, because the processes that sample meshes need only numpy and
trimesh, and importing torch and Lightning would delay their start by seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsepipe.data.augment import Augment
    from sparsepipe.data.cloud_shifts import CloudShift
    from sparsepipe.data.datamodule import ShapeDataModule
    from sparsepipe.data.domains import DomainDataModule
    from sparsepipe.data.images import DrawnDigits, ImageDataModule, ImageShift, Mnist
    from sparsepipe.data.points import PointSet
    from sparsepipe.data.sources import GeneratedShapes, NormalResampled, NpzBundle, OffTree
    from sparsepipe.data.volumes import GeneratedVolumes, VolumeDataModule, VolumeFiles

__all__ = [
    "Augment",
    "CloudShift",
    "DomainDataModule",
    "DrawnDigits",
    "GeneratedShapes",
    "GeneratedVolumes",
    "ImageDataModule",
    "ImageShift",
    "Mnist",
    "NormalResampled",
    "NpzBundle",
    "OffTree",
    "PointSet",
    "ShapeDataModule",
    "VolumeDataModule",
    "VolumeFiles",
]

_MODULES = {
    "Augment": "augment",
    "CloudShift": "cloud_shifts",
    "DomainDataModule": "domains",
    "DrawnDigits": "images",
    "GeneratedShapes": "sources",
    "GeneratedVolumes": "volumes",
    "ImageDataModule": "images",
    "ImageShift": "images",
    "Mnist": "images",
    "NormalResampled": "sources",
    "NpzBundle": "sources",
    "OffTree": "sources",
    "PointSet": "points",
    "ShapeDataModule": "datamodule",
    "VolumeDataModule": "volumes",
    "VolumeFiles": "volumes",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
