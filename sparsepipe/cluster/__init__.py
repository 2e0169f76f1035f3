"""The hardware inventory: which devices there are, on which hosts, joined by which links."""

from sparsepipe.cluster.inventory import Device, Host, Inventory, Link
from sparsepipe.cluster.local import local
from sparsepipe.cluster.places import Place, place_of, places_for

__all__ = ["Device", "Host", "Inventory", "Link", "Place", "local", "place_of", "places_for"]
