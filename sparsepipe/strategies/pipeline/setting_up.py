"""Puts one rank's pipeline together."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import Precision
from torch.optim import Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.randomness import KeyedRandomness
from sparsepipe.runtime.replicas import Replicas
from sparsepipe.runtime.stage import Stage
from sparsepipe.runtime.transport import Network
from sparsepipe.runtime.weights import Mode, Weights
from sparsepipe.runtime.whole import dissolve, stage_group
from sparsepipe.runtime.worker import Worker
from sparsepipe.strategies.pipeline.layers import Placement, Share
from sparsepipe.strategies.pipeline.metrics import Metrics
from sparsepipe.strategies.pipeline.pipeline import Pipeline
from sparsepipe.strategies.pipeline.steps import ModuleSteps
from sparsepipe.strategies.pipeline.updates import Updates


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of the strategy that reach the worker; see there."""

    mode: Mode | str
    predict_backward: bool
    send_input: bool
    keyed_randomness: bool
    timeout_s: float
    direct: bool

    def __post_init__(self) -> None:
        if self.mode not in list(Mode):
            raise ConfigError(
                f"mode={str(self.mode)!r} is unknown", remedy=f"use one of {', '.join(Mode)}"
            )


def make_pipeline(
    settings: Settings,
    *,
    placement: Placement,
    share: Share,
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
        share: what this rank keeps of them.
        module: with that share.
        device: of this rank.
        rank: this one.
        precision: Lightning's, for autocast and updates.
        optimizer: over this rank's parameters; None for evaluation only.

    Raises:
        ConfigError: the optimizer does not suit the mode.
    """
    plan = placement.plan
    stage = plan.stage_of(rank)
    parameters = dict(share.parameters()) if optimizer is not None else {}
    # First what may be refused, then what other ranks must take part in.
    weights = None
    if optimizer is not None:
        weights = Weights(
            parameters,
            settings.mode,
            optimizer,
            replicas=plan.replicas(stage),
            predict_backward=settings.predict_backward,
        )
    metrics = Metrics(module)
    metrics.detach()
    steps = ModuleSteps(
        module,
        placement.layers,
        metrics=metrics,
        autocast=precision.forward_context,
        send_input=settings.send_input,
    )
    backend = "gloo" if not settings.direct else "nccl"
    stages = map(plan.ranks_of, range(plan.num_stages))
    made = stage_group(stages, backend=backend, timeout_s=settings.timeout_s)
    network = Network(
        plan, rank, timeout_s=settings.timeout_s, device=device, direct=settings.direct
    )

    def end() -> None:
        network.close()
        dissolve(made)

    pipeline = Pipeline(
        module,
        plan=plan,
        rank=rank,
        steps=steps,
        metrics=metrics,
        share=share,
        updates=None if optimizer is None else Updates(module, parameters, optimizer, precision),
        before_backward=lambda loss: precision.pre_backward(loss, module),
        end=end,
    )
    pipeline.attach(
        Worker(
            plan=plan,
            rank=rank,
            stage=Stage(
                module,
                placement.layers,
                first=plan.stages[stage].layers[0],
                last=plan.stages[stage].layers[1],
                autocast=precision.forward_context,
                randomness=_randomness(device) if settings.keyed_randomness else None,
            ),
            weights=weights,
            replicas=Replicas(made, parameters),
            network=network,
            steps=steps,
            events=pipeline,
        )
    )
    return pipeline


def _randomness(device: torch.device) -> KeyedRandomness:
    return KeyedRandomness(seed=int(os.environ.get("PL_GLOBAL_SEED", "0")), device=device)
