"""One habit: how it is written, what a pipeline makes of it, and how a Trainer runs it.

The oracle is a plain Trainer in one process. The asynchronous pipeline validates after each step,
before which it runs empty, so that its weights are never old: what is the same there must be the
same to the bit. Synchronous pipelines cut the batch in two, and are the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sparsepipe.strategies import PipelineStrategy, SynchronousPipelineStrategy
from tests.support.pipeline_cases import QUIET

SAMPLES, BATCH, INPUTS, CLASSES = 12, 4, 6, 4
BATCHES = SAMPLES // BATCH
Verdict = Literal["same", "refused", "different"]
Options = Mapping[str, Any]


def samples(*, seed: int = 3, size: int = SAMPLES) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, INPUTS, generator=draw, dtype=torch.float64)
    return TensorDataset(x, torch.randint(CLASSES, (size,), generator=draw))


def loader(*, seed: int = 3, size: int = SAMPLES) -> DataLoader[Any]:
    return DataLoader(samples(seed=seed, size=size), batch_size=BATCH)


def mlp() -> nn.Sequential:
    """Cut after its second layer."""
    layers = nn.Sequential(
        nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    )
    return layers.double()


class Base(pl.LightningModule):
    """A classifier as the first page of Lightning's documentation has one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.lr = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.layers(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def step(function: Callable[[Any, Tensor, Tensor], Any]) -> type[Base]:
    """A module whose training step returns ``function(self, x, y)``."""

    class Stepping(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return function(self, *batch)

    return Stepping


def hook(name: str, function: Callable[..., Any], base: type[Base] = Base) -> type[Base]:
    """A module with one hook."""
    return type("Hooked", (base,), {name: function})


def calling(name: str, function: Callable[..., Any]) -> pl.Callback:
    """A callback with one hook, called with trainer, module and what else there is."""

    def called(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    kind = type("Callback", (pl.Callback,), {name: called})
    return kind()  # type: ignore[no-any-return]


def nothing(trainer: pl.Trainer, module: Any) -> Any:
    return None


@dataclass(frozen=True, kw_only=True)
class Habit:
    """One row of the table.

    Attributes:
        written: what people write, in Markdown.
        verdict: what becomes of it in a pipeline.
        note: in the table, of what is not the same: how, or what to do instead.
        module: makes the module.
        trainer: options of the Trainer, made anew for each run.
        strategy: options of the pipeline.
        message: of the refusal.
        early: refused on all ranks before any step.
        drained: validates after each step.
        fit: what a script does in place of ``trainer.fit(module, loader, validation)``.
        seen: what is compared beside weights and logged values, or judged by ``differs``.
        differs: of a row that is different, whether it is as the note has it: of what a plain
            Trainer and the two ranks have seen.
        warns: what is warned of on rank 0, once.
        synchronous: whether a synchronous pipeline does as one device, or refuses it, too.
        slow: its test takes seconds.
    """

    written: str
    verdict: Verdict
    note: str = ""
    module: Callable[[], Any] = Base
    trainer: Callable[[], dict[str, Any]] = dict
    strategy: Options = field(default_factory=dict)
    message: str = ""
    early: bool = True
    drained: bool = True
    fit: Callable[[pl.Trainer, Any], Any] | None = None
    seen: Callable[[pl.Trainer, Any], Any] = nothing
    differs: Callable[[Any, list[Any]], bool] | None = None
    warns: str = ""
    synchronous: bool = True
    slow: bool = False

    @property
    def row(self) -> str:
        """Its line of the table."""
        return f"| {self.written} | {self.verdict} | {self.note} |"


def strategy_of(habit: Habit, kind: str) -> dict[str, Any]:
    """Options of a Trainer: of a plain one, or of two stages."""
    if kind == "plain":
        return {"devices": 1}
    options = {"config": "1-1", "cuts": [2], "timeout_s": 30, **habit.strategy}
    if kind == "asynchronous":
        return {"devices": 2, "strategy": PipelineStrategy(**options)}
    return {"devices": 2, "strategy": SynchronousPipelineStrategy(microbatches=2, **options)}


def trained(habit: Habit, kind: str) -> dict[str, Any]:
    """Runs a habit in this process; its weights, logged values, and what it has seen."""
    torch.manual_seed(1)
    module = habit.module()
    options: dict[str, Any] = {**QUIET, "max_epochs": 2, "num_sanity_val_steps": 0}
    if habit.drained:
        options |= {"val_check_interval": 1, "limit_val_batches": 1}
    trainer = pl.Trainer(**{**options, **strategy_of(habit, kind), **habit.trainer()})
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002 - which some habits draw from
    if habit.fit is None:
        trainer.fit(module, loader(), loader(seed=4))
    else:
        habit.fit(trainer, module)
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
        "seen": habit.seen(trainer, module),
    }


def equal(found: Any, expected: Any, *, exactly: bool) -> bool:
    """Whether two results are the same, to the bit or but for rounding."""
    if isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(
            equal(found[key], expected[key], exactly=exactly) for key in expected
        )
    if isinstance(expected, list | tuple):
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(equal(a, b, exactly=exactly) for a, b in pairs)
    if isinstance(expected, Tensor | float) and not exactly:
        tolerance = 1e-5 if isinstance(expected, float) else 1e-12
        return torch.allclose(
            torch.as_tensor(found).double(),
            torch.as_tensor(expected).double(),
            rtol=tolerance,
            atol=tolerance,
        )
    if isinstance(expected, Tensor):
        return torch.equal(found, expected)
    return bool(found == expected)
