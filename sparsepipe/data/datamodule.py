"""The LightningDataModule of shapes: settings in, loaders of sparse or dense batches out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl

from sparsepipe.data.augment import Augment, Axis
from sparsepipe.data.checks import check_dense, check_num_points, check_numbers, check_share
from sparsepipe.data.dataloaders import (
    EvalSampler,
    ShapeLoader,
    TrainSampler,
    default_workers,
    make_loader,
    split_validation,
)
from sparsepipe.data.dataset import Collate, RatioMode, Representation, ShapeDataset, Voxelisation
from sparsepipe.data.points import IntArray, MappedArray, PointSet
from sparsepipe.data.sources.base import SPLITS, CacheSettings, Source, Split
from sparsepipe.data.voxels import Span
from sparsepipe.errors import ConfigError, DataError


class Splits:
    """Point clouds of training and test, and their surfaces where these are voxelised.

    Args:
        source: where they come from.
        cache: how they are prepared and kept.
        voxelisation: what they are read for.

    Raises:
        ConfigError: the source cannot give what that takes; told before a cache is built for
            nothing.
    """

    def __init__(self, source: Source, cache: CacheSettings, *, voxelisation: Voxelisation) -> None:
        self._source, self._cache, self._voxelisation = source, cache, voxelisation
        if getattr(source, "takes_cached_points", False):
            check_num_points(voxelisation.num_points, stored=cache.points)
        if voxelisation.representation == "dense_surface":
            self._surface_loader()
        self._points: dict[Split, PointSet] = {}
        self._surfaces: dict[Split, MappedArray] = {}

    def fingerprint(self) -> str:
        """Digest of what the source holds, the same wherever it lies on the disk."""
        return self._source.fingerprint(self._cache)

    def points(self, split: Split) -> PointSet:
        """The clouds of a split.

        Raises:
            ConfigError: fewer points are stored than are to be drawn.
            DataError: they cannot be read, or the splits name different classes.
        """
        if split not in self._points:
            points = self._source.load(split, self._cache)
            check_num_points(self._voxelisation.num_points, stored=points.points_per_shape)
            if "train" in self._points and points.classes != self._points["train"].classes:
                raise DataError(
                    "training and test data name different classes",
                    remedy="check data.root: both splits must hold the same classes",
                )
            self._points[split] = points
        return self._points[split]

    def surface(self, split: Split) -> MappedArray | None:
        """Packed occupancy of the shapes of a split by their meshes; None where points count."""
        if self._voxelisation.representation != "dense_surface":
            return None
        if split not in self._surfaces:
            self._surfaces[split] = self._surface_loader()(
                split,
                self._cache,
                resolution=self._voxelisation.resolution,
                span=self._voxelisation.span,
            )
        return self._surfaces[split]

    def open_all(self) -> None:
        """Reads all that is read later, built into the cache where needed."""
        for split in SPLITS:
            self.points(split)
            self.surface(split)

    def _surface_loader(self) -> Callable[..., MappedArray]:
        load_surface: Callable[..., MappedArray] | None = getattr(
            self._source, "load_surface", None
        )
        if load_surface is None:
            raise ConfigError(
                f"data.representation=dense_surface needs meshes, but "
                f"{type(self._source).__name__} holds points only",
                remedy="set data.representation=dense, or use a data group of OFF meshes "
                "(data=shapes, modelnet10 or modelnet40)",
            )
        return load_surface


class ShapeDataModule(pl.LightningDataModule):
    """Shapes as voxels, for training, validation, test and prediction.

    A batch is ``dict(input=SparseTensor | Tensor [B, 1, R, R, R], label=[B], index=[B])``;
    the input feature is the constant 1. ``index`` is the shape's place in its split.

    Args:
        root: directory of the data.
        source: class (or partial) called with ``root``, see ``sparsepipe.data.sources``.
        cache_dir: where sampled points and other preparations are kept.
        resolution: R, voxels along each side of the grid, 1 to 2^21.
        span: what the grid spans: the shape's ``extent`` on each axis (the paper's), the
            ``cube`` of its longest side, or its bounding ``sphere``.
        representation: ``sparse`` sites, ``dense`` occupancy from the same points, or
            ``dense_surface``, occupancy from the mesh itself.
        cached_points: points sampled once from each mesh.
        sampling_seed: seed of that sampling; apart from ``seed``, so that runs with other
            seeds share the cache.
        num_points: points drawn from these at each access; None is all that are stored.
        point_ratio: share p of the drawn points, in (0, 1], in training and testing.
        ratio_mode: ``fixed`` keeps the share p, ``uniform`` a share from U(0, p] per shape.
        augment: random variation of training shapes; None is none.
        up_axis: vertical axis of the shapes, about which augmentation turns them.
        batch_size: shapes in a batch, for each device.
        num_workers: loader processes for each rank; None chooses by the number of cores.
        val_share: share of every class's training shapes kept for validation, in [0, 1).
        seed: determines drawing, augmentation, order and validation split.
        strict: refuse corrupt files instead of leaving them out.
        cache_workers: processes that build a cache; 0 is one for each core.
        lock_wait_s: how long to wait for another process that builds the same cache.

    Raises:
        ConfigError: a setting is out of its range.
        DataError: the root is missing or of another layout.
    """

    def __init__(
        self,
        root: Path | str | None,
        *,
        source: Callable[[Path | str | None], Source],
        cache_dir: Path | str,
        resolution: int = 32,
        span: Span = "extent",
        representation: Representation = "sparse",
        cached_points: int = 16_384,
        sampling_seed: int = 0,
        num_points: int | None = 4_096,
        point_ratio: float = 1.0,
        ratio_mode: RatioMode = "fixed",
        augment: Augment | None = None,
        up_axis: Axis = "z",
        batch_size: int = 32,
        num_workers: int | None = None,
        val_share: float = 0.0,
        seed: int = 0,
        strict: bool = False,
        cache_workers: int = 0,
        lock_wait_s: float = 7_200.0,
    ) -> None:
        super().__init__()
        self._voxelisation = Voxelisation(
            resolution=resolution,
            span=span,
            representation=representation,
            num_points=num_points,
            point_ratio=point_ratio,
            ratio_mode=ratio_mode,
            up_axis=up_axis,
            seed=seed,
        )
        check_share(val_share)
        check_numbers(
            least_1={"batch_size": batch_size}, least_0={"num_workers": num_workers, "seed": seed}
        )
        cache = CacheSettings(
            directory=Path(os.path.expandvars(cache_dir)).expanduser().absolute(),
            points=cached_points,
            seed=sampling_seed,
            strict=strict,
            workers=cache_workers,
            lock_wait_s=lock_wait_s,
        )
        whole = point_ratio == 1 and not (augment is not None and augment.enabled)
        check_dense(representation, batch_size=batch_size, resolution=resolution, whole=whole)
        self._splits = Splits(source(root), cache, voxelisation=self._voxelisation)
        self._augment, self._val_share, self.batch_size = augment, val_share, batch_size
        self._num_workers = default_workers() if num_workers is None else num_workers
        self._train_N: IntArray = np.empty(0, np.int64)
        self._val_N: IntArray = np.empty(0, np.int64)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; labels index them."""
        return self.point_set("train").classes

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def fingerprint(self) -> str:
        """Digest of what the root holds, the same wherever it lies on the disk."""
        return self._splits.fingerprint()

    def point_set(self, split: Split) -> PointSet:
        """The clouds of ``train`` (with validation) or ``test``; built where needed."""
        return self._splits.points(split)

    def prepare_data(self) -> None:
        """Build all that is read later into the cache; call it in one process only."""
        self._splits.open_all()

    def setup(self, stage: str | None = None) -> None:
        """Open the caches and carve out the validation split."""
        del stage  # opening is cheap: all splits are always at hand
        self._splits.open_all()
        self._train_N, self._val_N = split_validation(
            self.point_set("train").labels_S, share=self._val_share, seed=self._voxelisation.seed
        )

    def train_dataloader(self) -> ShapeLoader:
        """Shuffled, augmented training shapes; every rank gets the same number."""
        dataset = self.dataset("train", self._train_N, augment=self._augment, stream=0)
        return self._loader(
            dataset, TrainSampler(dataset, seed=self._voxelisation.seed, **self._ranks())
        )

    def val_dataloader(self) -> ShapeLoader | list[ShapeLoader]:
        """The validation split, or no loader when ``val_share`` is 0."""
        if not len(self._val_N):
            return []
        dataset = self.dataset("train", self._val_N, augment=None, stream=1)
        return self._loader(dataset, EvalSampler(dataset, **self._ranks()))

    def test_dataloader(self) -> ShapeLoader:
        """The test split; no rank repeats a shape."""
        indices_N = np.arange(len(self.point_set("test")))
        dataset = self.dataset("test", indices_N, augment=None, stream=2)
        return self._loader(dataset, EvalSampler(dataset, **self._ranks()))

    def predict_dataloader(self) -> ShapeLoader:
        """The test split, read exactly as for testing."""
        return self.test_dataloader()

    def dataset(
        self, split: Split, indices_N: IntArray, *, augment: Augment | None, stream: int
    ) -> ShapeDataset:
        """Some shapes of a split as a data set; ``stream`` tells uses apart in the seed."""
        return ShapeDataset(
            self.point_set(split),
            indices_N,
            voxelisation=self._voxelisation,
            augment=augment,
            stream=stream,
            surface=self._splits.surface(split),
        )

    def _loader(self, dataset: ShapeDataset, sampler: TrainSampler | EvalSampler) -> ShapeLoader:
        return make_loader(
            dataset,
            sampler=sampler,
            batch_size=self.batch_size,
            num_workers=self._num_workers,
            collate=Collate(self._voxelisation.resolution),
        )

    def _ranks(self) -> dict[str, int]:
        """This process's share, from the trainer where there is one."""
        kwargs: dict[str, Any] = (
            (self.trainer.distributed_sampler_kwargs or {}) if self.trainer is not None else {}
        )
        return {"num_replicas": kwargs.get("num_replicas", 1), "rank": kwargs.get("rank", 0)}
