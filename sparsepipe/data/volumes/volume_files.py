"""Source of the user's signals, images and volumes: a folder of files, or a csv file of paths.

Shapes: S samples of a split, C channels.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from sparsepipe.data.cache import CacheSettings, build_once
from sparsepipe.data.files import digest_values, log_once, scan_files
from sparsepipe.data.listing import find_files, list_folder, named, read_table
from sparsepipe.data.points import SPLITS, FloatArray, IntArray, Split
from sparsepipe.data.volumes.datamodule import Labels, VolumePart
from sparsepipe.data.volumes.formats import (
    CONVERTED,
    SUFFIXES,
    TIFF,
    ChannelAxis,
    decompress,
    open_volume,
    placement_of,
    suffix_of,
)
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils.arguments import checked
from sparsepipe.utils.files import expanded

_VERSION, _TIFF_VERSION = 1, 2
"""Increased with any change to decompressed files, those of TIFF files separately."""
_UNLABELLED = -100
"""Label that losses and metrics ignore, as PyTorch's cross-entropy does."""
_ROUNDING = 1e-3
"""Largest distance of stored labels from whole numbers, to which scaled integers are rounded."""
_SAME_PLACE = 0.1
"""Distance of an input and its labels, in voxels, up to which rounded affines may move them."""
_LAYOUT = {
    "voxel": "a folder has inputs and labels with files of the same names; a csv file has columns "
    "input and label with their paths; folders train and test, or a column split, divide them",
    "sample": "a folder has one file for each sample in folders of classes; a csv file has the "
    "columns input with paths and label with names of classes; folders train and test, or a column "
    "split, divide them",
}
Finite = Annotated[float, Field(allow_inf_nan=False)]

