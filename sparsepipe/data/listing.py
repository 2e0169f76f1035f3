"""Listings of the samples in a user's folder, with their classes, for training and for testing.

A path is ``[<class>/][train/|test/]<name>``, with the folder of the split above or below that of
the class. Where no such folders divide the files, a csv file does, or else a given share of each
class is for testing. Shapes, images and volumes are all listed here.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparsepipe.data.files import digest_values, explaining_storage, log_once
from sparsepipe.data.points import SPLITS, IntArray, Split
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils import reading
from sparsepipe.utils.files import expanded

_NAMED = 5
_LAYOUT = (
    "the folder holds files, or a folder of files for each class; folders train and test, above or "
    "below the class folders, divide the files"
)
_SPLIT = (
    "if the data have the setting, set test_share or data.split to the share of each class for "
    "testing (between 0 and 1); data.split can also be a csv file with the columns file and split, "
    "or null"
)


@dataclass(frozen=True, slots=True, order=True)
class FoundFile:
    """One file of a user's folder; ``name`` is relative to the root, with forward slashes.

    ``class_name`` is empty for a file outside class folders, ``split`` None outside train and test.
    """

    class_name: str
    name: str
    split: Split | None


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one split: ``names`` relative to ``root``, with forward slashes.

    ``labels_S`` has the index in ``classes`` of each file's class, or -1 without class folders.
    """

    root: Path
    split: Split
    names: tuple[str, ...]
    labels_S: IntArray
    classes: tuple[str, ...]


def raised(error: OSError) -> None:
    """Raises the error of a folder that cannot be listed, which ``os.walk`` skips otherwise."""
    raise error


def find_files(root: Path, suffixes: Collection[str]) -> tuple[list[FoundFile], list[str]]:
    """Returns the files with these suffixes, by class and name, and the other paths under ``root``.

    Suffixes are in lower case. Names that begin with ``.`` or ``_`` are in neither list. A
    directory with one of the suffixes, such as a zarr array, counts as a file. Directories below
    those of a class and a split are among the other paths, but their files are not.
    """
    found, others = list[FoundFile](), list[str]()
    with explaining_storage(root, setting="data.root"):
        for folder, folders, files in os.walk(root, onerror=raised, followlinks=True):
            inner = Path(folder).relative_to(root)
            splits = [each for each in SPLITS for part in inner.parts if part.lower() == each]
            classes = [part for part in inner.parts if part.lower() not in SPLITS]
            visible = {name for name in (*folders, *files) if name[0] not in "._"}
            if len(splits) > 1 or len(classes) > 1:
                others.append(f"{inner.as_posix()}/")
                folders.clear()
                continue
            taken = {name for name in visible if name.lower().endswith(tuple(suffixes))}
            folders[:] = sorted({*folders} & visible - taken)
            others += [(inner / name).as_posix() for name in {*files} & visible - taken]
            found += [
                FoundFile("".join(classes), (inner / name).as_posix(), next(iter(splits), None))
                for name in taken
            ]
    return sorted(found, key=lambda file: (file.class_name, file.name)), sorted(others)


def list_folder(
    root: Path,
    *,
    suffixes: Collection[str],
    split: float | str | None = None,
    share: float = 0.2,
    seed: int | None = None,
    needs_classes: bool = False,
    keep: Callable[[str], bool] | None = None,
) -> Mapping[Split, Listing]:
    """Lists the files of both splits, in order of class and name; logs how many others it ignores.

    Args:
        root: the folder.
        suffixes: suffixes of the files, in lower case.
        split: share of each class for testing, in (0, 1); or the path of a csv file with columns
            ``file``, relative to ``root``, and ``split``; files that it does not list are left out.
            None: the folders ``train`` and ``test``, or ``share`` without such folders.
        share: share of each class for testing, if neither ``split`` nor folders divide the files.
        seed: seed of a digest of names that chooses the test files, so that new files hardly change
            the split of others; None: test files are spread evenly over the order of names.
        needs_classes: whether files outside class folders are ignored.
        keep: says of a file, by its name relative to ``root``, whether to list it; None: all.
    """
    found, others = find_files(root, suffixes)
    found = [file for file in found if keep is None or keep(file.name)]
    if needs_classes:
        others += [file.name for file in found if not file.class_name]
        found = [file for file in found if file.class_name]
    if others:
        log_once(f"{root}: other files and folders are ignored: {named(others)}")
    if found and (unread := unread_formats(others, {file.class_name for file in found})):
        log_once(f"{root}: classes are left out{unread}; those read are {', '.join(suffixes)}")
    for what, has in (("class", "class_name"), ("train or test", "split")):
        within = [file.name for file in found if getattr(file, has)]
        outside = [file.name for file in found if not getattr(file, has)]
        if within and outside and (has == "class_name" or not isinstance(split, str)):
            raise DataError(
                f"{root} has {within[0]} in a {what} folder, but {outside[0]} outside of one",
                remedy=f"move one of them; {_LAYOUT}",
            )
    if isinstance(split, str):
        split_of = _splits_in_table(root, {file.name for file in found}, split)
    elif all(file.split for file in found):
        if found and split is not None:
            raise ConfigError(
                f"data.split={split} is given, but folders train and test in {root} divide its "
                f"files, such as {found[0].name}",
                remedy="set data.split=null, or move the files out of these folders",
            )
        split_of = {file.name: str(file.split) for file in found}
    else:
        split_of = _splits_by_share(found, share if split is None else split, seed)
    classes = sorted({file.class_name for file in found if file.class_name})
    return {
        each: make_listing(
            root, each, [f for f in found if split_of.get(f.name) == each], classes, suffixes
        )
        for each in SPLITS
    }


