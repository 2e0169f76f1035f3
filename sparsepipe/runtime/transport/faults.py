"""What is said when a rank is gone, silent, or when a message goes wrong."""

from __future__ import annotations

from collections.abc import Sequence

from sparsepipe.errors import TransportError
from sparsepipe.runtime.transport.channel import Changed, Fault
from sparsepipe.runtime.transport.message import Kind
from sparsepipe.runtime.transport.waits import Wait
from sparsepipe.schedule import Plan

_AGAIN = "run the command again to go on from the last checkpoint"


class Teller:
    """Makes errors that name ranks, stages and minibatches.

    Args:
        plan: which rank is in which stage.
        rank: this process's.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank

    def lost(self, fault: Fault, *, doing: str) -> TransportError:
        """A channel's thread ended.

        Args:
            fault: what it met.
            doing: what this rank's worker did when it heard of it.
        """
        peer = self._name(fault.route.other(self._rank))
        what = fault.route.kind.value
        which = "" if fault.minibatch is None else f" of minibatch {fault.minibatch}"
        if isinstance(fault.error, Changed):
            return TransportError(
                f"the {what}{which} for {peer} was written to before it was sent; noticed by "
                f"{self._me} while it {doing}",
                remedy="do not change in place what was returned or passed on; clone it first",
            )
        during = f" during the {what}{which}" if which else ""
        return TransportError(
            f"{peer} is gone: its connection to {self._me} broke{during}, which {doing}",
            remedy=f"see what ended that rank (its own message, or the memory); then {_AGAIN}",
        )

    def late(self, chain: Sequence[Wait], *, limit_s: float) -> TransportError:
        """A message did not come, or room for one, within the limit.

        Args:
            chain: this rank's wait, then that of the rank it waits for, and so on.
            limit_s: how long this rank has waited.
        """
        wait = chain[-1]
        peer, waiter = self._name(wait.peer), self._name(wait.waiter)
        what = f"the {wait.kind} of minibatch {wait.minibatch}"
        if wait.sending:
            text = f"{peer} took nothing from {waiter}, so {what} could not be sent"
        else:
            text = f"{peer} did not send {what} to {waiter}"
        if wait.waiter == self._rank:
            text += f" within {limit_s:g} s"
        else:
            text += f"; {self._me} has waited for that for {limit_s:g} s"
        return TransportError(
            text,
            remedy=f"see whether that rank is stopped or hangs; if it only takes longer, raise "
            f"timeout_s; then {_AGAIN}",
        )

    def unreachable(self, peer: int, *, limit_s: float) -> TransportError:
        """No connection came about."""
        return TransportError(
            f"{self._name(peer)} could not be reached by {self._me} within {limit_s:g} s",
            remedy=f"see whether that rank has started, and whether the hosts reach each other "
            f"(GLOO_SOCKET_IFNAME names the interface); then {_AGAIN}",
        )

    def left(self, kind: Kind, peer: int, *, minibatch: int) -> TransportError:
        """The other side has closed its end in good order."""
        return TransportError(
            f"{self._name(peer)} ended before it sent the {kind.value} of minibatch {minibatch} "
            f"to {self._me}",
            remedy="see whether every rank runs the same number of steps",
        )

    def lingering(self, peer: int, *, limit_s: float) -> TransportError:
        """The other side does not close."""
        return TransportError(
            f"{self._name(peer)} did not end its connection to {self._me} within {limit_s:g} s",
            remedy="see whether that rank is stopped, hangs or runs more steps",
        )

    @property
    def _me(self) -> str:
        return self._name(self._rank)

    def _name(self, rank: int) -> str:
        return f"rank {rank} (stage {self._plan.stage_of(rank)})"
