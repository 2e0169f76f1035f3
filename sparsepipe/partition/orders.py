"""In which order HETE-MP takes devices: those of a kind stay together (Algorithm 1 sorts)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sparsepipe.errors import ConfigError
from sparsepipe.partition.fleet import Fleet, Kind
from sparsepipe.partition.spans import Spans

ORDERS = ("by_count", "by_speed", "by_tflops")


def kind_order(order: str | Sequence[str], fleet: Fleet, spans: Spans) -> list[int]:
    """Numbers of the kinds, in the order in which stages take their devices.

    Args:
        order: ``by_count``, the model first of which there are most over all hosts, which gives the
            paper's Table III;
            ``by_speed``, those first that run the whole model fastest; ``by_tflops``; or a list
            of the kinds' names. Ties keep the inventory's order.
        fleet: the devices.
        spans: what layers cost on each kind.

    Raises:
        ConfigError: there is no such order, or a list does not name each kind once.
    """
    kinds = list(enumerate(fleet.kinds))
    if not isinstance(order, str):
        return _listed(list(order), fleet.kinds)
    if order == "by_count":
        of_name: Counter[str] = Counter()
        for kind in fleet.kinds:
            of_name[kind.name] += kind.count
        first = {kind.name: k for k, kind in reversed(kinds)}
        return [
            k
            for k, kind in sorted(
                kinds, key=lambda entry: (-of_name[entry[1].name], first[entry[1].name])
            )
        ]
    if order == "by_speed":
        return [k for k, _ in sorted(kinds, key=lambda entry: spans.compute_s_KI[entry[0], -1])]
    if order == "by_tflops":
        unknown = [kind.name for kind in fleet.kinds if kind.tflops is None]
        if unknown:
            raise ConfigError(
                f"nobody says how many TFLOP/s {', '.join(unknown)} has",
                remedy="write tflops into the hardware inventory, or use by_speed",
            )
        return [k for k, kind in sorted(kinds, key=lambda entry: -(entry[1].tflops or 0))]
    raise ConfigError(
        f"there is no order {order!r} of devices",
        remedy=f"use {', '.join(ORDERS)}, or a list of the devices' names",
    )


def _listed(names: list[str], kinds: Sequence[Kind]) -> list[int]:
    left = list(range(len(kinds)))
    found = []
    for name in names:
        matching = [k for k in left if name in (kinds[k].name, f"{kinds[k].host}/{kinds[k].name}")]
        found += matching
        left = [k for k in left if k not in matching]
        if not matching:
            raise _no_order(names, kinds)
    if left:
        raise _no_order(names, kinds)
    return found


def _no_order(names: Sequence[str], kinds: Sequence[Kind]) -> ConfigError:
    there = ", ".join(dict.fromkeys(kind.name for kind in kinds))
    return ConfigError(
        f"the order {list(names)} does not name each kind of device once: there are {there}",
        remedy="list each of them, or HOST/NAME where several hosts have the same device",
    )
