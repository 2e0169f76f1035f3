"""Where ranks meet: a store on one address, and the interface on which they listen for each other.

Torch's own stores listen on all interfaces of a host, and gloo on whichever the host's name leads
to. Neither asks who connects, so a run listens on the loopback where all of its ranks are on one
host, and else only on the interface by which the address is reached that the launcher names.
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
    """A store that this process keeps, and that listens on ``address`` alone, one of this host's.

    Port 0 takes any that is free. The store waits for ``clients``, if any, and refuses an address
    that hosts beside this one do not reach if it is ``across_hosts``.
    """
    # Processes that only start others import this file without torch.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family, bound = _resolved(address)
    if across_hosts and ip_address(bound).is_loopback:
        raise ConfigError(
            f"{address} is {bound} on this host, which other hosts do not reach",
            remedy="name this host by the address that the others know (`ip address` lists them): "
            "its own name may lead to the loopback by /etc/hosts",
        )
    try:
        # Without SO_REUSEPORT, by which another process could take a share of the connections.
        listener = socket.create_server((bound, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"ranks cannot meet at {address}, port {port}: {error.strerror}",
            remedy="name an address of this host (`ip address` lists them) and a port that is free",
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
    """Sets the variables by which gloo and NCCL choose the interface, where nobody has set them.

    Raises a ConfigError if only this host reaches ``master``, at which the ranks of several hosts
    meet, or no interface leads to it.
    """
    missing = [name for name in INTERFACE_VARIABLES if not os.environ.get(name)]
    if not missing:
        return
    own = LOOPBACK
    if not one_host:
        family, address = _resolved(master)
        # One that is given as the loopback is for agents of one host that play several.
        given = master.startswith("127.") or master in ("::1", "localhost")
        if ip_address(address).is_loopback and not given:
            raise ConfigError(
                f"{master}, where ranks meet, is {address} on this host, so that others would not "
                "reach its ranks",
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
    return ip_address(_resolved(variables["MASTER_ADDR"])[1]).is_loopback


def _resolved(address: str) -> tuple[socket.AddressFamily, str]:
    """The first address of a name, of IPv4 where it has one."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"{address}, where ranks are to meet, is not known on this host: {error.strerror}",
            remedy="give the launcher an address instead of the name, or enter it in /etc/hosts",
        ) from error
    family, *_, place = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, str(place[0])
