"""Moves a rank's process to its emulated host, and switches the limits of links."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict

from sparsepipe.emulate import machine
from sparsepipe.emulate.layout import DATA, Layout, Station, limiting
from sparsepipe.errors import HardwareError
from sparsepipe.runtime.launch import environment_variables

_VARIABLE = "SPARSEPIPE_EMULATED_CLUSTER"
"""Environment variable: the layout and the name of each rank's host, as JSON."""
_CLONE_NEWNET = 0x40000000  # linux/sched.h


def announce_hosts(layout: Layout, hosts: Sequence[str]) -> AbstractContextManager[None]:
    """Passes the layout and each rank's host to ranks started in the block (:func:`enter_host`)."""
    text = json.dumps({"layout": asdict(layout), "hosts": list(hosts)})
    # Torch would warn on each rank that the launcher's address has no name.
    quiet = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    return environment_variables({_VARIABLE: text, **quiet})


def emulated_layout() -> Layout | None:
    """The emulated cluster of this rank; None if its network is not emulated."""
    text = os.environ.get(_VARIABLE)
    if text is None:
        return None
    found = json.loads(text)["layout"]
    stations = tuple(Station(**station) for station in found["stations"])
    return Layout(**{**found, "stations": stations})


def enter_host() -> None:
    """Moves the calling thread, and those that it starts from now on, to its rank's host.

    Must be called before any connection is made. Gloo then uses the limited interface, and the
    key-value store that ranks join is reached through the other one. Does nothing if the network
    is not emulated.
    """
    layout = emulated_layout()
    if layout is None:
        return
    host = json.loads(os.environ[_VARIABLE])["hosts"][int(os.environ["RANK"])]
    station = next(station for station in layout.stations if station.host == host)
    _enter(station.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = DATA
    os.environ["MASTER_ADDR"] = station.launcher


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is new in Python 3.12
    try:
        handle = os.open(machine.NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
        failed = libc.setns(handle, _CLONE_NEWNET)
        number = ctypes.get_errno() if failed else 0
        os.close(handle)
    except OSError as error:
        number = error.errno or 0
    if number:
        raise HardwareError(
            f"this rank cannot enter its emulated host {namespace}: {os.strerror(number)}",
            remedy="run the command again as root or with CAP_SYS_ADMIN, and leave its "
            "namespaces (`ip netns`) as they are while it runs",
        )


def set_limits(*, lifted: bool = False) -> None:
    """Limits the emulated links, if any, or lifts their limits; one rank does so for all."""
    if (layout := emulated_layout()) is not None:
        for command in limiting(layout, lifted=lifted):
            machine.do(command)
