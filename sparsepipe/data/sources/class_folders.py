"""A user's own shapes: a folder for each class, with files of any formats, and other files beside.

Paths are ``<class>/[train/|test/]<name>`` or ``{train,test}/<class>/<name>``.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sparsepipe.data.files import LIST_BYTES, digest_values, explaining_storage, read_text
from sparsepipe.data.points import SPLITS, Split
from sparsepipe.data.shape_files import SHAPE_SUFFIXES
from sparsepipe.data.sources.base import Listing, require_root, say_once, wrong_layout
from sparsepipe.data.sources.folders import ListedShapes
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils.files import expanded

_NAMED = 5
_DEFAULT_SHARE = 0.2
_LAYOUT = (
    "it holds a folder for each class, with files of "
    f"{', '.join(SHAPE_SUFFIXES)}; folders train and test may divide them"
)
_SPLIT = (
    "set data.split to a number between 0 and 1, the share of each class's shapes for testing, or "
    "to a csv file with the columns file and split, or to null"
)


class ClassFolder(ListedShapes):
    """Source: meshes and clouds of any formats in folders of their classes.

    Other files, and folders within those of the classes, are passed over, which the log says.

    Args:
        root: the folder.
        split: how shapes are divided for training and testing. A number is the share of each
            class's files for testing, drawn at random but always the same for a seed. A path is
            that of a csv file with the columns ``file``, relative to ``root``, and ``split``,
            ``train`` or ``test``; other files are left out. None takes the folders ``train`` and
            ``test`` where there are any, and otherwise the share 0.2.
        seed: of the share; not that of a run, so that all runs are tested on the same shapes.

    Raises:
        ConfigError: ``split`` is neither, or a share where folders divide the files.
        DataError: there is no such folder or csv file, they do not fit together, or a class has
            no shape for training.
    """

    def __init__(
        self, root: Path | str | None, *, split: float | str | None = None, seed: int = 0
    ) -> None:
        root = require_root(root, what="a folder of classes", where_from=_LAYOUT)
        files = _find(root)
        divided = _divide(root, files, split, seed)
        classes = tuple(sorted({file.class_name for file in files}))
        super().__init__(
            root,
            {each: _listing(root, each, divided[each], classes) for each in SPLITS},
        )


@dataclass(frozen=True, slots=True, order=True)
class _File:
    """A shape of a class; the name is relative to the root."""

    class_name: str
    name: str
    split: Split | None


@dataclass(slots=True)
class _Found:
    """What a folder holds: shapes, and what is passed over."""

    files: list[_File] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)


def _find(root: Path) -> list[_File]:
    """The shapes by class and name."""
    found = _Found()
    with explaining_storage(root, setting="data.root"):
        _search(root, "", None, None, found)
    if not found.files:
        raise wrong_layout(root, expected="a folder of shapes for each class")
    _say_passed_over(root, found)
    return sorted(found.files)


def _say_passed_over(root: Path, found: _Found) -> None:
    paths = [Path(name) for name in found.others]
    kinds = Counter("hidden" if p.name[0] in "._" else p.suffix.lower() or p.name for p in paths)
    parts = [f"{count} {kind}" for kind, count in kinds.most_common(_NAMED)]
    if (rest := len(paths) - sum(count for _, count in kinds.most_common(_NAMED))) > 0:
        parts.append(f"{rest} others")
    said = [f"{_number(paths, 'file')} ({', '.join(parts)})"] if paths else []
    for folders, more in ((found.folders, ""), (found.empty, " without shapes")):
        said += [f"{_number(folders, 'folder')}{more} ({_some(folders)})"] if folders else []
    if said:
        say_once(f"{root}: passed over are {' and '.join(said)}")


def _search(
    folder: Path, prefix: str, class_name: str | None, split: Split | None, found: _Found
) -> None:
    """Add what a folder holds; its class and split are those of the folders that lead to it."""
    for path in sorted(folder.iterdir()):
        name = prefix + path.name
        hidden = path.name.startswith((".", "_"))
        if path.is_dir():
            its_split = next((each for each in SPLITS if each == path.name.lower()), None)
            if hidden or (class_name is not None and (its_split is None or split is not None)):
                found.folders.append(name)
            elif its_split is not None and split is None:
                _search(path, f"{name}/", class_name, its_split, found)
            else:
                before = len(found.files)
                _search(path, f"{name}/", path.name, split, found)
                if len(found.files) == before:
                    found.empty.append(name)
        elif hidden or class_name is None or path.suffix.lower() not in SHAPE_SUFFIXES:
            found.others.append(name)
        else:
            found.files.append(_File(class_name, name, split))


def _divide(
    root: Path, files: Sequence[_File], split: float | str | None, seed: int
) -> Mapping[Split, Sequence[_File]]:
    """The files of each split, see :class:`ClassFolder`."""
    if isinstance(split, str):
        return _by_table(root, files, split)
    share = _DEFAULT_SHARE if split is None else split
    if isinstance(share, bool) or not 0 < share < 1:
        raise ConfigError(f"data.split={split} is not valid", remedy=_SPLIT)
    placed = [file.name for file in files if file.split is not None]
    if not placed:
        return _by_share(files, share, seed)
    if split is not None:
        raise ConfigError(
            f"data.split={split}, but {root} has folders train and test, such as that of "
            f"{placed[0]}",
            remedy="set data.split=null to divide the shapes as these folders do, or move the "
            "files out of them",
        )
    if others := [file.name for file in files if file.split is None]:
        raise DataError(
            f"{root} has {placed[0]} in a folder train or test, and {others[0]} in none",
            remedy=f"move the one or the other, or name them in a csv file: {_SPLIT}",
        )
    return {each: [file for file in files if file.split == each] for each in SPLITS}


def _by_table(root: Path, files: Sequence[_File], setting: str) -> Mapping[Split, Sequence[_File]]:
    """As a csv file says."""
    listed = _read_split(root, setting)
    if absent := sorted(set(listed) - {file.name for file in files}):
        raise DataError(
            f"{setting} names files that are not in the folders of classes of {root}: "
            f"{_some(absent)}",
            remedy="correct the paths, which are relative to data.root, such as "
            f"{files[0].name}, or remove these lines",
        )
    if left_out := [file.name for file in files if file.name not in listed]:
        which = f"{_number(left_out, 'shape')} that {setting} does not name"
        say_once(f"{which} {'is' if len(left_out) == 1 else 'are'} left out")
    return {each: [file for file in files if listed.get(file.name) == each] for each in SPLITS}


def _by_share(files: Sequence[_File], share: float, seed: int) -> Mapping[Split, Sequence[_File]]:
    """A share of each class for testing, at least one shape if one is left for training."""
    tested = set[_File]()
    for class_name in {file.class_name for file in files}:
        of_class = [file for file in files if file.class_name == class_name]
        # By digests of names, so that new files and classes hardly change what the others are for.
        drawn = sorted(of_class, key=lambda file: digest_values([seed, file.name]))
        tested.update(drawn[: min(max(round(share * len(drawn)), 1), len(drawn) - 1)])
    return {
        "train": [file for file in files if file not in tested],
        "test": [file for file in files if file in tested],
    }


def _read_split(root: Path, setting: str) -> dict[str, Split]:
    """The split of each file that a csv file names; paths relative to the root."""
    given = expanded(setting)
    path = next((each for each in (given, root / given) if each.exists()), None)
    if path is None:
        raise DataError(
            f"data.split={setting} is neither a share nor a csv file that exists", remedy=_SPLIT
        )
    listed: dict[str, Split] = {}
    for line, row in enumerate(_rows(path), 2):
        name, split = (row[column].strip() for column in ("file", "split"))
        name = os.path.relpath(root / name.replace("\\", "/"), root)
        found = next((each for each in SPLITS if each == split.lower()), None)
        if found is None or listed.get(name, found) != found:
            why = "which another line has in the other one" if found else "which is no split"
            raise DataError(
                f"{path}, line {line}, has the split {split!r} for {name}, {why}",
                remedy="write train or test there, once for each file; data.val_share keeps a "
                "share of the training shapes for validation",
            )
        listed[name] = found
    return listed


def _rows(path: Path) -> Iterable[dict[str, str]]:
    wanted = "it needs the columns file and split, separated by commas or semicolons"
    text = read_text(path, limit_bytes=LIST_BYTES)
    try:
        delimiter = ";" if ";" in text.partition("\n")[0] else ","
        reader = csv.DictReader(text.splitlines(), delimiter=delimiter, skipinitialspace=True)
        rows = list(reader)
    except csv.Error as error:
        raise DataError(f"{path} is no csv file: {error}", remedy=wanted) from error
    if missing := {"file", "split"} - set(reader.fieldnames or ()):
        raise DataError(f"{path} has no column {' and '.join(sorted(missing))}", remedy=wanted)
    for line, row in enumerate(rows, 2):
        if not (row["file"] and row["split"]):
            raise DataError(
                f"{path}, line {line}, lacks a file or its split",
                remedy="complete the line, or remove it",
            )
    return rows


def _listing(root: Path, split: Split, files: Sequence[_File], classes: Sequence[str]) -> Listing:
    counts = Counter(file.class_name for file in files)
    empty = [name for name in classes if not counts[name]]
    if not files or (empty and split == "train"):
        raise DataError(
            f"{root} has no {split} shape" + (f" of class {_some(empty)}" if files else ""),
            remedy=f"put two or more shapes into each class's folder, or divide them otherwise: "
            f"{_SPLIT}",
        )
    if empty:
        say_once(f"{root} has no {split} shape of class {_some(empty)}")
    return Listing(
        root=root,
        split=split,
        names=tuple(file.name for file in files),
        labels_S=np.array([classes.index(file.class_name) for file in files], np.int64),
        classes=tuple(classes),
    )


def _number(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'s' * (len(things) != 1)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
