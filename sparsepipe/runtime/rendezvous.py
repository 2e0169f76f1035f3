"""A rendezvous of torch's elastic agents that listens on one address only and reads no pickles.

Torch's own ``c10d`` keeps its state as a pickle in a store that listens on all interfaces: whoever
reaches the port can run code in every agent. This one expects a fixed number of numbered agents and
needs no state: ``torchrun --rdzv-backend=sparsepipe``.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives.meeting_point import LOOPBACK, keep_store


class FixedRendezvous(RendezvousHandler):
    """Rendezvous of numbered agents, set up by ``torchrun``'s options; agent 0 keeps the store."""

    use_agent_store = True

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._agents = agents = parameters.max_nodes
        address, _, port = parameters.endpoint.strip().rpartition(":")
        number = parameters.get_as_int("rank", 0 if agents == 1 else None)
        named = agents == 1 or bool(address and port)
        fixed = parameters.min_nodes == agents and number is not None and 0 <= number < agents
        if number is None or not fixed or not named or not (port or "0").isdecimal():
            raise ConfigError(
                "--rdzv-backend=sparsepipe needs a fixed number of nodes and, for several nodes, "
                "each node's number and the first node's address and port, but got "
                f"--nnodes={parameters.min_nodes}:{agents}, rank={number}, "
                f"--rdzv-endpoint={parameters.endpoint}",
                remedy="give one number as --nnodes, --rdzv-conf=rank=0 on the first node, rank=1 "
                "on the next and so on, and --rdzv-endpoint=ADDRESS:PORT of the first on all",
            )
        self._address, self._port = address.strip("[]") or LOOPBACK, int(port or 0)
        self._number = number
        self._run_id = parameters.run_id
        self._timeout = timedelta(seconds=parameters.get_as_int("timeout", 900) or 900)
        self._store: TCPStore | None = None
        self._attempts = 0

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        """Joins the other agents; after each restart anew, with different keys in the store."""
        if self._store is None and self._number == 0:
            across = self._agents > 1
            self._store = keep_store(
                self._address, self._port, timeout=self._timeout, across_hosts=across
            )
        elif self._store is None:
            self._store = TCPStore(self._address, self._port, None, False, self._timeout)
        self._attempts += 1
        return RendezvousInfo(
            PrefixStore(f"{self._run_id}/{self._attempts}", self._store),
            self._number,
            self._agents,
            RendezvousStoreInfo(self._address, self._store.port),
        )

    @override
    def get_backend(self) -> str:
        return "sparsepipe"

    @override
    def get_run_id(self) -> str:
        return self._run_id

    @override
    def is_closed(self) -> bool:
        return False

    @override
    def set_closed(self) -> None:
        """Does nothing, since agents share no state."""

    @override
    def num_nodes_waiting(self) -> int:
        return 0

    @override
    def shutdown(self) -> bool:
        return True


def torchrun_handler() -> object:
    """Returns the rendezvous class; an entry point of ``torchrun.handlers`` names this function."""
    return FixedRendezvous
