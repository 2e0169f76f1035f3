"""A report as one HTML page: nothing beside it is needed, nor a network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import jinja2

from sparsepipe.results import style
from sparsepipe.results.report.cell import HOW_COMPARED, MISSING
from sparsepipe.results.report.chapters import Chapter, citation_of, citation_text
from sparsepipe.results.report.failures import Failure


def page(
    title: str,
    chapters: Sequence[Chapter],
    pictures: Mapping[str, bytes],
    failures: Sequence[Failure] = (),
) -> str:
    """The whole report.

    Args:
        title: of the document.
        chapters: one for each table or figure of the paper.
        pictures: PNG files by their names.
        failures: jobs that have left no run.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=title,
        citation=citation_of(chapters),
        citation_text=citation_text,
        how_compared=HOW_COMPARED,
        chapters=chapters,
        failures=failures,
        pictures={name: _Picture.of(content) for name, content in pictures.items()},
        missing=MISSING,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """A picture within the page.

    Attributes:
        uri: all of it.
        width: in the page's pixels, of which an inch has 96.
    """

    uri: str
    width: int

    @classmethod
    def of(cls, png: bytes) -> Self:
        """From the content of a PNG file, whose header has its width."""
        encoded = base64.b64encode(png).decode("ascii")
        width = int.from_bytes(png[16:20], "big") * 96 / style.DPI
        return cls(uri=f"data:image/png;base64,{encoded}", width=round(width))
