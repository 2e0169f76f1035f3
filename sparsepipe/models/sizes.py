"""Checks of the arguments that networks share, and channels scaled by the width."""

from __future__ import annotations

from sparsepipe.errors import ConfigError

HEADS = ("classification", "segmentation")


def require(holds: bool, name: str, value: object, valid: str) -> None:
    """Raise ``ConfigError`` about the key ``model.<name>`` unless ``holds``."""
    if not holds:
        raise ConfigError(f"model.{name}={value!r} is not valid", remedy=f"choose {valid}")


def check_sizes(
    num_classes: int, *, in_channels: int, width: float, dropout: float = 0.0, head: str = HEADS[0]
) -> None:
    """Check the arguments that networks share.

    Raises:
        ConfigError: a width that is not positive, a dropout outside [0, 1), an unknown head, or no
            channels or classes.
    """
    require(width > 0, "width", width, "a number above 0, such as 0.5")
    require(0 <= dropout < 1, "dropout", dropout, "a number in [0, 1)")
    require(num_classes >= 1, "num_classes", num_classes, "1 or more")
    require(in_channels >= 1, "in_channels", in_channels, "1 or more")
    heads = "classification (labels of each sample) or segmentation (of each voxel)"
    require(head in HEADS, "head", head, heads)


def scaled(channels: int, width: float) -> int:
    """``channels`` times the width, at least 1."""
    return max(1, round(channels * width))
