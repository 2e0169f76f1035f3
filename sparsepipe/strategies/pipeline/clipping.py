"""Clipping by norm where each rank has the gradients of one stage only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.runtime import group


class WholeNorm:
    """Clips by the norm of the gradients of all stages, as one process does.

    Ranks tell each other the norms of single parameters' gradients, of which
    ``torch.nn.utils.clip_grad_norm_`` makes that of the whole network. They are put together in
    the order of the whole optimizer, so that gradients come out with the bits of one process.

    Every rank has to clip as often as the others: each waits for all.

    Args:
        parameters: of the whole optimizer, in its order; those of other stages need no values.
        speaks: this rank tells the norms of its stage; one of the stage's replicas does, since all
            of them have the same gradients.
    """

    def __init__(self, parameters: Sequence[Tensor], *, speaks: bool) -> None:
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._dtypes = [parameter.dtype.to_real() for parameter in parameters]
        self._speaks = speaks

    @contextmanager
    def clipping(self, precision: Precision) -> Iterator[None]:
        """Within the block ``precision`` clips so; it is refused if it has a way of its own."""
        own = type(precision).clip_grad_by_norm is not Precision.clip_grad_by_norm
        vars(precision)["clip_grad_by_norm"] = partial(_refuse if own else self._clip, precision)
        try:
            yield
        finally:
            del vars(precision)["clip_grad_by_norm"]

    def _clip(self, precision: Precision, optimizer: Optimizer, clip_val: float) -> None:
        mine = [(p, p.grad) for p in precision.main_params(optimizer) if p.grad is not None]
        norms = self._norms(mine)
        if mine:
            together = torch.stack(norms).to(mine[0][1].device)
            total = torch.linalg.vector_norm(together, 2.0)
            clip_grads_with_norm_([p for p, _ in mine], clip_val, total)

    @torch.no_grad()
    def _norms(self, mine: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Of each parameter of the whole optimizer that has a gradient; a collective.

        Args:
            mine: this rank's parameters, and their gradients.
        """
        told_P2 = torch.zeros(len(self._dtypes), 2, dtype=torch.float64)  # norm, whether there
        if mine and self._speaks:
            # As torch takes them, so that they are the same on every kind of device.
            found = torch._foreach_norm([gradient for _, gradient in mine], 2.0)
            numbers = [self._number(parameter) for parameter, _ in mine]
            told_P2[numbers, 0] = torch.stack([norm.double() for norm in found]).cpu()
            told_P2[numbers, 1] = 1.0
        # Zeros of all ranks but one are added to each norm, which changes no bit of it.
        group.add_(told_P2, what="taking the norm of all stages' gradients")
        return [
            norm.to(dtype)
            for (norm, there), dtype in zip(told_P2, self._dtypes, strict=True)
            if there
        ]

    def _number(self, parameter: Tensor) -> int:
        number = self._numbers.get(id(parameter))
        if number is None:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} came into the optimizer after the "
                "run had begun, and the other stages do not know it when gradients are clipped",
                remedy="give the optimizer all parameters in configure_optimizers, with lr=0 "
                "where they are to learn later",
            )
        return number


def _refuse(precision: Precision, *_: Any, **__: Any) -> None:
    """In place of what would take the norm of this stage's gradients.

    Raises:
        ConfigError: always.
    """
    kind = type(precision).__name__
    raise ConfigError(
        f"{kind} has a clip_grad_by_norm of its own, which on each rank knows the gradients of one "
        "stage only, and all stages are to be clipped by one norm",
        remedy=f"remove it from {kind}: Lightning's is replaced by one that knows all stages; or "
        "clip by value (trainer.gradient_clip_algorithm=value), or not at all",
    )
