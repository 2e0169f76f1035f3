"""The asynchronous pipeline as a Lightning strategy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.strategies import StrategyRegistry
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from sparsepipe.runtime.asynchronous_worker import AsynchronousWorker
from sparsepipe.runtime.weights import Mode, Weights
from sparsepipe.strategies.pipeline.logging import Logs
from sparsepipe.strategies.pipeline.pipeline import MakeWorker, Pipeline
from sparsepipe.strategies.pipeline.placeholders import StageModule
from sparsepipe.strategies.pipeline.stage_plan import Balance, Grids
from sparsepipe.strategies.pipeline.staged import StagedStrategy


class AsynchronousPipeline(Pipeline):
    """A pipeline whose worker reports each minibatch as soon as it is back at this rank."""

    def done(self, minibatch: int, *, loss: Tensor, logs: Logs) -> None:
        self.loss = loss
        self.note([((minibatch, 0), (minibatch, 1, logs))], logs)


class PipelineStrategy(StagedStrategy):
    """Splits the layers of one ``nn.Sequential`` of any LightningModule over ranks.

    The module's steps are written as for one device and call the Sequential once. Stages
    work on different minibatches at the same time; each stage updates after every backward pass
    (PipeDream's 1F1B with weight stashing), so gradients of early stages are some updates old. In
    one Lightning step, a minibatch enters each replica of stage 0. The pipeline is empty before
    validation, before checkpoints and at the end of each epoch. With one device a run is that of a
    plain Trainer, bit for bit; ``docs/pipeline.md`` lists what differs with several.

    Args:
        config: number of replicas of each stage, such as "2-1"; by default one device per stage.
        cuts: indices of the first layers of all stages but the first; by default from ``balance``.
        grids: for each stage, the shape of the grid of ranks that share each sample (spatial
            parallelism), such as [None, [1, 2]]; None for a stage of one device, or of replicas.
            A grid counts as one replica in ``config``.
        balance: what stages share evenly if there are no ``cuts``: ``flops`` of a batch's forward
            pass, ``parameters`` or ``layers``.
        layers: dotted name of the Sequential; by default the one called ``layers``, or the only
            one.
        mode: which weights a minibatch uses (:class:`sparsepipe.runtime.weights.Mode`).
        predict_backward: whether SpecTrain predicts weights for backward passes too. Both passes
            then use a prediction for the time at which the minibatch is back at stage 0, not for
            its own update (see :func:`~sparsepipe.schedule.versions.until_return`).
        send_input: whether the last stage also gets the input of the layers, for steps that use
            it for more than calling them.
        keyed_randomness: whether random draws in a layer depend only on (seed, minibatch, layer),
            so that a run does not depend on the plan; needs ``seed_everything``.
        timeout_s: longest wait for another rank, in seconds.
        process_group_backend: ``gloo`` (the default, also for CUDA) or ``nccl``.
        direct: whether tensors go from device to device over NCCL; every rank needs a CUDA device.
        slowdown: factor, at least 1, by which pauses slow this rank's device down.
        cluster_environment: gives this process its rank; by default ``RankEnvironment``.
    """

    strategy_name = "sparsepipe_async"
    pipeline_class = AsynchronousPipeline

    def __init__(
        self,
        *,
        config: str | None = None,
        cuts: Sequence[int] | None = None,
        grids: Grids | None = None,
        balance: Balance = "flops",
        layers: str | None = None,
        mode: Mode | str = Mode.STASH,
        predict_backward: bool = False,
        send_input: bool = False,
        keyed_randomness: bool = False,
        timeout_s: float = 300.0,
        process_group_backend: str | None = None,
        direct: bool = False,
        slowdown: float = 1.0,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        super().__init__(
            config=config,
            cuts=cuts,
            grids=grids,
            balance=balance,
            layers=layers,
            send_input=send_input,
            keyed_randomness=keyed_randomness,
            timeout_s=timeout_s,
            process_group_backend=process_group_backend,
            direct=direct,
            slowdown=slowdown,
            cluster_environment=cluster_environment,
        )
        self._mode, self._predict_backward = Mode(mode), predict_backward

    @override
    def make_worker(
        self, part: StageModule, *, rank: int, optimizer: Optimizer | None
    ) -> MakeWorker:
        if optimizer is None:
            return partial(AsynchronousWorker, weights=None)
        weights = Weights(
            dict(part.parameters()),
            self._mode,
            optimizer,
            replicas=self.plan.replicas(self.plan.stage_of(rank)),
            predict_backward=self._predict_backward,
            watched=self.runs_foreign_code,  # which may write parameters between two steps
        )
        return partial(AsynchronousWorker, weights=weights)


StrategyRegistry.register(
    PipelineStrategy.strategy_name,
    PipelineStrategy,
    description="asynchronous pipeline over the layers of an nn.Sequential, weights stashed",
)
