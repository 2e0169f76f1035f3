"""Synchronous pipelines as a Lightning Strategy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.strategies import StrategyRegistry
from pytorch_lightning.utilities.types import STEP_OUTPUT
from typing_extensions import override

from sparsepipe.schedule import SYNCHRONOUS
from sparsepipe.strategies.pipeline.plan_by_hand import Balance
from sparsepipe.strategies.pipeline.settings import SynchronousSettings
from sparsepipe.strategies.pipeline.staged import StagedStrategy


class SynchronousPipelineStrategy(StagedStrategy):
    """Splits one ``nn.Sequential`` of any LightningModule by layers over ranks, without staleness.

    The module's steps are written as for one device and call the Sequential once. A minibatch is
    cut into microbatches, on which stages work at the same time; their gradients add up, and each
    stage updates once when all are in. Training is that of one device on the same microbatches;
    clipping by norm takes the norm of all stages' gradients. One Lightning step is one minibatch
    for each replica of stage 0, all in one update. Learning rates count Lightning steps.

    With one device and one microbatch a run is that of a plain Trainer, bit for bit.

    Differences to one device, beside those of :class:`PipelineStrategy` that do not follow from
    stale weights:

    - ``training_step`` runs once for each microbatch, and gets its part of the batch. Its loss is
      to be the mean over samples: it counts by the part's samples, so that gradients are those of
      the mean over the minibatch. A sum over samples would become one divided by their number.
    - What it logs is put together to one value a step: on every rank that of the microbatches that
      came this way (all, where no stage has replicas), and of all when the epoch ends.
    - Batch norms normalise by the microbatch, and their running statistics move with each, if
      ``batch_norm`` says nothing else.

    Args:
        schedule: ``gpipe`` (all forwards, then all backwards), ``1f1b`` (one forward, one
            backward as soon as may be; no more in flight than stages follow) or ``eager_1f1b``
            (the same with a warm-up twice as long, for links that take their time).
        microbatches: T, parts of a minibatch; at least as many as any stage has replicas. The
            replicas of stage 0 share them: each cuts its own batch into its share of them.
        recompute: which layers keep the input of their span only, for the backward to run them
            forward once more: ``none``, ``all`` (each stage is a span), or a mapping of ``stages``
            (numbers, whole ones) and ``layers`` (numbers, and spans [first, last], inclusive);
            :data:`~sparsepipe.partition.recompute.layers.Setting`.
        config: replicas of each stage, such as "2-1"; by default one device a stage.
        cuts: first layer of each stage but the first; by default computed.
        balance: what stages without ``cuts`` share evenly: ``flops`` of a batch's forward,
            ``parameters`` or ``layers``.
        batch_norm: what batch norms do in training. ``microbatch``: normalise by the microbatch,
            and running statistics move with each; ``deferred``: so too, but these move once, by
            the statistics of the minibatch; ``running``: normalise by the running statistics from
            before the minibatch, as by constants, and these move as with ``deferred``.
        layers: name of the Sequential; by default the one there is.
        send_input: the last stage gets the input of the layers as well, for steps that use
            it afterwards.
        keyed_randomness: draws in a layer depend on (seed, number of the microbatch in the whole
            run, layer) alone, so that a run does not depend on the plan; needs
            ``seed_everything``.
        timeout_s: limit of every wait for another rank.
        process_group_backend: ``gloo`` (the default, also for CUDA) or ``nccl``.
        direct: tensors go from device to device over NCCL; a CUDA device for every rank.
        slowdown: how many times slower than it is this rank's device is made, by pausing.
        cluster_environment: by default the ranks of an elastic agent, ``torchrun`` or
            Lightning's own launcher.

    Attributes:
        microbatches: as given.
        schedule: as given.
    """

    strategy_name = "sparsepipe_gpipe"

    def __init__(
        self,
        *,
        schedule: Literal["gpipe", "1f1b", "eager_1f1b"] = "gpipe",
        microbatches: int = 4,
        recompute: Literal["none", "all", "auto"] | dict[str, list[Any]] = "none",
        config: str | None = None,
        cuts: Sequence[int] | None = None,
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
            balance=balance,
            layers=layers,
            timeout_s=timeout_s,
            process_group_backend=process_group_backend,
            slowdown=slowdown,
            cluster_environment=cluster_environment,
        )
        self.schedule, self.microbatches = schedule, microbatches
        self._told_of_empty = False
        self._settings = SynchronousSettings(
            schedule=schedule,
            microbatches=microbatches,
            recompute=recompute,
            send_input=send_input,
            keyed_randomness=keyed_randomness,
            batch_norm=batch_norm,
            timeout_s=timeout_s,
            direct=direct,
            slowed=self.throttle.slowed,
        )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        loss = super().training_step(*args, **kwargs)
        if self._pipeline is not None and not self._told_of_empty:
            self._tell_of_empty(self._pipeline.worker)
        return loss

    def _tell_of_empty(self, worker: Any) -> None:
        """Warns of microbatches without samples, once, but of those of an epoch's last batch."""
        sizes = worker.sizes_read
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        if not self.is_global_zero or progress.is_last_batch or all(sizes):
            return
        self._told_of_empty = True
        warnings.warn(
            f"a batch of {sum(sizes)} samples is cut into {len(sizes)} microbatches, of which "
            f"{sizes.count(0)} are empty: stages wait as for {len(sizes)}, and compute fewer. "
            f"Larger batches, or microbatches={sum(sizes) * self.plan.replicas(0)} or fewer, "
            "leave none empty.",
            stacklevel=2,
        )

    @override
    def _number(self, loaders: Sequence[Any], step: int) -> int:
        return self._trainer.current_epoch * int(self._trainer.num_training_batches) + step


for _schedule in SYNCHRONOUS:
    StrategyRegistry.register(
        f"sparsepipe_{_schedule}",
        SynchronousPipelineStrategy,
        description="synchronous pipeline over the layers of an nn.Sequential, in microbatches",
        schedule=_schedule,
    )
