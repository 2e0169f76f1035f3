"""Batch norms as one process has them that knows all of a minibatch, to compare others with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from sparsepipe.sparse import SparseTensor
from tests.support.accumulation import Accumulation
from tests.support.synchronous_cases import Case


class Noting(nn.Module):
    """A batch norm that keeps all that it sees, until its statistics move by that.

    Args:
        norm: in whose place it is.
        mode: ``deferred`` or ``running``.
        by_hand: normalises by the definition's formula, not by torch's kernel.
    """

    def __init__(self, norm: _BatchNorm, *, mode: str, by_hand: bool) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer.clone())
        self._momentum, self._eps = norm.momentum, norm.eps
        self._mode, self._by_hand = mode, by_hand
        self.seen: list[Tensor] = []

    def forward(self, value: Any) -> Any:
        if isinstance(value, SparseTensor):
            return value.replace_feats(self._normalised(value.feats))
        return self._normalised(value)

    def _normalised(self, x_NC: Tensor) -> Tensor:
        self.seen.append(x_NC.detach().clone())
        running = self._mode == "running"
        if not self._by_hand:
            kept = (self.running_mean, self.running_var) if running else (None, None)
            return F.batch_norm(
                x_NC, *kept, self.weight, self.bias, training=not running, eps=self._eps
            )
        mean_C = self.running_mean if running else x_NC.mean(0)
        var_C = self.running_var if running else x_NC.var(0, correction=0)
        return (x_NC - mean_C) / (var_C + self._eps).sqrt() * self.weight + self.bias

    def move(self, every: Sequence[Noting]) -> None:
        """Moves the statistics by all that these have seen, in double precision."""
        x_NC = torch.cat([x for norm in every for x in norm.seen]).double()
        self.num_batches_tracked += 1
        share = 1 / int(self.num_batches_tracked) if self._momentum is None else self._momentum
        for kept, new in ((self.running_mean, x_NC.mean(0)), (self.running_var, x_NC.var(0))):
            kept.copy_((1 - share) * kept.double() + share * new)


class Normed(Accumulation):
    """Gradient accumulation in one process with such norms.

    Args:
        case: what is trained.
        by_hand: see :class:`Noting`.
    """

    def __init__(self, case: Case, *, by_hand: bool = False) -> None:
        super().__init__(case)
        for copies in self._copies:
            for layers in copies:
                for name, norm in list(layers.named_modules()):
                    if isinstance(norm, _BatchNorm):
                        noting = Noting(norm, mode=case.batch_norm, by_hand=by_hand)
                        layers.set_submodule(name, noting)

    def _minibatch(self, batches: list[list[int]]) -> None:
        super()._minibatch(batches)
        for copies in self._copies:
            for modules in zip(*(layers.modules() for layers in copies), strict=True):
                norms = [module for module in modules if isinstance(module, Noting)]
                for norm in norms:
                    norm.move(norms)
                for norm in norms:
                    norm.seen.clear()


def whole(case: Case, *, by_hand: bool = False) -> Normed:
    """One process that takes each minibatch in one piece, in double precision.

    So it has next to no rounding of its own, and what differs is that of who is compared with it.
    """
    one = Normed(dataclasses.replace(case, config="1", microbatches=1), by_hand=by_hand)
    (layers,), (newest,) = one._copies[0], one._newest
    layers.double()[0].register_forward_pre_hook(_doubled)
    for parameter in newest:
        parameter.data = parameter.data.double()
    return one


def _doubled(_: nn.Module, given: tuple[Any]) -> Any:
    (value,) = given
    return value.replace_feats(value.feats.double()) if hasattr(value, "feats") else value.double()


def distance(value: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest element."""
    return float((value.double() - expected.double()).abs().max() / expected.abs().max())
