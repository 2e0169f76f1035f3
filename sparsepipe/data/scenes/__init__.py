"""Scenes whose points have features and labels, in files of many formats."""

from sparsepipe.data.scenes.datamodule import SceneDataModule, ScenePreprocessing
from sparsepipe.data.scenes.reader import SceneReader
from sparsepipe.data.scenes.scene import Scene, SceneVoxels
from sparsepipe.data.scenes.sources import SceneFolder

__all__ = [
    "Scene",
    "SceneDataModule",
    "SceneFolder",
    "ScenePreprocessing",
    "SceneReader",
    "SceneVoxels",
]
