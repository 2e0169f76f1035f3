"""Commands of the cells that no run is for: at the scales and with the overrides asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparsepipe.results.report.commands import Commands
from sparsepipe.results.report.overridden import GROUPS, of_training
from sparsepipe.results.report.wanted import Wanted

_SWEPT_SCALE = "hydra.sweeper.params.scale"
"""At which an experiment is swept where the command line has no scale."""
_PLACES = ("data.cache_dir", "data.root")
"""Keys that say where data are: the same data may be elsewhere."""


def of_missing(
    commands: Commands, told: Collection[Commands], *, also: Sequence[str] = ()
) -> dict[str, Commands]:
    """Commands of the cells that no run is for, by the title of their block.

    Args:
        commands: of the experiment; they say what is asked for.
        told: those of the blocks that there are.
        also: further keys that count, beside those of trainings.

    Returns:
        Some for each scale, with its overrides, that is asked for and is that of no block. Where
        nothing is asked for and there is no block, those of the one scale at which the experiment
        is swept by itself, if it is swept at one.
    """
    lacking = [
        wanted
        for wanted in _wanted(commands, is_any_told=bool(told))
        if not any(_is_told(wanted, block, commands, also) for block in told)
    ]
    is_alone = not told and len(lacking) == 1 and not lacking[0].overrides
    alike = Counter(title for title, _ in {(each.title, each.setting) for each in lacking})
    return {
        "" if is_alone else _title(wanted, alike): replace(
            commands.giving(*wanted.given), of_task=wanted.of_task
        )
        for wanted in lacking
    }


def _title(wanted: Wanted, alike: Mapping[str, int]) -> str:
    """Of its own where only places differ: else one block would be that of several."""
    return wanted.title if alike[wanted.title] == 1 else wanted.placed_title


def _wanted(commands: Commands, *, is_any_told: bool) -> list[Wanted]:
    precise = {wanted.scale for wanted in commands.wanted}
    found = [Wanted(scale=scale) for scale in commands.scales if scale not in precise]
    found += commands.wanted
    if found or is_any_told:
        return found
    return [Wanted(scale=_swept_scale(commands))]


def _swept_scale(commands: Commands) -> str | None:
    """None where the experiment has none, or nobody knows."""
    if commands.usual is None:
        return None
    experiment = f"experiment={commands.experiment}"
    found = commands.usual((experiment,), (_SWEPT_SCALE,)).get(_SWEPT_SCALE)
    return None if found is None else str(found)


def _is_told(wanted: Wanted, block: Commands, commands: Commands, also: Sequence[str]) -> bool:
    """Whether runs of what is wanted come into a block that is there."""
    scales = [word.partition("=")[2] for word in block.given if word.startswith("scale=")]
    if scales != ([wanted.scale] if wanted.scale else []):
        return False
    return wanted.overrides is None or _alike(wanted.setting, block.given, commands, also)


def _alike(
    words: Sequence[str], others: Sequence[str], commands: Commands, also: Sequence[str]
) -> bool:
    """Whether overrides give configurations whose figures may be compared."""
    if commands.usual is None:
        return set(words) == set(others)
    return _counted(words, commands, also) == _counted(others, commands, also)


def _counted(words: Sequence[str], commands: Commands, also: Sequence[str]) -> dict[str, Any]:
    """What counts of the configuration that overrides give."""
    assert commands.usual is not None
    placed = tuple(word for word in words if word.partition("=")[0] not in _PLACES)
    experiment = f"experiment={commands.experiment}"
    found = commands.usual((experiment, *placed), (*GROUPS, *also))
    pairs = (pair for name in GROUPS if name in found for pair in _flat(name, found[name]))
    kept = {key: value for key, value in pairs if of_training(key) and key not in _PLACES}
    return kept | {key: found[key] for key in also if key in found}


def _flat(name: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Values by their dotted keys."""
    if not isinstance(node, Mapping):
        yield name, node
        return
    for key, item in node.items():
        yield from _flat(f"{name}.{key}", item)
