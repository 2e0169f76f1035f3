"""How fast domains over ranks train, beside one process.

Steps of training (forward, losses, backward, sum of gradients, update) of a domain separation
network with one source and one target on images: in one process with one thread, and on two ranks
with a domain and a thread each, gloo on loopback. Both take turns; medians of samples a second are
printed, and their ratio, whose goal is 1.7.

    python benchmarks/domains.py
    python benchmarks/domains.py --targets 3 --width 2
    python benchmarks/domains.py --quick
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pipeline_ranks import on_ranks
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from sparsepipe.models import DomainSeparation, dsn_2d
from sparsepipe.strategies import DomainStrategy

GOAL = 1.7
CLASSES, CHANNELS = 10, 3


class Steps(pl.Callback):
    """Times steps behind the first ones.

    Attributes:
        seconds: of all timed steps.
    """

    def __init__(self, warmup: int) -> None:
        self._warmup, self._began_s = warmup, 0.0
        self.seconds = 0.0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._warmup:
            self._began_s = time.perf_counter()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = time.perf_counter() - self._began_s


def module_of(names: Sequence[str], *, width: float = 1.0, decoded: int = 28) -> DomainSeparation:
    """A network of these domains, the source first."""
    torch.manual_seed(0)
    network = dsn_2d(
        CLASSES,
        domains=names,
        in_channels=CHANNELS,
        width=width,
        decoded=[decoded] * 2,
        norm="domain",
    )
    return DomainSeparation(network, optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9))


def batch_of(names: Sequence[str], *, count: int, side: int) -> dict[str, dict[str, Tensor]]:
    """So many images of each domain."""
    return {
        name: {
            "input": torch.rand(count, CHANNELS, side, side),
            "label": torch.arange(count) % CLASSES,
            "index": torch.arange(count),
        }
        for name in names
    }


def samples_per_s(rank: int, ranks: int, options: argparse.Namespace) -> float:
    """Samples of all domains, a second, of a training on so many ranks."""
    torch.set_num_threads(1)
    names = ["source", *(f"target_{n}" for n in range(options.targets))]
    module = module_of(names, width=options.width, decoded=options.size)
    timed = Steps(warmup=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DomainStrategy(timeout_s=120) if ranks > 1 else "auto",
        max_epochs=1,
        callbacks=[timed],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    own = names[rank * len(names) // ranks : (rank + 1) * len(names) // ranks]
    batch = batch_of(own, count=options.batch_size, side=options.size)
    trainer.fit(module, DataLoader([batch] * (options.steps + 2), batch_size=None))  # type: ignore[arg-type]
    return float(options.steps * options.batch_size * len(names) / timed.seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--targets", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", type=int, default=28, help="pixels of a side")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of each domain")
    parser.add_argument("--width", type=float, default=1.0, help="multiplies channels")
    parser.add_argument("--steps", type=int, default=30, help="timed ones of a repetition")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="does it run?")
    options = parser.parse_args(arguments)
    if options.quick:
        options.width, options.steps, options.repeats = 0.1, 2, 1
    rows: dict[int, list[float]] = {1: [], options.ranks: []}
    for _ in range(options.repeats):
        for ranks, rates in rows.items():
            rates.append(min(on_ranks(samples_per_s, ranks, ranks, options)))
    print(
        f"torch {torch.__version__}, one thread a process; 1 source, {options.targets} targets, "
        f"{options.batch_size} images of {options.size} x {options.size} of each, width "
        f"{options.width:g}"
    )
    one = statistics.median(rows[1])
    for ranks, rates in rows.items():
        median = statistics.median(rates)
        goal = f", goal {GOAL}" if ranks == 2 and options.targets == 1 else ""
        print(
            f"  {ranks} ranks {median:9.1f} samples/s [{min(rates):.1f}..{max(rates):.1f}]  "
            f"x {median / one:.2f}{goal}"
        )


if __name__ == "__main__":
    main()
