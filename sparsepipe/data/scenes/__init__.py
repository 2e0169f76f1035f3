"""Scenes whose points have features and labels, in files of many formats."""

from sparsepipe.data.scenes.augment import SceneAugment
from sparsepipe.data.scenes.datamodule import SceneDataModule, ScenePreprocessing
from sparsepipe.data.scenes.reader import SceneReader, read_scene
from sparsepipe.data.scenes.scene import Scene, SceneVoxels
from sparsepipe.data.scenes.sources import SceneFolder

__all__ = [
    "Scene",
    "SceneAugment",
    "SceneDataModule",
    "SceneFolder",
    "ScenePreprocessing",
    "SceneReader",
    "SceneVoxels",
    "read_scene",
]
