"""``scale=`` of experiments that compute with recorded measurements.

No smaller width, batch or training makes such an experiment cheaper, and the files of
``conf/scale`` would change the meaning of its figures. Its own file has overrides in place of each
scale, which narrow what it sweeps, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

STUDY = "paper"
"""Key of an experiment's file with the settings of the paper's studies."""
KEY = "instead_of_scale"
"""Key below it: overrides by scale."""
_SWEEPS = frozenset({"-m", "--multirun", "hydra.mode=MULTIRUN"})
"""Words of a command line that make it a sweep."""


def in_place_of_scale(arguments: Sequence[str], config_dir: Path) -> list[str]:
    """The arguments, with the experiment's overrides in place of their scale, if it has some.

    Args:
        arguments: of the command line. A key or group that they set stays as they have it.
        config_dir: of the YAML groups that we ship.
    """
    given = {name.lstrip("+"): value for name, _, value in (a.partition("=") for a in arguments)}
    scale = given.get("scale", "")
    instead = _instead(config_dir / "experiment" / f"{given.get('experiment')}.yaml")
    if scale not in instead:
        return list(arguments)
    narrowed = [word for word in instead[scale] if word.partition("=")[0] not in given]
    return [*(a for a in arguments if a.lstrip("+") != f"scale={scale}"), *narrowed]


def has_own_scales(experiment: str, config_dir: Path) -> bool:
    """Whether an experiment has overrides in place of scales, which narrow what it sweeps."""
    return bool(_instead(config_dir / "experiment" / f"{experiment}.yaml"))


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether a command with these arguments is a sweep."""
    return bool(_SWEEPS & set(arguments))


def scales_of(text: str, *, is_sweep: bool) -> list[str]:
    """The scales that a command names; none if Hydra will refuse them.

    Args:
        text: what stands behind ``scale=``.
        is_sweep: the command may name several.
    """
    try:
        override = OverridesParser.create().parse_override(f"scale={text}")
        if not override.is_sweep_override():
            return [str(override.value())] if override.value() else []
        return list(override.sweep_string_iterator()) if is_sweep else []
    except HydraException:  # of what is no override, or of a pattern, such as scale=*
        return []


def _instead(experiment: Path) -> Mapping[str, Sequence[str]]:
    if not experiment.is_file():
        return {}
    content = yaml.safe_load(experiment.read_text(encoding="utf-8")) or {}
    return (content.get(STUDY) or {}).get(KEY) or {}
