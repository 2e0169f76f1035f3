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
"""Environment variable: the layout, and the host of each rank."""
_CLONE_NEWNET = 0x40000000  # linux/sched.h


def announce_hosts(layout: Layout, hosts: Sequence[str]) -> AbstractContextManager[None]:
    """Passes the cluster to ranks started within the block, for :func:`enter_host`."""
    text = json.dumps({"layout": asdict(layout), "hosts": list(hosts)})
    # Torch would warn on each rank that the launcher's address has no name.
    quiet = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    return environment_variables({_VARIABLE: text, **quiet})


def emulated_layout() -> Layout | None:
    """The cluster in which this rank is; None: it has no network of its own."""
    text = os.environ.get(_VARIABLE)
    if text is None:
        return None
    found = json.loads(text)["layout"]
    stations = tuple(Station(**station) for station in found["stations"])
    return Layout(**{**found, "stations": stations})


def enter_host() -> None:
    """Moves the calling thread, and those it starts from now on, to its rank's host.

    To be called before anything is connected. Gloo then uses the limited interface; the store
    at which ranks meet is reached by the other one. Does nothing where the cluster has no
    network of its own.
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
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
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
            remedy="run the command again, and do not remove namespaces of running processes "
            "(`ip netns`)",
        )


def set_limits(*, lifted: bool = False) -> None:
    """Limits the links, or lets bytes go as fast as they can: before and after a training.

    To be called by one rank.
    """
    if (layout := emulated_layout()) is not None:
        for command in limiting(layout, lifted=lifted):
            machine.do(command)
