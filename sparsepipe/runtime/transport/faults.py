"""What is said when a rank is gone, silent, or when a message goes wrong."""

from __future__ import annotations

from collections.abc import Callable

from sparsepipe.errors import ConfigError, SparsePipeError, TransportError
from sparsepipe.runtime.meeting import blaming
from sparsepipe.runtime.transport.channel import Changed, Fault
from sparsepipe.runtime.transport.message import Kind
from sparsepipe.runtime.waits import GONE, LATE, WaitedInVain, late_text
from sparsepipe.schedule import Plan


class Teller:
    """Makes errors that name ranks, stages and minibatches.

    Args:
        rank: this process's.
        name: how ranks are called.
        called: what the minibatch of a message is called, by its number.
    """

    def __init__(
        self, rank: int, *, name: Callable[[int], str], called: Callable[[int], str]
    ) -> None:
        self._rank = rank
        self._name = name
        self._called = called

    def lost(self, fault: Fault, *, doing: str) -> SparsePipeError:
        """A channel ended.

        Args:
            fault: what it met.
            doing: what this rank's worker did when it heard of it.
        """
        peer = self._name(fault.route.other(self._rank))
        what = fault.route.kind.value
        which = "" if fault.minibatch is None else f" of {self._called(fault.minibatch)}"
        if isinstance(fault.error, Changed):
            return ConfigError(  # of this rank's own code, and it would come again
                f"the {what}{which} for {peer} was written to before it was sent; noticed by "
                f"{self._me} while it {doing}",
                remedy="do not change in place what was returned or passed on; clone it first",
            )
        during = f" during the {what}{which}" if which else ""
        return blaming(
            fault.route.other(self._rank),
            f"{peer} is gone: its connection to {self._me} broke{during}, which {doing}",
            remedy=GONE,
        )

    def cut_off(self, *, doing: str) -> TransportError:
        """Neither this rank's peers can be reached nor the launcher."""
        text = f"{self._me} is cut off from all others; it {doing}"
        return blaming(self._rank, text, remedy=GONE)

    def late(self, vain: WaitedInVain, *, limit_s: float) -> TransportError:
        """A message did not come, or room for one, within the limit.

        Args:
            vain: this rank's wait, then that of the rank it waits for, and so on.
            limit_s: how long this rank has waited.
        """
        text = late_text(vain, rank=self._rank, limit_s=limit_s, name=self._name)
        return blaming(vain.missed, text, remedy=LATE)

    def left(self, kind: Kind, peer: int, *, minibatch: int) -> TransportError:
        """The other side has closed its end in good order."""
        return blaming(
            peer,
            f"{self._name(peer)} ended before it sent the {kind.value} of "
            f"{self._called(minibatch)} to {self._me}",
            remedy="see whether every rank runs the same number of steps",
        )

    def lingering(self, peer: int, *, limit_s: float) -> TransportError:
        """The other side does not close."""
        return blaming(
            peer,
            f"{self._name(peer)} did not end its connection to {self._me} within {limit_s:g} s",
            remedy="see whether that rank is stopped, hangs or runs more steps",
        )

    @property
    def _me(self) -> str:
        return self._name(self._rank)


def stage_name(rank: int, plan: Plan) -> str:
    """A rank of a plan in words."""
    return f"rank {rank} (stage {plan.stage_of(rank)})"
