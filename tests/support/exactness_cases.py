"""What is trained by ranks and replayed by one process, how a rank trains it, and grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pytorch_lightning import Callback

from sparsepipe.schedule import Plan
from tests.support import synchronous_cases
from tests.support.pipeline_cases import dealt, make_loader, make_net, pipeline_trainer, weights

PLANS = {
    "1-1": {"dense": [3], "sparse": [17], "residual": [7], "image": [4]},
    "1-1-1": {"dense": [2, 5], "sparse": [10, 24], "image": [3, 5]},
    "2-1": {"dense": [4], "sparse": [20], "residual": [6]},
    "1-2": {"dense": [3], "sparse": [14]},
    "1-2-1": {"dense": [1, 5], "sparse": [7, 25]},
    "2-1-1": {"dense": [3, 6], "sparse": [14, 28]},
    "1-3-1": {"dense": [2, 4], "sparse": [10, 20], "wide": [2, 6]},
    "2-3": {"dense": [3], "sparse": [17]},
}


@dataclass(frozen=True)
class Case:
    config: str
    net: str = "dense"
    optimizer: str = "momentum"
    mode: str = "stash"
    predict_backward: bool = False
    minibatches: int = 7  # of an epoch; whole rounds are dealt by Lightning, others by Dealt
    epochs: int = 2
    step_size: int = 0  # of a schedule that halves the learning rate
    grids: Any = None  # of each stage

    @property
    def cuts(self) -> list[int]:
        return PLANS[self.config][self.net]

    @property
    def replicas(self) -> list[int]:
        return [int(part) for part in self.config.split("-")]

    @property
    def steps(self) -> int:
        """Of an epoch: rounds of the first stage, the last one perhaps partial."""
        return -(-self.minibatches // self.replicas[0])

    @property
    def lightning_deals(self) -> bool:
        return self.minibatches % self.replicas[0] == 0

    def ahead(self, stage: int) -> int:
        """Forwards of a stage ahead of its first backward, from the semantics."""
        return (sum(self.replicas[stage:]) - 1) // self.replicas[stage]

    def __str__(self) -> str:
        every = (self.config, self.net, self.optimizer, self.mode, f"m{self.minibatches}")
        return " ".join(every) + (" lr" if self.step_size else "")


def train(rank: int, cases: Sequence[Case], **places: Any) -> list[Any]:
    """Each case's weights, losses and recorded versions on this rank.

    Args:
        rank: this one's number.
        cases: trained one after the other.
        places: which devices the Trainer gets, in its own words; by default processors.
    """
    found = []
    for case in cases:
        net = make_net(case.net, optimizer=case.optimizer, step_size=case.step_size)
        if case.lightning_deals:
            loader = make_loader(case.net, batches=case.minibatches)
        else:
            readers = case.replicas[0]
            reader = rank if rank < readers else 0
            loader = dealt(case.minibatches, readers=readers, reader=reader, net=case.net)
        trainer = pipeline_trainer(
            case.config,
            case.cuts,
            mode=case.mode,
            predict_backward=case.predict_backward,
            grids=case.grids,
            max_epochs=case.epochs,
            callbacks=[Recording()],
            **places,
        )
        recording = trainer.callbacks[0]
        trainer.fit(net, loader)
        found.append(
            (weights(net.layers), recording.segments, float(trainer.callback_metrics["loss"]))
        )
    return found


class Recording(Callback):
    segments: Any = ()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.segments = trainer.strategy.pipeline.worker.segments = []


def plan_of_grids(case: Any) -> Plan:
    """A plan of as many ranks, with other layers."""
    count = len(case.replicas)
    return Plan.of(config=case.config, cuts=range(1, count), num_layers=count, grids=case.grids)


def num_ranks(case: Any) -> int:
    return sum(case.replicas) if case.grids is None else plan_of_grids(case).num_ranks


def leaders(found: Sequence[Any], case: Any) -> list[Any]:
    """What the ranks found that speak for their stages; the others of a grid have the same."""
    plan = plan_of_grids(case)
    for rank, mine in enumerate(found):
        for name, value in mine[0].items():
            assert torch.equal(value, found[plan.leader_of(rank)][0][name]), f"rank {rank}: {name}"
    return [mine for rank, mine in enumerate(found) if plan.leader_of(rank) == rank]


def grid_rows() -> list[Any]:
    """Cases with stages that are grids, asynchronous and synchronous ones, of 3 and of 4 ranks."""
    last, both = (None, (1, 2)), ((1, 2), (2, 1))
    first, middle = ((2, 1), None), (None, (1, 2), None)
    images: dict[str, Any] = {"net": "image", "precision": "64-true", "samples": 40}
    drop = {**images, "net": "image_drop"}
    synchronous = synchronous_cases.Case
    return [
        Case("1-1", net="image", grids=last),
        Case("1-1", net="image", grids=first, mode="spectrain"),
        Case("1-1", net="image", grids=both),
        Case("1-1", net="image", grids=both, mode="vertical_sync", optimizer="decay"),
        Case("1-1-1", net="image", grids=middle, step_size=3),
        synchronous("1-1", 4, "gpipe", grids=last, **images),
        synchronous("1-1", 3, "1f1b", grids=first, **drop),
        synchronous("1-1", 3, "eager_1f1b", grids=last, clip=0.05, optimizer="adam", **images),
        synchronous("1-1", 3, "1f1b", grids=both, **drop),
        synchronous("1-1", 4, "1f1b", grids=both, clip=0.05, optimizer="decay", **images),
        synchronous("1-1-1", 4, "eager_1f1b", grids=middle, **images),
    ]
