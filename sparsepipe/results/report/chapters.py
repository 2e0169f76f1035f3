"""A report's chapters: a table or figure of the paper with all that we have of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from sparsepipe.results.paper import CITATION
from sparsepipe.results.report.cell import Row
from sparsepipe.results.report.commands import Commands
from sparsepipe.results.report.exhibit import Block, Exhibit
from sparsepipe.results.report.picture import beside_each_other
from sparsepipe.results.report.shown import ShownBlock, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """A table or figure of the paper, filled.

    Attributes:
        exhibit: which.
        found: figures by block.
        blocks: the same as texts.
        pictures: file names of each block's pictures.
        figures: what is drawn, by file name.
    """

    exhibit: Exhibit
    found: tuple[Block, ...]
    blocks: tuple[ShownBlock, ...]
    pictures: tuple[tuple[str, ...], ...]
    figures: Mapping[str, Figure]


def chapter(exhibit: Exhibit, rows: Sequence[Row], commands: Commands | None = None) -> Chapter:
    """Fills an exhibit from finished runs.

    Args:
        exhibit: which.
        rows: of its experiment.
        commands: make the commands that fill its cells; None: see :meth:`Exhibit.blocks`.
    """
    found = tuple(exhibit.blocks(rows, commands))
    draw = exhibit.draw or (lambda block: beside_each_other(exhibit, block))
    drawn = [draw(block) for block in found]
    names = [_name(exhibit.name, number) for number in range(len(found))]
    figures = {name: figure for name, figure in zip(names, drawn, strict=True) if figure}
    return Chapter(
        exhibit=exhibit,
        found=found,
        blocks=tuple(shown(exhibit, block) for block in found),
        pictures=tuple((name,) if name in figures else () for name in names),
        figures=figures,
    )


def citation_of(chapters: Sequence[Chapter]) -> str:
    """What columns "paper" have the figures of, where a chapter says nothing else."""
    found = dict.fromkeys(each.exhibit.citation for each in chapters)
    return next(iter(found)) if len(found) == 1 else CITATION


def citation_text(each: Chapter, common: str) -> str:
    """What a chapter says of that; empty where it is what all have.

    Args:
        each: the chapter.
        common: see :func:`citation_of`.
    """
    own = each.exhibit.citation
    return "" if own == common else f'Here columns "paper" have what is printed in: {own}.'


def _name(exhibit: str, number: int) -> str:
    return f"{exhibit}_{number + 1}.png" if number else f"{exhibit}.png"
