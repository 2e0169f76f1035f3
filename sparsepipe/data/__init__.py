"""Data sources, voxelisation, augmentation and LightningDataModules.

Names are imported on first use, because the processes that sample meshes need only numpy and
trimesh, and importing torch and Lightning would delay their start by seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsepipe.data.augment import Augment as Augment
    from sparsepipe.data.augment import CloudShift as CloudShift
    from sparsepipe.data.datamodule import ShapeDataModule as ShapeDataModule
    from sparsepipe.data.domains import DomainDataModule as DomainDataModule
    from sparsepipe.data.domains import FolderDomains as FolderDomains
    from sparsepipe.data.images import DrawnDigits as DrawnDigits
    from sparsepipe.data.images import ImageDataModule as ImageDataModule
    from sparsepipe.data.images import ImageFolder as ImageFolder
    from sparsepipe.data.images import ImageShift as ImageShift
    from sparsepipe.data.images import Mnist as Mnist
    from sparsepipe.data.images import PackagedDigits as PackagedDigits
    from sparsepipe.data.images import Svhn as Svhn
    from sparsepipe.data.images import Usps as Usps
    from sparsepipe.data.points import PointSet as PointSet
    from sparsepipe.data.scenes import Scene as Scene
    from sparsepipe.data.scenes import SceneAugment as SceneAugment
    from sparsepipe.data.scenes import SceneDataModule as SceneDataModule
    from sparsepipe.data.scenes import SceneFolder as SceneFolder
    from sparsepipe.data.scenes import SceneVoxels as SceneVoxels
    from sparsepipe.data.scenes.rooms import GeneratedRooms as GeneratedRooms
    from sparsepipe.data.sources import ClassFolder as ClassFolder
    from sparsepipe.data.sources import GeneratedShapes as GeneratedShapes
    from sparsepipe.data.sources import NormalResampled as NormalResampled
    from sparsepipe.data.sources import NpzBundle as NpzBundle
    from sparsepipe.data.sources import OffTree as OffTree
    from sparsepipe.data.volumes import GeneratedVolumes as GeneratedVolumes
    from sparsepipe.data.volumes import VolumeDataModule as VolumeDataModule
    from sparsepipe.data.volumes import VolumeFiles as VolumeFiles
    from sparsepipe.data.volumes.organs import GeneratedOrgans as GeneratedOrgans

_MODULES = {
    "augment": ("Augment", "CloudShift"),
    "datamodule": ("ShapeDataModule",),
    "domains": ("DomainDataModule", "FolderDomains"),
    "images": ("DrawnDigits", "ImageDataModule", "ImageFolder", "ImageShift"),
    "images.real_digits": ("Mnist", "PackagedDigits", "Svhn", "Usps"),
    "points": ("PointSet",),
    "scenes": ("Scene", "SceneAugment", "SceneDataModule", "SceneFolder", "SceneVoxels"),
    "scenes.rooms": ("GeneratedRooms",),
    "sources": ("ClassFolder", "GeneratedShapes", "NormalResampled", "NpzBundle", "OffTree"),
    "volumes": ("GeneratedVolumes", "VolumeDataModule", "VolumeFiles"),
    "volumes.organs": ("GeneratedOrgans",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
