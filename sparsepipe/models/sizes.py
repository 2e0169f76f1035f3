"""Sizes that every network has: what is possible, and how the width scales channels."""

from __future__ import annotations

from sparsepipe.errors import ConfigError


def check_sizes(num_classes: int, *, in_channels: int, width: float, dropout: float) -> None:
    """Refuses networks that cannot be.

    Raises:
        ConfigError: a width that is not positive, a dropout outside [0, 1), or no channels or
            classes.
    """
    if not width > 0:
        raise ConfigError(f"model.width is {width}", remedy="choose a width above 0, such as 0.5")
    if not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout is {dropout}", remedy="choose a dropout in [0, 1)")
    if num_classes < 1 or in_channels < 1:
        raise ConfigError(
            f"a network from {in_channels} channels to {num_classes} classes",
            remedy="give at least one of each",
        )


def scaled(channels: int, width: float) -> int:
    """``channels`` times the width, at least 1."""
    return max(1, round(channels * width))
