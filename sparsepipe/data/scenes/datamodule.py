"""LightningDataModule of scenes whose points have labels.

Shapes: B scenes in a batch, S scenes of a split, P points, N voxels, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from numpy.random import Generator
from pydantic import Field
from torch.utils.data import DataLoader, Dataset

from sparsepipe.data.augment import Axis
from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.dataloaders import Access, split_validation
from sparsepipe.data.datamodule import Purpose, Share, SplitDataModule
from sparsepipe.data.files import LOCK_WAIT_S, log_once
from sparsepipe.data.points import IntArray
from sparsepipe.data.scenes.augment import SceneAugment, crop, mixed
from sparsepipe.data.scenes.reader import SceneReader, Value
from sparsepipe.data.scenes.scene import Scene, SceneVoxels, class_counts
from sparsepipe.data.scenes.sources import SceneSet
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.sparse import SparseTensor, sparse_collate
from sparsepipe.utils.arguments import Count, CountFrom0, Seed, checked
from sparsepipe.utils.files import expanded
from sparsepipe.utils.reading import explained

Side = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_SIDE = 64
"""Each side of a batch's grid is rounded up to a multiple of this many voxels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenePreprocessing:
    """Preparation of a scene as a network's input, as in the test of a training.

    Attributes:
        reader: reads files and folders of scenes.
        voxels: turns a scene into voxels.
    """

    reader: SceneReader
    voxels: SceneVoxels


