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
    from sparsepipe.data.domains import DomainDataModule, FolderDomains
    from sparsepipe.data.images import (
        DrawnDigits,
        ImageDataModule,
        ImageFolder,
        ImageShift,
        Mnist,
        PackagedDigits,
        Svhn,
        Usps,
    )
    from sparsepipe.data.points import PointSet
    from sparsepipe.data.sources import (
        ClassFolder,
        GeneratedShapes,
        NormalResampled,
        NpzBundle,
        OffTree,
    )
    from sparsepipe.data.volumes import GeneratedVolumes, VolumeDataModule, VolumeFiles

__all__ = [
    "Augment",
    "ClassFolder",
    "CloudShift",
    "DomainDataModule",
    "DrawnDigits",
    "FolderDomains",
    "GeneratedShapes",
    "GeneratedVolumes",
    "ImageDataModule",
    "ImageFolder",
    "ImageShift",
    "Mnist",
    "NormalResampled",
    "NpzBundle",
    "OffTree",
    "PackagedDigits",
    "PointSet",
    "ShapeDataModule",
    "Svhn",
    "Usps",
    "VolumeDataModule",
    "VolumeFiles",
]

_MODULES = {
    "Augment": "augment",
    "ClassFolder": "sources",
    "CloudShift": "cloud_shifts",
    "DomainDataModule": "domains",
    "DrawnDigits": "images",
    "FolderDomains": "domains",
    "GeneratedShapes": "sources",
    "GeneratedVolumes": "volumes",
    "ImageDataModule": "images",
    "ImageFolder": "images",
    "ImageShift": "images",
    "Mnist": "images",
    "NormalResampled": "sources",
    "NpzBundle": "sources",
    "OffTree": "sources",
    "PackagedDigits": "images",
    "PointSet": "points",
    "ShapeDataModule": "datamodule",
    "Svhn": "images",
    "Usps": "images",
    "VolumeDataModule": "volumes",
    "VolumeFiles": "volumes",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
