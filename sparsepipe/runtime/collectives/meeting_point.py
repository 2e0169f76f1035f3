"""Where ranks meet: a store on one address, and the interface on which they listen for each other.

Torch's own stores listen on all interfaces of a host, and gloo on the one that the host's name
resolves to. Neither checks who connects, so a run listens on the loopback if all of its ranks are
on one host, and otherwise only on the interface that leads to the launcher's address.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

import psutil

from sparsepipe.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_BACKLOG = 4096


def keep_store(
    address: str,
    port: int,
    *,
    timeout: timedelta,
    clients: int | None = None,
    across_hosts: bool = False,
) -> TCPStore:
    """Opens a store in this process that listens only on ``address``, which must be this host's.

    Port 0 means any free port. If ``clients`` is given, waits until that many processes use the
    store, with this one; ``timeout`` limits waits. With ``across_hosts``, refuses loopbacks.
    """
    # Processes that only start others import this file without torch.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family, bound = _resolved(address)
    if across_hosts and ip_address(bound).is_loopback:
        raise ConfigError(
            f"{address} resolves to {bound} on this host, which other hosts cannot reach",
            remedy="give an address of this host that the others can reach (`ip address` lists "
            "them); /etc/hosts may resolve its own name to the loopback",
        )
    try:
        # Without SO_REUSEPORT, with which another process could take a share of the connections.
        listener = socket.create_server((bound, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"ranks cannot meet at {address}, port {port}: {error.strerror}",
            remedy="give an address of this host (`ip address` lists them) and a free port",
        ) from error
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


def choose_interfaces(master: str, *, one_host: bool) -> None:
    """Sets those environment variables for gloo's and NCCL's interface that are not set yet.

    Raises a ConfigError if only this host can reach ``master``, the address at which ranks of
    several hosts meet, or if no interface leads to it. ``one_host``: whether all ranks are here.
    """
    missing = [name for name in INTERFACE_VARIABLES if not os.environ.get(name)]
    if not missing:
        return
    own = LOOPBACK
    if not one_host:
        family, address = _resolved(master)
        # An explicit loopback address is for agents of one host that play several.
        given = master.startswith("127.") or master in ("::1", "localhost")
        if ip_address(address).is_loopback and not given:
            raise ConfigError(
                f"{master}, where ranks meet, resolves to {address} on this host, but other hosts "
                "cannot reach ranks at that address",
                remedy="give the launcher an address instead of the name, or set "
                "GLOO_SOCKET_IFNAME to the interface of the network between the hosts",
            )
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))  # sends nothing, only looks for a route
                own = probe.getsockname()[0]
            except OSError:
                own = ""
    interfaces = psutil.net_if_addrs().items()
    found = next((name for name, all_of in interfaces for a in all_of if a.address == own), "")
    if not found:
        raise ConfigError(
            f"no interface of this host leads to {LOOPBACK if one_host else master}",
            remedy=f"set {' and '.join(missing)} to the interface through which the ranks reach "
            "each other (`ip address` lists them)",
        )
    for name in missing:
        # Without the equals sign, NCCL would match all names that begin so.
        os.environ[name] = f"={found}" if name.startswith("NCCL") else found


def on_one_host(variables: Mapping[str, str]) -> bool:
    """Whether all ranks are on this host, according to the variables that a launcher sets."""
    local = variables.get("LOCAL_WORLD_SIZE")
    if local is not None:
        return local == variables.get("WORLD_SIZE")
    return ip_address(_resolved(variables["MASTER_ADDR"])[1]).is_loopback


def _resolved(address: str) -> tuple[socket.AddressFamily, str]:
    """Address family and first address of a host name or address; IPv4 if it has both."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"{address}, where ranks meet, cannot be resolved on this host: {error.strerror}",
            remedy="give the launcher an address instead of the name, or enter it in /etc/hosts",
        ) from error
    family, *_, place = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, str(place[0])
