"""What ``scale=`` means for an experiment that computes with what was measured elsewhere.

No width, batch or length of a training makes such an experiment smaller, and files of
``conf/scale`` would change what its figures are of. It says in its own file what stands in the
place of each scale: overrides that narrow what it sweeps, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

KEY = "instead_of_scale"
"""Of an experiment's file: overrides by scale."""


def in_place_of_scale(arguments: Sequence[str], config_dir: Path) -> list[str]:
    """The arguments, with what the experiment has in place of their scale, where it has something.

    Args:
        arguments: of the command line. A key or group that they set stays as they have it.
        config_dir: of the YAML groups that we ship.
    """
    given = {name.lstrip("+"): value for name, _, value in (a.partition("=") for a in arguments)}
    instead = _instead(config_dir / "experiment" / f"{given.get('experiment')}.yaml")
    scale = given.get("scale")
    if scale is None or scale not in instead:
        return list(arguments)
    narrowed = [word for word in instead[scale] if word.partition("=")[0] not in given]
    return [*(a for a in arguments if a.lstrip("+") != f"scale={scale}"), *narrowed]


def _instead(experiment: Path) -> Mapping[str, Sequence[str]]:
    if not experiment.is_file():
        return {}
    content = yaml.safe_load(experiment.read_text(encoding="utf-8")) or {}
    return content.get(KEY) or {}
