"""Preprocessing of one shape for a trained network, as for the test shapes of its training run.

Shapes: F faces, Q points of a cloud, P points stored, R voxels along each side.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsepipe.data.dataset import CollateShapes, ShapeDataset, Voxelisation
from sparsepipe.data.files import digest_file
from sparsepipe.data.formats import as_shape, read_shape
from sparsepipe.data.points import HeldArray, PointSet, measure_frames
from sparsepipe.data.shape_rows import ShapeSampler, SurfaceVoxels, quantised_points
from sparsepipe.errors import DataError
from sparsepipe.sparse import SparseTensor
from sparsepipe.utils.reading import explained

_TEST_STREAM, _OWN_STREAM = 2, 3
"""Streams of random draws: for the test shapes of the training run, and for any other shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """Turns one shape into a network's input, as a data module does with test shapes.

    Called with a file's path, a trimesh mesh or points [Q, 3], it returns the input of a batch of
    one. The content of the file or array seeds the drawing of points; for a file of the training
    run's test split, they are the points drawn in its test.

    Attributes:
        voxelisation: how points are drawn and become voxels.
        sampler: chooses the points of a shape from which ``voxelisation`` draws.
        keeps_clouds: whether ``voxelisation`` draws from all points of a cloud instead.
        test_number: function of a path that returns the file's index in the training run's test
            split, or None for other files; None: all files are others.
        device: device of the input.
        dtype: type of the input's values; None: that of batches in training.
    """

    voxelisation: Voxelisation
    sampler: ShapeSampler
    keeps_clouds: bool = False
    test_number: Callable[[Path], int | None] | None = None
    device: str | torch.device = "cpu"
    dtype: torch.dtype | None = None

    def __call__(self, shape: Any) -> SparseTensor | Tensor:
        """Returns the input of a batch of one shape: sparse, or dense [1, 1, R, R, R]."""
        found: SparseTensor | Tensor = self.batch([self.sample(shape)])["input"]
        return found

    def sample(self, shape: Any) -> dict[str, Any]:
        """Returns a sample as in :class:`~sparsepipe.data.dataset.ShapeDataset`, with label -1."""
        if not isinstance(shape, str | os.PathLike):
            values = as_shape(shape)
            digest = hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()
            return self._sample(values, digest)
        path = Path(os.path.expanduser(shape))
        with explained(path, "shape", error=DataError, remedy="check the path and its permissions"):
            number = None if self.test_number is None else self.test_number(path)
            return self._sample(read_shape(path), digest_file(path), number)

    def batch(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Collates samples into a batch, and moves its ``input`` to ``device`` and ``dtype``."""
        batch = CollateShapes(self.voxelisation.resolution)(samples)
        x: SparseTensor | Tensor = batch["input"]
        return {**batch, "input": x.to(self.device, self.dtype or x.dtype)}

    def _sample(
        self, values: NDArray[np.float64], digest: str, number: int | None = None
    ) -> dict[str, Any]:
        settings, surface = self.voxelisation, None
        of_shape: dict[str, Any] = {
            "rows_S": np.zeros(1, np.int64),
            "labels_S": np.full(1, -1),
            "names": (digest,),
            "classes": (),
        }
        if settings.representation == "dense_surface":
            if values.ndim == 2:
                raise DataError(
                    "the network was trained on surfaces of meshes, but this shape is a cloud",
                    remedy="give a mesh, or train with data.representation=dense",
                )
            voxels = SurfaceVoxels(self.sampler, settings.resolution, settings.span)
            surface = HeldArray(voxels.packed(values, digest)[None])
        if values.ndim == 3 or not self.keeps_clouds:
            points_P3, numbers = self.sampler.quantised(values, digest)
            points = quantised_points(HeldArray(points_P3[None]), numbers[None], **of_shape)
        else:
            needed = settings.num_points or 1
            rows_P = np.arange(max(len(values), needed)) % len(values)  # repeats points if too few
            points_1P3 = values[rows_P][None]
            points = PointSet(
                points=HeldArray(points_1P3),
                offset_S3=np.zeros((1, 3)),
                step_S3=np.ones((1, 3)),
                frames=measure_frames(points_1P3, 1.0),
                **of_shape,
            )
        key = (_OWN_STREAM, 0, int(digest, 16)) if number is None else (_TEST_STREAM, 0, number)
        only = np.zeros(1, np.int64)
        return ShapeDataset(points, only, voxelisation=settings, surface=surface).sample(0, key=key)
