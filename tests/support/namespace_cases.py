"""Helpers for tests that make real namespaces: who may, what is left, and a small cluster."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sparsepipe.cluster import Device, Host, Inventory, Link
from sparsepipe.emulate import machine
from sparsepipe.emulate.layout import leftovers
from tests.support.paths import environment

PROGRAMS = Path(__file__).parent / "programs"
PERMITTED = (
    machine.may_administer() and shutil.which("tc", path="/usr/sbin:/sbin:/usr/bin") is not None
)
needs_namespaces = pytest.mark.skipif(
    not PERMITTED,
    reason="making network namespaces needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN) and iproute2",
)


def cluster(hosts: int = 2, *, bytes_per_s: float = 20e6) -> Inventory:
    return Inventory(
        hosts=tuple(
            Host(name=f"host{k}", devices=(Device(name="GPU", count=1),)) for k in range(hosts)
        ),
        link=Link(bytes_per_s=bytes_per_s),
    )


def left(pid: int) -> list[str]:
    """Names of namespaces and interfaces that a process has made."""
    namespaces, cables = leftovers(
        machine.namespaces(), [n for _, n in socket.if_nameindex()], living=()
    )
    marks = (f"sparsepipe-{pid}-", f"spe{pid}c")
    return [name for name in (*namespaces, *cables) if name.startswith(marks)]


def start(program: str) -> subprocess.Popen[str]:
    """A program of the directory ``programs``, on this machine."""
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / program)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