Entry = tuple[Path, Path | int]
"""The file of an input, and its class number or the file of its voxels' labels."""
Entries = Mapping[Split, Sequence[Entry]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSamples:
    """Samples of a split, each stored in files.

    ``inputs`` and ``voxels`` (files of voxel labels; empty where each sample has one label) can be
    read in part; ``files`` and ``label_files`` hold the paths of the user's own files. For ``fill``
    and ``ignore``, see :class:`VolumeFiles`.
    """

    inputs: tuple[Path, ...]
    voxels: tuple[Path, ...]
    labels_S: IntArray
    num_classes: int
    channel_axis: ChannelAxis | None
    mean: float
    std: float
    files: tuple[str, ...] = ()
    label_files: tuple[str, ...] = ()
    fill: float | None = None
    ignore: int | None = None

    def read_input(self, index: int, part: VolumePart) -> FloatArray:
        """Reads a part of an input, normalised: float32 [C, *part]; only this part is in memory.

        Raises:
            DataError: the part has values that are not finite in float32, and ``fill`` is None.
        """
        with open_volume(self.inputs[index]) as array, np.errstate(over="ignore"):
            if self.channel_axis is None:
                stored = np.asarray(array[part])[None]
            elif self.channel_axis == "first":
                stored = np.asarray(array[(slice(None), *part)])
            else:
                stored = np.moveaxis(np.asarray(array[(*part, slice(None))]), -1, 0)
            values: FloatArray = np.array(stored, np.float32, order="C")
        if stored.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
            if self.fill is None:
                raise DataError(
                    f"{self.files[index]} has {np.sum(~finite):,} values that are not finite: NaN, "
                    "infinite or beyond float32",
                    remedy="correct the file, or set data.source.fill to the number to take "
                    "instead",
                )
            values[~finite] = self.fill
        if self.mean:
            values -= np.float32(self.mean)
        if self.std != 1:
            values /= np.float32(self.std)
        return values

    def read_label(self, index: int, part: VolumePart) -> IntArray:
        """Returns the class numbers of a part's voxels, int64 [*part]; -100 without a label.

        Raises:
            DataError: the part has labels that are not class numbers, and that are not ignored.
        """
        with open_volume(self.voxels[index]) as array, np.errstate(invalid="ignore"):
            stored = np.asarray(array[part])
            whole = np.rint(stored) if stored.dtype.kind == "f" else stored
            labels: IntArray = np.array(whole, np.int64, order="C")
        is_whole = whole is stored or np.allclose(stored, labels, rtol=0, atol=_ROUNDING)
        if self.ignore is not None:
            labels[labels == self.ignore] = _UNLABELLED
        is_known = ((labels >= 0) & (labels < self.num_classes)) | (labels == _UNLABELLED)
        if not (is_whole and is_known.all()):
            raise DataError(
                f"{self.label_files[index]} has labels from {stored.min()} to {stored.max()}, "
                f"which should be whole numbers from 0 to {self.num_classes - 1}, the class "
                f"numbers, or {_UNLABELLED} for voxels without a label",
                remedy="name all classes in data.source.classes, beginning with that of label 0; "
                "set data.source.ignore to the number of voxels without a label; resample labels "
                "with nearest neighbours; or correct the file",
            )
        return labels


class VolumeFiles:
    """Source: zarr arrays, ``.npy``, ``.h5``, ``.tif``, ``.nii``, ``.nii.gz`` files of equal size.

    ``root`` is a folder or a csv file. With labels of voxels, a folder has ``inputs`` and
    ``labels`` with files of the same names, whatever their suffixes; with labels of samples, it has
    folders of classes. Folders ``train`` and ``test`` within these divide the files; without them,
    a fifth (of each class) is for testing. A csv file has columns ``input`` (a path), ``label`` (a
    path, or the name of a class) and optionally ``split`` (``train`` or ``test``; default
    ``train``); paths are relative to the csv file.

    From ``.npy`` and ``.h5`` files and zarr arrays, only the part that a rank needs is read. Files
    of the other formats are decompressed once, into the cache.

    Args:
        root: the folder or csv file.
        labels: what has a label, each ``sample`` or each ``voxel``.
        cache: settings of the cache that keeps decompressed files and digests.
        classes: names of the classes. For voxels they are required, in the order of the labels from
            0; for samples, None: all class folders, or all names in the csv file.
        channel_axis: whether the channels are the ``first`` or the ``last`` axis of inputs; None:
            inputs have no such axis.
        mean: number subtracted from inputs; not computed, because a rank may read only a part.
        std: number by which inputs are then divided.
        fill: number that replaces values of inputs that are not finite, before ``mean`` and ``std``
            apply; None: files with such values are refused.
        ignore: label of voxels that do not count, in addition to -100.
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
        mean: Finite = 0.0,
        std: Annotated[Finite, Field(gt=0)] = 1.0,
        fill: Finite | None = None,
        ignore: int | None = None,
    ) -> None:
        if labels == "voxel" and not classes:
            raise ConfigError(
                "data.labels=voxel needs data.source.classes, which is not set",
                remedy="set data.source.classes to the names of the labels 0, 1 and so on, such as "
                "[background,vessel]",
            )
        self._root, self._labels, self._cache = root, labels, cache
        self._given = tuple(map(str, classes or ()))
        self._channel_axis: ChannelAxis | None = channel_axis
        self._reading: dict[str, Any] = {
            **{"channel_axis": channel_axis, "mean": mean, "std": std},
            **{"fill": fill, "ignore": ignore},
        }

    @cached_property
    def _listing(self) -> tuple[tuple[str, ...], Entries]:
        """Names of the classes, and the samples of each split."""
        root, labels = expanded(self._root or ".").absolute(), self._labels
        if self._root and root.suffix.lower() == ".csv" and root.is_file():
            classes, entries = _in_table(root, labels, self._given)
        elif self._root and root.is_dir() and labels == "voxel":
            classes, entries = self._given, _in_pairs(root)
        elif self._root and root.is_dir():
            classes, entries = _in_class_folders(root, self._given)
        else:
            raise DataError(
                f"data.root={self._root} is neither a folder of volumes nor a csv file of paths",
                remedy=f"set data.root to one that exists; {_LAYOUT[labels]}",
            )
        if not entries["train"]:
            raise DataError(
                f"{root} has no samples for training", remedy=f"add some; {_LAYOUT[labels]}"
            )
        return classes, entries

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names of samples or of voxels, indexed by the labels."""
        return self._listing[0]

    @property
    def sample_sizes(self) -> tuple[int, ...]:
        """Spatial sizes, the same for every sample."""
        spatial = {"first": slice(1, None), "last": slice(None, -1), None: slice(None)}
        return self._first_shape[spatial[self._channel_axis]]

    @cached_property
    def _first_shape(self) -> tuple[int, ...]:
        first, _ = self._listing[1]["train"][0]
        with open_volume(self._readable([first], self._channel_axis)[first]) as array:
            shape = tuple(array.shape)
        dimensions = len(shape) - (self._channel_axis is not None)
        if not 1 <= dimensions <= 3 or min(shape) < 1:
            raise DataError(
                f"{first} has the shape {list(shape)} (spatial dimensions: {dimensions}), but "
                "samples need one to three spatial dimensions and no empty axis",
                remedy="set data.source.channel_axis to first or last if this axis holds channels, "
                "or else to null; or write the files with a valid shape",
            )
        return shape

    def load(self, split: Split) -> FileSamples:
        """Returns the samples of a split."""
        classes, entries = self._listing[0], self._listing[1][split]
        if len(self._placements) > 1:
            log_once(
                "inputs differ in orientation or spacing, but are read as if they did not: "
                + "; ".join(f"{text} ({named(files)})" for text, files in self._placements.items()),
                level=logging.WARNING,
            )
        files = [path for path, _ in entries]
        label_files = [label for _, label in entries if isinstance(label, Path)]
        inputs, voxels = self._readable(files, self._channel_axis), self._readable(label_files)
        partial_copies = list[str]()
        for number, path in enumerate((*files, *label_files)):
            is_input = number < len(files)
            with open_volume((inputs if is_input else voxels)[path]) as array:
                shape, chunks = tuple(array.shape), getattr(array, "nchunks", 0)
                if is_input and chunks and (lost := chunks - array.nchunks_initialized):
                    partial_copies.append(f"{path} ({lost} of {chunks})")
            wanted = self._first_shape if is_input else self.sample_sizes
            if shape != wanted:
                raise DataError(
                    f"{path} has the shape {list(shape)}, not {list(wanted)} like the first input",
                    remedy="crop, pad or resample all inputs to one shape, and write one label for "
                    "each voxel, without channels",
                )
        if partial_copies:
            log_once(
                "zarr inputs lack chunks, which are read as the fill value: correct for empty "
                f"chunks, but not in a partial copy: {named(partial_copies)}",
                level=logging.WARNING,
            )
        return FileSamples(
            inputs=tuple(inputs[path] for path in files),
            voxels=tuple(voxels[path] for path in label_files),
            files=tuple(map(str, files)),
            label_files=tuple(map(str, label_files)),
            labels_S=np.array([0 if isinstance(x, Path) else x for _, x in entries], np.int64),
            num_classes=len(classes),
            **self._reading,
        )

    @cached_property
    def _placements(self) -> Mapping[str, list[str]]:
        """The inputs of both splits by orientation and size of a voxel, where files give these.

        Raises:
            DataError: an input and its labels are in different places.
        """
        ends = [(0, size - 1) for size in (*self.sample_sizes, 1, 1)[:3]]
        corners_84 = np.array([(*corner, 1) for corner in itertools.product(*ends)])
        found: dict[str, list[str]] = {}
        for path, label in itertools.chain(*self._listing[1].values()):
            if (place := placement_of(path)) is None:
                continue
            found.setdefault(place[1], []).append(str(path))
            if not isinstance(label, Path) or (other := placement_of(label)) is None:
                continue
            moved_8 = np.linalg.norm(corners_84 @ (place[0] - other[0]).T, axis=1)
            apart = moved_8.max() / np.linalg.norm(place[0][:3, :3], axis=0).min()
            if apart > _SAME_PLACE:
                raise DataError(
                    f"voxels of {path} ({place[1]}) and of its labels {label} ({other[1]}) are "
                    f"up to {apart:.3g} voxels apart, by their affines",
                    remedy="resample the labels to the grid of the input; or, if they do belong "
                    "voxel by voxel, write them with the affine of the input",
                )
        return found

    def fingerprint(self) -> str:
        """Returns a hex digest of the class names, and of each sample's content and label."""
        entries = [self._listing[1][split] for split in SPLITS]
        values = itertools.chain(*entries[0], *entries[1])
        digests = self._digests([path for path in values if isinstance(path, Path)])
        contents = [
            [
                [digests[path], label if isinstance(label, int) else digests[label]]
                for path, label in found
            ]
            for found in entries
        ]
        return digest_values([self.classes, contents])

    def _readable(
        self, paths: Sequence[Path], channel_axis: ChannelAxis | None = None
    ) -> dict[Path, Path]:
        """Maps files to those to read: themselves, or their decompressed copies in the cache."""
        compressed = [path for path in dict.fromkeys(paths) if suffix_of(path) in CONVERTED]
        digests = self._digests(compressed)
        folder = self._cache.directory / "volumes" / "decompressed"
        of_tiff = f"{_TIFF_VERSION}{channel_axis or ''}"
        targets = {
            path: folder / f"{digests[path]}_{of_tiff if suffix_of(path) in TIFF else _VERSION}.npy"
            for path in compressed
        }
        for path, target in targets.items():
            build = partial(decompress, path, target, channel_axis=channel_axis)
            build_once(target, build, wait_s=self._cache.lock_wait_s)
        return {path: targets.get(path, path) for path in paths}

    def _digests(self, paths: Sequence[Path]) -> dict[Path, str]:
        """Maps volumes to digests of their contents; a zarr array is a directory of files."""
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


def _in_class_folders(root: Path, classes: tuple[str, ...]) -> tuple[tuple[str, ...], Entries]:
    listings = list_folder(root, suffixes=SUFFIXES, needs_classes=True)
    found = listings["train"].classes
    if absent := [name for name in classes if name not in found]:
        raise DataError(
            f"data.source.classes names {named(absent)}, for which {root} has no folder",
            remedy="correct the names, or set data.source.classes=null for all folders",
        )
    classes = classes or found
    entries = {
        split: [
            (root / listing.names[index], label)
            for label, name in enumerate(classes)
            for index in np.flatnonzero(listing.labels_S == found.index(name))
        ]
        for split, listing in listings.items()
    }
    return classes, entries


def _in_pairs(root: Path) -> Entries:
    listings = list_folder(root / "inputs", suffixes=SUFFIXES)
    names = [file.name for file in find_files(root / "labels", SUFFIXES)[0]]
    given = [name for listing in listings.values() for name in listing.names]
    stems = {name: name[: -len(suffix_of(Path(name)))] for name in (*names, *given)}
    labels = {stems[name]: root / "labels" / name for name in names}
    inputs = {stems[name] for name in given}
    if alone := sorted(inputs ^ labels.keys()):
        raise DataError(
            f"files in inputs and labels of {root} have no counterpart: {named(alone)}",
            remedy="give an input and its labels the same name in the folders inputs and labels",
        )
    return {
        split: [(listing.root / name, labels[stems[name]]) for name in listing.names]
        for split, listing in listings.items()
    }


def _in_table(
    path: Path, labels: Labels, classes: tuple[str, ...]
) -> tuple[tuple[str, ...], Entries]:
    rows = read_table(path, columns=("input", "label"))
    if labels == "sample" and not classes:
        found = {row["label"] for row in rows}
        # Numbers are sorted by value, not as 1, 10, 2.
        as_numbers = all(name.isdecimal() for name in found)
        classes = tuple(sorted(found, key=lambda name: (int(name) if as_numbers else 0, name)))
    entries: dict[Split, list[Entry]] = {split: [] for split in SPLITS}
    for line, row in enumerate(rows, 2):
        if labels == "voxel":
            label: Path | int = path.parent / row["label"]
        elif row["label"] in classes:
            label = classes.index(row["label"])
        else:
            raise DataError(
                f"{path}, line {line}, has the label {row['label']!r}, which is not a class",
                remedy="correct it, or name all classes in data.source.classes",
            )
        entries["test" if row.get("split") == "test" else "train"].append(
            (path.parent / row["input"], label)
        )
    return classes, entries
