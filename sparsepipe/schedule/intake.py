"""How many minibatches a run has: said before, or settled while it goes on."""

from __future__ import annotations

from collections.abc import Iterator


class Intake:
    """The minibatches of one run, as its ranks learn of them.

    Ranks that ask for more only as they go on need no list of all they will do, and the run may
    be cut short while it goes on.

    Args:
        minibatches: of the run.

    Attributes:
        limit: minibatches of the run; it may be lowered, not below ``told``.
        told: minibatches that some rank knows of.
    """

    __slots__ = ("limit", "told")

    def __init__(self, minibatches: int) -> None:
        self.limit = minibatches
        self.told = 0

    def portions(self, size: int) -> Iterator[int]:
        """Minibatches for one rank: how many come next, ``size`` each time and the rest at last.

        Args:
            size: at least 1.
        """
        come = 0
        while come < self.limit:
            count = min(size, self.limit - come)
            come += count
            self.told = max(self.told, come)
            yield count
