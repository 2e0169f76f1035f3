"""Source of the user's signals, images and volumes: a folder of files, or a csv file of paths.

Shapes: S samples of a split, C channels, D spatial dimensions.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sparsepipe.data.cache import CacheSettings, parallel_map
from sparsepipe.data.files import (
    digest_values,
    explaining_storage,
    locked,
    log_once,
    new_array,
    scan_files,
)
from sparsepipe.data.listing import find_files, list_folder, named, read_table
from sparsepipe.data.points import SPLITS, FloatArray, IntArray, Split
from sparsepipe.data.volumes.datamodule import UNLABELLED, Labels, VolumePart
from sparsepipe.data.volumes.formats import (
    CONVERTED,
    SUFFIXES,
    ChannelAxis,
    geometry_of,
    open_volume,
    read_volume,
    stem_of,
    suffix_of,
)
from sparsepipe.data.volumes.geometry import Geometry
from sparsepipe.data.volumes.preparation import Intensity, Preparation, finite
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils.arguments import checked
from sparsepipe.utils.files import expanded
from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.progress import progress

_VERSION = 1
"""Increased with any change to prepared or decompressed files."""
_VOXELS_PER_WORKER = 2**22
"""Voxels that justify starting a process that prepares them."""
_ROUNDING = 1e-3
"""Largest distance of stored labels from whole numbers, to which scaled integers are rounded."""
_LAYOUT = {
    "voxel": "a folder has inputs and labels with files of the same names, and perhaps masks; a "
    "csv file has columns input, label and perhaps mask with their paths; folders train and test, "
    "or a column split, divide them",
    "sample": "a folder has one file for each sample in folders of classes; a csv file has the "
    "columns input with paths and label with names of classes; folders train and test, or a column "
    "split, divide them",
}
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Case:
    """The files of a sample.

    Attributes:
        inputs: the file of its input, or those of its channels.
        label: its class number, or the file of its voxels' labels.
        mask: the file of a mask, which is 0 where labels do not count; None: all count.
    """

    inputs: tuple[Path, ...]
    label: Path | int
    mask: Path | None = None

    @property
    def parts(self) -> tuple[Path | int, ...]:
        """All files of the case, and its class number if it has one."""
        return (*self.inputs, self.label, *([self.mask] if self.mask else ()))


Entries = Mapping[Split, Sequence[Case]]
_Read = Callable[[], NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSamples:
    """Samples of a split, each stored in files.

    ``inputs`` and ``voxels`` (files of voxel labels; empty where each sample has one label) can be
    read in part; ``files`` and ``label_files`` hold the paths of the user's own files, the first
    one of each sample. ``sizes_S`` are the spatial sizes of each sample, and ``spacings_S`` [S, D]
    the sizes of its voxels in mm, NaN if they are unknown. Of ``reading``, axis of channels, fill,
    mean and std apply; for ``ignore``, see :class:`VolumeFiles`.
    """

    inputs: tuple[Path, ...]
    voxels: tuple[Path, ...]
    labels_S: IntArray
    sizes_S: tuple[tuple[int, ...], ...]
    spacings_S: FloatArray
    num_classes: int
    reading: Preparation
    files: tuple[str, ...] = ()
    label_files: tuple[str, ...] = ()
    ignore: int | None = None

    def read_input(self, index: int, part: VolumePart) -> FloatArray:
        """Reads a part of an input, normalised: float32 [C, *part]; only this part is in memory.

        Raises:
            DataError: the part has values that are not finite in float32, and ``fill`` is None.
        """
        with open_volume(self.inputs[index]) as array:
            if self.reading.channel_axis is None:
                stored = np.asarray(array[part])[None]
            elif self.reading.channel_axis == "first":
                stored = np.asarray(array[(slice(None), *part)])
            else:
                stored = np.moveaxis(np.asarray(array[(*part, slice(None))]), -1, 0)
            values = finite(stored, fill=self.reading.fill, file=self.files[index])
        if self.reading.mean:
            values -= np.float32(self.reading.mean)
        if self.reading.std != 1:
            values /= np.float32(self.reading.std)
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
            labels[labels == self.ignore] = UNLABELLED
        is_known = ((labels >= 0) & (labels < self.num_classes)) | (labels == UNLABELLED)
        if not (is_whole and is_known.all()):
            raise DataError(
                f"{self.label_files[index]} has labels from {stored.min()} to {stored.max()}, "
                f"which should be whole numbers from 0 to {self.num_classes - 1}, the class "
                f"numbers, or {UNLABELLED} for voxels without a label",
                remedy="name all classes in data.source.classes, beginning with that of label 0; "
                "set data.source.ignore to the number of voxels without a label; resample labels "
                "with nearest neighbours; or correct the file",
            )
        return labels


class VolumeFiles:
    """Source: NIfTI, NRRD, MetaImage, TIFF, ``.npy`` and ``.h5`` files, and zarr arrays.

    ``root`` is a folder or a csv file. With labels of voxels, a folder has ``inputs``, ``labels``
    and perhaps ``masks`` with files of the same names, whatever their suffixes; inputs without
    labels are left out. With labels of samples, it has folders of classes. Folders ``train`` and
    ``test`` within these divide the files; without them, a fifth (of each class) is for testing. A
    csv file has columns ``input`` (a path), ``label`` (a path, or the name of a class) and
    optionally ``mask`` (a path) and ``split`` (``train`` or ``test``; default ``train``); paths are
    relative to the csv file.

    From ``.npy`` and ``.h5`` files and zarr arrays, only the part that a rank needs is read. Files
    of the other formats are decompressed once, into the cache. Where there are masks, or one of
    ``orientation``, ``spacing``, ``intensity`` and ``channels`` is set, each case is prepared once,
    into the cache.

    Args:
        root: the folder or csv file.
        labels: what has a label, each ``sample`` or each ``voxel``.
        cache: settings of the cache that keeps decompressed and prepared files, and digests.
        classes: names of the classes. For voxels they are required, in the order of the labels from
            0; for samples, None: all class folders, or all names in the csv file.
        channel_axis: whether the channels are the ``first`` or the ``last`` axis of inputs; None:
            inputs have no such axis.
        mean: number subtracted from inputs; not computed, because a rank may read only a part.
        std: number by which inputs are then divided.
        fill: number that replaces values of inputs that are not finite, before ``mean`` and ``std``
            apply; None: files with such values are refused.
        ignore: label of voxels that do not count, in addition to -100.
        orientation: as in :class:`Preparation`, like ``intensity``.
        spacing: as there, or ``median``: that of the training cases, for each axis.
        channels: endings of the names of the files of a sample's channels, in their order, such as
            ``_T1`` and ``_T2`` of ``scan_T1.nii.gz`` and ``scan_T2.nii.gz``; labels and masks have
            the name without an ending, and a csv file names the first channel's file. Empty: each
            sample has one file.
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
        orientation: str | None = None,
        spacing: Sequence[Annotated[Finite, Field(gt=0)]] | Literal["median"] | None = None,
        intensity: Intensity = None,
        channels: Sequence[str] = (),
    ) -> None:
        if labels == "voxel" and not classes:
            raise ConfigError(
                "data.labels=voxel needs data.source.classes, which is not set",
                remedy="set data.source.classes to the names of the labels 0, 1 and so on, such as "
                "[background,vessel]",
            )
        self._root, self._labels, self._cache = root, labels, cache
        self._given = tuple(map(str, classes or ()))
        self._ignore, self._takes_median = ignore, spacing == "median"
        self._before_median = Preparation(
            orientation=orientation,
            spacing=None if spacing is None or spacing == "median" else tuple(spacing),
            intensity=intensity,
            channels=tuple(channels),
            channel_axis=channel_axis,
            mean=mean,
            std=std,
            fill=fill,
        )

    @cached_property
    def _listing(self) -> tuple[tuple[str, ...], Entries]:
        """Names of the classes, and the samples of each split."""
        root, labels = expanded(self._root or ".").absolute(), self._labels
        channels = self._before_median.channels
        if self._root and root.suffix.lower() == ".csv" and root.is_file():
            classes, entries = _in_table(root, labels, self._given, channels)
        elif self._root and root.is_dir() and labels == "voxel":
            classes, entries = self._given, _in_pairs(root, channels)
        elif self._root and root.is_dir():
            classes, entries = _in_class_folders(root, self._given, channels)
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

    @cached_property
    def _geometries(self) -> Mapping[Path, Geometry]:
        """Where the voxels of each case are, by the first of its files."""
        axis = self._before_median.channel_axis
        paths = [case.inputs[0] for case in itertools.chain(*self._listing[1].values())]
        return {path: geometry_of(path, channel_axis=axis) for path in paths}

    @cached_property
    def preparation(self) -> Preparation:
        """How files of a case become an input; a ``median`` spacing is the number that it is."""
        if not self._takes_median:
            return self._before_median
        oriented = self._before_median.oriented
        of_cases = [self._geometries[case.inputs[0]] for case in self._listing[1]["train"]]
        spacings_SD = [oriented(each).spacing for each in of_cases]
        spacing = tuple(np.median(spacings_SD, axis=0).tolist())
        sides = " x ".join(f"{side:.4g}" for side in spacing)
        log_once(f"the median size of a voxel of the training cases is {sides} mm")
        return replace(self._before_median, spacing=spacing)

    @property
    def recorded_preparation(self) -> Preparation:
        """The preparation of other files; if no orientation is set, that which all training cases
        have, if they have one in common.
        """
        of_cases = [self._geometries[case.inputs[0]] for case in self._listing[1]["train"]]
        axes = {each.axes if each.known == "place" else None for each in of_cases}
        common = axes.pop() if len(axes) == 1 else None
        return replace(self.preparation, orientation=self.preparation.orientation or common)

    @cached_property
    def _grids(self) -> Mapping[Path, Geometry]:
        """Where the voxels of each prepared case are, by the first of its files."""
        found = {path: self.preparation.geometry(each) for path, each in self._geometries.items()}
        kinds = dict[str, list[str]]()
        for path, each in found.items():
            if each.known != "nothing":
                kinds.setdefault(str(each), []).append(str(path))
        if len(kinds) > 1:
            log_once(
                "inputs differ in orientation or spacing, but are read as if they did not "
                "(data.source.orientation and data.source.spacing make them alike): "
                + "; ".join(f"{text} ({named(files)})" for text, files in kinds.items()),
                level=logging.WARNING,
            )
        return found

    @property
    def sample_sizes(self) -> tuple[int, ...]:
        """Largest spatial sizes of the samples of both splits."""
        sizes = [each.sizes for each in self._grids.values()]
        return tuple(map(max, zip(*sizes, strict=True)))

    def load(self, split: Split) -> FileSamples:
        """Returns the samples of a split, after preparing or decompressing them if necessary.

        Raises:
            DataError: files are missing or broken, or do not belong together.
        """
        classes, cases = self._listing[0], self._listing[1][split]
        inputs, voxels = self._stored(cases)
        firsts, reading = [case.inputs[0] for case in cases], self.preparation
        if reading.is_needed:
            reading = Preparation(channel_axis="first")
        partial_copies = list[str]()
        for path in [path for case in cases for path in case.inputs if suffix_of(path) == ".zarr"]:
            with open_volume(path) as array:
                if lost := array.nchunks - array.nchunks_initialized:
                    partial_copies.append(f"{path} ({lost} of {array.nchunks})")
        if partial_copies:
            log_once(
                "zarr inputs lack chunks, which are read as the fill value: correct for empty "
                f"chunks, but not in a partial copy: {named(partial_copies)}",
                level=logging.WARNING,
            )
        grids = [self._grids[path] for path in firsts]
        spacings_SD = [
            [np.nan if each.known == "nothing" else side for side in each.spacing] for each in grids
        ]
        labels = [case.label if isinstance(case.label, int) else 0 for case in cases]
        return FileSamples(
            inputs=tuple(inputs),
            voxels=tuple(voxels),
            files=tuple(map(str, firsts)),
            label_files=tuple(str(case.label) for case in cases),
            labels_S=np.array(labels, np.int64),
            sizes_S=tuple(each.sizes for each in grids),
            spacings_S=np.array(spacings_SD, np.float32),
            num_classes=len(classes),
            reading=reading,
            ignore=self._ignore,
        )

    def fingerprint(self) -> str:
        """Returns a hex digest of the class names, and of each sample's content and label."""
        entries = [self._listing[1][split] for split in SPLITS]
        digests = self._digests(itertools.chain(*entries))
        contents = [
            [[digests.get(part, part) for part in case.parts] for case in cases]
            for cases in entries
        ]
        return digest_values([self.classes, contents])

    def _stored(self, cases: Sequence[Case]) -> tuple[list[Path], list[Path]]:
        """Returns files with the inputs and labels of cases.

        These are the user's own files if they can be read in parts and need no preparation, or else
        files of the cache, several of which are written at a time.
        """
        prepared, digests = self.preparation, self._digests(cases)
        settings = asdict(prepared) if prepared.is_needed else [prepared.channel_axis]
        folder, jobs = self._cache.directory / "volumes" / "prepared", dict[Path, _Read]()
        inputs, voxels = list[Path](), list[Path]()
        for case in cases:
            path, label, given = case.inputs[0], case.label, self._geometries[case.inputs[0]]
            name, voxel_name = (
                digest_values([_VERSION, settings, [digests.get(each, each) for each in parts]])
                for parts in (case.inputs, case.parts)
            )
            if prepared.is_needed or suffix_of(path) in CONVERTED:
                path = folder / f"{name}_input.npy"
                jobs[path] = partial(_input, prepared, case.inputs)
            inputs.append(path)
            if isinstance(label, int):
                continue
            if prepared.is_needed or case.mask or suffix_of(label) in CONVERTED:
                label = folder / f"{voxel_name}_label.npy"
                jobs[label] = partial(_voxels, prepared, case, given)
            else:
                given.check_same_grid(geometry_of(label))
            voxels.append(label)
        if not all(path.is_file() for path in jobs):
            with (
                explaining_storage(folder, setting="data.cache_dir"),
                locked(folder / "lock", wait_s=self._cache.lock_wait_s),
                progress("preparing volumes") as advance,
            ):
                new = [(path, read) for path, read in jobs.items() if not path.is_file()]
                voxels_S = [math.prod(self._geometries[each.inputs[0]].sizes) for each in cases]
                most = sum(voxels_S) // _VOXELS_PER_WORKER
                workers = min(self._cache.workers or usable_cores(), len(new), most)
                with parallel_map(workers, chunk=1) as mapped:
                    for _ in mapped(_store, new):
                        advance(len(new))
        return inputs, voxels

    def _digests(self, cases: Iterable[Case]) -> dict[Path | int, str]:
        """Maps the files of cases to digests of their contents.

        A zarr array is a directory of files; the group that has it may give its spacing.
        """
        parts = itertools.chain(*(case.parts for case in cases))
        files = {each: [each] for each in parts if isinstance(each, Path)}
        for path in filter(Path.is_dir, files):
            group = (path.parent / name for name in ("zarr.json", ".zattrs"))
            files[path] = sorted(filter(Path.is_file, (*path.rglob("*"), *group)))
        root = expanded(str(self._root)).absolute()
        names = [str(file) for found in files.values() for file in found]
        scanned = scan_files(root, names, cache_directory=self._cache.directory)
        contents = {file.path: file.digest for file in scanned}
        return {
            path: contents[path]
            if found == [path]
            else digest_values([[os.path.relpath(f, path), contents[f]] for f in found])
            for path, found in files.items()
        }


