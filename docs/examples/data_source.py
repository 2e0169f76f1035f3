"""A data source: arrays ``<split>_points.npy`` [S, P, 3] and ``<split>_labels.npy`` [S].

Used by ``data.source._target_=data_source.Arrays data.root=/path/to/them``.
"""

from pathlib import Path

import numpy as np

from sparsepipe.data.files import digest_file, digest_values
from sparsepipe.data.points import MappedArray, PointSet, measure_frames
from sparsepipe.data.sources import CacheSettings, Split


class Arrays:
    """Points that lie ready, so that nothing has to be cached."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        points = MappedArray(self.root / f"{split}_points.npy")
        frames = measure_frames(points.array, 1.0)
        labels_S = np.load(self.root / f"{split}_labels.npy")
        rows_S, zero_S3 = np.arange(len(labels_S)), np.zeros_like(frames.low_S3)
        names, classes = tuple(map(str, rows_S)), ("ball", "box")
        return PointSet(points, rows_S, zero_S3, zero_S3 + 1, frames, labels_S, names, classes)

    def fingerprint(self, cache: CacheSettings) -> str:
        return digest_values([digest_file(path) for path in sorted(self.root.glob("*.npy"))])
