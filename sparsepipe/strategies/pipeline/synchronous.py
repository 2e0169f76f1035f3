"""Synchronous pipelines as a Lightning strategy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.strategies import StrategyRegistry
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.setting import (
    StageSpans,
    check_setting,
    recomputed_spans,
)
from sparsepipe.partition.memory import check_microbatches
from sparsepipe.runtime.base_worker import Microbatch
from sparsepipe.runtime.batch_norm import MinibatchNorms, NormMode, check_norms
from sparsepipe.runtime.synchronous_worker import SynchronousWorker
from sparsepipe.schedule import SYNCHRONOUS, Plan, order_by_name
from sparsepipe.strategies.pipeline.logging import merge_logs
from sparsepipe.strategies.pipeline.pipeline import MakeWorker, Pipeline
from sparsepipe.strategies.pipeline.placeholders import StageModule
from sparsepipe.strategies.pipeline.stage_plan import Balance, Grids
from sparsepipe.strategies.pipeline.staged import StagedStrategy
from sparsepipe.utils.extensions import DottedPath


class SynchronousPipeline(Pipeline):
    """A pipeline whose worker reports all microbatches of a step together.

    Until the drain, a step's loss and logs are those of the microbatches that passed this rank:
    all of them if no stage from here to the last has replicas.
    """

    cut = True

    def done(self, microbatches: Sequence[Microbatch]) -> None:
        if not microbatches:
            return
        self.loss = microbatches[0].loss
        if len(microbatches) > 1:
            # A loss without weight may be 0 / 0.
            counted = [part for part in microbatches if part.weight] or microbatches
            total = sum(part.weight for part in counted)
            weighted = torch.stack([part.weight * part.loss.double() for part in counted])
            mean = weighted.sum() / total if total else counted[0].loss
            self.loss = mean.to(self.loss.dtype)
        kept = [
            ((part.minibatch, part.number), (part.minibatch, part.samples, part.logs))
            for part in microbatches
        ]
        self.note(kept, merge_logs([(part.samples, part.logs) for part in microbatches]))


class SynchronousPipelineStrategy(StagedStrategy):
    """Splits the layers of one ``nn.Sequential`` over ranks, without stale gradients.

    The module's steps are written as for one device and call the Sequential once. A minibatch is
    cut into microbatches, on which stages work at the same time; their gradients add up, and each
    stage updates once at the end. Training is that of one device on the same microbatches;
    with one device and one microbatch it is that of a plain Trainer, bit for bit.

    ``training_step`` runs once for each microbatch. Its loss must be a mean over samples: it is
    weighted by the microbatch's number of samples. What it logs becomes one value per step
    (``docs/synchronous.md``). In one Lightning step each replica of stage 0 reads one batch;
    together, these are the minibatch.

    Arguments that are not listed are those of :class:`PipelineStrategy`.

    Args:
        schedule: ``gpipe`` (all forwards, then all backwards), ``1f1b`` (one forward, one
            backward as soon as possible) or ``eager_1f1b`` (the same with twice the warm-up).
        microbatches: T, the number of microbatches of a minibatch; at least the number of replicas
            of any stage. Each replica of stage 0 cuts its own batch into its share of the T.
        recompute: which layers keep only the input of their span, and run forward again in the
            backward pass: ``none``, ``all`` (each stage is a span), or a mapping of ``stages``
            (indices) and ``layers`` (indices, [first, last]); ``auto`` only on the command line.
        batch_norm: what batch norms do in training. ``microbatch``: normalise by the microbatch,
            and update running statistics with each; ``deferred``: the same, but update these once,
            with the statistics of the minibatch; ``running``: normalise by the running statistics
            from before the minibatch, as constants, and update these as with ``deferred``.
        keyed_randomness: whether random draws in a layer depend only on (seed, number of the
            microbatch in the whole run, layer); needs ``seed_everything``.
    """

    strategy_name = "sparsepipe_gpipe"
    pipeline_class = SynchronousPipeline
    is_synchronous = True

    def __init__(
        self,
        *,
        schedule: Literal["gpipe", "1f1b", "eager_1f1b"] | DottedPath = "gpipe",
        microbatches: int = 4,
        recompute: Literal["none", "all", "auto"] | dict[str, list[Any]] = "none",
        config: str | None = None,
        cuts: Sequence[int] | None = None,
        grids: Grids | None = None,
        balance: Balance = "flops",
        batch_norm: Literal["microbatch", "deferred", "running"] = "microbatch",
        layers: str | None = None,
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
        self._order = order_by_name(schedule)
        check_microbatches(microbatches)
        check_setting(recompute)
        if recompute == "auto":
            raise ConfigError(
                "recompute='auto' chooses layers by a profile and the memory of the devices, which "
                "a strategy that a script makes does not know",
                remedy="run it from the command line, with parallel.strategy.recompute=auto and a "
                "search for the plan; or list the layers, such as {layers: [[0, 5]]}",
            )
        self.schedule, self.microbatches = schedule, microbatches
        self._batch_norm, self._recompute = NormMode(batch_norm), recompute
        self.queue_depth = microbatches  # a minibatch: the schedule limits what is in flight
        cut = microbatches > 1 or self._batch_norm != NormMode.MICROBATCH
        self.is_plain = self.is_plain and recompute == "none" and not cut

    @override
    def spans_of(
        self, plan: Plan, layers: nn.Sequential, *, trained: nn.Module | None = None
    ) -> StageSpans:
        if trained is not None:
            check_norms(trained, self._batch_norm)
        check_microbatches(self.microbatches, plan.replicas_of_stages)
        spans = recomputed_spans(self._recompute, plan)
        for number, stage in enumerate(plan.stages):
            if stage.grid is not None and spans[number]:
                raise ConfigError(
                    f"recompute={self._recompute!r} selects layers of stage {number}, but its "
                    "devices form a grid, which cannot recompute layers",
                    remedy="let the model's own layers compute again (model.checkpointing=true), "
                    "or name other layers",
                )
        if plan.has_grids and self._batch_norm != NormMode.MICROBATCH:
            raise ConfigError(
                f"batch_norm={str(self._batch_norm)!r} cannot be used where devices form a grid",
                remedy="leave it at its default, 'microbatch'",
            )
        return spans

    @override
    def make_worker(
        self, part: StageModule, *, rank: int, optimizer: Optimizer | None
    ) -> MakeWorker:
        own, others = part.norms() if optimizer is not None else ({}, {})
        return partial(
            SynchronousWorker,
            order=self._order,
            microbatches=self.microbatches,
            parameters=dict(part.parameters()) if optimizer is not None else {},
            norms=MinibatchNorms(own, self._batch_norm, of_others=others),
        )


for _schedule in SYNCHRONOUS:
    StrategyRegistry.register(
        f"sparsepipe_{_schedule}",
        SynchronousPipelineStrategy,
        description="synchronous pipeline over the layers of an nn.Sequential, in microbatches",
        schedule=_schedule,
    )
