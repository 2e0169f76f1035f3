"""Strategies with the whole model on each device: data parallelism, and a slowed single CPU."""

from __future__ import annotations

import inspect
from functools import partialmethod
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.strategies import SingleDeviceStrategy, StrategyRegistry
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.batch_norm import norms_of
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.slowdown import Slowdown
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.distributed import RankedStrategy, RankEnvironment, SlowedSteps


class SlowedDeviceStrategy(SlowedSteps, SingleDeviceStrategy):
    """Lightning's strategy for one CPU, on which pauses make steps ``slowdown`` times as long."""

    def __init__(self, *, slowdown: float) -> None:
        super().__init__(device="cpu")
        self.slowdown = Slowdown(slowdown)


# torch 2.13 renames the option that makes each forward broadcast buffers.
_BUFFERS_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class DataParallelStrategy(RankedStrategy):
    """Lightning's DDP strategy, with these differences.

    - Buffers are not broadcast at each step. Floating-point buffers, such as the running statistics
      of batch norms, are averaged over the ranks before evaluations and checkpoints.
    - Evaluation steps call the module itself, not its DDP wrapper: ranks may have different
      numbers of batches, so nothing in these steps may wait for another rank.
    - Lightning's broadcast of signals at each step is off: the code that starts the Trainer must
      make all ranks stop after the same step.

    Args:
        timeout_s: longest wait for another rank, in seconds.
        process_group_backend: ``gloo`` or ``nccl``; by default the one that suits the device.
        gradient_as_bucket_view: whether gradients are views of the buffers that DDP averages.
        bucket_cap_mb: largest size of such a buffer, in MiB.
        find_unused_parameters: whether every step looks for parameters without a gradient, which
            takes time; needed if a step may leave parameters unused.
        static_graph: whether DDP may rely on all steps using the same parameters in one order.
        slowdown: factor, at least 1, by which pauses slow this rank's device down.
        cluster_environment: gives this process its rank; by default :class:`RankEnvironment`.
    """

    strategy_name = "sparsepipe_dp"

    def __init__(
        self,
        *,
        timeout_s: float = 300.0,
        process_group_backend: str | None = None,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        slowdown: float = 1.0,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        buffers: dict[str, Any] = {_BUFFERS_OPTION: False}
        super().__init__(
            slowdown=slowdown,
            cluster_environment=cluster_environment or RankEnvironment(),
            process_group_backend=process_group_backend,
            timeout_s=timeout_s,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            **buffers,
        )
        self._averages_buffers, self._buffers_differ = True, False

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self.join()  # Lightning keeps a group that exists
        super().setup_distributed()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if internals.synchronises_batch_norm(self) and self.lightning_module is not None:
            for name, norm in norms_of(self.lightning_module).items():
                if type(norm).forward is not _BatchNorm.forward:  # Lightning would replace it
                    raise ConfigError(
                        f"trainer.sync_batchnorm=true would replace {name}, but "
                        f"{type(norm).__name__} overrides the forward of PyTorch's batch norms",
                        remedy="set trainer.sync_batchnorm=false: each rank then normalises with "
                        "the statistics of its own batch",
                    )
        super().setup(trainer)
        internals.disable_signal_broadcast(trainer)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._buffers_differ = True
        return super().training_step(*args, **kwargs)

    def _run_unwrapped(self, step: str, context: str, /, *args: Any, **kwargs: Any) -> Any:
        with self.slowdown.slowed(), getattr(self.precision_plugin, context)():
            return getattr(self.lightning_module, step)(*args, **kwargs)

    validation_step: Any = partialmethod(_run_unwrapped, "validation_step", "val_step_context")
    test_step: Any = partialmethod(_run_unwrapped, "test_step", "test_step_context")
    predict_step: Any = partialmethod(_run_unwrapped, "predict_step", "predict_step_context")

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Lightning calls this on every rank when it saves a checkpoint.
        self.synchronize_buffers()
        return super().lightning_module_state_dict()

    def synchronize_buffers(self) -> None:
        """Averages floating-point buffers over the ranks if a step has changed them; collective."""
        if not (self._averages_buffers and self._buffers_differ and self.lightning_module):
            return
        buffers = self.lightning_module.buffers()  # without the states of metrics
        with torch.no_grad():
            process_group.average_([each for each in buffers if each.is_floating_point()])
        self._buffers_differ = False

    on_validation_start = on_test_start = on_predict_start = synchronize_buffers


StrategyRegistry.register(
    DataParallelStrategy.strategy_name,
    DataParallelStrategy,
    description="DDP with unpadded evaluation and BatchNorm statistics averaged when needed",
)
