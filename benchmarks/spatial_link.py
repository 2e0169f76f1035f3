"""How much of the communication between shards is exposed over a slow link."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from pipeline_ranks import on_ranks
from spatial_steps import TIMEOUT_S, shard_step
from spatial_workloads import Sample
from torch import Tensor

from sparsepipe.cluster import Device, Host, Inventory, Link
from sparsepipe.emulate import machine
from sparsepipe.emulate.hosts import emulated_hosts
from sparsepipe.emulate.ranks import announce_hosts, enter_host
from sparsepipe.runtime.collectives import halo, process_group
from sparsepipe.spatial import grid, normalization

HOSTS = ("first", "second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """What a step waits for, of the rank of which most is exposed.

    Attributes:
        kind: of the link.
        plain_s: for halos, where they are waited for at once.
        overlapped_s: for halos, where the interior is computed meanwhile.
        reductions_s: for statistics of norms and results that all ranks have.
        sent_bytes: of halos.
    """

    kind: str
    plain_s: float
    overlapped_s: float
    reductions_s: float
    sent_bytes: float

    @property
    def exposed_share(self) -> float:
        """Of all communication."""
        return (self.overlapped_s + self.reductions_s) / (self.plain_s + self.reductions_s)


def exposed(sample: Sample, bytes_per_s: float, *, steps: int, paced: bool) -> Exposed:
    """Measures steps on two ranks.

    Args:
        sample: network and data.
        bytes_per_s: of the link.
        steps: timed ones.
        paced: on loopback, even where hosts can be emulated.
    """
    if paced or not machine.may_administer():
        found = on_ranks(_waits, 2, sample, steps, {}, bytes_per_s)
        return _longest(found, "loopback, where messages are held back as by a link")
    hosts = tuple(Host(name=name, devices=(Device(name="CPU", count=1),)) for name in HOSTS)
    inventory = Inventory(hosts=hosts, link=Link(bytes_per_s=bytes_per_s))
    with emulated_hosts(inventory) as layout, announce_hosts(layout, HOSTS):
        variables = {name: value for name, value in os.environ.items() if "EMULATED" in name}
        found = on_ranks(_waits, 2, sample, steps, variables, None)
    return _longest(found, "a link between two emulated hosts")


def _longest(found: list[dict[str, float]], kind: str) -> Exposed:
    ranks = [Exposed(kind=kind, **rank) for rank in found]
    return max(ranks, key=lambda rank: rank.exposed_share)


def _waits(
    rank: int,
    sample: Sample,
    steps: int,
    variables: Mapping[str, str],
    bytes_per_s: float | None,
) -> dict[str, float]:
    """Seconds of a step that this rank waits, with and without overlap, in turn."""
    os.environ.update(variables)
    enter_host()
    process_group.join("gloo", timeout_s=TIMEOUT_S)
    step = shard_step(sample)
    clock = _Clock(bytes_per_s)
    with clock.measuring():
        step()  # warms up
        clock.reset()
        for _ in range(steps):
            for clock.is_plain in (True, False):
                dist.barrier()
                step()
    process_group.leave()
    return {
        "plain_s": clock.halos_s[True] / steps,
        "overlapped_s": clock.halos_s[False] / steps,
        "reductions_s": clock.reductions_s / steps / 2,
        "sent_bytes": clock.sent_bytes / steps / 2,
    }


class _Clock:
    """Times the waits of shards for each other.

    Args:
        bytes_per_s: of a link whose time messages are held back; None: they come as they come.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self.is_plain = False
        self.reset()

    def reset(self) -> None:
        """Begins anew."""
        self.halos_s = {True: 0.0, False: 0.0}
        self.reductions_s, self.sent_bytes = 0.0, 0
        self._free_s = 0.0
        self._due: dict[int, float] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within it, messages and reductions between shards are timed."""
        start, wait = halo.start_messages, halo.Pending.wait

        def starting(sends: Any, receives: Any, **more: Any) -> halo.Pending:
            pending = start(sends, receives, **more)
            self.sent_bytes += sum(each.numel() * each.element_size() for _, each in sends)
            self._note(pending)
            if self.is_plain:
                pending.wait()
            return pending

        def waiting(pending: halo.Pending) -> list[Tensor]:
            began_s = time.perf_counter()
            received = wait(pending)
            time.sleep(max(self._due.pop(id(pending), 0.0) - time.perf_counter(), 0.0))
            waited_s = time.perf_counter() - began_s
            if not pending.what.startswith("adding up"):
                self.halos_s[self.is_plain] += waited_s
            else:
                self.reductions_s += waited_s
            return received

        with (
            patch.object(grid, "start_messages", starting),
            patch.object(halo.Pending, "wait", waiting),
            self._reductions(halo, "_reduce"),
            self._reductions(normalization, "gather_rows"),
        ):
            yield

    def _reductions(self, module: ModuleType, name: str) -> Any:
        """Times a function of a module as waiting for results that all ranks have."""
        reduce = getattr(module, name)

        def reducing(*arguments: Any, **more: Any) -> Tensor:
            began_s = time.perf_counter()
            result: Tensor = reduce(*arguments, **more)
            self.reductions_s += time.perf_counter() - began_s
            return result

        return patch.object(module, name, reducing)

    def _note(self, pending: halo.Pending) -> None:
        """When what comes would have passed the link, one message behind the other."""
        if self._bytes_per_s is not None:
            size = sum(each.numel() * each.element_size() for each in pending.received)
            now_s = time.perf_counter()
            self._free_s = max(self._free_s, now_s) + size / self._bytes_per_s
            self._due[id(pending)] = self._free_s
