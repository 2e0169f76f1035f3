"""Puts one rank's pipeline together."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import Precision
from torch.optim import Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.randomness import KeyedRandomness
from sparsepipe.runtime.replicas import Replicas
from sparsepipe.runtime.stage import Stage
from sparsepipe.runtime.transport import Network
from sparsepipe.runtime.whole import dissolve, stage_group
from sparsepipe.schedule import Plan
from sparsepipe.strategies.pipeline.layers import Placement
from sparsepipe.strategies.pipeline.metrics import Metrics
from sparsepipe.strategies.pipeline.pipeline import Pipeline
from sparsepipe.strategies.pipeline.settings import Settings
from sparsepipe.strategies.pipeline.spreading import SpreadModule
from sparsepipe.strategies.pipeline.steps import ModuleSteps
from sparsepipe.strategies.pipeline.updates import Updates


def make_pipeline(
    settings: Settings,
    *,
    placement: Placement,
    spread: SpreadModule,
    module: pl.LightningModule,
    device: torch.device,
    rank: int,
    precision: Precision,
    optimizer: Optimizer | None,
) -> Pipeline:
    """A pipeline and its worker; every rank must call it.

    Args:
        settings: options.
        placement: of the module's layers.
        spread: the module, over the ranks.
        module: with this rank's share of it.
        device: of this rank.
        rank: this one.
        precision: Lightning's, for autocast and updates.
        optimizer: over this rank's parameters; None for evaluation only.

    Raises:
        ConfigError: the optimizer does not suit the mode, or there is no seed to key draws by.
    """
    # First what may be refused, then what other ranks must take part in.
    plan, share = placement.plan, spread.share
    keyed = settings.keyed_randomness and optimizer is not None  # evaluation draws as it is
    randomness = _randomness(device) if keyed else None
    parameters = dict(share.parameters()) if optimizer is not None else {}
    make_worker = settings.worker(plan, rank, share, optimizer)
    updates = None
    if optimizer is not None:
        norm = spread.whole_norm() if settings.clips_whole and plan.num_stages > 1 else None
        updates = Updates(module, parameters, optimizer, precision, norm=norm)
    stage = _stage(
        settings,
        placement,
        module,
        rank=rank,
        autocast=precision.forward_context,
        randomness=randomness,
    )
    together = _Connections(settings, plan=plan, rank=rank, device=device)
    metrics = Metrics(module)
    metrics.detach()
    steps = ModuleSteps(
        module,
        placement.layers,
        metrics=metrics,
        autocast=precision.forward_context,
        send_input=settings.send_input,
    )
    events = settings.events(module, updates=updates, precision=precision, keeps=share.is_last)
    worker = make_worker(
        plan=plan,
        rank=rank,
        stage=stage,
        replicas=Replicas(together.replicas, parameters),
        network=together.network,
        steps=steps,
        events=events,
        slowed=settings.slowed,
    )
    return Pipeline(
        worker,
        plan=plan,
        rank=rank,
        steps=steps,
        events=events,
        metrics=metrics,
        share=share,
        end=together.end,
    )


def _stage(
    settings: Settings,
    placement: Placement,
    module: pl.LightningModule,
    *,
    rank: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    randomness: KeyedRandomness | None,
) -> Stage:
    """The layers of a rank."""
    plan = placement.plan
    number = plan.stage_of(rank)
    first, last = plan.stages[number].layers
    return Stage(
        module,
        placement.layers,
        first=first,
        last=last,
        autocast=autocast,
        randomness=randomness,
        recomputed=settings.recomputed(plan)[number],
    )


class _Connections:
    """What the ranks make together: every rank must call each method.

    Attributes:
        replicas: group of this rank's stage; None where it has no replicas.
        network: to the other stages.
    """

    def __init__(self, settings: Settings, *, plan: Plan, rank: int, device: torch.device) -> None:
        limit_s = settings.timeout_s
        stages = map(plan.ranks_of, range(plan.num_stages))
        backend = "nccl" if settings.direct else "gloo"
        self.replicas = stage_group(stages, backend=backend, timeout_s=limit_s)
        self.network = Network(
            plan,
            rank,
            timeout_s=limit_s,
            device=device,
            direct=settings.direct,
            queue_depth=settings.queue_depth,
        )

    def end(self) -> None:
        self.network.close()
        dissolve(self.replicas)


def _randomness(device: torch.device) -> KeyedRandomness:
    seed = os.environ.get("PL_GLOBAL_SEED")
    if seed is None:
        raise ConfigError(
            "keyed_randomness makes draws of the run's seed, and there is none",
            remedy="call pytorch_lightning.seed_everything before the Trainer runs",
        )
    return KeyedRandomness(seed=int(seed), device=device)
