"""Where ranks meet: a store on one address, and the interface on which they listen for each other.

Torch's own stores listen on all interfaces of a host, and gloo on whichever the host's name leads
to. Neither asks who connects, so a run listens on the loopback where all of its ranks are on one
host, and else only on the interface by which the address is reached that the launcher names.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING

from sparsepipe.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_GET_ADDRESSES, _IFREQ_BYTES = 0x8912, 40  # SIOCGIFCONF of linux/sockios.h, struct ifreq
_BACKLOG = 4096


def keep_store(
    address: str,
    port: int,
    *,
    timeout: timedelta,
    clients: int | None = None,
    across_hosts: bool = False,
) -> TCPStore:
    """A store that this process keeps, and that listens on ``address`` alone.

    Args:
        address: one of this host's, or a name of it.
        port: 0: any that is free.
        timeout: of each request.
        clients: how many to wait for; None: for none.
        across_hosts: other hosts are to reach it.

    Raises:
        ConfigError: it is no address of this host, one that other hosts would not reach, or its
            port is taken.
    """
    # Processes that only start others import this file without torch.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with _listening(address, port, across_hosts=across_hosts) as listener:
        bound, port = listener.getsockname()[:2]
        return TCPStore(
            bound,
            port,
            clients,
            True,
            timeout,
            wait_for_workers=clients is not None,
            master_listen_fd=listener.detach(),  # the store closes it
        )


def _listening(address: str, port: int, *, across_hosts: bool) -> socket.socket:
    family, bound = _resolved(address)
    if across_hosts and _is_loopback(bound):
        raise ConfigError(
            f"{address} is {bound} on this host, which other hosts do not reach",
            remedy="name this host by the address that the others know (`ip address` lists them): "
            "its own name may lead to the loopback by /etc/hosts",
        )
    try:
        # Without SO_REUSEPORT, by which another process could take a share of the connections.
        return socket.create_server((bound, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"ranks cannot meet at {address}, port {port}: {error.strerror}",
            remedy="name an address of this host (`ip address` lists them) and a port that is free",
        ) from error


def choose_interfaces(master: str, *, one_host: bool) -> None:
    """Sets the variables by which gloo and NCCL choose the interface, where nobody has set them.

    Args:
        master: the address at which the ranks of all hosts meet, or its name.
        one_host: all ranks are on this host.

    Raises:
        ConfigError: the address is one that only this host reaches, or no interface leads to it:
            gloo and NCCL would choose one by themselves.
    """
    missing = [name for name in INTERFACE_VARIABLES if not os.environ.get(name)]
    if not missing:
        return
    found = _loopback() if one_host else _interface_to(master)
    if not found:
        place = "this host's loopback" if one_host else f"{master}, where ranks meet,"
        raise ConfigError(
            f"none of this host's interfaces leads to {place}",
            remedy=f"set {' and '.join(missing)} to the interface by which the ranks reach each "
            "other (`ip address` lists them)",
        )
    for name in missing:
        # NCCL would take a name for the beginning of one.
        os.environ[name] = f"={found}" if name.startswith("NCCL") else found


def on_one_host(variables: Mapping[str, str]) -> bool:
    """Whether all ranks are on this host, by the variables that a launcher sets."""
    local = variables.get("LOCAL_WORLD_SIZE")
    if local is not None:
        return local == variables.get("WORLD_SIZE")
    return _is_loopback(_resolved(variables["MASTER_ADDR"])[1])


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")


def _interface_to(master: str) -> str:
    """The interface by which an address is reached; empty where there is none."""
    family, address = _resolved(master)
    if _is_loopback(address):
        if _is_loopback(master) or master == "localhost":
            return _loopback()  # agents of one host that play several
        raise ConfigError(
            f"{master}, where ranks meet, is {address} on this host, so that others would not "
            "reach its ranks",
            remedy="give the launcher an address instead of the name, or set GLOO_SOCKET_IFNAME "
            "to the interface of the network between the hosts",
        )
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing, only looks for a route
        except OSError:
            return ""
        own = probe.getsockname()[0]
    return next((name for name, each in _own_addresses(family) if each == own), "")


def _own_addresses(family: socket.AddressFamily) -> list[tuple[str, str]]:
    """Interfaces and their addresses, of which one may have several; empty where not on Linux."""
    try:
        import fcntl  # which Unix systems have

        if family == socket.AF_INET6:
            lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").split("\n")
            rows = [line.split() for line in lines if line]
            return [(row[-1], str(IPv6Address(int(row[0], 16)))) for row in rows]
        content = bytearray(_IFREQ_BYTES * 1024)
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(content))
        with socket.socket(family, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("iP", len(content), pointer)
            answer = fcntl.ioctl(any_socket, _GET_ADDRESSES, request)
    except (ImportError, OSError):
        return []
    end: int = struct.unpack("iP", answer)[0]
    entries = [content[n : n + _IFREQ_BYTES] for n in range(0, end, _IFREQ_BYTES)]
    names = [entry[:16].split(b"\0")[0].decode().partition(":")[0] for entry in entries]
    return [(name, socket.inet_ntoa(e[20:24])) for name, e in zip(names, entries, strict=True)]


def _resolved(address: str) -> tuple[socket.AddressFamily, str]:
    """The first address of a name, of IPv4 where there is one.

    Raises:
        ConfigError: the name is not known here.
    """
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"{address}, where ranks are to meet, is not known on this host: {error.strerror}",
            remedy="give the launcher an address instead of the name, or enter it in /etc/hosts",
        ) from error
    family, *_, place = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, str(place[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
