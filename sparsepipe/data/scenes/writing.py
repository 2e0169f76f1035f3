"""Writing scenes whose points have predicted classes.

Shapes: Q points of a file, K classes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.formats.ply import write_ply
from sparsepipe.data.points import ExactArray, FloatArray, IntArray
from sparsepipe.data.scenes.reader import Value
from sparsepipe.utils.files import replacing, write_bytes_atomic, writing

log = logging.getLogger(__name__)

_WIDE_LAS = {0: 6, 1: 6, 2: 7, 3: 7, 4: 9, 5: 10}
"""Point formats of LAS with classes up to 255, in place of those with classes up to 31."""
_SCAN_ANGLE = 0.006
"""Unit of scan angles in the wide point formats, in degrees."""
_UNKNOWN = (128, 128, 128)
"""Colour of points without a class."""


def write_scene(
    stem: Path,
    source: Path,
    positions_Q3: ExactArray,
    *,
    labels_Q: IntArray,
    probability_Q: FloatArray,
    colors_K3: NDArray[np.uint8],
    classes: Sequence[str],
    file_labels: Sequence[Value],
) -> list[Path]:
    """Writes a labelled scene as PLY and, for ``.bin``, ``.las`` and ``.laz``, like its source.

    The PLY has all points in the order of the source: ``x``, ``y`` and ``z`` as doubles, the colour
    of the class, the ``label`` as in files (-1: unknown) and its ``probability``. A ``.label`` file
    is as in SemanticKITTI, with 0 for unknown labels. A LAS file is the source with another
    ``classification``.

    Args:
        stem: path of the files to write, without their suffixes.
        source: the user's file or folder.
        positions_Q3: positions of all points of the source.
        labels_Q: class number of each point; negative: unknown.
        probability_Q: probability of that class.
        colors_K3: colour of each class.
        classes: names of the classes.
        file_labels: label of each class in files; for a name, the number of the class is written.

    Returns:
        The paths of the files.
    """
    numbers = [v if isinstance(v, int) else k for k, v in enumerate(file_labels)]
    places_Q = np.where(labels_Q < 0, len(classes), labels_Q)
    values_Q = np.array([*numbers, -1])[places_Q]
    colors_Q3 = np.array([*colors_K3, _UNKNOWN], np.uint8)[places_Q]
    columns = dict(zip("xyz", positions_Q3.T, strict=True))
    columns |= dict(zip(("red", "green", "blue"), colors_Q3.T, strict=True))
    columns |= {"label": values_Q.astype(np.int32), "probability": probability_Q}
    written, suffix = [stem.with_name(f"{stem.name}.ply")], source.suffix.lower()
    comments = [f"label {value} {name}" for value, name in zip(numbers, classes, strict=True)]
    with writing(written[0]):
        write_ply(written[0], columns, comments=comments)
    if suffix == ".bin" and source.is_file():
        written.append(stem.with_name(f"{stem.name}.label"))
        write_bytes_atomic(written[-1], values_Q.clip(min=0).astype("<u4").tobytes())
    if suffix in (".las", ".laz"):
        written += _write_las(stem.with_name(f"{stem.name}{suffix}"), source, values_Q)
    return written


def _write_las(path: Path, source: Path, values_Q: IntArray) -> list[Path]:
    laspy = import_module("laspy")
    las = laspy.read(source)
    top = int(values_Q.max(initial=0))
    if top > 255:
        log.warning("%s is not written: a LAS file has no class %d, only 0 to 255", path, top)
        return []
    if top > 31 and las.point_format.id in _WIDE_LAS:
        ranks_Q = np.asarray(las.scan_angle_rank)  # degrees, which laspy does not convert
        las = laspy.convert(las, point_format_id=_WIDE_LAS[las.point_format.id])
        las.scan_angle = np.rint(ranks_Q / _SCAN_ANGLE).astype(np.int16)
    las.classification = values_Q.clip(min=0).astype(np.uint8)
    with writing(path), replacing(path) as temporary, temporary.open("wb+") as stream:
        las.write(stream, do_compress=path.suffix == ".laz")
    return [path]
