"""What is trained by ranks and replayed by one process, and how a rank trains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytorch_lightning import Callback

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
