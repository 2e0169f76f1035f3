"""Counts, means and squared deviations of channels, taken in parts and put together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
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
    """Of the values that a batch norm saw of each channel, in double precision.

    Shapes: C channels, P parts.

    Args:
        count: values of each channel: samples, times their pixels or voxels; rows of a sparse
            tensor.
        mean_C: their mean; zero of no values.
        squares_C: the sum of their squared deviations from the mean.
    """

    count: int
    mean_C: Tensor
    squares_C: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Of a batch [N, C, ...] with one value of a channel at least.

        In two passes, the second of which corrects what rounding the mean has left, so that
        channels far from zero keep their digits. On a CPU that costs less than
        ``torch.var_mean``, which does not vectorise over the first dimension.
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
        """Of all values of some parts (one at least), of which some may be of none.

        Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
        Variances", for any number of parts: deviations from the common mean are those within the
        parts and those of the parts' means.
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

    def packed(self) -> Tensor:
        """As one vector [1 + 2 C]."""
        return torch.cat([self.mean_C.new_tensor([self.count]), self.mean_C, self.squares_C])

    @classmethod
    def unpacked(cls, vector: Tensor) -> Moments:
        """What :meth:`packed` made."""
        channels = len(vector) // 2
        count, mean_C, squares_C = vector.split_with_sizes([1, channels, channels])
        return cls(count=int(count), mean_C=mean_C, squares_C=squares_C)


class NormMode(StrEnum):
    """What batch norms normalise by in training, and when their running statistics move."""

    MICROBATCH = "microbatch"
    """By the microbatch; they move with each of them, as where gradients accumulate."""
    DEFERRED = "deferred"
    """By the microbatch; they move once, by the statistics of the minibatch."""
    RUNNING = "running"
    """By the running statistics from before the minibatch, which are constants; these move once,
    by the statistics of the minibatch. How it is cut then changes no gradient."""


def check_norms(module: nn.Module, mode: NormMode) -> None:
    """Refuse batch norms that a mode cannot be had of.

    Raises:
        ConfigError: naming one with a forward of its own, or without running statistics where
            these are to normalise.
    """
    if mode is NormMode.MICROBATCH:
        return
    for name, norm in norms_of(module).items():
        if "forward" in vars(norm) or type(norm).forward not in _KNOWN:
            raise ConfigError(
                f"{name} is a {type(norm).__name__} with a forward of its own, and "
                f"batch_norm={mode.value} would not know what it normalises",
                remedy="use torch.nn.BatchNorm1d, 2d or 3d or sparsepipe.sparse.BatchNorm, or "
                "batch_norm=microbatch",
            )
        if mode is NormMode.RUNNING and (norm.running_mean is None or not norm.track_running_stats):
            raise ConfigError(
                f"{name} ({type(norm).__name__}) has no running statistics, and "
                f"batch_norm={mode.value} normalises by them",
                remedy="give it track_running_stats=True, or use batch_norm=microbatch",
            )


def norms_of(module: nn.Module) -> dict[str, _BatchNorm]:
    """Batch norms of a module by name, each once."""
    return {name: m for name, m in module.named_modules() if isinstance(m, _BatchNorm)}


_KNOWN: Sequence[Callable[..., Any]] = (_BatchNorm.forward, BatchNorm.forward)


class MinibatchNorms:
    """The batch norms of a stage while it trains in microbatches.

    Modules keep their kinds, parameters and buffers. Only within :meth:`gathering` they run
    differently, and what they gather there is kept here, not in them.

    Args:
        norms: in the same order on all replicas of the stage; :func:`check_norms` knows them.
        mode: what they do.
        of_others: those by name that this rank has and another stage owns, outside of the layers.
            Steps that call them here are refused.
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
        others = (of_others or {}).items()
        self._refused = [
            _Refused(name, n, mode) for name, n in others if n.running_mean is not None
        ]

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Around a minibatch: norms that train note what they see."""
        every: list[_InPlace] = [*self._norms, *self._refused]
        for norm in every:
            norm.begin()
        try:
            yield
        finally:
            for norm in every:
                norm.end()

    @torch.no_grad()
    def move(self, replicas: Replicas) -> None:
        """Moves running statistics by those of the minibatch; a collective of replicas.

        Statistics of its parts on all replicas are put together in their order, so that all have
        the same bits.

        Raises:
            TransportError: a replica is gone or did not come.
        """
        if not self._norms:
            return
        found = [norm.take() for norm in self._norms]
        if replicas.count > 1:
            found = _over(replicas, found)
        for norm, moments in zip(self._norms, found, strict=True):
            norm.move(moments)