def case_files(first: Path, channels: Sequence[str]) -> tuple[Path, ...]:
    """Returns the files of a case's channels, in the folder of the first one, which is given.

    Args:
        first: the file of the first channel.
        channels: as in :class:`VolumeFiles`.
    """
    stem, found = stem_of(first), list[Path]()
    suffixes, stem = (first.name[len(stem) :], *SUFFIXES), stem.removesuffix("".join(channels[:1]))
    for ending in channels:
        named_so = [first.with_name(f"{stem}{ending}{suffix}") for suffix in suffixes]
        found.append(next((path for path in named_so if path.exists()), named_so[0]))
    return tuple(found) or (first,)


def _input(preparation: Preparation, files: Sequence[Path]) -> NDArray[Any]:
    if preparation.is_needed:
        return preparation.read(files)[0]
    values, _ = read_volume(files[0], channel_axis=preparation.channel_axis)
    return np.moveaxis(values, 0, -1) if preparation.channel_axis == "last" else values


def _voxels(preparation: Preparation, case: Case, given: Geometry) -> NDArray[Any]:
    assert isinstance(case.label, Path)
    labels = preparation.read_labels(case.label, given)
    if case.mask is not None:
        labels = labels.astype(np.promote_types(labels.dtype, np.int8))  # which has -100
        labels[preparation.read_labels(case.mask, given) == 0] = UNLABELLED
    return labels


