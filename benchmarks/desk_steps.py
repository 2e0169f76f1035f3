"""What single training steps of Table II and Fig. 8 take, and what their sweeps then would.

    python benchmarks/desk_steps.py
    python benchmarks/desk_steps.py --scale smoke

Times are processor time, all threads together, so that a busy machine shows less of what else
runs on it. What is made of them is an estimate: single steps times shapes and epochs, without
loading of data beside training, checkpoints, starts of processes and waits of ranks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from torch.nn import functional as F

from sparsepipe.config import compose
from sparsepipe.config.build import build_data, build_module
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.utils.files import markdown_table

TABLE_2 = [
    (network, resolution)
    for resolution in (32, 50)
    for network in ("dense", "sparse", "sparse_p050", "sparse_p025")
]
FIG_8 = [("sparse", 100), ("sparse", 200)]  # beside those of Table II
FIG_8_WHOLE = [("dense", 32), ("dense", 50), ("sparse", 32), ("sparse", 50), *FIG_8]
DENSE_BATCH = 4  # enough to time a step by the shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Processor seconds of a shape, in a training step with its loading and in an evaluation."""

    train_s: float
    evaluate_s: float


def main() -> None:
    """Prints the times and the estimates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_KeepLines)
    parser.add_argument("--scale", choices=["smoke", "desk", "paper"], default="desk")
    parser.add_argument("--steps", type=int, default=3, help="of each cell; the fastest counts")
    asked = parser.parse_args()
    torch.manual_seed(0)
    found: dict[tuple[str, int], Steps] = {}
    rows: list[tuple[str, ...]] = []
    for network, resolution in (*TABLE_2, *FIG_8):
        spec = _spec(asked.scale, network, resolution)
        steps = found[network, resolution] = _timed(spec, asked.steps)
        epoch_s = _shapes(spec)[0] * steps.train_s
        times = (f"{1e3 * steps.train_s:.1f}", f"{1e3 * steps.evaluate_s:.1f}", f"{epoch_s:.0f}")
        rows.append((network, f"{resolution}", *times))
        print(*rows[-1], flush=True)
    head = ("network", "grid", "step ms a shape", "forward ms a shape", "epoch s")
    print("\n" + markdown_table(head, rows) + "\n")
    spec = _spec(asked.scale, "sparse", 32)
    for name, trained, trials in (("table2", TABLE_2, 2), ("fig8", FIG_8_WHOLE, 1)):
        whole_s = trials * sum(_training_s(spec, found[cell]) for cell in trained)
        print(
            f"{name}: {trials * len(trained)} trainings, {whole_s:,.0f} s of a core: "
            f"{whole_s / 2 / 3600:.1f} h of two cores, as an estimate"
        )


class _KeepLines(argparse.RawDescriptionHelpFormatter):
    """The description as it is written."""


def _spec(scale: str, network: str, resolution: int) -> RunSpec:
    asked = ("experiment=table2", f"scale={scale}", f"paper/network={network}", "data=shapes")
    with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
        words = compose.admit([*asked, f"data.resolution={resolution}"])
        return compose.resolve(hydra_compose(compose.CONFIG_NAME, words))


def _timed(spec: RunSpec, steps: int) -> Steps:
    source = {**spec.data.arguments["source"], "train_per_class": 8, "test_per_class": 4}
    batch_size = spec.data.arguments["batch_size"]
    if spec.representation == "dense":
        batch_size = min(DENSE_BATCH, batch_size)
    small = spec.data.replace(num_workers=0, source=source, batch_size=batch_size)
    spec = spec.replace(data=small)
    data = build_data(spec)
    data.prepare_data()
    data.setup("fit")
    module = build_module(spec, data).train()
    layers: Any = module.layers
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01, momentum=0.9)
    taken = []
    for batch, loaded_s in islice(_loaded(data.train_dataloader()), steps):
        started_s = time.process_time()
        loss = F.cross_entropy(layers(batch["input"]), batch["label"])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        taken.append((loaded_s + time.process_time() - started_s) / len(batch["label"]))
    layers.eval()
    batch = next(iter(data.test_dataloader()))
    with torch.inference_mode():
        started_s = time.process_time()
        layers(batch["input"])
        evaluate_s = (time.process_time() - started_s) / len(batch["label"])
    return Steps(train_s=min(taken), evaluate_s=evaluate_s)


def _loaded(loader: Any) -> Iterator[tuple[dict[str, Any], float]]:
    """Batches, and what it took to load them."""
    batches = iter(loader)
    while True:
        started_s = time.process_time()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.process_time() - started_s


def _shapes(spec: RunSpec) -> tuple[int, int]:
    """To train on in an epoch, and to test, of the twenty classes that we model."""
    source, size = spec.data.arguments["source"], spec.data.arguments["batch_size"]

    def limited(split: str) -> int:
        count = 20 * int(source[f"{split}_per_class"])
        limit = getattr(spec.trainer, f"limit_{split}_batches")
        return count if limit is None else min(count, size * int(limit))

    return limited("train"), limited("test")


def _training_s(spec: RunSpec, steps: Steps) -> float:
    train, test = _shapes(spec)
    epochs = int(spec.trainer.max_epochs or 0)
    return epochs * train * steps.train_s + test * steps.evaluate_s


if __name__ == "__main__":
    main()
