"""Why a search for the largest batch ends: searches, reports and documents tell the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from sparsepipe.paper.chapters.trainings import OF_MEMORY, OTHERS
from sparsepipe.tasks.fitting.fit_batch import Found, _limit
from sparsepipe.tasks.fitting.prober import Outcome

DOCS = Path(__file__).parents[3] / "docs"


def test_reports_know_the_reasons_that_searches_give() -> None:
    assert {*get_args(Outcome)} - {"fits", "too_few_shapes"} == OF_MEMORY  # that one is of data
    ended = Found(largest=4, refused=None)
    given = {_limit(ended, None, limited_by_data=by_data) for by_data in (False, True)}  # type: ignore[arg-type]
    assert given == set(OTHERS)


def test_documents_tell_them() -> None:
    (told,) = re.findall(r"another reason \(`limited_by` is ([^)]*)\)", read("reports.md"))
    assert {*re.findall(r"`(\w+)`", told)} == set(OTHERS)
    for name in ("results.md", "experiments.md"):
        (row,) = re.findall(r"^\| `limited_by` \|(.*)\|$", read(name), re.MULTILINE)
        assert OF_MEMORY | set(OTHERS) <= {*re.findall(r"`(\w+)`", row)}


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")
