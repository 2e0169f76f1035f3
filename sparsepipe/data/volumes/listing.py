"""Which files are the samples of a data set: all of a directory, or those that a csv file names."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsepipe.data.files import LIST_BYTES, check_class_names, read_text
from sparsepipe.data.points import SPLITS, Split
from sparsepipe.data.volumes.formats import SUFFIXES, suffix_of
from sparsepipe.data.volumes.samples import Labels
from sparsepipe.errors import DataError
from sparsepipe.utils.files import expanded

_NAMED = 5
_LAYOUT = {
    "voxel": "a directory has inputs/train, labels/train, inputs/test and labels/test with files "
    "of equal names; a csv file has the columns input and label with their paths, and split with "
    "train or test",
    "sample": "a directory has <class>/train and <class>/test with one file for each sample; a "
    "csv file has the columns input with paths, label with names of classes, and split with train "
    "or test",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample: the file of its input, and its class or the file of its voxels' labels."""

    input: Path
    label: Path | int

    @property
    def paths(self) -> tuple[Path, ...]:
        """Its files."""
        return (self.input, self.label) if isinstance(self.label, Path) else (self.input,)


@dataclass(frozen=True, slots=True)
class Listing:
    """The samples of a data set.

    Attributes:
        classes: names of the classes.
        entries: of each split.
    """

    classes: tuple[str, ...]
    entries: Mapping[Split, tuple[Entry, ...]]


def list_samples(
    root: Path | str | None, *, labels: Labels, classes: tuple[str, ...] | None
) -> Listing:
    """The samples in a directory or a csv file.

    Args:
        root: the user's setting ``data.root``.
        labels: of samples or of voxels.
        classes: their names; None takes those of the samples there.

    Raises:
        DataError: there is no such directory or file, or it has another layout.
    """
    if root is None or str(root) == "":
        raise DataError(
            "data.root is not set; it should name a directory of volumes, or a csv file of paths",
            remedy=f"set data.root=/path/to/it; {_LAYOUT[labels]}",
        )
    path = expanded(root).absolute()
    if path.suffix.lower() == ".csv" and path.is_file():
        listing = _list_csv(path, labels, classes)
    elif path.is_dir():
        list_directory = _list_pairs if labels == "voxel" else _list_classes
        listing = list_directory(path, classes)
    else:
        raise DataError(
            f"data.root={root} is neither a directory nor a csv file",
            remedy=f"set data.root to an existing one; {_LAYOUT[labels]}",
        )
    check_class_names(listing.classes, path)
    if not listing.entries["train"]:
        raise DataError(f"{path} has no samples for training", remedy=_LAYOUT[labels])
    return listing


def _list_classes(root: Path, classes: tuple[str, ...] | None) -> Listing:
    folders = sorted(
        path.name for path in root.iterdir() if any((path / split).is_dir() for split in SPLITS)
    )
    chosen = tuple(folders) if classes is None else classes
    if absent := [name for name in chosen if name not in folders]:
        raise DataError(
            f"{root} has no folders {_some(absent)}, which data.source.classes names",
            remedy="correct the names, or set data.source.classes=null for all folders there are",
        )
    entries = {
        split: tuple(
            Entry(path, label)
            for label, name in enumerate(chosen)
            for path in _volumes(root / name / split)
        )
        for split in SPLITS
    }
    return Listing(chosen, entries)


def _list_pairs(root: Path, classes: tuple[str, ...] | None) -> Listing:
    assert classes is not None, "labels of voxels have no names of their own"
    return Listing(classes, {split: tuple(_pairs(root, split)) for split in SPLITS})


def _pairs(root: Path, split: Split) -> list[Entry]:
    inputs, labels = (
        {_stem(path): path for path in _volumes(root / kind / split)}
        for kind in ("inputs", "labels")
    )
    if alone := sorted(inputs.keys() ^ labels.keys()):
        without = "label" if alone[0] in inputs else "input"
        raise DataError(
            f"{root} has no {without} for {_some(alone)} of {split}",
            remedy="give an input and its labels the same name, in inputs and labels",
        )
    return [Entry(inputs[name], labels[name]) for name in inputs]


def _list_csv(path: Path, labels: Labels, classes: tuple[str, ...] | None) -> Listing:
    rows = _rows(path, labels)
    if labels == "sample" and classes is None:
        found = {row["label"] for row in rows}
        # Numbers in their order, not 1, 10, 2.
        as_numbers = all(name.isdecimal() for name in found)
        classes = tuple(sorted(found, key=lambda name: (int(name) if as_numbers else 0, name)))
    assert classes is not None
    entries: dict[Split, list[Entry]] = {split: [] for split in SPLITS}
    for line, row in enumerate(rows, 2):
        split = row.get("split") or "train"
        if split not in SPLITS:
            raise DataError(
                f"{path}, line {line}, has the split {split!r}",
                remedy="write train or test there; data.val_share keeps a share of the training "
                "samples for validation",
            )
        source = path.parent / row["input"]
        _check_suffix(source)
        if labels == "voxel":
            label: Path | int = path.parent / row["label"]
            _check_suffix(path.parent / row["label"])
        elif row["label"] in classes:
            label = classes.index(row["label"])
        else:
            raise DataError(
                f"{path}, line {line}, has the label {row['label']!r}, which is no class",
                remedy="correct it, or name all classes in data.source.classes",
            )
        entries[split].append(Entry(source, label))
    return Listing(classes, {split: tuple(found) for split, found in entries.items()})


def _rows(path: Path, labels: Labels) -> list[dict[str, str]]:
    text = read_text(path, limit_bytes=LIST_BYTES)
    try:
        reader = csv.DictReader(io.StringIO(text), skipinitialspace=True, strict=True)
        rows = list(reader)
        columns = reader.fieldnames or []
    except csv.Error as error:
        raise DataError(f"{path} is no csv file: {error}", remedy=_LAYOUT[labels]) from error
    if missing := {"input", "label"} - set(columns):
        raise DataError(
            f"{path} has no column {' and '.join(sorted(missing))}, but {', '.join(columns)}",
            remedy=_LAYOUT[labels],
        )
    for line, row in enumerate(rows, 2):
        if not (row["input"] and row["label"]) or None in row:
            raise DataError(
                f"{path}, line {line}, does not have a value in each column",
                remedy="complete the line, or remove it",
            )
    return rows


def _volumes(folder: Path) -> list[Path]:
    """The volumes in a folder by their names; none if there is no such folder."""
    if not folder.is_dir():
        return []
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in paths:
        _check_suffix(path)
    return paths


def _check_suffix(path: Path) -> None:
    if suffix_of(path) is None:
        raise DataError(
            f"{path} has none of the suffixes {', '.join(SUFFIXES)}",
            remedy="convert it to one of these formats, or leave it out",
        )


def _stem(path: Path) -> str:
    return path.name[: -len(suffix_of(path) or "")]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