class SceneDataModule(SplitDataModule):
    """Data module of scenes, for training, validation, test and prediction.

    A batch is ``dict(input=SparseTensor [N, C], label=SparseTensor [N, K], index=[B])``. Both have
    the same sites, and ``label`` counts the points of each class in each voxel.

    Args:
        root: directory of the data.
        source: class (or partial) called as ``source(root, reader=SceneReader(...),
            cache=CacheSettings(...))``, with ``split`` and ``group`` if they are set. A source has
            ``classes``, the names of the classes, ``load(split)``, which returns a ``SceneSet``,
            and ``fingerprint()``, a digest of the data.
        cache_dir: directory in which parsed scenes are cached.
        voxel_size: as in :class:`SceneVoxels`, like ``features``, ``reduce`` and ``up_axis``.
        crop_points: largest number of points of a training scene: those nearest to a random one;
            None: no limit.
        crop_size: side in metres of a box around a random point, upwards without limits, outside
            which a training scene has no points; None: no limit.
        crops_per_scene: how often each training scene is read in an epoch.
        augment: augmentation of training scenes, if any.
        classes: as in :class:`SceneReader`, like ``ignore``, ``learning_map``, ``columns`` and
            ``label``; None: those of the source.
        split: as in ``SceneFolder``, like ``group``; None for other sources.
        batch_size: as in ``ShapeDataModule``, like the arguments after it.
    """

    input_kind = "sparse"
    """Kind of the inputs."""

    @checked
    def __init__(
        self,
        root: Path | str | None,
        *,
        source: Callable[..., Any],
        cache_dir: Path | str,
        voxel_size: Side = 0.05,
        features: Annotated[Sequence[str], Field(min_length=1)] = ("constant",),
        reduce: Literal["mean", "first"] = "mean",
        up_axis: Axis = "z",
        crop_points: Count | None = None,
        crop_size: Side | None = None,
        crops_per_scene: Count = 1,
        augment: SceneAugment | None = None,
        classes: Sequence[str] | None = None,
        ignore: Value | Sequence[Value] | None = None,
        learning_map: Mapping[Value, int] | Sequence[Any] | str | None = None,
        columns: Sequence[str] | None = None,
        label: str | None = None,
        split: float | str | Mapping[str, Any] | None = None,
        group: str | None = None,
        batch_size: Count = 4,
        num_workers: CountFrom0 | None = None,
        val_share: Share = 0.0,
        seed: Seed = 0,
        cache_workers: CountFrom0 = 0,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        super().__init__(
            batch_size=batch_size, num_workers=num_workers, val_share=val_share, seed=seed
        )
        names = tuple(str(name).lower() for name in features)
        self._voxels = SceneVoxels(
            voxel_size=voxel_size, features=names, reduce=reduce, up_axis=up_axis
        )
        self._reader = SceneReader(
            features=names,
            columns=columns,
            label=label,
            classes=classes,
            ignore=ignore,
            learning_map=learning_map,
        )
        self._crop = partial(crop, up_axis=up_axis, points=crop_points, size=crop_size)
        self._crops_per_scene, self._augment = crops_per_scene, augment
        directory = expanded(cache_dir).absolute()
        cache = CacheSettings(directory=directory, workers=cache_workers, lock_wait_s=lock_wait_s)
        settings = {"split": split, "group": group}
        given = {name: value for name, value in settings.items() if value is not None}
        self._source = source(root, reader=self._reader, cache=cache, **given)
        self._collate = collate_scenes

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, indexed by the labels."""
        return tuple(self._source.classes)

    @property
    def in_channels(self) -> int:
        """Number of features of a voxel."""
        return self._voxels.in_channels

    def class_counts(self) -> IntArray:
        """Returns the number of points of each class in the split train, int64 [K]."""
        scenes, counts_K = self.samples("train"), np.zeros(self.num_classes, np.int64)
        for labels_P in (scenes.read(index).labels_P for index in range(len(scenes.files))):
            if labels_P is not None:
                counts_K += np.bincount(labels_P[labels_P >= 0], minlength=self.num_classes)
        return counts_K

    def recorded(self) -> dict[str, Any]:
        """Returns the settings of the data that a checkpoint needs instead of the user's files."""
        reader = self._reader
        return {"learning_map": reader.learning_map, "classes": list(self.classes)}

    def preprocessing(self) -> ScenePreprocessing:
        """Returns what makes a network's input of any scene, as of a test scene."""
        return ScenePreprocessing(reader=self._reader, voxels=self._voxels)

    def test_dataloader(self) -> DataLoader[dict[str, Any]]:
        """Loader of this rank's test scenes; each goes to exactly one rank.

        Raises:
            ConfigError: no test scene has labels.
        """
        labels_S = self.samples("test").labels_S
        if len(labels_S) and (labels_S < 0).all():
            raise ConfigError(
                "no scene to test on has labels",
                remedy="test on others, such as data.split={test:[val]}, or set task.test=false",
            )
        return super().test_dataloader()

    def setup(self, stage: str | None = None) -> None:
        """Opens both splits, and chooses the validation scenes: those that the source says, or else
        a share of the groups of training scenes.
        """
        super().setup(stage)
        scenes: SceneSet = self.samples("train")
        groups, group_S = np.unique(np.array(scenes.groups), return_inverse=True)
        of_one_class = np.zeros(len(groups), np.int64)
        _, chosen = split_validation(of_one_class, share=self._val_share, seed=self._seed)
        held_S = scenes.held_S if scenes.held_S.any() else np.isin(group_S, chosen)
        if self._val_share and not held_S.any():
            log_once(f"no scenes are held for validation: they are of {len(groups)} groups")
        self._train_S, self._val_S = np.flatnonzero(~held_S), np.flatnonzero(held_S)
        self.num_train, self.num_val = len(self._train_S), len(self._val_S)
        self.epoch_samples = self._crops_per_scene * self.num_train

    def _dataset(self, purpose: Purpose, indices_S: IntArray) -> SceneDataset:
        return SceneDataset(
            self.samples("test" if purpose == "test" else "train"),
            indices_S,
            voxels=self._voxels,
            num_classes=self.num_classes,
            seed=(self._seed, get_args(Purpose).index(purpose)),
            crop=self._crop if purpose == "train" else None,
            augment=self._augment if purpose == "train" else None,
        )


class SceneDataset(Dataset[dict[str, Any]]):
    """Scenes ``indices_S`` of a split, read by (epoch, position in these).

    Random draws depend on ``seed``, the epoch and the scene. ``crop`` and ``augment`` are None for
    evaluation.
    """

    def __init__(
        self,
        scenes: SceneSet,
        indices_S: IntArray,
        *,
        voxels: SceneVoxels,
        num_classes: int,
        seed: tuple[int, ...],
        crop: Callable[[Scene, Generator], Scene] | None = None,
        augment: SceneAugment | None = None,
    ) -> None:
        self.scenes, self.indices_S, self.voxels = scenes, indices_S, voxels
        self.num_classes, self.seed, self.crop, self.augment = num_classes, seed, crop, augment

    def __len__(self) -> int:
        return len(self.indices_S)

    def __getitem__(self, access: Access | int) -> dict[str, Any]:
        """Returns ``coords`` [N, 3], ``feats`` [N, C], ``counts`` [N, K] and ``index``."""
        epoch, position = access if isinstance(access, tuple) else (0, access)
        index = int(self.indices_S[position])
        rng = np.random.default_rng([*self.seed, epoch, index])
        scene = self._scene(index, rng)
        if self.augment is not None and self.augment.enabled and rng.random() < self.augment.mix:
            scene = mixed(scene, self._scene(int(rng.choice(self.indices_S)), rng))
        path = Path(self.scenes.files[index])
        with explained(path, "scene", error=DataError, remedy="replace it, or leave it out"):
            coords_N3, feats_NC, rows_P = self.voxels.voxelise(scene)
        counts_NK = class_counts(
            rows_P, scene.labels_P, num_voxels=len(coords_N3), num_classes=self.num_classes
        )
        return {"coords": coords_N3, "feats": feats_NC, "counts": counts_NK, "index": index}

    def _scene(self, index: int, rng: Generator) -> Scene:
        scene = self.voxels.prepare(self.scenes.read(index))
        scene = scene if self.crop is None else self.crop(scene, rng)
        if self.augment is not None:
            scene = self.augment(scene, rng, up_axis=self.voxels.up_axis)
        return scene


def collate_scenes(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a batch of scenes with ``input`` and ``label`` (SparseTensor) and ``index`` [B]."""
    tensors = [{name: torch.from_numpy(s[name]) for name in s if name != "index"} for s in samples]
    extent_3 = torch.stack([each["coords"].amax(0) for each in tensors]).amax(0) + 1
    shape = [-(-int(size) // _SIDE) * _SIDE for size in extent_3]
    x = sparse_collate([(each["coords"], each["feats"]) for each in tensors], spatial_shape=shape)
    counts_NK = torch.cat([each["counts"] for each in tensors])
    label = SparseTensor(
        counts_NK, x.coords, spatial_shape=x.spatial_shape, batch_size=len(samples)
    )
    index = torch.tensor([sample["index"] for sample in samples])
    return {"input": x, "label": label, "index": index}
