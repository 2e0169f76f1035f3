"""Steps of a LightningModule, as a stage worker runs them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn

from sparsepipe.runtime import safe_pickle
from sparsepipe.strategies.metrics import Metrics
from sparsepipe.strategies.pipeline.logging import Logged, Recorder
from sparsepipe.strategies.pipeline.refusals import check_output
from sparsepipe.strategies.pipeline.stand_ins import Absence
from sparsepipe.strategies.pipeline.step_split import (
    run_from_layers,
    run_through,
    run_until_layers,
    without_input,
)


class AttributeGrowth:
    """Warns of attributes of a module that grow in a step.

    Hooks at an epoch's end run on every rank, and most ranks would find these attributes empty.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._ignored = vars(pl.LightningModule()).keys()
        self._seen: set[str] = set()

    @contextmanager
    def watching(self, hook: str) -> Iterator[None]:
        """Put around a step; checks the first call of each kind."""
        if hook in self._seen or self._module.trainer.world_size == 1:
            yield
            return
        self._seen.add(hook)
        before = self._sizes()
        yield
        grown = [name for name, size in self._sizes().items() if size > before.get(name, 0)]
        if grown:
            names = ", ".join(f"self.{name}" for name in grown)
            warnings.warn(
                f"{type(self._module).__name__}.{hook} adds to {names}, and only ranks of the "
                "last stage see it: elsewhere it stays empty. Use self.log or a torchmetric for "
                "values that are needed at the epoch's end: every rank has these.",
                stacklevel=2,
            )

    def _sizes(self) -> dict[str, int]:
        return {
            name: len(value)
            for name, value in vars(self._module).items()
            if isinstance(value, list | dict | set) and name not in self._ignored
        }


class ModuleSteps:
    """Both halves of ``training_step``, ``validation_step``, ``test_step`` and ``predict_step``.

    Args:
        absence: of layers that are on other ranks.
        send_input: whether the last stage gets the input of ``layers`` too.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        layers: nn.Sequential,
        *,
        metrics: Metrics,
        absence: Absence,
        autocast: Callable[[], AbstractContextManager[Any]],
        send_input: bool,
    ) -> None:
        self._module = module
        self._layers = layers
        self._metrics = metrics
        self._absence = absence
        self._autocast = autocast
        self._send_input = send_input
        self._recorder = Recorder(module)
        self._growth = AttributeGrowth(module)
        self._hook = "training_step"
        self._arguments: tuple[Any, ...] = ()

    def choose(self, hook: str, arguments: tuple[Any, ...]) -> None:
        """Sets the step to run, and its arguments after the batch."""
        self._hook, self._arguments = hook, arguments

    def open(self, batch: Any) -> tuple[Any, Any]:
        with self._recorder.silence(), self._autocast():
            opened = run_until_layers(self._layers, lambda: self._step(batch), module=self._module)
        drawn = safe_pickle.dumps(opened.randomness) if opened.randomness else None
        rest = batch if self._send_input else without_input(batch, opened.value)
        return opened.value, {"batch": rest, "randomness": drawn}

    def close(self, rest: Any, run: Callable[[], Any]) -> tuple[Tensor, tuple[Logged, ...]]:
        result, logs = self._close(rest, run, epoch_default=False)
        return check_output(result), logs

    def close_evaluation(self, rest: Any, run: Callable[[], Any]) -> tuple[Any, tuple[Logged, ...]]:
        return self._close(rest, run, epoch_default=True)

    def whole(self, batch: Any, run: Callable[[Any], Any]) -> tuple[Tensor, tuple[Logged, ...]]:
        result, logs = self._whole(batch, run, epoch_default=False)
        return check_output(result), logs

    def whole_evaluation(
        self, batch: Any, run: Callable[[Any], Any]
    ) -> tuple[Any, tuple[Logged, ...]]:
        return self._whole(batch, run, epoch_default=True)

    def _whole(
        self, batch: Any, run: Callable[[Any], Any], *, epoch_default: bool
    ) -> tuple[Any, tuple[Logged, ...]]:
        with self._recording(batch, epoch_default=epoch_default) as notes:
            result = run_through(self._layers, lambda: self._step(batch), run=run)
        return result, tuple(notes)

    def _close(
        self, rest: Any, run: Callable[[], Any], *, epoch_default: bool
    ) -> tuple[Any, tuple[Logged, ...]]:
        batch, drawn = rest["batch"], rest["randomness"]
        with self._recording(batch, epoch_default=epoch_default) as notes:
            result = run_from_layers(
                self._layers,
                lambda: self._step(batch),
                run=run,
                module=self._module,
                randomness=None if drawn is None else safe_pickle.loads(drawn),
                input_sent=self._send_input,
            )
        return result, tuple(notes)

    @contextmanager
    def _recording(self, batch: Any, *, epoch_default: bool) -> Iterator[list[Logged]]:
        """Put around a step whose logs and metrics count; yields what it logs."""
        recording = self._recorder.recording(batch, epoch_default=epoch_default)
        kept = self._growth.watching(self._hook)
        with recording as notes, self._metrics.tracking(), kept:
            yield notes

    def _step(self, batch: Any) -> Any:
        with self._absence.step():
            return getattr(self._module, self._hook)(batch, *self._arguments)
