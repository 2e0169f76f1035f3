"""Trainings whose loss or weights are no longer finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from sparsepipe.callbacks import FiniteOnly
from sparsepipe.errors import DivergedError
from sparsepipe.results import best
from sparsepipe.sweep.record import objective_value
from sparsepipe.tasks.compare import compare
from sparsepipe.utils.files import read_json
from tests.integration.test_domain_runs import RANKS as DOMAINS
from tests.support.command_line import checkpoint, composed
from tests.support.pipeline_cases import QUIET
from tests.support.spatial_house import SPATIAL

Job = Callable[..., Path]
FULL = pytest.mark.full
STEEP, WARN = "optim.optimizer.lr=1e20", "trainer.nonfinite=warn"
LOSS, WEIGHTS = "the loss is (nan|inf) in epoch 1, batch ", "the parameter layers.{}.weight is not "


class Poison(pl.Callback):
    """Spoils the first parameter of one rank after a number of steps."""

    def __init__(self, *, rank: int, step: int) -> None:
        self.when = rank, step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == self.when:
            next(pl_module.parameters()).detach().fill_(torch.nan)


def poison(rank: int, step: int) -> str:
    return f"callbacks={{poison: {{_target_: {__name__}.Poison, rank: {rank}, step: {step}}}}}"


@pytest.mark.usefixtures("networks_for_ranks")
@pytest.mark.parametrize(
    ("command", "found"),
    [
        ((STEEP,), LOSS + "2"),
        ((poison(0, 16),), WEIGHTS.format(0) + "finite after epoch 2, batch 8"),
        (("parallel=pipeline", "parallel.devices=2", poison(1, 3)), LOSS),
        *(
            pytest.param((f"parallel={name}", "parallel.devices=2", fault), found, marks=FULL)
            for name, fault, found in (
                ("dp", poison(1, 2), LOSS + "3"),
                ("dp", poison(1, 8), WEIGHTS.format(0)),
                ("pipeline", poison(0, 16), WEIGHTS.format(0)),
                ("gpipe", poison(0, 2), LOSS + "3"),
                ("gpipe", poison(1, 16), WEIGHTS.format(3)),
            )
        ),
        pytest.param((*SPATIAL, STEEP), LOSS + "2", marks=FULL),
        pytest.param((*DOMAINS, STEEP), LOSS, marks=FULL),
    ],
)
def test_it_is_said_at_once_and_nothing_is_reported(
    job: Job, workplace: Path, command: tuple[str, ...], found: str
) -> None:
    """All ranks end, and checkpoints from before stay."""
    with pytest.raises(DivergedError, match=found) as diverged:
        job(*command)
    assert diverged.value.exit_code == 8
    assert not [*workplace.glob("outputs/*/*/result.json")]
    saved = [*workplace.glob("outputs/*/*/checkpoints/*.ckpt")]
    assert len(saved) == (2 if "epoch 2" in str(diverged.value) else 0)
    for path in saved:
        state = checkpoint(path.parents[1], path.stem)["state_dict"]
        assert all(value.isfinite().all() for value in state.values()), path


def test_a_training_that_goes_on_is_marked_and_never_the_best(job: Job, workplace: Path) -> None:
    marked, good = job(WARN, poison(0, 16)), job("trainer.nonfinite=stop")
    assert composed("trainer.nonfinite=stop").identity() == composed().identity()
    result = read_json(marked / "result.json")
    assert result["nonfinite"] == WEIGHTS.format(0) + "finite after epoch 2, batch 8"
    assert result["val/accuracy"] == 0, "predictions that are not finite are wrong"
    assert checkpoint(marked)["nonfinite"] == result["nonfinite"], "for a run that is resumed"
    assert checkpoint(marked, "best")["epoch"] == 0, "whose weights were finite"
    assert best(workplace / "outputs").directory == good.resolve()
    with pytest.raises(DivergedError, match="diverged, so its test/accuracy does not count: the p"):
        objective_value(marked, "test/accuracy")
    told = compare([], width=80, runs=[str(marked), str(good)], where=str(workplace / "outputs"))
    assert [name for name in (marked.name, good.name) if f"{name} has" in told] == [marked.name]


class Scaled(pl.LightningModule):
    """Whose losses are 1 with given gradients, or are not finite."""

    def __init__(self, gradients: list[float]) -> None:
        super().__init__()
        self.weight, self.gradients = torch.nn.Parameter(torch.zeros(())), gradients

    def train_dataloader(self) -> DataLoader[float]:
        return DataLoader(self.gradients)  # type: ignore[arg-type]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 1 + self.gradients[batch_idx] * (self.weight - self.weight.detach())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-40)


def test_gradients_that_overflow_by_a_scale_are_no_divergence() -> None:
    def scaled(*gradients: float) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
        precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        trainer = pl.Trainer(**QUIET, max_epochs=1, plugins=precision, callbacks=FiniteOnly())
        trainer.fit(Scaled([*gradients]))
        return scaler.get_scale()

    assert scaled(1.0, 1e30, 2.0) < 2.0**60, "a step was skipped"
    with pytest.raises(DivergedError, match=LOSS + "2"):
        scaled(1.0, torch.nan)
