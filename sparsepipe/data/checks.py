"""Refusals of settings that cannot be used, each naming the valid range."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, get_args

from sparsepipe.errors import ConfigError
from sparsepipe.sparse.coordinates import MAX_COORDINATE

MAX_RESOLUTION = MAX_COORDINATE + 1
"""As many voxels as sparse coordinates tell apart on an axis."""


def check_resolution(resolution: int) -> None:
    """Refuse a grid that coordinates cannot address.

    Raises:
        ConfigError: ``resolution`` is not an integer from 1 to 2^21.
    """
    is_integer = isinstance(resolution, int) and not isinstance(resolution, bool)
    if not (is_integer and 1 <= resolution <= MAX_RESOLUTION):
        raise ConfigError(
            f"data.resolution={resolution} is no voxel grid",
            remedy=f"set data.resolution to an integer from 1 to {MAX_RESOLUTION} "
            "(the paper uses 32, 50, 100 and 200)",
        )


def check_ratio(point_ratio: float) -> None:
    """Refuse a share of points outside (0, 1].

    Raises:
        ConfigError: with the valid range.
    """
    if not 0 < point_ratio <= 1:
        raise ConfigError(
            f"data.point_ratio={point_ratio} is no share of points",
            remedy="set data.point_ratio to a number in (0, 1]; 1 keeps all points",
        )


def check_share(val_share: float) -> None:
    """Refuse a validation share outside [0, 1).

    Raises:
        ConfigError: with the valid range.
    """
    if not 0 <= val_share < 1:
        raise ConfigError(
            f"data.val_share={val_share} is no share",
            remedy="set data.val_share to a number from 0 to below 1",
        )


def check_numbers(*, least_1: Mapping[str, int | None], least_0: Mapping[str, int | None]) -> None:
    """Refuse numbers that are too small; None stands for a default chosen later.

    Raises:
        ConfigError: with the smallest valid value.
    """
    for least, settings in ((1, least_1), (0, least_0)):
        for name, value in settings.items():
            if value is not None and value < least:
                raise ConfigError(
                    f"data.{name}={value} is too small",
                    remedy=f"set data.{name} to {least} or more",
                )


def check_num_points(num_points: int | None, *, stored: int) -> None:
    """Refuse to draw more points than there are; None is all of them.

    Raises:
        ConfigError: with the largest valid value.
    """
    if num_points is not None and num_points > stored:
        raise ConfigError(
            f"data.num_points={num_points}, but {stored} points are stored a shape",
            remedy=f"set data.num_points to at most {stored}, or to null for all",
        )


def check_choices(**settings: tuple[str, Any]) -> None:
    """Refuse values that are not among a ``Literal``'s.

    Args:
        settings: for each setting its value and the ``Literal`` type of its valid values.

    Raises:
        ConfigError: with the valid values.
    """
    for name, (value, literal) in settings.items():
        if value not in get_args(literal):
            raise ConfigError(
                f"data.{name}={value} is unknown",
                remedy=f"set data.{name} to one of {', '.join(get_args(literal))}",
            )


def check_dense(representation: str, *, batch_size: int, resolution: int, whole: bool) -> None:
    """Refuse dense grids that memory cannot hold, or that would ignore other settings.

    Args:
        representation: how shapes are handed to the network.
        batch_size: shapes in a batch.
        resolution: voxels along each side.
        whole: no points are left out and none are varied.

    Raises:
        ConfigError: with settings that work.
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
