"""What the house's strategies have in common: ranks that fit the Trainer, and exact means."""

from __future__ import annotations

import atexit
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import pytorch_lightning as pl
from lightning_fabric.utilities.distributed import _distributed_is_initialized
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import override

from sparsepipe.runtime import group
from sparsepipe.runtime.meeting import meeting
from sparsepipe.runtime.throttle import Throttle
from sparsepipe.strategies.environment import check_ranks
from sparsepipe.strategies.orphans import end_orphans, remember
from sparsepipe.utils.memory import keep_freed_memory

_Value = TypeVar("_Value")
_PLACE = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Where a process finds its place among the ranks."""


class RankedStrategy(DDPStrategy):
    """A strategy whose Trainer has as many ranks as it asks for.

    A Trainer with one device leaves nothing behind: the next one in its process may have
    more of them.

    Args:
        slowdown: how many times slower than it is this rank's device is made.
        **options: of Lightning's strategy.

    Attributes:
        throttle: what makes it slower.
    """

    def __init__(self, *, slowdown: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.throttle = Throttle(slowdown)
        self._place_before: dict[str, str | None] | None = None

    @property
    def _asks_for_one(self) -> bool:
        return self.num_nodes * self.num_processes == 1

    @override
    def _configure_launcher(self) -> None:
        if not self._asks_for_one:  # it would set the variables of a world of one
            super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        remember(self.launcher)
        assert self.cluster_environment is not None
        check_ranks(self.cluster_environment, nodes=self.num_nodes, devices=self.num_processes)
        if self._asks_for_one and not _distributed_is_initialized():
            self._place_before = {name: os.environ.get(name) for name in _PLACE}
        super().setup_environment()
        if not self._asks_for_one and self.root_device.type == "cpu":
            keep_freed_memory()
        # A group's threads that outlive the interpreter abort the process now and then.
        atexit.unregister(group.leave)
        atexit.register(group.leave)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        atexit.unregister(group.leave)  # it could wait for ranks that are gone
        end_orphans()

    @override
    def teardown(self) -> None:
        super().teardown()
        before, self._place_before = self._place_before, None
        if before is None:
            return
        group.leave()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        # Lightning divides summed values by the mean of the ranks' integer counts, which
        # loses the fraction where ranks saw unequal numbers of shapes.
        mean = reduce_op in (None, "mean", "avg")
        counts = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        with _together("reducing what was logged"):
            return super().reduce(tensor.double() if mean and counts else tensor, group, reduce_op)

    @override
    def barrier(self, name: str | None = None) -> None:
        with _together(f"the barrier {name}" if name else "a barrier"):
            super().barrier(name)

    @override
    def broadcast(self, obj: _Value, src: int = 0) -> _Value:
        with _together(f"hearing what rank {src} says"):
            return super().broadcast(obj, src)


def _together(what: str) -> AbstractContextManager[None]:
    """Around Lightning's own collectives: an error says which rank did not come."""
    return meeting(what) if _distributed_is_initialized() else nullcontext()


def replace_signal_broadcast(trainer: pl.Trainer, instead: Any) -> None:
    """Lightning tells all ranks of signals by a broadcast at each step: others' do it better.

    Args:
        trainer: its training loop changes.
        instead: is called before each step.
    """
    # Private, hence guarded.
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = instead  # type: ignore[method-assign]
