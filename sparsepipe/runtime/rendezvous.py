"""A rendezvous of torch's elastic agents that listens on one address only and reads no pickles.

Torch's own ``c10d`` keeps its state as a pickle in a store that listens on all interfaces: whoever
reaches the port runs code in every agent. This one counts on a fixed number of agents, each with
its number, and needs no state. :mod:`sparsepipe.runtime.launch` uses it on one host; over several,
``torchrun --rdzv-backend=sparsepipe`` does.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives.meeting_point import LOOPBACK, keep_store

BACKEND = "sparsepipe"


class FixedRendezvous(RendezvousHandler):
    """Agents of fixed numbers, of which number 0 keeps the store.

    Args:
        address: of the host of agent 0.
        port: there; 0 with a single agent: any that is free.
        number: this agent's.
        agents: how many there are.
        run_id: keeps runs apart.
        timeout: of the store's requests, and of waiting for agent 0.
    """

    def __init__(
        self, address: str, port: int, *, number: int, agents: int, run_id: str, timeout: timedelta
    ) -> None:
        self._address, self._port = address, port
        self._number, self._agents = number, agents
        self._run_id = run_id
        self._timeout = timeout
        self._store: TCPStore | None = None
        self._attempts = 0

    @override
    def get_backend(self) -> str:
        return BACKEND

    @property
    @override
    def use_agent_store(self) -> bool:
        return True

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        """Joins the agents; again after each restart, under keys of its own."""
        if self._store is None:
            self._store = self._made()
        self._attempts += 1
        return RendezvousInfo(
            PrefixStore(f"{self._run_id}/{self._attempts}", self._store),
            self._number,
            self._agents,
            RendezvousStoreInfo(self._address, self._store.port),
        )

    def _made(self) -> TCPStore:
        if self._number == 0:
            return keep_store(
                self._address, self._port, timeout=self._timeout, across_hosts=self._agents > 1
            )
        return TCPStore(self._address, self._port, None, False, self._timeout)

    @override
    def is_closed(self) -> bool:
        return False

    @override
    def set_closed(self) -> None:
        """Nothing: there is no state that others would see."""

    @override
    def num_nodes_waiting(self) -> int:
        return 0

    @override
    def get_run_id(self) -> str:
        return self._run_id

    @override
    def shutdown(self) -> bool:
        return True


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous for the options of ``torchrun``.

    Raises:
        ConfigError: a varying number of agents, or no endpoint or number where there are several.
    """
    agents = parameters.max_nodes
    if parameters.min_nodes != agents:
        raise ConfigError(
            f"--nnodes={parameters.min_nodes}:{agents} varies",
            remedy="give --rdzv-backend=sparsepipe one number of nodes",
        )
    address, _, port = parameters.endpoint.strip().rpartition(":")
    number = parameters.get_as_int("rank", 0 if agents == 1 else None)
    if number is None or not 0 <= number < agents or (agents > 1 and not (address and port)):
        raise ConfigError(
            f"--rdzv-backend=sparsepipe over {agents} nodes needs a number for each and the "
            "address of the first",
            remedy="give --rdzv-conf=rank=0 on the first node, rank=1 on the next and so on, and "
            "--rdzv-endpoint=ADDRESS:PORT of the first on all",
        )
    if port and not port.isdecimal():
        raise ConfigError(
            f"--rdzv-endpoint={parameters.endpoint} has no port",
            remedy="give it as ADDRESS:PORT",
        )
    return FixedRendezvous(
        address.strip("[]") or LOOPBACK,
        int(port or 0),
        number=number,
        agents=agents,
        run_id=parameters.run_id,
        timeout=timedelta(seconds=parameters.get_as_int("timeout", 900) or 900),
    )


def register() -> None:
    """Makes the rendezvous known to torch's elastic agents of this process."""
    rendezvous_handler_registry.register(BACKEND, create)


def torchrun_handler() -> object:
    """What ``torchrun`` looks up, by the entry point of the group ``torchrun.handlers``."""
    return create
