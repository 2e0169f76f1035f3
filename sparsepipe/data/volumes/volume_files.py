"""Source of the user's own signals, images and volumes: a folder of files, or a csv of paths.

Shapes: S samples of a split, C channels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.files import digest_values, explaining_storage, locked, scan_files
from sparsepipe.data.points import SPLITS, FloatArray, IntArray, Split
from sparsepipe.data.volumes.formats import CONVERTED, decompress, open_volume, suffix_of
from sparsepipe.data.volumes.listing import VolumeListing, list_samples
from sparsepipe.data.volumes.samples import Labels, Part
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils.arguments import checked
from sparsepipe.utils.files import expanded
from sparsepipe.utils.progress import progress

_LOG = logging.getLogger(__name__)

_VERSION = 1
"""Increased with any change to decompressed files."""
ChannelAxis = Literal["first", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSamples:
    """Samples of a split that are files; see ``Samples``.

    Attributes:
        inputs: files of which parts can be read.
        voxels: files of the voxels' labels; none where samples have labels.
        labels_S: the class of each sample.
        num_classes: number of classes of voxels.
        channel_axis: the axis of inputs that is their channels; None: they have no such axis.
        mean: subtracted from inputs.
        std: inputs are divided by it afterwards.
        files: the user's files, of which ``inputs`` may have decompressed copies.
    """

    inputs: tuple[Path, ...]
    voxels: tuple[Path, ...]
    labels_S: IntArray
    num_classes: int
    channel_axis: ChannelAxis | None
    mean: float
    std: float
    files: tuple[str, ...] = ()

    def read_input(self, index: int, part: Part) -> FloatArray:
        """See ``Samples.read_input``."""
        with open_volume(self.inputs[index]) as array:
            if self.channel_axis is None:
                stored = np.asarray(array[part])[None]
            elif self.channel_axis == "first":
                stored = np.asarray(array[(slice(None), *part)])
            else:
                stored = np.moveaxis(np.asarray(array[(*part, slice(None))]), -1, 0)
            values: FloatArray = np.array(stored, np.float32, order="C")
        if self.mean:
            values -= np.float32(self.mean)
        if self.std != 1:
            values /= np.float32(self.std)
        return values

    def read_label(self, index: int, part: Part) -> IntArray:
        """See ``Samples.read_label``."""
        path = self.voxels[index]
        with open_volume(path) as array:
            stored = np.asarray(array[part])
            labels: IntArray = np.array(stored, np.int64, order="C")
        if stored.dtype.kind == "f" and not np.array_equal(labels, stored):
            raise DataError(
                f"{path} has labels that are no whole numbers",
                remedy="resample labels by their nearest neighbours, or correct the file",
            )
        if labels.size and not (labels.min() >= 0 and labels.max() < self.num_classes):
            raise DataError(
                f"{path} has labels from {labels.min()} to {labels.max()}, but there are "
                f"{self.num_classes} classes",
                remedy="name all classes in data.source.classes, from that of label 0 on, or "
                "correct the file",
            )
        return labels


class VolumeFiles:
    """Source: ``.npy``, ``.h5``, ``.tif``, ``.nii``, ``.nii.gz`` files and zarr arrays of one size.

    ``root`` is a folder or a csv file. With labels of voxels, a folder has ``inputs`` and
    ``labels`` with files of equal names, whatever their suffixes; with labels of samples, folders
    of classes. Folders ``train`` and ``test`` within these divide the files; without them every
    fifth file or so is for testing. A csv file has the columns ``input`` (a path), ``label`` (a
    path, or the name of a class) and optionally ``split`` (``train`` or ``test``, without it
    ``train``); paths are relative to the csv file.

    Of ``.npy`` and ``.h5`` files and zarr arrays only the part that a rank needs is read. Files of
    the other formats are decompressed once, into the cache.

    Args:
        root: the folder or csv file.
        labels: of samples or of voxels.
        cache: where decompressed files and digests are kept.
        classes: names of the classes. For voxels they are required, from that of label 0 on; for
            samples, None takes all of the folders or the csv file.
        channel_axis: ``first`` or ``last`` axis of inputs, if that is their channels; None: they
            have no such axis.
        mean: subtracted from inputs. A setting, because a rank that reads a part does not know the
            mean of the whole.
        std: inputs are divided by it afterwards.

    Raises:
        ConfigError: a setting is not valid, or the voxels' classes are not named.
    """

    @checked
    def __init__(
        self,
        root: Path | str | None,
        *,
        labels: Labels,
        cache: CacheSettings,
        classes: Sequence[str] | None = None,
        channel_axis: ChannelAxis | None = None,
        mean: float = 0.0,
        std: Annotated[float, Field(gt=0)] = 1.0,
    ) -> None:
        if labels == "voxel" and not classes:
            raise ConfigError(
                "data.labels=voxel needs data.source.classes, which is not set",
                remedy="set data.source.classes to the names of the labels 0, 1 and so on, such as "
                "[background,vessel]",
            )
        self._root, self._labels, self._cache = root, labels, cache
        self._given = None if classes is None else tuple(map(str, classes))
        self._channel_axis, self._mean, self._std = channel_axis, mean, std

    @cached_property
    def _listing(self) -> VolumeListing:
        return list_samples(self._root, labels=self._labels, classes=self._given)

    @property
    def classes(self) -> tuple[str, ...]:
        """See ``VolumeSource.classes``."""
        return self._listing.classes

    @property
    def sample_sizes(self) -> tuple[int, ...]:
        """See ``VolumeSource.sample_sizes``."""
        spatial = {"first": slice(1, None), "last": slice(None, -1), None: slice(None)}
        return self._first_shape[spatial[self._channel_axis]]

    @cached_property
    def _first_shape(self) -> tuple[int, ...]:
        first = self._listing.entries["train"][0].input
        shape = _shape_of(self._readable([first])[first])
        dimensions = len(shape) - (self._channel_axis is not None)
        if not 1 <= dimensions <= 3 or min(shape) < 1:
            raise DataError(
                f"{first} has the shape {_product(shape)}, of which {dimensions} are dimensions of "
                "space",
                remedy="samples have one to three of them; set data.source.channel_axis to first "
                "or last if that dimension is of channels, or to null otherwise",
            )
        return shape

    def load(self, split: Split) -> FileSamples:
        """The samples of a split; see ``VolumeSource.load``."""
        entries = self._listing.entries[split]
        readable = self._readable([path for entry in entries for path in entry.paths])
        for entry in entries:
            for path in entry.paths:
                shape = _shape_of(readable[path])
                wanted = self._first_shape if path == entry.input else self.sample_sizes
                if shape != wanted:
                    raise DataError(
                        f"{path} has the shape {_product(shape)}, not {_product(wanted)} as the "
                        "first input",
                        remedy="crop, pad or resample all inputs to one shape, and write one label "
                        "for each voxel, without channels",
                    )
        return FileSamples(
            inputs=tuple(readable[entry.input] for entry in entries),
            voxels=tuple(readable[path] for entry in entries for path in entry.paths[1:]),
            files=tuple(str(entry.input) for entry in entries),
            labels_S=np.array(
                [entry.label if isinstance(entry.label, int) else 0 for entry in entries], np.int64
            ),
            num_classes=len(self.classes),
            channel_axis=self._channel_axis,
            mean=self._mean,
            std=self._std,
        )

    def fingerprint(self) -> str:
        """Digest of the files' contents and labels; see ``VolumeSource.fingerprint``."""
        entries = [self._listing.entries[split] for split in SPLITS]
        digests = self._digests([path for found in entries for e in found for path in e.paths])
        contents = [
            [
                [digests[e.input], e.label if isinstance(e.label, int) else digests[e.label]]
                for e in found
            ]
            for found in entries
        ]
        return digest_values([self.classes, contents])

    def _readable(self, paths: Sequence[Path]) -> dict[Path, Path]:
        """For each file the one to read parts of, decompressed into the cache if necessary."""
        compressed = [path for path in dict.fromkeys(paths) if suffix_of(path) in CONVERTED]
        digests = self._digests(compressed)
        folder = self._cache.directory / "volumes" / "decompressed"
        targets = {path: folder / f"{digests[path]}_{_VERSION}.npy" for path in compressed}
        if not all(target.is_file() for target in targets.values()):
            with (
                explaining_storage(folder, setting="data.cache_dir"),
                locked(folder / "lock", wait_s=self._cache.lock_wait_s),
                progress("decompressing volumes") as advance,
            ):
                missing = {path: each for path, each in targets.items() if not each.is_file()}
                if missing:  # which no other process has written meanwhile
                    text = "%d files are decompressed once, into %s"
                    _LOG.info(text, len(missing), folder)
                for path, target in missing.items():
                    decompress(path, target)
                    advance(len(missing))
        return {path: targets.get(path, path) for path in paths}

    def _digests(self, paths: Sequence[Path]) -> dict[Path, str]:
        """Digests of the contents of volumes; a zarr array is a directory of files."""
        files = {
            path: sorted(filter(Path.is_file, path.rglob("*"))) if path.is_dir() else [path]
            for path in dict.fromkeys(paths)
        }
        root = expanded(str(self._root)).absolute()
        names = [str(file) for found in files.values() for file in found]
        scanned = scan_files(root, names, cache_directory=self._cache.directory)
        contents = {file.path: file.digest for file in scanned}
        return {
            path: contents[path]
            if found == [path]
            else digest_values([[str(f.relative_to(path)), contents[f]] for f in found])
            for path, found in files.items()
        }


def _shape_of(path: Path) -> tuple[int, ...]:
    with open_volume(path) as array:
        return tuple(array.shape)


def _product(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
