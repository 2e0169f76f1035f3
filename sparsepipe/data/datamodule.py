"""LightningDataModule of shapes in sparse or dense batches, and the base of all data modules."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import numpy as np
import pytorch_lightning as pl
from pydantic import Field
from torch.utils.data import DataLoader, Dataset

from sparsepipe.data.augment import Augment, Axis, CloudShift
from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.dataloaders import (
    EvalSampler,
    TrainSampler,
    default_workers,
    make_loader,
    split_validation,
    stacked,
)
from sparsepipe.data.dataset import (
    CollateShapes,
    PointRatio,
    RatioMode,
    Representation,
    Resolution,
    ShapeDataset,
    Voxelisation,
)
from sparsepipe.data.files import LOCK_WAIT_S, log_once
from sparsepipe.data.points import SPLITS, IntArray, MappedArray, PointSet, Split
from sparsepipe.data.preprocessing import Preprocessing
from sparsepipe.data.shape_rows import ShapeSampler
from sparsepipe.data.sources.listed import PointSource
from sparsepipe.data.voxels import Span
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils.arguments import Count, CountFrom0, Seed, checked
from sparsepipe.utils.files import expanded

Purpose = Literal["train", "val", "test"]
Share = Annotated[float, Field(ge=0, lt=1)]
"""A share of samples, in [0, 1)."""


class SplitDataModule(pl.LightningDataModule, ABC):
    """Base of data modules whose source has a training and a test split.

    The order of training samples depends only on seed, epoch and ``stream``. All ranks train on
    equally many; evaluations read each sample once. Arguments are as for ``ShapeDataModule``.

    Attributes:
        epoch_samples: number of training samples that all ranks together draw in an epoch; if there
            are fewer, they are repeated in new orders. None: ``num_train``.
        eval_batch_size: number of samples in a batch of validation or test; None: ``batch_size``.
        stream: number that gives data modules with the same seed different orders of samples.
        num_train: number of training samples; 0 before ``setup``.
        num_val: number of validation samples; 0 before ``setup``.
    """

    _source: Any

    @checked
    def __init__(
        self, *, batch_size: Count, num_workers: CountFrom0 | None, val_share: Share, seed: Seed
    ) -> None:
        super().__init__()
        self.batch_size, self._val_share, self._seed = batch_size, val_share, seed
        self._num_workers = default_workers() if num_workers is None else num_workers
        self._collate: Callable[[Sequence[dict[str, Any]]], dict[str, Any]] = stacked
        self._splits: dict[Split, Any] = {}
        self._train_S = self._val_S = np.empty(0, np.int64)
        self.num_train = self.num_val = 0
        self.epoch_samples: int | None = None
        self.eval_batch_size: int | None = None
        self.stream = 0

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)  # type: ignore[attr-defined]

    def class_counts(self) -> IntArray:
        """Returns the number of labels of each class in the split train, int64 [K]."""
        labels_S = self.samples("train").labels_S
        return np.bincount(labels_S[labels_S >= 0], minlength=self.num_classes)

    @property
    def is_labelled(self) -> bool:
        """Whether every sample for training or validation has a label."""
        return bool((self.samples("train").labels_S >= 0).all())

    def fingerprint(self) -> str:
        """Returns a hex digest of the data, which does not depend on their location on disk."""
        return str(self._source.fingerprint())

    def _load(self, split: Split) -> Any:
        """Returns the samples of a split, after building its part of the cache if necessary."""
        return self._source.load(split)

    @abstractmethod
    def _dataset(self, purpose: Purpose, indices_S: IntArray) -> Dataset[dict[str, Any]]:
        """Returns samples ``indices_S`` of the split test if that is the purpose, else of train."""

    def samples(self, split: Split) -> Any:
        """Returns a split's samples, with ``labels_S`` (-1: unknown); train includes validation."""
        if split not in self._splits:
            self._splits[split] = self._load(split)
        return self._splits[split]

    def prepare_data(self) -> None:
        """Builds the caches of both splits if necessary; one process builds while others wait."""
        for split in SPLITS:
            self.samples(split)

    def setup(self, stage: str | None = None) -> None:
        """Opens both splits, and chooses the validation samples among those of ``train``."""
        del stage
        self.prepare_data()
        self._train_S, self._val_S = split_validation(
            self.samples("train").labels_S, share=self._val_share, seed=self._seed
        )
        self.num_train, self.num_val = len(self._train_S), len(self._val_S)

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """Loader of this rank's shuffled, augmented training samples, equally many for each."""
        return self._loader("train", self._train_S)

    def val_dataloader(self) -> DataLoader[dict[str, Any]] | list[DataLoader[dict[str, Any]]]:
        """Loader of this rank's validation samples, or an empty list if there are none at all."""
        if not self.num_val:
            return []
        return self._loader("val", self._val_S)

    def test_dataloader(self) -> DataLoader[dict[str, Any]]:
        """Loader of this rank's test samples; each sample goes to exactly one rank."""
        count = len(self.samples("test").labels_S)
        if not count:
            raise ConfigError(
                "the data have no samples to test on",
                remedy="put files into a folder test, mark rows of a csv file with split=test, set "
                "data.source.held_out=2000 to test on the last rows of MNIST's train.csv, or, to "
                "train without a test, set task.test=false",
            )
        return self._loader("test", np.arange(count))

    predict_dataloader = test_dataloader

    def test_names(self) -> Sequence[str]:
        """Returns each test sample's path or, if samples share files, its name or index as text."""
        samples = self.samples("test")
        names: Sequence[str] = getattr(samples, "files", ()) or getattr(samples, "names", ())
        return names or [str(number) for number in range(len(samples.labels_S))]

    def _ranks(self) -> dict[str, int]:
        """Returns how many ranks share an epoch's samples, and which of them this one is."""
        kwargs: dict[str, Any] = (self.trainer and self.trainer.distributed_sampler_kwargs) or {}
        return {"num_replicas": kwargs.get("num_replicas", 1), "rank": kwargs.get("rank", 0)}

    def _loader(self, purpose: Purpose, indices_S: IntArray) -> DataLoader[dict[str, Any]]:
        dataset, ranks = self._dataset(purpose, indices_S), self._ranks()
        batch_size = None if purpose == "train" else self.eval_batch_size
        sized = cast(Sized, dataset)
        sampler: TrainSampler | EvalSampler
        if purpose == "train":
            sampler = TrainSampler(
                sized, seed=self._seed, samples=self.epoch_samples, stream=self.stream, **ranks
            )
        else:
            sampler = EvalSampler(sized, **ranks)
        return make_loader(
            dataset,
            sampler=sampler,
            batch_size=batch_size or self.batch_size,
            num_workers=self._num_workers,
            collate=self._collate,
            keeps_memory=isinstance(dataset, ShapeDataset),
        )


