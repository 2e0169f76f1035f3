"""The hardware inventory: which devices there are, on which hosts, joined by which links."""

from sparsepipe.cluster.inventory import Device, Host, Inventory, Link
from sparsepipe.cluster.local import local

__all__ = ["Device", "Host", "Inventory", "Link", "local"]
