"""Checks of the sizes that all networks share, and channels scaled by the width."""

from __future__ import annotations

from sparsepipe.errors import ConfigError


def check_sizes(num_classes: int, *, in_channels: int, width: float, dropout: float) -> None:
    """Check the sizes of a network.

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
            f"a network with {in_channels} input channels and {num_classes} classes",
            remedy="set both to at least 1",
        )


def scaled(channels: int, width: float) -> int:
    """``channels`` times the width, at least 1."""
    return max(1, round(channels * width))
