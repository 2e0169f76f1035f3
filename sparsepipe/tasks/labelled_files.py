"""Labels a user's files one after the other, and lists the answers and the files that fail."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparsepipe.errors import DataError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.utils.files import write_csv, write_json
from sparsepipe.utils.progress import progress

log = logging.getLogger(__name__)

LOGGED = 20
"""Largest number of files whose answers are logged one by one."""


class Labelled(NamedTuple):
    """Values and files of a labelled case that tables list; see :func:`label_files`."""

    row: Mapping[str, Any]
    text: str
    written: Sequence[Path] = ()
    classes: Sequence[Mapping[str, Any]] = ()


def label_files(
    run: ResolvedRun,
    files: Mapping[str, Sequence[Path]],
    label: Callable[[str, Sequence[Path], bool], Labelled],
    *,
    known: Mapping[str, Any],
    gallery: int,
    what: str,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Labels files, and writes ``predictions.csv``, ``classes.csv`` and ``predictions.json``.

    Files that raise a DataError are listed and logged; each rank must call this function.

    Args:
        run: the run, to whose directory the tables are written.
        files: the files of each case, by the name that its results get.
        label: labels a case, given its name, its files and whether to draw it, and writes it.
            Returns values of its row in ``predictions.csv``, what is logged, the files that it has
            written, and values of its rows in ``classes.csv``, one for each class.
        known: values of ``predictions.json`` beside the lists of files.
        gallery: largest number of cases that are drawn, spread over the list.
        what: what the cases are, such as ``scenes``.

    Returns:
        The rows of labelled files, and their number and that of the others for ``result.json``.

    Raises:
        DataError: none of the files can be labelled.
    """
    rows, classes = list[dict[str, Any]](), list[dict[str, Any]]()
    lists: dict[str, list[dict[str, Any]]] = {"predictions": [], "unreadable": []}
    drawn = spread_over(len(files), most=gallery)
    with progress(f"labelling {what}") as advance:
        for number, (name, paths) in enumerate(files.items()):
            row: dict[str, Any] = {"file": str(paths[0])}
            try:
                found = label(name, paths, number in drawn)
            except DataError as error:
                row |= {"error": error.message, "remedy": error.remedy}
                lists["unreadable"].append(row)
                if process_group.rank() == 0:
                    log.warning("%s (%s)", error.message, error.remedy)
            else:
                classes += [{**row, **each} for each in found.classes]
                row |= found.row
                inside = run.directory.path
                written = [path.relative_to(inside).as_posix() for path in found.written]
                lists["predictions"].append({**row, "written": written, "classes": found.classes})
                if len(lists["predictions"]) <= LOGGED and process_group.rank() == 0:
                    log.info("%s: %s", row["file"], found.text)
            rows.append(row)
            # A reader may have reported a signal as an error in the file.
            run.watch.raise_if_stopped()
            advance(len(files))
    if not lists["predictions"]:
        first = lists["unreadable"][0]
        raise DataError(
            f"none of {len(files)} {what} can be labelled; the first error: {first['error']}",
            remedy=first["remedy"],
        )
    if process_group.rank() == 0:
        columns = (key for row in rows if "error" not in row for key in row)
        blank = dict.fromkeys((*columns, "error", "remedy"), "")
        write_csv(run.directory.predictions, [blank | row for row in rows])
        if classes:
            write_csv(run.directory.path / "classes.csv", classes)
        write_json(run.directory.predictions_json, {**known, **lists})
        log.info("%s, tables and pictures are in %s", what, run.directory.path)
    predicted, unreadable = lists.values()
    counts = {"predicted_files": len(predicted), "unreadable_files": len(unreadable)}
    return predicted, counts


def spread_over(count: int, *, most: int) -> set[int]:
    """Returns at most ``most`` of the numbers from 0 to ``count - 1``, evenly spread."""
    return {int(n) for n in np.linspace(0, count - 1, max(0, min(most, count))).round()}


def names_of(files: Sequence[Path], short: Callable[[Path], str]) -> list[str]:
    """Returns the paths of files to write for each file, below the folder around all of them: with
    its name as ``short`` returns it, unless that is another file's too.
    """
    around = os.path.commonpath([file.absolute().parent for file in files])
    within = [file.absolute().relative_to(around) for file in files]
    given = [path.with_name(short(file)) for file, path in zip(files, within, strict=True)]
    counts = Counter(given)
    return [(s if counts[s] == 1 else w).as_posix() for s, w in zip(given, within, strict=True)]
