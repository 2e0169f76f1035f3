"""The splits of a source, each read when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable

from sparsepipe.data.checks import check_num_points
from sparsepipe.data.dataset import Voxelisation
from sparsepipe.data.points import MappedArray, PointSet
from sparsepipe.data.sources.base import SPLITS, CacheSettings, Source, Split
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