class ShapeDataModule(SplitDataModule):
    """Data module of voxelised shapes, for training, validation, test and prediction.

    A batch is ``dict(input=SparseTensor | Tensor [B, 1, R, R, R], label=[B], index=[B])``; the
    feature of an occupied voxel is 1. ``label``: -1 if unknown; ``index``: position in the split.

    Args:
        root: directory of the data.
        source: class (or partial) of a ``PointSource``, called as ``source(root)``, or as
            ``source(root, split=split)`` if ``split`` is not None.
        cache_dir: directory of sampled points and other prepared data.
        resolution: R, voxels along each side of the grid, 1 to 2^21.
        span: box that the grid divides: the shape's bounding box (``extent``, as in the paper), a
            ``cube`` with its longest side, or the cube around its bounding ``sphere``.
        representation: ``sparse``: voxels with points; ``dense``: the whole grid, 1 in the same
            voxels; ``dense_surface``: the whole grid, 1 where the mesh's surface passes.
        cached_points: number of points sampled once from each shape's file, into the cache.
        sampling_seed: seed of that sampling; separate from ``seed``, so that runs with different
            seeds share the cache.
        num_points: number of cached points drawn at each access; None: all of them.
        point_ratio: share p of the drawn points to keep, in training and evaluation; in (0, 1].
        ratio_mode: ``fixed`` keeps the share p; ``uniform`` draws a share from (0, p] per access.
        augment: augmentation of training shapes, if any.
        shift: shift that turns the shapes into those of another domain, if any.
        up_axis: vertical axis of the shapes, for ``augment`` and ``shift``.
        batch_size: number of shapes in the batch of each device.
        num_workers: number of loader processes for each rank; None: see ``default_workers``.
        val_share: share of every class's training shapes kept for validation, in [0, 1).
        seed: seed of the points drawn, augmentation, order and validation split.
        split: how ``source`` divides its shapes; see ``ClassFolder``. None for other sources.
        strict: whether corrupt files raise a DataError instead of being left out.
        cache_workers: number of processes that build a cache; 0: one for each core.
        lock_wait_s: seconds to wait for another process that builds the same cache.
    """

    in_channels = 1
    """Number of features of a voxel: one, the constant 1. Normals and colours are not read."""

    def __init__(
        self,
        root: Path | str | None,
        *,
        source: Callable[..., PointSource],
        cache_dir: Path | str,
        resolution: Resolution = 32,
        span: Span = "extent",
        representation: Representation = "sparse",
        cached_points: Count = 16_384,
        sampling_seed: Seed = 0,
        num_points: Count | None = 4_096,
        point_ratio: PointRatio = 1.0,
        ratio_mode: RatioMode = "fixed",
        augment: Augment | None = None,
        shift: CloudShift | None = None,
        up_axis: Axis = "z",
        batch_size: Count = 32,
        num_workers: CountFrom0 | None = None,
        val_share: Share = 0.0,
        seed: Seed = 0,
        split: float | str | None = None,
        strict: bool = False,
        cache_workers: CountFrom0 = 0,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        super().__init__(
            batch_size=batch_size, num_workers=num_workers, val_share=val_share, seed=seed
        )
        self._voxelisation = Voxelisation(
            resolution=resolution,
            span=span,
            representation=representation,
            num_points=num_points,
            point_ratio=point_ratio,
            ratio_mode=ratio_mode,
            up_axis=up_axis,
            seed=seed,
            shift=shift,
        )
        self._cache = CacheSettings(
            directory=expanded(cache_dir).absolute(),
            points=cached_points,
            seed=sampling_seed,
            strict=strict,
            workers=cache_workers,
            lock_wait_s=lock_wait_s,
        )
        whole = point_ratio == 1 and not (augment is not None and augment.enabled)
        check_dense(representation, batch_size=batch_size, resolution=resolution, whole=whole)
        self._root, self._augment = root, augment
        self._collate = CollateShapes(resolution)
        self._source: PointSource = source(root) if split is None else source(root, split=split)
        # Checked here and not only when loading, before a cache is built in vain.
        if getattr(self._source, "takes_cached_points", False):
            check_num_points(num_points, stored=cached_points)
        if representation == "dense_surface" and not hasattr(self._source, "load_surface"):
            raise ConfigError(
                f"data.representation=dense_surface needs a source that voxelises surfaces, but "
                f"{type(self._source).__name__} only yields points",
                remedy="set data.representation=dense, or use a data group of OFF meshes "
                "(data=shapes, modelnet10 or modelnet40)",
            )
        self._surfaces: dict[Split, MappedArray] = {}

    @property
    def input_kind(self) -> str:
        """Kind of the inputs, ``sparse`` or ``dense 3D``."""
        return "sparse" if self._voxelisation.representation == "sparse" else "dense 3D"

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, indexed by the labels."""
        classes: tuple[str, ...] = self.samples("train").classes
        return classes

    def fingerprint(self) -> str:
        """Returns a hex digest of the data, which does not depend on their location on disk."""
        return self._source.fingerprint(self._cache)

    def preprocessing(self) -> Preprocessing:
        """Returns a callable that prepares any shape for a network, as test shapes are prepared."""
        first = getattr(self._source, "takes_first_points", False)
        return Preprocessing(
            voxelisation=self._voxelisation,
            sampler=ShapeSampler(self._cache.points, self._cache.seed, first=first),
            keeps_clouds=not getattr(self._source, "takes_cached_points", False),
        )

    def _load(self, split: Split) -> PointSet:
        settings = self._voxelisation
        points = self._source.load(split, self._cache)
        check_num_points(settings.num_points, stored=points.points_per_shape)
        known = self._splits["train"].classes if "train" in self._splits else points.classes
        if points.classes != known:
            odd = sorted({*known} ^ {*points.classes}) or "their order"
            raise DataError(
                f"the classes of training and test data in {self._root} differ in {odd}",
                remedy="check data.root: both splits must have the same classes in the same order",
            )
        wanted = settings.num_points or points.points_per_shape
        if points.counts_S is not None and (points.counts_S < wanted).any():
            fewest, few = int(points.counts_S.argmin()), int((points.counts_S < wanted).sum())
            log_once(
                f"{split} clouds repeat points if they have fewer than the {wanted} to draw: "
                f"{few} of {len(points)}, the smallest {points.counts_S[fewest]} "
                f"({(points.files or points.names)[fewest]})"
            )
        if settings.representation == "dense_surface":
            self._surfaces[split] = self._source.load_surface(  # type: ignore[attr-defined]
                split, self._cache, resolution=settings.resolution, span=settings.span
            )
        return points

    def _dataset(self, purpose: Purpose, indices_S: IntArray) -> ShapeDataset:
        split: Split = "test" if purpose == "test" else "train"
        return ShapeDataset(
            self.samples(split),
            indices_S,
            voxelisation=self._voxelisation,
            augment=self._augment if purpose == "train" else None,
            stream=get_args(Purpose).index(purpose),
            surface=self._surfaces.get(split),
        )


def check_num_points(num_points: int | None, *, stored: int) -> None:
    """Raises a ConfigError if ``num_points`` exceeds ``stored``, the points stored per shape."""
    if num_points is not None and num_points > stored:
        raise ConfigError(
            f"data.num_points={num_points} exceeds the {stored} points stored for each shape",
            remedy=f"set data.num_points to at most {stored}, or to null for all",
        )


def check_dense(representation: str, *, batch_size: int, resolution: int, whole: bool) -> None:
    """Raises a ConfigError if a dense batch exceeds a quarter of memory or would ignore settings.

    ``whole``: whether ``point_ratio`` is 1 and augmentation is off, as dense_surface requires.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if representation != "sparse" and 4 * batch_size * resolution**3 > memory_bytes // 4:
        largest = int((memory_bytes / 16 / batch_size) ** (1 / 3))
        raise ConfigError(
            f"a dense batch of {batch_size} grids of {resolution}^3 takes more than a quarter of "
            "this machine's memory",
            remedy=f"set data.resolution to at most {largest} or lower data.batch_size; for sparse "
            "models, set data.representation=sparse",
        )
    if representation == "dense_surface" and not whole:
        raise ConfigError(
            "data.representation=dense_surface takes whole meshes, of which no points can be left "
            "out or augmented",
            remedy="set data.point_ratio=1 and data.augment.enabled=false, or "
            "data.representation=dense",
        )
