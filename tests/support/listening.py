"""On which addresses processes listen, as the kernel has it."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

_LISTENING = "0A"  # TCP_LISTEN of linux/tcp_states.h


def processes_in(cwd: Path) -> list[int]:
    """All processes but this one that work in a directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) != os.getpid() and (process / "cwd").resolve() == cwd.resolve():
                found.append(int(process.name))
        except OSError:
            continue  # it ended while we looked
    return found


def listening(pids: Iterable[int]) -> set[str]:
    """Addresses at which any of the processes takes connections over TCP, without their ports."""
    return {address for pid in pids for address in _listening(Path("/proc") / str(pid))}


def address_for_others() -> str:
    """An address of this machine beside the loopback's; without one the test is skipped."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of documentation, where nobody is
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


def _listening(process: Path) -> set[str]:
    own = set()
    try:
        for handle in os.listdir(process / "fd"):
            with suppress(OSError):  # closed meanwhile, as the one of this listing is
                own.add(os.readlink(process / "fd" / handle))
        rows = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in (process / "net" / table).read_text().splitlines()[1:]
        ]
    except OSError:
        return set()
    return {
        _address(row[1].partition(":")[0])
        for row in rows
        if row[3] == _LISTENING and f"socket:[{row[9]}]" in own
    }


def _address(text: str) -> str:
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)
