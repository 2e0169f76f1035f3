"""Batch norms in pipelines that cut minibatches into microbatches.

torch's batch norms normalise with the statistics of their batch, and update running statistics with
these. :class:`NormMode` says which batch that is for a microbatch; ``deferred`` is
torchgpipe's ``DeferredBatchNorm`` (Kim et al., 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.activation_checkpointing import recomputing
from sparsepipe.runtime.collectives.replicas import Replicas
from sparsepipe.sparse import BatchNorm, SparseTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean and squared deviations of the values that a batch norm saw in each channel.

    In double precision. Shapes: C channels, P parts of the values.

    Args:
        count: number of values per channel: samples times pixels or voxels, or sparse rows.
        mean_C: mean of the values; zero if there are none.
        squares_C: sum of the values' squared deviations from the mean.
    """

    count: int
    mean_C: Tensor
    squares_C: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Moments of a batch [N, C, ...] with at least one value per channel.

        Takes two passes, the second of which corrects the rounding of the mean, so that channels
        far from zero stay accurate; faster than ``torch.var_mean`` on a CPU.
        """
        exact = values if values.dtype == torch.float64 else values.float()
        others = [dim for dim in range(exact.dim()) if dim != 1]
        count = values.numel() // values.shape[1]
        rounded = exact.mean(others, keepdim=True)
        deviations = exact - rounded
        off_C = deviations.sum(others).double() / count
        squares_C = deviations.square_().sum(others).double() - count * off_C.square()
        mean_C = rounded.flatten().double() + off_C
        return cls(count=count, mean_C=mean_C, squares_C=squares_C.clamp_(min=0))

    @classmethod
    def together(cls, parts: Sequence[Moments]) -> Moments:
        """Moments of the values of all ``parts`` together; some parts may have no values.

        After Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
        Sample Variances": adds the deviations within the parts and those of the parts' means.
        """
        if len(parts) == 1:
            return parts[0]
        count = sum(part.count for part in parts)
        means_PC = torch.stack([part.mean_C for part in parts])
        shares_P1 = means_PC.new_tensor([[part.count / max(count, 1)] for part in parts])
        mean_C = (shares_P1 * means_PC).sum(0)
        between_C = (shares_P1 * (means_PC - mean_C).square()).sum(0) * count
        within_C = torch.stack([part.squares_C for part in parts]).sum(0)
        return cls(count=count, mean_C=mean_C, squares_C=within_C + between_C)


class NormMode(StrEnum):
    """What batch norms normalise with in training, and when they update running statistics."""

    MICROBATCH = "microbatch"
    """The microbatch's statistics; an update with each microbatch, as when gradients accumulate."""
    DEFERRED = "deferred"
    """The microbatch's statistics; one update, with the statistics of the minibatch."""
    RUNNING = "running"
    """The running statistics from before the minibatch, as constants; one update, with the
    statistics of the minibatch. Gradients then do not depend on how the minibatch is cut."""


_KNOWN: Sequence[Callable[..., Any]] = (_BatchNorm.forward, BatchNorm.forward)


def check_norms(module: nn.Module, mode: NormMode) -> None:
    """Raises a ConfigError for batch norms that ``mode`` cannot handle: those with a forward of
    their own, and, if it normalises with running statistics, those without any.
    """
    if mode is NormMode.MICROBATCH:
        return
    for name, norm in norms_of(module).items():
        if "forward" in vars(norm) or type(norm).forward not in _KNOWN:
            raise ConfigError(
                f"{name} is a {type(norm).__name__} with a forward of its own, but "
                f"batch_norm={mode.value} needs to know what a batch norm computes",
                remedy="use torch.nn.BatchNorm1d, 2d or 3d or sparsepipe.sparse.BatchNorm, or "
                "batch_norm=microbatch",
            )
        if mode is NormMode.RUNNING and (norm.running_mean is None or not norm.track_running_stats):
            raise ConfigError(
                f"{name} ({type(norm).__name__}) has no running statistics, but "
                f"batch_norm={mode.value} normalises with them",
                remedy="give it track_running_stats=True, or use batch_norm=microbatch",
            )


def norms_of(module: nn.Module) -> dict[str, _BatchNorm]:
    """The distinct batch norms within a module, by name."""
    return {name: m for name, m in module.named_modules() if isinstance(m, _BatchNorm)}


