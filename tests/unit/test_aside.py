"""Who says that its time is not its own, and who hears of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsepipe.aside import Aside, aside, heard_by
from sparsepipe.data.lock import locked
from sparsepipe.errors import DataError

WAITS = Aside(what="waits")
PREPARES = Aside(what="prepares", limit_s=0.3)


def test_what_begins_and_ends_is_heard() -> None:
    told: list[Aside | None] = []
    with heard_by(told.append), aside(WAITS), pytest.raises(EOFError), aside(PREPARES):
        raise EOFError
    assert told == [WAITS, PREPARES, WAITS, None]
    with aside(WAITS):
        pass
    assert len(told) == 4, "nobody listens any more"


def test_a_cache_is_waited_for_and_built_for_as_long_as_others_wait(tmp_path: Path) -> None:
    told: list[Aside | None] = []
    path = tmp_path / "lock"
    with heard_by(told.append), locked(path, wait_s=0.3):
        assert told == [PREPARES, None, PREPARES]
        told.clear()
        with pytest.raises(DataError, match="longer than"), locked(path, wait_s=0.3):
            pass
        assert told == [PREPARES, PREPARES], "it builds all the same"
    assert told[2:] == [None]
