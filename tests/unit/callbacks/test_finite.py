"""Trainings whose loss or weights are no longer finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsepipe.callbacks import FiniteOnly
from sparsepipe.errors import ConfigError, DivergedError
from sparsepipe.results import best
from sparsepipe.sweep.record import objective_value
from sparsepipe.tasks.compare import compare
from sparsepipe.utils.files import read_json
from tests.integration.test_domain_runs import RANKS as DOMAINS
from tests.support.command_line import checkpoint, composed
from tests.support.pipeline_cases import QUIET
from tests.support.spatial_house import SPATIAL

Job = Callable[..., Path]
TWO = ("parallel.devices=2",)
WARN = "trainer.nonfinite=warn"
LOSS, WEIGHTS = "the loss is (nan|inf) in epoch 1, batch ", "the parameter {} is not finite after "


class Poison(pl.Callback):
    """Spoils what one rank has after a number of steps: a batch, or its first parameter."""

    def __init__(self, *, rank: int, step: int, batch: bool = False) -> None:
        self.when, self.batch = (rank, step), batch

    def _is_due(self, trainer: pl.Trainer) -> bool:
        return (trainer.global_rank, trainer.global_step) == self.when

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self.batch and self._is_due(trainer):
            batch["input"].fill_(torch.nan)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if not self.batch and self._is_due(trainer):
            with torch.no_grad():
                next(pl_module.parameters()).fill_(torch.nan)


def poison(**settings: Any) -> str:
    words = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return f"callbacks={{poison: {{_target_: {__name__}.Poison, {words}}}}}"


@pytest.mark.usefixtures("networks_for_ranks")
@pytest.mark.parametrize(
    ("command", "found"),
    [
        (("optim.optimizer.lr=1e20",), LOSS + "2"),
        ((poison(rank=0, step=16),), WEIGHTS.format("layers.0.weight") + "epoch 2, batch 8"),
        (("parallel=pipeline", *TWO, poison(rank=1, step=3)), LOSS),
        *(
            pytest.param(command, found, marks=pytest.mark.full)
            for command, found in (
                (("parallel=dp", *TWO, poison(rank=1, step=2, batch=True)), LOSS + "3"),
                (("parallel=dp", *TWO, poison(rank=1, step=8)), WEIGHTS.format("layers.0.weight")),
                (("parallel=pipeline", *TWO, poison(rank=0, step=2, batch=True)), LOSS),
                (("parallel=pipeline", *TWO, poison(rank=0, step=16)), WEIGHTS.format(".*")),
                (("parallel=gpipe", *TWO, poison(rank=0, step=2, batch=True)), LOSS + "3"),
                (("parallel=gpipe", *TWO, poison(rank=1, step=16)), WEIGHTS.format(".*3.weight")),
                ((*SPATIAL, "optim.optimizer.lr=1e20"), LOSS + "2"),
                ((*DOMAINS, "optim.optimizer.lr=1e20"), LOSS),
            )
        ),
    ],
)
def test_it_says_so_at_once_and_reports_nothing(
    job: Job, workplace: Path, command: tuple[str, ...], found: str
) -> None:
    """All ranks end, and what was good before stays."""
    with pytest.raises(DivergedError, match=found) as diverged:
        job(*command)
    assert diverged.value.exit_code == 8
    assert not [*workplace.glob("outputs/*/*/result.json")]
    saved = [*workplace.glob("outputs/*/*/checkpoints/*.ckpt")]
    assert len(saved) == (2 if "epoch 2" in str(diverged.value) else 0)
    for path in saved:
        state = checkpoint(path.parents[1], path.stem)["state_dict"]
        assert all(value.isfinite().all() for value in state.values()), path


def test_a_training_that_goes_on_is_marked_and_is_never_the_best(job: Job, workplace: Path) -> None:
    """Its only checkpoint with finite weights stays the best, and predictions count as wrong."""
    marked, good = job(WARN, poison(rank=0, step=16)), job()
    result = read_json(marked / "result.json")
    assert result["nonfinite"] == WEIGHTS.format("layers.0.weight") + "epoch 2, batch 8"
    assert result["val/accuracy"] == 0
    assert checkpoint(marked)["nonfinite"] == result["nonfinite"], "for a run that is resumed"
    kept = checkpoint(marked, "best")
    assert kept["epoch"] == 0
    assert best(workplace / "outputs").directory == good.resolve()
    with pytest.raises(DivergedError, match="diverged, so its test/accuracy does not count: the p"):
        objective_value(marked, "test/accuracy")
    runs = [str(marked), str(good)]
    told = compare([], width=80, runs=runs, where=str(workplace / "outputs"))
    assert f"{marked.name} has diverged" in told
    assert f"{good.name} has" not in told


class Steep(pl.LightningModule):
    """With losses of its own, whose gradients in half precision overflow."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.layer, self.losses = nn.Linear(1, 1), losses

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(len(self.losses), 1))  # type: ignore[arg-type]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        one = self.layer(batch).float()
        return self.losses[batch_idx] * (one - one.detach() + 1).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("losses", "batch"), [([1.0, 1e30, 2.0], None), ([1.0, torch.inf, 2.0], 2), ([torch.nan], 1)]
)
def test_a_scaled_loss_that_overflows_is_no_divergence(
    losses: list[float], batch: int | None
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    trainer = pl.Trainer(**QUIET, max_epochs=1, plugins=precision, callbacks=FiniteOnly())
    if batch is None:
        trainer.fit(Steep(losses))
        assert scaler.get_scale() < 2.0**60, "the step was skipped"
        return
    with pytest.raises(DivergedError, match=f"the loss is (nan|inf) in epoch 1, batch {batch}"):
        trainer.fit(Steep(losses))


def test_runs_keep_their_ids() -> None:
    assert composed("trainer.nonfinite=stop").identity() == composed().identity()
    assert composed(WARN).identity() != composed().identity()
    with pytest.raises(ConfigError, match="nonfinite"):
        composed("trainer.nonfinite=never")
