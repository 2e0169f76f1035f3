"""Trainings with each kind of recomputation against the same without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch

from tests.support.pipeline_cases import Net
from tests.support.synchronous_cases import NETS, Case, train_one

SPANS: dict[str, Any] = {
    "norm_drop": {"layers": [[1, 3], 5, [6, 8]]},
    "drop": {"layers": [1, 2, [4, 7]]},
    "dense": {"layers": [[0, 2], [3, 5]]},
    "sparse_drop": {"layers": [[0, 5], [6, 9], 11, [15, 20]]},  # one across a cut of two stages
}


class Runs(pl.Callback):
    """How often each layer of this rank began to run in training.

    The last one of a span that runs again ends as soon as nothing more is needed.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Net)
        for number, layer in enumerate(pl_module.layers):
            layer.register_forward_pre_hook(partial(self._count, number))

    def _count(self, number: int, *_: Any) -> None:
        self.counts[number] = self.counts.get(number, 0) + 1


def every(case: Case) -> list[Case]:
    """The case without recomputation, and with some kinds of it."""
    stages = {"stages": [len(case.replicas) - 1]}
    return [replace(case, recompute=how) for how in ("none", "all", SPANS[case.net], stages)]


def train(rank: int, cases: Sequence[Case]) -> list[Any]:
    """Of each kind of each case weights and statistics, losses, and how often layers ran."""
    found = []
    for case in cases:
        kinds = []
        for kind in every(case):
            runs = Runs()
            kinds.append((*train_one(kind, rank, callbacks=[runs]), runs.counts))
        found.append(kinds)
    return found


def recomputed_layers(case: Case) -> set[int]:
    """By the documents, not by the code."""
    length = len(NETS[case.net]())
    if isinstance(case.recompute, str):
        return set(range(length)) if case.recompute == "all" else set()
    spans = [[n, n] if isinstance(n, int) else n for n in case.recompute.get("layers", [])]
    found = {layer for first, last in spans for layer in range(first, last + 1)}
    bounds = [0, *case.cuts, length]
    for stage in case.recompute.get("stages", []):
        found |= {*range(bounds[stage], bounds[stage + 1])}
    return found


def check(case: Case, found: Sequence[Any]) -> None:
    """The first kind keeps all; of the others layers ran twice, and nothing else differs."""
    for (state, told, most, counts), *others in found:
        for kind, (its_state, its_told, its_most, its_counts) in zip(
            every(case)[1:], others, strict=True
        ):
            assert its_state.keys() == state.keys()
            for name, value in its_state.items():
                assert torch.equal(value, state[name]), f"{kind} {kind.recompute}: {name}"
            assert its_told == told, f"{kind} {kind.recompute}"
            assert most in (None, its_most), "but where a plain Trainer runs"
            twice = recomputed_layers(kind)
            expected = {n: (1 + (n in twice)) * runs for n, runs in counts.items()}
            assert its_counts == expected, str(kind)
