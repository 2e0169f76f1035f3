"""What is said when ranks do not all come to join: who is missing, as far as that is known.

Before they have joined they share nothing but a store, so each that comes leaves word there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparsepipe.errors import TransportError
from sparsepipe.runtime.backend import of_backend
from sparsepipe.runtime.meeting import UNREACHED, blaming, name_of
from sparsepipe.runtime.waits import within

_ASKING_S = 2.0


class Roll:
    """Which ranks have come to join.

    Args:
        rank: this one.
        count: of all ranks.
        keeper: the rank whose process keeps the store; None: the launcher does.
        limit_s: of the joining.
    """

    def __init__(self, rank: int, *, count: int, keeper: int | None, limit_s: float) -> None:
        self._rank = rank
        self._count = count
        self._keeper = keeper
        self._limit_s = limit_s
        self._store: Any = None

    def sign(self, store: Any) -> None:
        """Tells the others that this rank has come; ``store`` is of this joining alone."""
        self._store = store
        store.set(_key(self._rank), "1")

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Around all of the joining; errors of the backend become the house's.

        Raises:
            TransportError: not all ranks came within the limit, or one was lost again.
        """
        try:
            yield
        except RuntimeError as error:
            if not of_backend(type(error).__name__, str(error)):
                raise
            raise self._explained(error) from error

    def _explained(self, error: RuntimeError) -> TransportError:
        me, within_limit = name_of(self._rank), f"within {self._limit_s:g} s"
        if self._store is None and self._keeper == self._rank:
            return blaming((), f"{_came(error, self._count)} {within_limit}", remedy=UNREACHED)
        absent = None if self._store is None else within(_ASKING_S, self._absent)
        if absent is None:
            if self._keeper is None:
                text = f"{me} does not reach the launcher, at which all ranks join"
                return blaming(self._rank, text, remedy=UNREACHED)
            text = f"{name_of(self._keeper)}, at which all ranks join, does not answer {me}"
            return blaming(self._keeper, text, remedy=UNREACHED)
        if not absent:
            said = str(error).partition("\n")[0]
            text = f"all ranks came to join, but {me} could not connect to all others: {said}"
            return blaming((), text, remedy=UNREACHED)
        who = " and ".join(map(name_of, absent))
        return blaming(absent, f"{who} did not come to join {me} {within_limit}", remedy=UNREACHED)

    def _absent(self) -> list[int]:
        return [rank for rank in range(self._count) if not self._store.check([_key(rank)])]


def _key(rank: int) -> str:
    return f"sparsepipe/came/{rank}"


def _came(error: RuntimeError, count: int) -> str:
    """How many came to the store's own rank, which counts them and does not know them."""
    found = re.search(r"(\d+)/\d+ clients joined", str(error))
    if found is None:
        return f"not all of {count} ranks came to join"
    return f"{found[1]} of {count} ranks came to join"
