"""An optimizer's step as Lightning does it, with the options of the step it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer


class Updates:
    """Hooks, clipping, step.

    Schedulers change an optimizer's options between Lightning steps. Replicas of a stage may
    come to the same update in different steps, and must all use the options of one.

    Args:
        module: the LightningModule.
        parameters: of this stage, by name.
        optimizer: over these.
        precision: Lightning's.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        precision: Precision,
    ) -> None:
        self._module = module
        self._parameters = parameters
        self._optimizer = optimizer
        self._precision = precision
        self._options: dict[int, list[dict[str, Any]]] = {}

    def note(self, step: int) -> None:
        """Remembers the options as those of a step; steps count from 0 after a drain."""
        if step == 0:
            self._options.clear()
        self._options[step] = [_options(group) for group in self._optimizer.param_groups]

    def apply(self, gradients: Mapping[str, Tensor | None], *, loss: Tensor, step: int) -> None:
        """Updates the parameters.

        Args:
            gradients: by name.
            loss: of the last minibatch, for hooks.
            step: whose options count; no earlier one will be asked for.
        """
        for name, parameter in self._parameters.items():
            parameter.grad = gradients.get(name)
        self._precision.post_backward(loss, self._module)
        with self._as_of(step):
            self._precision.optimizer_step(
                self._optimizer, model=self._module, closure=lambda: loss
            )
        for earlier in [known for known in self._options if known < step]:
            del self._options[earlier]

    @contextmanager
    def _as_of(self, step: int) -> Iterator[None]:
        groups = self._optimizer.param_groups
        now = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        for group, options in zip(groups, self._options[step], strict=True):
            group.update(options)
        yield
        for group, options in zip(groups, now, strict=True):
            group.update(options)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
