"""Checks of settings; error messages name the valid range."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from sparsepipe.errors import ConfigError, DataError
from sparsepipe.sparse.coordinates import MAX_COORDINATE

MAX_RESOLUTION = MAX_COORDINATE + 1
"""Voxels on an axis that sparse coordinates can represent."""
_MOST = 2**32


def check_resolution(resolution: int) -> None:
    """Raise ``ConfigError`` unless ``resolution`` is an integer from 1 to 2^21."""
    is_integer = isinstance(resolution, int) and not isinstance(resolution, bool)
    if not (is_integer and 1 <= resolution <= MAX_RESOLUTION):
        raise ConfigError(
            f"data.resolution={resolution} is not valid",
            remedy=f"set data.resolution to an integer from 1 to {MAX_RESOLUTION} "
            "(the paper uses 32, 50, 100 and 200)",
        )


def check_ratio(point_ratio: float) -> None:
    """Raise ``ConfigError`` unless the share of points is in (0, 1]."""
    if not 0 < point_ratio <= 1:
        raise ConfigError(
            f"data.point_ratio={point_ratio} is not valid",
            remedy="set data.point_ratio to a number in (0, 1]; 1 keeps all points",
        )


def check_share(val_share: float) -> None:
    """Raise ``ConfigError`` unless the validation share is in [0, 1)."""
    if not 0 <= val_share < 1:
        raise ConfigError(
            f"data.val_share={val_share} is not valid",
            remedy="set data.val_share to a number from 0 to below 1",
        )


def check_numbers(*, least_1: Mapping[str, int | None], least_0: Mapping[str, int | None]) -> None:
    """Raise ``ConfigError`` for numbers below 1 or 0, or above 2^32, which only seeds may be; None
    stands for a default.
    """
    for least, settings in ((1, least_1), (0, least_0)):
        for name, value in settings.items():
            if value is not None and value < least:
                raise ConfigError(
                    f"data.{name}={value} is too small",
                    remedy=f"set data.{name} to {least} or more",
                )
            if value is not None and value > _MOST and not name.endswith("seed"):
                raise ConfigError(
                    f"data.{name}={value} is too large",
                    remedy=f"set data.{name} to {_MOST} or less",
                )


def check_num_points(num_points: int | None, *, stored: int) -> None:
    """Raise ``ConfigError`` if more points are drawn than stored; None is all of them."""
    if num_points is not None and num_points > stored:
        raise ConfigError(
            f"data.num_points={num_points}, but {stored} points are stored per shape",
            remedy=f"set data.num_points to at most {stored}, or to null for all",
        )


def check_class_names(classes: Sequence[str], where: Path) -> None:
    """Raise ``DataError`` for names that are no Unicode text, since results could not be written.

    Args:
        classes: names; those of folders in another encoding contain surrogates.
        where: the file or folder that they are from.
    """
    for name in classes:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where} has a class of the name {name!a}, which is not text in UTF-8",
                remedy="give it another name",
            ) from error


def check_choices(**settings: tuple[str, Any]) -> None:
    """Raise ``ConfigError`` for values that are not in their ``Literal`` type.

    Args:
        settings: for each setting its value and the ``Literal`` type of its valid values.
    """
    for name, (value, literal) in settings.items():
        if value not in get_args(literal):
            raise ConfigError(
                f"data.{name}={value} is unknown",
                remedy=f"set data.{name} to one of {', '.join(get_args(literal))}",
            )


def check_dense(representation: str, *, batch_size: int, resolution: int, whole: bool) -> None:
    """Raise ``ConfigError`` for dense grids that exceed memory or ignore other settings.

    ``whole`` means that all points are used, without augmentation.
    """
    if representation == "sparse":
        return
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    batch_bytes = 4 * batch_size * resolution**3
    if batch_bytes > memory_bytes // 4:
        largest = int((memory_bytes / 16 / batch_size) ** (1 / 3))
        raise ConfigError(
            f"a dense batch of {batch_size} grids of {resolution}^3 takes "
            f"{batch_bytes / 2**30:,.1f} GiB, more than a quarter of this machine's memory",
            remedy=f"set data.representation=sparse, or data.resolution to at most {largest} "
            "for this data.batch_size",
        )
    if representation == "dense_surface" and not whole:
        raise ConfigError(
            "data.representation=dense_surface takes whole meshes, so points cannot be left "
            "out or augmented",
            remedy="set data.point_ratio=1 and data.augment.enabled=false, or "
            "data.representation=dense",
        )