def unread_formats(others: Collection[str], present: Collection[str]) -> str:
    """Returns which formats of ``others`` are not read, as text, or nothing if there are none.

    Only files in folders of classes that are not ``present`` count, or, without such folders, all.
    """
    found = set[str]()
    for path in [Path(name) for name in others if not name.endswith("/")]:
        folder = "/".join(part for part in path.parts[:-1] if part.lower() not in SPLITS)
        if folder not in present and (folder or not present):
            found.add(f"{folder or '.'}/*{path.suffix}")
    return f", since these formats are not read: {named(sorted(found))}" if found else ""


def _splits_in_table(root: Path, names: Collection[str], setting: str) -> Mapping[str, str]:
    given = expanded(setting)
    listed: dict[str, str] = {}
    for row in read_table(given if given.exists() else root / given, columns=("file", "split")):
        name = os.path.relpath(root / row["file"].replace("\\", "/"), root)
        if listed.setdefault(name, row["split"]) != row["split"]:
            raise DataError(
                f"{setting} has {name} in both splits", remedy="remove one of its lines"
            )
    if absent := sorted(listed.keys() - names):
        raise DataError(
            f"{setting} names files that are not in class folders of {root}: {named(absent)}",
            remedy="correct the paths, which are relative to data.root, or remove these lines",
        )
    return listed


def _splits_by_share(
    found: Sequence[FoundFile], share: float, seed: int | None
) -> Mapping[str, str]:
    """Maps file names to splits; ``share`` of each class, at least one, never all, is for tests."""
    if isinstance(share, bool) or not 0 < share < 1:
        raise ConfigError(f"the share {share} for testing is not in (0, 1)", remedy=_SPLIT)
    split_of = {file.name: "train" for file in found}
    for class_name in {file.class_name for file in found}:
        names = [file.name for file in found if file.class_name == class_name]
        count = min(max(round(share * len(names)), 1), len(names) - 1)
        if seed is None:
            ends = [number * count // len(names) for number in range(len(names) + 1)]
            tested = [name for n, name in enumerate(names) if ends[n + 1] > ends[n]]
        else:
            tested = sorted(names, key=lambda name: digest_values([seed, name]))[:count]
        split_of.update(dict.fromkeys(tested, "test"))
    return split_of


def make_listing(
    root: Path,
    split: Split,
    files: Sequence[FoundFile],
    classes: Sequence[str],
    suffixes: Collection[str],
) -> Listing:
    """Returns a split's listing; raises a DataError if it is empty or, in train, lacks a class."""
    present = {file.class_name for file in files}
    empty = [name for name in classes if name not in present]
    if not files or (empty and split == "train"):
        raise DataError(
            f"{root} has no {split} files"
            + (f" of these classes: {named(empty)}" if files else "")
            + unread_formats(find_files(root, suffixes)[1], present),
            remedy=f"put at least two files ({', '.join(suffixes)}) into each class folder; "
            f"{_LAYOUT}; {_SPLIT}",
        )
    numbers = {name: number for number, name in enumerate(classes)}
    return Listing(
        root=root,
        split=split,
        names=tuple(file.name for file in files),
        labels_S=np.array([numbers.get(file.class_name, -1) for file in files], np.int64),
        classes=tuple(classes),
    )


def read_table(
    path: Path, *, columns: Sequence[str], splits: Sequence[str] = SPLITS
) -> list[dict[str, str]]:
    """Returns the lines of a csv file as mappings of columns to values; needs these ``columns``.

    Columns are separated by commas, or by semicolons if the first line has any. The values of a
    column ``split``, if there is one, are turned into lower case and must be among ``splits``.
    """
    needs = f"name {' and '.join(columns)} in its first line, separated by commas or semicolons"
    with reading.explained(path, "csv file", error=DataError, remedy=f"{needs}; {_SPLIT}"):
        text = reading.read_text(path)
        delimiter = ";" if ";" in text.partition("\n")[0] else ","
        reader = csv.DictReader(text.splitlines(), delimiter=delimiter, skipinitialspace=True)
        rows = list(reader)
        if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
            raise ValueError(f"its first line does not name {' and '.join(missing)}")
        for line, row in enumerate(rows, 2):
            if not all(row[name] for name in columns) or None in row:
                raise ValueError(f"line {line} does not have one value for each column")
            row.update({name: value.strip() for name, value in row.items() if value})
            if row.get("split"):
                row["split"] = row["split"].lower()
                if row["split"] not in splits:
                    known = " or ".join(splits)
                    raise ValueError(f"line {line} has the split {row['split']!r}, not {known}")
    return rows


def named(names: Sequence[str]) -> str:
    """Returns the first five names, and the number of others, as text for a message."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
