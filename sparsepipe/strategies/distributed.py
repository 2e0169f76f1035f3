"""Base classes of strategies: for slowed devices, and for ranks that form a process group."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partialmethod
from typing import Any, TypeVar

import pytorch_lightning as pl
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.strategies.strategy import Strategy
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.meeting_point import INTERFACE_VARIABLES, LOOPBACK
from sparsepipe.runtime.failures.missing_ranks import collective
from sparsepipe.runtime.launch import LAUNCHER_VARIABLE, environment_variables
from sparsepipe.runtime.slowdown import Slowdown
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.utils.process import end_with_parent, keep_freed_memory, outlive_parent


class RankEnvironment(LightningEnvironment):
    """Cluster environment of ranks started by Lightning or an elastic agent (such as torchrun's).

    Lightning's own environment for elastic agents requires the same number of devices on every
    host; this one reads the environment variables ``RANK`` and ``WORLD_SIZE`` instead.
    """

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return "LOCAL_RANK" in os.environ

    @override
    def global_rank(self) -> int:
        return int(os.environ.get("RANK", super().global_rank()))

    @override
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", super().world_size()))

    @override
    def teardown(self) -> None:
        """Keeps the rank's environment variables, which a second fit in the same process needs."""


def check_ranks(environment: ClusterEnvironment, *, nodes: int, devices: int) -> None:
    """Checks that ``nodes * devices`` ranks run; nodes with different numbers of ranks pass too."""
    running = environment.world_size()
    unequal = (
        nodes > 1
        and os.environ.get("LOCAL_WORLD_SIZE") == str(devices)
        and os.environ.get("GROUP_WORLD_SIZE", str(nodes)) == str(nodes)
    )
    if running != nodes * devices and not unequal:
        raise ConfigError(
            f"the Trainer has devices={devices} and num_nodes={nodes}, but the number of running "
            f"ranks is {running}",
            remedy="start devices * num_nodes ranks; if a Trainer of the script has started them, "
            "give all its Trainers the same number of devices",
        )


_Value = TypeVar("_Value")
_RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Environment variables with a process's rank and the address at which ranks meet."""


class SlowedSteps(Strategy):
    """A strategy whose steps end with a pause, to last as long as on a slower device.

    An optimizer's step calls the training step and the backward pass in a closure; each of the
    three adds a pause for its own computing time only. Results do not change.
    """

    slowdown: Slowdown

    def _run_slowed(self, step: str, /, *args: Any, **kwargs: Any) -> Any:
        with self.slowdown.slowed():
            return getattr(super(), step)(*args, **kwargs)

    training_step: Any = partialmethod(_run_slowed, "training_step")
    backward: Any = partialmethod(_run_slowed, "backward")
    optimizer_step: Any = partialmethod(_run_slowed, "optimizer_step")
    validation_step: Any = partialmethod(_run_slowed, "validation_step")
    test_step: Any = partialmethod(_run_slowed, "test_step")
    predict_step: Any = partialmethod(_run_slowed, "predict_step")


class RankedStrategy(SlowedSteps, DDPStrategy):
    """Base class of all strategies that can have several ranks.

    A Trainer with one device leaves neither a process group nor environment variables behind, so
    the next Trainer in the process may have several devices.
    """

    def __init__(self, *, timeout_s: float, slowdown: float = 1.0, **options: Any) -> None:
        super().__init__(timeout=timedelta(seconds=timeout_s), **options)
        self._timeout_s = timeout_s
        self._on_teardown = ExitStack()
        self._follows_first_rank = False
        self._groups: list[Any] = []  # besides that of all ranks
        self.slowdown = Slowdown(slowdown)

    @property
    def _is_single(self) -> bool:
        return self.num_nodes * self.num_processes == 1

    @override
    def _configure_launcher(self) -> None:
        if self._is_single:  # the launcher would set the variables of a single rank
            return
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        parent, by_agent = os.getppid(), "TORCHELASTIC_RUN_ID" in os.environ
        by_first_rank = os.environ.get(LAUNCHER_VARIABLE) == str(parent)
        if not self._is_single and (by_agent or by_first_rank):
            # An agent outlives its ranks. The script's first rank may end before the others, which
            # outlive it once their training is over.
            end_with_parent(parent)
            self._follows_first_rank = not by_agent
        assert self.cluster_environment is not None
        check_ranks(self.cluster_environment, nodes=self.num_nodes, devices=self.num_processes)
        if self._is_single and not internals.process_group_exists():
            restored = (*_RANK_VARIABLES, *INTERFACE_VARIABLES)
            self._on_teardown.enter_context(environment_variables({}, restored=restored))
            self._on_teardown.callback(process_group.leave)
        super().setup_environment()
        if not self._is_single and self.root_device.type == "cpu":
            keep_freed_memory()
        # A group's threads may abort the process if they outlive the interpreter.
        atexit.unregister(process_group.leave)
        atexit.register(process_group.leave)

    def join(self) -> None:
        """Joins the process group of all ranks; on one host, over its loopback interface."""
        environment = self.cluster_environment
        assert environment is not None
        # Unless a launcher gives an address, ranks of one host meet on its loopback interface.
        own = LOOPBACK if self.num_nodes == 1 else environment.main_address
        os.environ.setdefault("MASTER_ADDR", own)
        os.environ.setdefault("MASTER_PORT", str(environment.main_port))
        os.environ.setdefault("RANK", str(self.global_rank))
        os.environ.setdefault("WORLD_SIZE", str(self.world_size))
        backend = internals.resolve_process_group_backend(self)
        process_group.join(backend, timeout_s=self._timeout_s, device=self.root_device)
        process_group.ranks_per_sample = 1

    def keep_samplers(self, trainer: pl.Trainer) -> None:
        """Makes loaders keep their own samplers until this run ends; for a single reader."""
        connector, name = internals.accelerator_connector(trainer), "use_distributed_sampler"
        self._on_teardown.callback(setattr, connector, name, connector.use_distributed_sampler)
        connector.use_distributed_sampler = False

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        # Leaving or destroying a group could wait for ranks that are gone.
        atexit.unregister(process_group.leave)
        self._groups.clear()
        if self._follows_first_rank:
            outlive_parent()  # in order to report the error

    @override
    def teardown(self) -> None:
        try:
            super().teardown()
        finally:  # what raised an exception in the fit may raise another
            if self._follows_first_rank:
                outlive_parent()
            self._on_teardown.close()

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        # Lightning divides summed values by the mean of the ranks' integer counts, which
        # loses the fraction if ranks saw different numbers of samples.
        mean = reduce_op in (None, "mean", "avg")
        counts = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        with collective("reducing logged values"):
            return super().reduce(tensor.double() if mean and counts else tensor, group, reduce_op)

    @override
    def barrier(self, name: str | None = None) -> None:
        with collective(f"the barrier {name}" if name else "a barrier"):
            super().barrier(name)

    @override
    def broadcast(self, obj: _Value, src: int = 0) -> _Value:
        # Lightning would send a plain pickle, which could run a stranger's code.
        if not internals.process_group_exists():
            return obj
        return process_group.broadcast_object(obj, source=src, what=f"the broadcast of rank {src}")


def exit_if_blocked(error: BaseException, *, blocked: Callable[[], bool]) -> None:
    """Makes the process end with ``os._exit`` if ``blocked()`` is true when it exits.

    ``blocked`` tells whether network threads hang: they cannot be ended, and would make Python
    abort when it shuts down. Functions of ``atexit`` run first. The exit status is that of
    ``error``, even if the script catches it: the status of a later ``sys.exit`` is not known.
    """
    status = 1
    if isinstance(error, KeyboardInterrupt):
        status = 128 + signal.SIGINT
    elif isinstance(error, SIGTERMException):
        status = 128 + signal.SIGTERM
    elif isinstance(error, SystemExit) and isinstance(error.code, int | None):
        status = error.code or 0
    known = atexit._ncallbacks() + 1
    atexit.register(_exit, status, blocked, known)


def _exit(status: int, blocked: Callable[[], bool], known: int) -> None:
    if not blocked():
        return
    if atexit._ncallbacks() == known:  # no function was registered later, so none has run yet
        atexit.unregister(_exit)
        atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)
