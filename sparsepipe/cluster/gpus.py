"""Which of a machine's GPUs the devices of an inventory are; names in, numbers out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sparsepipe.cluster.inventory import Host
from sparsepipe.cluster.places import Place
from sparsepipe.errors import HardwareError


def gpu_indices(places: Sequence[Place], gpus: Sequence[str], *, host: Host) -> list[int]:
    """CUDA's number of each device; the k-th of a kind is the k-th GPU of that name.

    A GPU is of the kind whose name is its own, else of the longest name that it contains as whole
    words, as ``NVIDIA GeForce RTX 2080 Ti`` does ``RTX 2080 Ti``.

    Args:
        places: devices of ``host``.
        gpus: names of this machine's GPUs, in CUDA's order.
        host: whose kinds are told apart.

    Raises:
        HardwareError: a device is not here.
    """
    kinds = [device.name for device in host.devices]
    kind_of = [_kind(gpu, kinds) for gpu in gpus]
    found = []
    for place in places:
        alike = [index for index, kind in enumerate(kind_of) if kind == place.name]
        if place.number >= len(alike):
            listed = ", ".join(f"{index}: {gpu}" for index, gpu in enumerate(gpus))
            raise HardwareError(
                f"the inventory has {place.text}, and this machine has {len(alike)} GPUs of that "
                f"name; its GPUs are {listed or 'none that torch finds'}",
                remedy="choose the hardware at hand (hardware=local), or call the devices of the "
                "inventory as these are called",
            )
        found.append(alike[place.number])
    return found


def any_alike_serve(places: Sequence[Place]) -> bool:
    """Whether other GPUs of their kinds would serve these devices as well, as many of each.

    Of those that a process sees, :func:`gpu_indices` takes the k-th of a kind: one that sees no
    more than it needs has the first ones only.
    """
    numbers: dict[str, set[int]] = {}
    for place in places:
        numbers.setdefault(place.name, set()).add(place.number)
    return all(found == set(range(len(found))) for found in numbers.values())


def _kind(gpu: str, kinds: Sequence[str]) -> str | None:
    if gpu in kinds:
        return gpu
    within = [kind for kind in kinds if re.search(rf"(?<!\w){re.escape(kind)}(?!\w)", gpu)]
    return max(within, key=len, default=None)