def _store(job: tuple[Path, _Read]) -> None:
    values = job[1]()
    with new_array(job[0], dtype=values.dtype, shape=values.shape) as stored:
        stored[...] = values


def _in_class_folders(
    root: Path, classes: tuple[str, ...], channels: Sequence[str]
) -> tuple[tuple[str, ...], Entries]:
    listings = list_folder(
        root,
        suffixes=SUFFIXES,
        needs_classes=True,
        keep=lambda name: _stem(name).endswith("".join(channels[:1])),
    )
    found = listings["train"].classes
    if absent := [name for name in classes if name not in found]:
        raise DataError(
            f"data.source.classes names {named(absent)}, for which {root} has no folder",
            remedy="correct the names, or set data.source.classes=null for all folders",
        )
    classes = classes or found
    entries = {
        split: [
            Case(case_files(root / listing.names[index], channels), label)
            for label, name in enumerate(classes)
            for index in np.flatnonzero(listing.labels_S == found.index(name))
        ]
        for split, listing in listings.items()
    }
    return classes, entries


def _in_pairs(root: Path, channels: Sequence[str]) -> Entries:
    def by_case(kind: str, ending: str = "") -> dict[str, str]:
        """Maps the names of cases to those of their files, which have this ending."""
        found = dict[str, str]()
        for name in [each.name for each in find_files(root / kind, SUFFIXES)[0]]:
            case = _stem(name).removesuffix(ending)
            if _stem(name).endswith(ending) and found.setdefault(case, name) != name:
                raise DataError(
                    f"{root / kind} has two files of one case, {found[case]} and {name}",
                    remedy="remove or rename one of them",
                )
        return found

    inputs, labels = by_case("inputs", "".join(channels[:1])), by_case("labels")
    masks = by_case("masks") if (root / "masks").is_dir() else {}
    if without_input := sorted({*labels, *masks} - {*inputs}):
        raise DataError(
            f"labels or masks in {root} have no input: {named(without_input)}",
            remedy="give an input and its labels the same name in the folders inputs and labels",
        )
    if unlabelled := sorted({*inputs} - {*labels}):
        log_once(f"{root / 'inputs'}: inputs without labels are left out: {named(unlabelled)}")
    if masks:
        log_once(f"{root / 'masks'}: cases with a mask: {len(masks)} of {len(labels)}")
    case_of = {inputs[case]: case for case in labels}
    listings = list_folder(root / "inputs", suffixes=SUFFIXES, keep=case_of.__contains__)
    return {
        split: [
            Case(
                case_files(root / "inputs" / name, channels),
                root / "labels" / labels[case_of[name]],
                root / "masks" / masks[case_of[name]] if case_of[name] in masks else None,
            )
            for name in listing.names
        ]
        for split, listing in listings.items()
    }


