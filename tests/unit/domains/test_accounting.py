"""What ranks of domains send and keep."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pytorch_lightning.callbacks import LambdaCallback

from sparsepipe.domains import exchange, sent_numbers
from sparsepipe.models import DomainSeparation, dsn_2d
from sparsepipe.profiling.memory import Alive
from sparsepipe.runtime.collectives.halo import start_messages
from sparsepipe.runtime.collectives.ordered_sum import OrderedSum
from tests.support.domain_cases import (
    SAMPLES,
    STEPS,
    Case,
    Data,
    placement_of,
    strategy_of,
    trainer_of,
)
from tests.support.processes import run


def sent_of(rank: int, case: Case) -> dict[str, Any]:
    """Numbers that this rank sends for losses, and lengths of the gradients that are summed."""
    floats, sums = [0], set[int]()
    reduce = OrderedSum.reduce

    def counting(sends: Any, *rest: Any, **more: Any) -> Any:
        floats[0] += sum(each.numel() for _, each in sends if each.is_floating_point())
        return start_messages(sends, *rest, **more)

    def summing(summed: OrderedSum) -> None:
        sums.add(len(summed.values))
        reduce(summed)

    module = case.module()
    # The values that the rank of the losses announces to each other one.
    announced = (1 + len(module.part_names)) * STEPS * (case.ranks - 1)
    with (
        patch.object(exchange, "start_messages", counting),
        patch.object(OrderedSum, "reduce", summing),
    ):
        trainer = trainer_of(
            case, strategy=strategy_of(case), ranks=case.ranks, limit_val_batches=0
        )
        trainer.fit(module, Data(case))
    shared = {
        "encoder": [p.numel() for p in module.network.shared.parameters()],
        "rest": [
            p.numel()
            for part in (module.network.decoder, module.network.head, module.network.discriminator)
            for p in part.parameters()
        ],
        "private": [p.numel() for p in next(iter(module.network.private.values())).parameters()],
    }
    return {"floats": floats[0], "sums": sums, "announced": announced, "shared": shared}


CASES = [
    Case(norm="none"),
    Case(norm="none", targets=2, ranks=3),
    Case(norm="none", targets=3, ranks=2),
    Case(norm="none", targets=1, ranks=4),
    Case(norm="none", targets=2, ranks=4, roles="separate"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sent_is_what_is_counted(case: Case) -> None:
    placement = placement_of(case)
    samples = [
        len(placement.domains_of(rank)) * SAMPLES // placement.replica(rank)[1]
        for rank in range(case.ranks)
    ]
    network = case.module().network
    target = torch.Size(network.decoded_shape).numel()
    for rank, found in enumerate(run(sent_of, case.ranks, case)):
        expected = STEPS * sent_numbers(
            placement, rank, samples=samples, code=network.code, target=target
        )
        if rank == placement.loss_rank:
            expected += found["announced"]
        assert found["floats"] == expected
        # Of each parameter its numbers and whether it has a gradient, and how many minibatches.
        lengths = {name: sum(each) + len(each) + 1 for name, each in found["shared"].items()}
        both = sum(lengths[name] for name in ("encoder", "rest")) - 1
        summed = {lengths["encoder"] if case.roles == "separate" else both}
        if placement.replica(rank)[1] > 1:
            summed.add(lengths["private"])
        assert found["sums"] == (set() if rank == placement.loss_rank else summed)


def peak_of(rank: int, case: Case) -> int:
    """Bytes alive at a time in training steps of a network of usual size."""
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    peaks: list[int] = []
    with Alive() as alive:
        network = dsn_2d(10, domains=case.domains, decoded=[28, 28], width=0.5, norm="domain")
        module = DomainSeparation(network, optimizer=optimizer)
        steps = LambdaCallback(  # by then private encoders of others are gone
            on_train_start=lambda *_: alive.restart(),
            on_train_end=lambda *_: peaks.append(alive.peak_bytes),
        )
        trainer = trainer_of(
            case,
            strategy=strategy_of(case),
            ranks=case.ranks,
            max_steps=2,
            limit_val_batches=0,
            callbacks=[steps],
        )
        trainer.fit(module, LargeData(case))
    return peaks[0]


class LargeData(Data):
    """Images of 28 x 28, 32 of each domain."""

    def train_dataloader(self) -> Any:
        names, *_ = self._own()
        batch = {
            "input": torch.rand(32, 1, 28, 28),
            "label": torch.arange(32) % 10,
            "index": torch.arange(32),
        }
        return torch.utils.data.DataLoader([dict.fromkeys(names, batch)] * 2, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.full
def test_memory_of_a_rank_does_not_grow_with_the_targets() -> None:
    """Within 5 %, from one to seven."""
    few, many = Case(targets=1, ranks=2), Case(targets=7, ranks=8)
    peaks = [max(run(peak_of, case.ranks, case)) for case in (few, many)]
    assert peaks[1] <= 1.05 * peaks[0], peaks
    on_one = run(peak_of, 1, Case(targets=7, ranks=1), join_group=False)[0]
    assert on_one > 4 * peaks[1], "which one process that has all of them needs"
