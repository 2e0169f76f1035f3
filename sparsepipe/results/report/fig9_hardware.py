"""Which bars of the paper's Fig. 9 were taken on its GPUs, as its Table III lists them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import PurePath
from typing import Any

from sparsepipe.results.fig9_settings import devices_of
from sparsepipe.results.paper import printed
from sparsepipe.results.report.cell import Row
from sparsepipe.results.report.commands import Usual

_HOSTS = "hardware.value.hosts"


def is_on_its_gpus(row: Row, usual: Usual | None) -> bool:
    """Whether a run's hardware is the inventory of the paper for as many GPUs.

    Args:
        row: a run; what it does not tell of its hosts is not held against it.
        usual: tells that inventory; None: kinds of GPUs and their numbers alone are compared.
    """
    gpus = devices_of(row)
    if _kinds(str(row.get("hardware_devices") or "").split(", ")) != _papers().get(gpus):
        return False
    own = row.get(_HOSTS)
    if usual is None or not isinstance(own, list):
        return True
    theirs = usual(("experiment=fig9", f"hardware=paper_{gpus}gpu"), (_HOSTS,)).get(_HOSTS)
    return theirs is None or list(map(_host, own)) == list(map(_host, theirs))


@cache
def _papers() -> Mapping[int, Counter[str]]:
    """Kinds of GPUs and their numbers, by the number of all."""
    return {
        int(row["num_gpus"]): _kinds(row["gpu_config"].split(" + ")) for row in printed("table3")
    }


def _kinds(parts: Iterable[str]) -> Counter[str]:
    """Of parts such as ``4 x RTX 2080 Ti`` or, as the paper prints them, ``4 RTX``."""
    found: Counter[str] = Counter()
    for part in parts:
        told = re.fullmatch(r"(\d+) (?:x )?(.+)", part)
        if told is not None:
            name = told[2].casefold().replace(" ", "")
            found["rtx" if name == "rtx2080ti" else name] += int(told[1])
    return found


def _host(host: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a host a simulation or an emulation takes account of."""
    devices = [
        (
            device.get("name"),
            device.get("count"),
            device.get("memory_bytes"),
            {name: PurePath(file).name for name, file in (device.get("profile") or {}).items()},
        )
        for device in host.get("devices", ())
    ]
    return devices, (host.get("link") or {}).get("bytes_per_s")