def _stem(name: str) -> str:
    return name[: -len(suffix_of(Path(name)))]


def _in_table(
    path: Path, labels: Labels, classes: tuple[str, ...], channels: Sequence[str]
) -> tuple[tuple[str, ...], Entries]:
    needed = ("input", "label") if labels == "sample" else ("input",)
    rows = read_table(path, columns=needed)
    if labels == "sample" and not classes:
        found = {row["label"] for row in rows}
        # Numbers are sorted by value, not as 1, 10, 2.
        as_numbers = all(name.isdecimal() for name in found)
        classes = tuple(sorted(found, key=lambda name: (int(name) if as_numbers else 0, name)))
    entries: dict[Split, list[Case]] = {split: [] for split in SPLITS}
    bare = list[str]()
    for line, row in enumerate(rows, 2):
        mask = path.parent / row["mask"] if labels == "voxel" and row.get("mask") else None
        if labels == "voxel" and not row.get("label"):
            bare.append(row["input"])
            continue
        if labels == "voxel":
            label: Path | int = path.parent / row["label"]
        elif row["label"] in classes:
            label = classes.index(row["label"])
        else:
            raise DataError(
                f"{path}, line {line}, has the label {row['label']!r}, which is not a class",
                remedy="correct it, or name all classes in data.source.classes",
            )
        case = Case(case_files(path.parent / row["input"], channels), label, mask)
        entries["test" if row.get("split") == "test" else "train"].append(case)
    if bare:
        log_once(f"{path}: inputs without labels are left out: {named(bare)}")
    return classes, entries
