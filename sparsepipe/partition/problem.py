"""What is to be partitioned, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsepipe.cluster import Inventory
from sparsepipe.errors import ProfileError
from sparsepipe.partition.cost import CostModel
from sparsepipe.partition.fleet import Counts, Fleet, kinds_of
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.partition.recompute.layers import StageSpans
from sparsepipe.partition.spans import Spans, spans_of
from sparsepipe.partition.synchronous import SynchronousStages
from sparsepipe.partition.ties import Choice
from sparsepipe.profiling import Profile, check_agreement


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Problem:
    """A model, devices, and what counts.

    Args:
        fleet: the devices; a plan uses them all.
        spans: what the layers cost on each kind of device.
        model: what stages and transfers cost.
        memory: what stages keep; None: memory is no limit.
        profiles: of each kind, where the spans are made of some.
        synchronous: the microbatches of a synchronous pipeline, and what its stages run once more;
            the spans are of a chain of profiles then. None: memory counts as in an asynchronous
            pipeline.
    """

    fleet: Fleet
    spans: Spans
    model: CostModel
    memory: MemoryModel | None = None
    profiles: tuple[Profile, ...] = ()
    synchronous: SynchronousStages | None = None

    @property
    def numbers_of_readers(self) -> Sequence[int | None]:
        """Numbers of first-stage devices to search one by one, since memory depends on them.

        The largest comes first; with the least all microbatches have samples. None: any number will
        do, as where no device has a limit.
        """
        if self.synchronous is None:
            return [None]
        cut = self.synchronous.microbatches
        is_free = self.memory is None or all(k.memory_bytes is None for k in self.fleet.kinds)
        if is_free and cut.least_readers == 1:
            return [None]
        return range(min(cut.count, self.fleet.num_devices), cut.least_readers - 1, -1)

    @property
    def stages_told(self) -> int:
        """How many of the first stages have to be told apart."""
        return 0 if self.synchronous is None else self.synchronous.stages_told

    @classmethod
    def of(
        cls,
        inventory: Inventory,
        profiles: Mapping[str, Profile],
        *,
        model: CostModel,
        memory: MemoryModel | None = None,
        bandwidth_bytes_per_s: float | None = None,
        synchronous: SynchronousStages | None = None,
    ) -> Problem:
        """From an inventory and a profile for each device in it.

        Args:
            inventory: the devices.
            profiles: of one model, by the devices' names.
            model: what stages and transfers cost.
            memory: what stages keep; None: memory is no limit.
            bandwidth_bytes_per_s: one bandwidth for all links, whatever the inventory says.
            synchronous: how the stages of a synchronous pipeline work. With plans of a branching
                graph, by which nobody trains, it does not count.

        Raises:
            ProfileError: a device has no profile, or they are of different models.
            HardwareError: there is no device, or a link that is needed has no bandwidth, or none
                above 0.
        """
        names = list(dict.fromkeys(kind.name for kind in kinds_of(inventory)))
        if missing := [name for name in names if name not in profiles]:
            there = ", ".join(profiles) or "none"
            raise ProfileError(
                f"there is no profile of {', '.join(missing)} (there is: {there})",
                remedy="measure it with task=profile on that device, and name the file under "
                "'profile' of the device in the hardware inventory",
            )
        check_agreement({name: profiles[name] for name in names})
        fleet = Fleet.of(inventory, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        found = tuple(profiles[kind.name] for kind in fleet.kinds)
        spans = spans_of(found)
        return cls(
            fleet=fleet,
            spans=spans,
            model=model,
            memory=memory,
            profiles=found,
            synchronous=synchronous if spans.nested_II is None else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best plan of a search.

    Attributes:
        stages: first one first.
        strategy: name of the search.
        order: of the kinds, where devices are taken from a sorted list; else None.
        assumed: fleet and spans that the search saw, where it takes unlike devices for alike.
        spans: layers of each stage that it has chosen to be recomputed; None: it has chosen none.
    """

    stages: tuple[Choice, ...]
    strategy: str
    order: tuple[str, ...] | None = None
    assumed: Problem | None = None
    spans: StageSpans | None = None

    @property
    def config(self) -> str:
        """Devices of each stage, such as ``"2-1"``."""
        return "-".join(str(sum(stage.counts)) for stage in self.stages)


def taken_in_order(stages: Sequence[Choice], fleet: Fleet, order: Sequence[int]) -> list[Choice]:
    """The same stages on devices taken from a list, one after another.

    Args:
        stages: of which only the numbers of their devices count.
        fleet: the devices.
        order: of the kinds.
    """
    devices = [kind for kind in order for _ in range(fleet.kinds[kind].count)]
    taken, found = 0, []
    for stage in stages:
        number = sum(stage.counts)
        mine = devices[taken : taken + number]
        counts: Counts = tuple(mine.count(kind) for kind in range(len(fleet.kinds)))
        found.append(Choice(first=stage.first, end=stage.end, counts=counts))
        taken += number
    return found
