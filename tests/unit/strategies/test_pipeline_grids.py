"""Plans with stages that are grids, and what such stages cannot do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from sparsepipe.errors import ConfigError, PlanError, TransportError
from sparsepipe.schedule import Plan
from sparsepipe.strategies import PipelineStrategy, SynchronousPipelineStrategy
from tests.support.pipeline_cases import QUIET, Net, image_layers, make_loader, make_net
from tests.support.processes import run


@pytest.mark.parametrize(
    ("grids", "error", "text"),
    [
        ([None], PlanError, "1 grids are given for 2 stages"),
        ([None, [1, 1]], PlanError, "stage 1 is a grid of 1 x 1 on 1 devices"),
        ([None, [0, 2]], PlanError, "stage 1 is a grid of 0 x 2"),
    ],
)
def test_grids_that_fit_no_plan_are_refused(grids: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        Plan.of(config="1-1", cuts=[2], num_layers=4, grids=grids)
    with pytest.raises(PlanError, match="a grid of 1 x 2 on 4 devices"):
        Plan.of(config="1-2", cuts=[2], num_layers=4, grids=[None, [1, 2]])


def test_a_plan_with_grids_is_read_back() -> None:
    plan = Plan.of(config="1-1-2", cuts=[2, 5], num_layers=9, grids=[None, [2, 2], None])
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.num_ranks == 7
    assert [plan.stage_of(rank) for rank in range(7)] == [0, 1, 1, 1, 1, 2, 2]
    assert [plan.leader_of(rank) for rank in range(7)] == [0, 1, 1, 1, 1, 5, 6]
    assert [plan.warmup(stage) for stage in range(3)] == [3, 2, 0]


class Headed(Net):
    """With a layer behind the layers."""

    def __init__(self) -> None:
        super().__init__(image_layers())
        self.head = torch.nn.Linear(4, 4)


def refused(rank: int, kind: str) -> str:
    options: dict[str, Any] = {"config": "1-1", "cuts": [4], "grids": [None, [1, 2]]}
    net, strategy = make_net("image"), PipelineStrategy
    if kind == "head":
        net = Headed()
    elif kind == "rule":
        net.layers[4] = torch.nn.Sequential(torch.nn.LocalResponseNorm(2))
    elif kind == "one stage":
        options.update(config="1", cuts=[], grids=[[3, 1]])
    elif kind == "devices":
        options["grids"] = [[1, 2], [1, 2]]
    elif kind == "dimensions":
        options.update(cuts=[9])
    elif kind == "recompute":
        strategy, options["recompute"] = SynchronousPipelineStrategy, "all"
    elif kind == "norms":
        strategy, options["batch_norm"] = SynchronousPipelineStrategy, "deferred"
    trainer = pl.Trainer(
        **QUIET, max_steps=2, devices=3, strategy=strategy(**options, timeout_s=20)
    )
    with pytest.raises((ConfigError, TransportError)) as caught:
        trainer.fit(net, make_loader("image", batches=2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("head", "head.weight is trained outside of the layers"),
        ("rule", r"LocalResponseNorm\) has no rule"),
        ("one stage", "the only stage is a grid"),
        ("devices", "is for 4 devices, the Trainer has 3"),
        ("dimensions", "no tensor with 2 dimensions behind batch and channel"),
        ("recompute", "has layers of stage 1, which is a grid"),
        ("norms", "does not go with a stage that is a grid"),
    ],
)
def test_what_a_grid_cannot_do_is_refused(kind: str, text: str) -> None:
    messages = run(refused, 3, kind)
    found = [message for message in messages if re.search(text, message)]
    assert len(found) == (2 if kind == "dimensions" else 3), messages