def _over(replicas: Replicas, found: Sequence[Moments]) -> list[Moments]:
    """The moments of all replicas together."""
    packed = [moments.packed() for moments in found]
    sizes = [len(vector) for vector in packed]
    everyone = [vector.split_with_sizes(sizes) for vector in replicas.gather(torch.cat(packed))]
    return [
        Moments.together([Moments.unpacked(vector) for vector in vectors])
        for vectors in zip(*everyone, strict=True)
    ]


class _InPlace(ABC):
    """Stands for the forward of a batch norm.

    Args:
        norm: the module.
        mode: not ``MICROBATCH``, which the module has by itself.
    """

    def __init__(self, norm: _BatchNorm, mode: NormMode) -> None:
        self._norm = norm
        self._mode = mode

    def begin(self) -> None:
        """Takes the place of the module's forward."""
        vars(self._norm)["forward"] = self

    def end(self) -> None:
        """Gives it back."""
        vars(self._norm).pop("forward", None)

    @property
    def _moves(self) -> bool:
        """Whether the module's running statistics are to follow what it sees."""
        return self._norm.training and self._norm.track_running_stats

    @abstractmethod
    def __call__(self, input: Any) -> Any:
        """The forward."""


class _Refused(_InPlace):
    """Of a norm whose statistics another rank has.

    Args:
        name: of the norm.
        norm: the module.
        mode: see :class:`_InPlace`.
    """

    def __init__(self, name: str, norm: _BatchNorm, mode: NormMode) -> None:
        super().__init__(norm, mode)
        self._name = name

    def __call__(self, input: Any) -> Any:
        if self._moves:
            raise ConfigError(
                f"{self._name} ({type(self._norm).__name__}) runs before the layers, on the first "
                "stage and once more on the last, which has its running statistics: "
                f"batch_norm={self._mode.value} could not move them once a minibatch",
                remedy="make it the first entry of the Sequential, or use batch_norm=microbatch",
            )
        return type(self._norm).forward(self._norm, input)


class _Gathering(_InPlace):
    """Of a norm that notes what it sees, for its statistics to move later."""

    def __init__(self, norm: _BatchNorm, mode: NormMode) -> None:
        super().__init__(norm, mode)
        self._seen: list[Moments] = []

    def begin(self) -> None:
        """Takes the place of the module's forward."""
        self._seen.clear()
        super().begin()

    def __call__(self, input: Any) -> Any:
        norm = self._norm
        if not self._moves:
            return type(norm).forward(norm, input)
        statistics = self._constant if self._mode is NormMode.RUNNING else self._untouched
        with statistics():
            output = type(norm).forward(norm, input)
        if not recomputing():  # else they were counted when the layers ran first
            self._note(input.feats if isinstance(input, SparseTensor) else input)
        return output

    @torch.no_grad()
    def _note(self, values: Tensor) -> None:
        if values.numel():
            self._seen.append(Moments.of(values))

    @contextmanager
    def _constant(self) -> Iterator[None]:
        """The module normalises as in evaluation."""
        self._norm.training = False
        try:
            yield
        finally:
            self._norm.training = True

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """The module moves copies of its statistics."""
        buffers = self._norm._buffers
        kept = dict(buffers)
        buffers.update({name: None if b is None else b.clone() for name, b in kept.items()})
        try:
            yield
        finally:
            buffers.update(kept)

    def take(self) -> Moments:
        """Of all that was seen since the minibatch began."""
        seen, self._seen = self._seen, []
        if seen:
            return Moments.together(seen)
        assert self._norm.running_mean is not None
        zeros_C = torch.zeros_like(self._norm.running_mean, dtype=torch.float64)
        return Moments(count=0, mean_C=zeros_C, squares_C=zeros_C)

    def move(self, moments: Moments) -> None:
        """As torch moves them for a batch. A single value has no variance, and moves nothing."""
        norm = self._norm
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
        variance_C = moments.squares_C / (moments.count - 1)
        _mix_(norm.running_mean, moments.mean_C, share)
        _mix_(norm.running_var, variance_C, share)


def _mix_(running_C: Tensor, new_C: Tensor, share: float) -> None:
    running_C.copy_(running_C.double().lerp_(new_C, share))
