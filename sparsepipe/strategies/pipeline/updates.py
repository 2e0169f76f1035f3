"""An optimizer's step as Lightning does it, with the options of the step it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import pytorch_lightning as pl
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.strategies.pipeline.clipping import WholeNorm
from sparsepipe.strategies.pipeline.options import PastOptions

_REMEDY = "use an optimizer that takes one gradient for an update, such as SGD or AdamW"


class Updates:
    """Hooks, clipping, step.

    Schedulers change an optimizer's options between Lightning steps. Replicas of a stage may
    come to the same update in different steps, and must all use the options of one.

    Args:
        module: the LightningModule.
        parameters: of this stage, by name.
        optimizer: over these.
        precision: Lightning's.
        norm: what clips by norm in place of ``precision``; None: that itself.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        precision: Precision,
        *,
        norm: WholeNorm | None = None,
    ) -> None:
        self._module = module
        self._parameters = parameters
        self._optimizer = optimizer
        self._precision = precision
        self._norm = norm
        self._options = PastOptions(optimizer)

    def note(self, step: int) -> None:
        """Remembers the options as those of a step; steps count from 0 after a drain."""
        self._options.note(step)

    def apply(self, gradients: Mapping[str, Tensor | None], *, loss: Tensor, step: int) -> None:
        """Updates the parameters.

        Args:
            gradients: by name.
            loss: of the last minibatch, for hooks.
            step: whose options count; no earlier one will be asked for.

        Raises:
            ConfigError: the optimizer wants gradients at other weights too.
        """
        for name, parameter in self._parameters.items():
            parameter.grad = gradients.get(name)
        self._precision.post_backward(loss, self._module)
        evaluation = _Evaluation(self._optimizer, self._parameters, loss)
        clipping = nullcontext() if self._norm is None else self._norm.clipping(self._precision)
        with self._options.as_of(step), clipping:
            self._precision.optimizer_step(self._optimizer, model=self._module, closure=evaluation)
        evaluation.check()


class _Evaluation:
    """The closure of one step: the gradients are there, and can be had this once only."""

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], loss: Tensor
    ) -> None:
        self._kind = type(optimizer).__name__
        self._parameters = parameters
        self._loss = loss
        self._calls = 0
        self._before = self._state()

    def __call__(self) -> Tensor:
        self._calls += 1
        if self._calls > 1:
            raise ConfigError(
                f"{self._kind} evaluates the network several times for one update, and in a "
                "pipeline other minibatches are under way",
                remedy=_REMEDY,
            )
        if self._state() != self._before:
            raise ConfigError(
                f"{self._kind} changes parameters or gradients before it asks for the gradients",
                remedy=_REMEDY,
            )
        return self._loss

    def check(self) -> None:
        """After the step: a closure that was not called has run no hooks and clipped nothing."""
        if not self._calls:
            raise ConfigError(
                f"{self._kind} does not call the closure that its step is given",
                remedy=_REMEDY,
            )

    def _state(self) -> list[tuple[int, int]]:
        """Tells whether anything was changed or replaced."""
        return [(p._version, id(p.grad)) for p in self._parameters.values()]
