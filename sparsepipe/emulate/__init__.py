"""The emulated cluster: layers that take the time of a profile, hosts and limited links."""

from sparsepipe.emulate.hosts import clear, emulated_hosts
from sparsepipe.emulate.machine import NotPermitted
from sparsepipe.emulate.ranks import announce_hosts, emulated_layout, enter_host, set_limits

__all__ = [
    "NotPermitted",
    "announce_hosts",
    "clear",
    "emulated_hosts",
    "emulated_layout",
    "enter_host",
    "set_limits",
]
