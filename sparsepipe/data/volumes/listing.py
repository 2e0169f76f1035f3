"""The samples of a data set of volumes: files of a folder, or the paths in a csv file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparsepipe.data.files import check_class_names
from sparsepipe.data.listing import find_files, list_folder, named, read_table
from sparsepipe.data.points import SPLITS, Split
from sparsepipe.data.volumes.formats import SUFFIXES, suffix_of
from sparsepipe.data.volumes.samples import Labels
from sparsepipe.errors import DataError
from sparsepipe.utils.files import expanded

_LAYOUT = {
    "voxel": "a folder has inputs and labels with files of equal names; a csv file has the columns "
    "input and label with their paths; folders train and test, or a column split, divide them",
    "sample": "a folder has one file for each sample in folders of classes; a csv file has the "
    "columns input with paths and label with names of classes; folders train and test, or a column "
    "split, divide them",
}


@dataclass(frozen=True, slots=True)
class VolumeEntry:
    """A sample: the file of its input, and its class or the file of its voxels' labels."""

    input: Path
    label: Path | int

    @property
    def paths(self) -> tuple[Path, ...]:
        """Its files."""
        return (self.input, self.label) if isinstance(self.label, Path) else (self.input,)


@dataclass(frozen=True, slots=True)
class VolumeListing:
    """The samples of a data set.

    Attributes:
        classes: names of the classes.
        entries: samples of each split.
    """

    classes: tuple[str, ...]
    entries: Mapping[Split, Sequence[VolumeEntry]]


def list_samples(
    root: Path | str | None, *, labels: Labels, classes: tuple[str, ...] | None
) -> VolumeListing:
    """The samples in a folder or a csv file.

    Args:
        root: the user's setting ``data.root``.
        labels: of samples or of voxels.
        classes: names of the classes; None takes all classes of the samples there.

    Raises:
        DataError: no such folder or file exists, or it has another layout.
    """
    path = expanded(root or "").absolute()
    if root and path.suffix.lower() == ".csv" and path.is_file():
        listing = _list_table(path, labels, classes)
    elif root and path.is_dir():
        listing = _list_pairs(path, classes or ()) if labels == "voxel" else _list(path, classes)
    else:
        raise DataError(
            f"data.root={root} is neither a folder of volumes nor a csv file of paths",
            remedy=f"set data.root to an existing one; {_LAYOUT[labels]}",
        )
    check_class_names(listing.classes, path)
    if not listing.entries["train"]:
        raise DataError(f"{path} has no samples for training", remedy=_LAYOUT[labels])
    return listing


def _list(root: Path, classes: tuple[str, ...] | None) -> VolumeListing:
    listings = list_folder(root, suffixes=SUFFIXES, needs_classes=True)
    found = listings["train"].classes
    chosen = found if classes is None else classes
    if absent := [name for name in chosen if name not in found]:
        raise DataError(
            f"{root} has no folders {named(absent)}, which data.source.classes names",
            remedy="correct the names, or set data.source.classes=null for all folders there are",
        )
    entries = {
        split: [
            VolumeEntry(root / listing.names[index], label)
            for label, name in enumerate(chosen)
            for index in np.flatnonzero(listing.labels_S == found.index(name))
        ]
        for split, listing in listings.items()
    }
    return VolumeListing(chosen, entries)


def _list_pairs(root: Path, classes: tuple[str, ...]) -> VolumeListing:
    def stem(name: str) -> str:
        return name[: -len(suffix_of(Path(name)))]

    if not ((root / "inputs").is_dir() and (root / "labels").is_dir()):
        raise DataError(f"{root} lacks the folder inputs or labels", remedy=_LAYOUT["voxel"])
    listings = list_folder(root / "inputs", suffixes=SUFFIXES)
    names = [file.name for file in find_files(root / "labels", SUFFIXES)[0]]
    labels = {stem(name): root / "labels" / name for name in names}
    inputs = {stem(name): name for listing in listings.values() for name in listing.names}
    if alone := sorted(inputs.keys() ^ labels.keys()):
        without = "label" if alone[0] in inputs else "input"
        raise DataError(
            f"{root} has no {without} for {named(alone)}",
            remedy="give an input and its labels the same name, in inputs and labels",
        )
    entries = {
        split: [VolumeEntry(listing.root / name, labels[stem(name)]) for name in listing.names]
        for split, listing in listings.items()
    }
    return VolumeListing(classes, entries)


def _list_table(path: Path, labels: Labels, classes: tuple[str, ...] | None) -> VolumeListing:
    rows = read_table(path, columns=("input", "label"))
    if labels == "sample" and classes is None:
        found = {row["label"] for row in rows}
        # Numbers in their order, not 1, 10, 2.
        as_numbers = all(name.isdecimal() for name in found)
        classes = tuple(sorted(found, key=lambda name: (int(name) if as_numbers else 0, name)))
    assert classes is not None
    entries: dict[Split, list[VolumeEntry]] = {split: [] for split in SPLITS}
    for line, row in enumerate(rows, 2):
        if labels == "voxel":
            label: Path | int = path.parent / row["label"]
        elif row["label"] in classes:
            label = classes.index(row["label"])
        else:
            raise DataError(
                f"{path}, line {line}, has the label {row['label']!r}, which is no class",
                remedy="correct it, or name all classes in data.source.classes",
            )
        split: Split = "test" if row.get("split") == "test" else "train"
        entries[split].append(VolumeEntry(path.parent / row["input"], label))
    return VolumeListing(classes, entries)
