"""Which updates have to copy weights first.

Those that change what a minibatch in flight went forward with, as in the worker
(:mod:`sparsepipe.runtime.weights`, mode ``stash``). It follows from where a rank stands in the
order of its actions, so that runs that stand alike copy alike.
"""

from __future__ import annotations

from sparsepipe.schedule import Action


class Stash:
    """Who uses the newest weights of one rank."""

    __slots__ = ("_users",)

    def __init__(self) -> None:
        self._users: set[tuple[int, int | None]] = set()

    @property
    def in_use(self) -> bool:
        """Whether an update now would change what a minibatch in flight went forward with."""
        return bool(self._users)

    def see(self, action: Action) -> None:
        """An action of the rank, the next in its order."""
        if action.kind == "U":
            self._users.clear()
        elif action.kind == "F":
            self._users.add((action.number, action.microbatch))
        else:
            self._users.discard((action.number, action.microbatch))
