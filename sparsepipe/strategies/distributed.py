"""The base of strategies with several ranks: how a rank finds its place, joins and leaves."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.failures.missing_ranks import collective
from sparsepipe.runtime.slowdown import Slowdown
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.orphans import end_orphans, remember
from sparsepipe.utils.memory import keep_freed_memory


class RankEnvironment(LightningEnvironment):
    """A cluster environment for ranks that were started from outside.

    Lightning's own environment for the elastic agent insists on the same number of devices
    on every host; this one takes rank and world size as the agent gives them.
    """

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return "LOCAL_RANK" in os.environ

    @override
    def global_rank(self) -> int:
        return int(os.environ.get("RANK", super().global_rank()))

    @override
    def set_global_rank(self, rank: int) -> None:
        super().set_global_rank(int(os.environ.get("RANK", rank)))

    @override
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", super().world_size()))

    @override
    def set_world_size(self, size: int) -> None:
        super().set_world_size(int(os.environ.get("WORLD_SIZE", size)))

    @override
    def teardown(self) -> None:
        """Leaves the environment alone: the agent set it, and a second fit needs it."""


def check_ranks(environment: ClusterEnvironment, *, nodes: int, devices: int) -> None:
    """Refuse to train on other ranks than the Trainer asks for.

    Args:
        environment: knows how many there are.
        nodes: of the Trainer.
        devices: of the Trainer on this node; other nodes may have other numbers.

    Raises:
        ConfigError: there are more or fewer.
    """
    there_are = environment.world_size()
    unequal = (
        nodes > 1
        and os.environ.get("LOCAL_WORLD_SIZE") == str(devices)
        and os.environ.get("GROUP_WORLD_SIZE", str(nodes)) == str(nodes)
    )
    if there_are != nodes * devices and not unequal:
        raise ConfigError(
            f"the Trainer has devices={devices} and num_nodes={nodes}, but {there_are} ranks run",
            remedy="start as many ranks as the Trainer has devices; all Trainers of a script that "
            "starts ranks need the same number",
        )


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
        slowdown: what makes it slower.
    """

    def __init__(self, *, slowdown: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.slowdown = Slowdown(slowdown)
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
        if self._asks_for_one and not internals.process_group_exists():
            self._place_before = {name: os.environ.get(name) for name in _PLACE}
        super().setup_environment()
        if not self._asks_for_one and self.root_device.type == "cpu":
            keep_freed_memory()
        # A group's threads that outlive the interpreter abort the process now and then.
        atexit.unregister(process_group.leave)
        atexit.register(process_group.leave)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        atexit.unregister(process_group.leave)  # it could wait for ranks that are gone
        end_orphans()

    @override
    def teardown(self) -> None:
        super().teardown()
        before, self._place_before = self._place_before, None
        if before is None:
            return
        process_group.leave()
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
    return collective(what) if internals.process_group_exists() else nullcontext()


def leave_at_exit(error: BaseException, *, blocked: Callable[[], bool]) -> None:
    """At the end of this process, ends it at once if threads are still blocked then.

    Such threads cannot be ended, and Python's own clean-up aborts in them. What others have
    registered for the end runs before. The status is the error's own, whether or not the
    script caught it: what a later ``sys.exit`` wished is not known there.

    Args:
        error: what ended the run.
        blocked: whether threads wait in vain.
    """
    known = atexit._ncallbacks() + 1
    atexit.register(_leave, status_of(error), blocked, known)


def status_of(error: BaseException) -> int:
    """With which status a process ends that an exception ends."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SIGTERMException):
        return 128 + signal.SIGTERM
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or 0
    return 1


def _leave(status: int, blocked: Callable[[], bool], known: int) -> None:
    if not blocked():
        return
    if atexit._ncallbacks() == known:  # none came later and has run already
        atexit.unregister(_leave)
        atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)
