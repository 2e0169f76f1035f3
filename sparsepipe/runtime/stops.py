"""Stops in the middle of an epoch: all ranks after the same step, without waiting each step.

Ranks of a pipeline are never more than some steps apart. One that wants to stop names a
step that no rank can have reached yet, in the store that all ranks share; each looks there
after every step.
"""

from __future__ import annotations

import itertools

from sparsepipe.runtime import group

_uses = itertools.count()


class StopAgreement:
    """Agrees on a step to stop after. Every rank must make as many of these, in one order.

    Args:
        spread: steps that ranks can be apart at most.
    """

    def __init__(self, *, spread: int) -> None:
        self._spread = spread
        self._key = f"sparsepipe/stop/{next(_uses)}"
        self._store = group.store() if group.world_size() > 1 else None
        self._agreed: int | None = None

    @property
    def pending(self) -> bool:
        """Whether this rank knows of a step that has been agreed on."""
        return self._agreed is not None

    def reached(self, step: int, *, asked: bool) -> bool:
        """Whether to stop after ``step``; each rank asks after each of its steps.

        Args:
            step: number of the step just done.
            asked: this rank wants to stop as soon as it can be.
        """
        if self._store is None:
            return asked
        if self._agreed is None and asked:
            wish = str(step + 2 * self._spread + 2)  # twice: the others look after a step
            self._agreed = int(self._store.compare_set(self._key, "", wish))
        elif self._agreed is None and self._store.check([self._key]):
            self._agreed = int(self._store.get(self._key))
        return self._agreed is not None and step >= self._agreed
