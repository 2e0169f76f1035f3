"""The hardware inventory: hosts, their devices and the links that join them."""

from sparsepipe.cluster.inventory import Device, Host, Inventory, Link
from sparsepipe.cluster.local import local
from sparsepipe.cluster.places import Place, place_of, places_for

__all__ = ["Device", "Host", "Inventory", "Link", "Place", "local", "place_of", "places_for"]