class MinibatchNorms:
    """The batch norms of a stage that trains in microbatches.

    Only within :meth:`gathering`, their forward is replaced, in order to collect moments.

    Args:
        norms: norms by name that passed :func:`check_norms`, in the same order on all replicas.
        of_others: norms by name, outside of the layers, whose running statistics another stage
            keeps; a step that calls one of them here gets a ConfigError.
    """

    def __init__(
        self,
        norms: Mapping[str, _BatchNorm],
        mode: NormMode,
        *,
        of_others: Mapping[str, _BatchNorm] | None = None,
    ) -> None:
        if mode is NormMode.MICROBATCH:
            norms = of_others = {}
        self._norms = [_Gathering(n, mode) for n in norms.values() if n.running_mean is not None]
        self._refused: list[tuple[_BatchNorm, Callable[..., Any]]] = [
            (norm, partial(_refuse, name=name, norm=norm, mode=mode))
            for name, norm in (of_others or {}).items()
            if norm.running_mean is not None
        ]

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Context of a minibatch: norms in training mode collect the moments of their inputs."""
        forwards = [*self._refused, *((norm.norm, norm) for norm in self._norms)]
        for norm in self._norms:
            norm.seen.clear()
        for module, forward in forwards:
            vars(module)["forward"] = forward
        try:
            yield
        finally:
            for module, _ in forwards:
                vars(module).pop("forward", None)

    @torch.no_grad()
    def move(self, replicas: Replicas) -> None:
        """Updates running statistics with those of the minibatch; a collective of replicas.

        Moments are combined in the order of the replicas, so that all get the same bits.
        """
        if not self._norms:
            return
        found = []
        for norm in self._norms:
            seen, norm.seen = norm.seen, []
            assert norm.norm.running_mean is not None
            zeros_C = torch.zeros_like(norm.norm.running_mean, dtype=torch.float64)
            nothing = Moments(count=0, mean_C=zeros_C, squares_C=zeros_C)
            found.append(Moments.together(seen or [nothing]))
        if replicas.count > 1:
            packed = [
                torch.cat([each.mean_C.new_tensor([each.count]), each.mean_C, each.squares_C])
                for each in found
            ]
            sizes = [len(vector) for vector in packed]
            everyone = [v.split_with_sizes(sizes) for v in replicas.gather(torch.cat(packed))]
            found = []
            for vectors in zip(*everyone, strict=True):
                parts = [vector.tensor_split([1, 1 + len(vector) // 2]) for vector in vectors]
                found.append(
                    Moments.together(
                        [Moments(count=int(n), mean_C=a, squares_C=b) for n, a, b in parts]
                    )
                )
        for norm, moments in zip(self._norms, found, strict=True):
            norm.move(moments)


def _refuse(input: Any, *, name: str, norm: _BatchNorm, mode: NormMode) -> Any:
    """Replaces the forward of a norm whose statistics another stage keeps; raises in training."""
    if norm.training and norm.track_running_stats:
        raise ConfigError(
            f"{name} ({type(norm).__name__}) runs before the layers, on the first stage and again "
            "on the last, which has its running statistics, so "
            f"batch_norm={mode.value} cannot update them once per minibatch",
            remedy="make it the first entry of the Sequential, or use batch_norm=microbatch",
        )
    return type(norm).forward(norm, input)


@dataclass(slots=True, eq=False)
class _Gathering:
    """Replaces the forward of a norm whose running statistics are updated later."""

    norm: _BatchNorm
    mode: NormMode
    seen: list[Moments] = field(default_factory=list)  # of each input since the minibatch began

    def __call__(self, input: Any) -> Any:
        norm = self.norm
        if not (norm.training and norm.track_running_stats):
            return type(norm).forward(norm, input)
        kept = dict(norm._buffers)
        if self.mode is NormMode.RUNNING:  # it normalises with its running statistics
            norm.training = False
        else:  # it updates copies of them
            copies = {name: None if b is None else b.clone() for name, b in kept.items()}
            norm._buffers.update(copies)
        try:
            output = type(norm).forward(norm, input)
        finally:
            norm.training = True
            norm._buffers.update(kept)
        if not recomputing():  # else the first run of the layers counted them
            values = input.feats if isinstance(input, SparseTensor) else input
            if values.numel():
                with torch.no_grad():
                    self.seen.append(Moments.of(values))
        return output

    def move(self, moments: Moments) -> None:
        """Updates running statistics as torch does, unless a channel has fewer than 2 values."""
        norm = self.norm
        if moments.count < 2:
            return
        share = norm.momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            if share is None:
                share = 1 / float(norm.num_batches_tracked)
        assert share is not None
        assert norm.running_mean is not None
        assert norm.running_var is not None
        for running_C, new_C in (
            (norm.running_mean, moments.mean_C),
            (norm.running_var, moments.squares_C / (moments.count - 1)),
        ):
            running_C.copy_(running_C.double().lerp_(new_C, share))
