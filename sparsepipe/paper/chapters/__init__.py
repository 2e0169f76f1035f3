"""The chapters that a report can have: tables and figures of papers, and other packages' chapters.

Other packages add a :class:`~sparsepipe.report.chapter.Chapter` as an entry point of the group
``sparsepipe.report_chapters``, with the name of the experiment whose runs fill it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from sparsepipe.errors import ConfigError
from sparsepipe.report.chapter import Chapter

GROUP = "sparsepipe.report_chapters"
_HERE = {
    "table1": "table1",
    "table2": "trainings",
    "table3": "table3",
    "fig7": "fig7",
    "fig8": "trainings",
    "fig9": "fig9",
    "pipeline_depth": "pipeline_depth",
    "bigconv": "measured_steps",
    "convnext_tp": "measured_steps",
    "multi_dsn": "multi_dsn",
    "multi_dsn_memory": "multi_dsn",
}
"""The module of each chapter of this package, in the order of a report with all chapters."""


@cache
def _points() -> Mapping[str, EntryPoint]:
    here = {
        name: EntryPoint(name=name, group=GROUP, value=f"{__name__}.{module}:{name.upper()}")
        for name, module in _HERE.items()
    }
    return here | {each.name: each for each in entry_points(group=GROUP) if each.name not in here}


class _Chapters(Mapping[str, Chapter]):
    """Maps names to chapters; imports a chapter, and matplotlib, only when it is looked up."""

    def __getitem__(self, name: str) -> Chapter:
        point = _points()[name]
        why = f"it is not a sparsepipe.report.chapter.Chapter with the name '{name}'"
        try:
            found = point.load()
        except (ImportError, AttributeError) as error:
            found, why = None, str(error)
        if not isinstance(found, Chapter) or found.name != name:
            raise ConfigError(
                f"the report chapter '{name}' cannot be loaded from {point.value}: {why}",
                remedy="install what it imports, or mend or uninstall the package that provides it",
            )
        return found

    def __contains__(self, name: object) -> bool:
        return name in _points()

    def __iter__(self) -> Iterator[str]:
        return iter(_points())

    def __len__(self) -> int:
        return len(_points())


CHAPTERS: Mapping[str, Chapter] = _Chapters()
"""Chapters by their name, which is that of the experiment whose runs fill them."""
