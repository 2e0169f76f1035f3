"""The emulated cluster: layers that take as long as a profile says, hosts and limited links."""

from sparsepipe.emulate.entering import (
    emulated_layout,
    enter_host,
    lift_limits,
    set_limits,
    told_to_ranks,
)
from sparsepipe.emulate.hosts import clear, emulated_hosts
from sparsepipe.emulate.machine import NotPermitted

__all__ = [
    "NotPermitted",
    "clear",
    "emulated_hosts",
    "emulated_layout",
    "enter_host",
    "lift_limits",
    "set_limits",
    "told_to_ranks",
]
