"""Domain separation networks: encoders, decoder, head and discriminator.

Source: Bousmalis et al., "Domain Separation Networks" (NIPS 2016), Fig. 1, and for many targets
Tsaris and Hinkle's Multi-DSN: each domain has a private encoder, and all use the shared one.

Shapes: B samples, C values of a code, K classes, D domains, of which the first is the source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsepipe import sparse
from sparsepipe.models.chain import CONVOLUTIONS, MAX_POOLS, check_sizes, require, scaled
from sparsepipe.models.domain_losses import DomainLosses

Norm = Literal["none", "domain", "all"]
"""Batch norms of encoders: none, with statistics of each domain, or of all domains together."""
_CHANNELS = (32, 64)
_POOLED = {2: 4, 3: 2}
"""Size per dimension to which a dense encoder pools its features, by number of dimensions."""
_HIDDEN = 128


class PerDomain(nn.ModuleDict):
    """Modules by domain name; a rank needs only the modules of its domains."""


class DomainNorm(nn.Module):
    """Batch norm with one scale and shift, but running statistics of each domain or of all.

    Statistics of each domain are those of domain-specific batch normalisation (Chang et al., CVPR
    2019), in training and in evaluation.

    Args:
        channels: C of inputs [B, C, ...], or of the rows [M, C] of a sparse tensor.
        domains: names of domains with statistics of their own; empty: all domains share them.
        together: whether samples of all domains are normalised together; else those of one domain.

    Attributes:
        domain: name of the next input's domain, which :func:`of_domain` sets.
        add_up: called with sums and their domain (None: all domains); adds them up over the
            processes with samples of that domain. None: all samples are in this process.
    """

    def __init__(
        self, channels: int, domains: Sequence[str] = (), *, together: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.statistics: nn.Module = (
            PerDomain({name: _Statistics(channels) for name in domains})
            if domains
            else _Statistics(channels)
        )
        self.together = together
        self.domain: str | None = None
        self.add_up: Callable[[Tensor, str | None], Tensor] | None = None

    def forward(self, input: Any) -> Any:
        """Normalises a tensor, or the features of a sparse tensor; the shape stays the same."""
        is_sparse = isinstance(input, sparse.SparseTensor)
        value: Tensor = input.feats if is_sparse else input
        known = self.statistics
        if isinstance(known, PerDomain):
            assert self.domain is not None, "call it within of_domain(), which names the domain"
            known = known[self.domain]
        assert isinstance(known, _Statistics)
        shape = (1, -1, *[1] * (value.dim() - 2))
        mean, variance = known.mean, known.variance
        if self.training:  # statistics of all processes, in two passes to avoid cancellation
            others = [dim for dim in range(value.dim()) if dim != 1]
            sums = value.sum(others)
            count = sums.new_tensor([value.numel() / max(value.shape[1], 1)])
            domain = None if self.together else self.domain
            add_up = self.add_up or (lambda own, _: own)
            added = add_up(torch.cat([sums, count]), domain)
            mean, total = added[:-1] / added[-1], added[-1].detach()
            squares = (value - mean.view(shape)).square().sum(others)
            variance = add_up(squares, domain) / total
            with torch.no_grad():
                known.mean.lerp_(mean, _MOMENTUM)
                known.variance.lerp_(variance * (total / (total - 1).clamp(min=1)), _MOMENTUM)
        scale = self.weight * (variance + _EPS).rsqrt()
        shift = self.bias - mean * scale
        normalised = value * scale.view(shape) + shift.view(shape)
        return input.replace_feats(normalised) if is_sparse else normalised


_EPS, _MOMENTUM = 1e-5, 0.1


class _Statistics(nn.Module):
    """Running mean and variance [C], used in evaluation."""

    mean: Tensor
    variance: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))


@contextmanager
def of_domain(module: nn.Module, name: str) -> Iterator[None]:
    """Context in which the inputs of ``module`` belong to the domain ``name``."""
    norms = [each for each in module.modules() if isinstance(each, DomainNorm)]
    for norm in norms:
        norm.domain = name
    try:
        yield
    finally:
        for norm in norms:
            norm.domain = None


class DomainSeparationNetwork(nn.Module):
    """A shared encoder, a private one for each domain, a decoder, a head and a discriminator.

    Args:
        make_encoder: returns an encoder; its argument ``make_norm`` maps a number of channels to a
            norm, or to None for an encoder without norms.
        domains: names of the domains, the source first.
        code: number of values of a code, C.
        num_classes: number of classes, K.
        decoder: maps codes [B, C] to reconstructions [B, *decoded_shape].
        decoded: maps a batch's input to the tensor to reconstruct [B, *decoded_shape].
        decoded_shape: shape of a sample's reconstruction.
        norm: see :data:`Norm`; ``all`` needs inputs that can be concatenated.
        losses: losses of the training; None: the defaults of :class:`DomainLosses`.
    """

    def __init__(
        self,
        make_encoder: Callable[..., nn.Module],
        *,
        domains: Sequence[str],
        code: int,
        num_classes: int,
        decoder: nn.Module,
        decoded: Callable[[Any], Tensor],
        decoded_shape: Sequence[int],
        norm: Norm,
        losses: DomainLosses | None = None,
    ) -> None:
        super().__init__()
        listed = ", ".join(domains) or "none"
        valid = "a source and at least one target, with different names of letters, digits and _"
        unique = len(domains) >= 2 and len({*domains}) == len(domains)
        require(
            unique and all(re.fullmatch(r"\w+", name) for name in domains), "domains", listed, valid
        )
        kinds: dict[str, Callable[[int], nn.Module | None]] = {
            "none": lambda channels: None,
            "domain": partial(DomainNorm, domains=tuple(domains)),
            "all": partial(DomainNorm, together=True),
        }
        valid = "none, domain (statistics of each domain) or all (of all together)"
        require(norm in kinds, "norm", norm, valid)
        self.domains = tuple(domains)
        self.num_classes = num_classes
        self.norm = norm
        self.losses = losses or DomainLosses()
        self.shared = make_encoder(make_norm=kinds[norm])
        own: Callable[[int], nn.Module | None] = kinds["none"] if norm == "none" else DomainNorm
        self.private = PerDomain({name: make_encoder(make_norm=own) for name in domains})
        self.decoder = decoder
        self.decoded = decoded
        self.decoded_shape = tuple(decoded_shape)
        self.code = code
        self.head, self.discriminator = (
            nn.Sequential(nn.Linear(code, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, outputs))
            for outputs in (num_classes, len(domains))
        )

    def shared_codes(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the shared codes [B, C] of each domain's input, by domain name."""
        if self.norm != "all" or len(inputs) < 2:
            found = {}
            for name, each in inputs.items():
                with of_domain(self.shared, name):
                    found[name] = self.shared(each)
            return found
        values = list(inputs.values())
        sizes = [batch_size(each) for each in values]
        if isinstance(values[0], sparse.SparseTensor):
            offsets = [sum(sizes[:number]) for number in range(len(sizes))]
            coords = [
                each.coords + each.coords.new_tensor([offset, 0, 0, 0])
                for each, offset in zip(values, offsets, strict=True)
            ]
            joined = sparse.SparseTensor(
                torch.cat([each.feats for each in values]),
                torch.cat(coords),
                spatial_shape=values[0].spatial_shape,
                batch_size=sum(sizes),
            )
            codes_BC = self.shared(joined)
        else:
            codes_BC = self.shared(torch.cat(values))
        return dict(zip(inputs, codes_BC.split_with_sizes(sizes), strict=True))


def batch_size(input: Any) -> int:
    """Returns the number of samples of a dense or sparse input."""
    return input.batch_size if isinstance(input, sparse.SparseTensor) else len(input)


def dsn_dense(
    dimensions: int,
    num_classes: int,
    *,
    domains: Sequence[str],
    in_channels: int = 1,
    code: int = 100,
    width: float = 1.0,
    decoded: Sequence[int],
    norm: Norm = "none",
    losses: DomainLosses | None = None,
) -> DomainSeparationNetwork:
    """Builds a domain separation network for images or volumes of any size.

    An encoder has two convolutions with kernel size 5 and a max pool after each, then an average
    pool to a coarse grid and a linear layer; the decoder has a linear layer and three convolutions,
    between which values are repeated up to the decoded size.

    Args:
        dimensions: 2 for images, 3 for volumes.
        num_classes: number of classes, K.
        domains: names of the domains, the source first.
        in_channels: channels of a sample.
        code: number of values of a shared or private code, C.
        width: multiplies the channels of hidden layers.
        decoded: spatial size of reconstructions; samples of another size are averaged to it.
        norm: batch norms of the encoders; see :data:`Norm`.
        losses: losses of the training; None: the defaults of :class:`DomainLosses`.
    """
    check_sizes(num_classes, in_channels=in_channels, width=width)
    channels = [scaled(each, width) for each in _CHANNELS]

    def make_encoder(make_norm: Callable[[int], nn.Module | None]) -> nn.Module:
        layers: list[nn.Module | None] = []
        for before, after in zip([in_channels, *channels], channels, strict=False):
            layer = CONVOLUTIONS[dimensions](before, after, 5, padding=2)
            layers += [layer, make_norm(after), nn.ReLU(), MAX_POOLS[dimensions](2)]
        side = _POOLED[dimensions]
        pool = {2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[dimensions](side)
        layers += [pool, nn.Flatten(), nn.Linear(channels[-1] * side**dimensions, code)]
        return nn.Sequential(*(each for each in layers if each is not None))

    return DomainSeparationNetwork(
        make_encoder,
        domains=domains,
        code=code,
        num_classes=num_classes,
        decoder=_decoder(code, in_channels, decoded, dimensions, scaled(_CHANNELS[0], width)),
        decoded=partial(_averaged, size=tuple(decoded)),
        decoded_shape=(in_channels, *decoded),
        norm=norm,
        losses=losses,
    )


dsn_2d = partial(dsn_dense, 2)
dsn_3d = partial(dsn_dense, 3)


def dsn_sparse(
    num_classes: int,
    *,
    domains: Sequence[str],
    in_channels: int = 1,
    code: int = 100,
    width: float = 1.0,
    decoded: Sequence[int] = (16, 16, 16),
    norm: Norm = "domain",
    losses: DomainLosses | None = None,
    backend: sparse.Backend | None = None,
) -> DomainSeparationNetwork:
    """Builds a network for sparse tensors of shapes; arguments as in :func:`dsn_dense`.

    An encoder has three submanifold convolutions with a max pool after each, then a global max pool
    and a linear layer. The decoder reconstructs the share of occupied voxels in each cell of a
    coarser grid.
    """
    check_sizes(num_classes, in_channels=in_channels, width=width)
    channels = [scaled(each, width) for each in (*_CHANNELS, 2 * _CHANNELS[-1])]

    def make_encoder(make_norm: Callable[[int], nn.Module | None]) -> nn.Module:
        layers: list[nn.Module | None] = []
        for before, after in zip([in_channels, *channels], channels, strict=False):
            layers += [sparse.Conv3d(before, after, 3, backend=backend), make_norm(after)]
            layers += [sparse.ReLU(), sparse.MaxPool3d(2, backend=backend)]
        layers += [sparse.GlobalMaxPool(backend=backend), nn.Linear(channels[-1], code)]
        return nn.Sequential(*(each for each in layers if each is not None))

    return DomainSeparationNetwork(
        make_encoder,
        domains=domains,
        code=code,
        num_classes=num_classes,
        decoder=_decoder(code, 1, decoded, 3, scaled(_CHANNELS[0], width)),
        decoded=partial(_averaged, size=tuple(decoded)),
        decoded_shape=(1, *decoded),
        norm=norm,
        losses=losses,
    )


def _decoder(
    code: int, out_channels: int, decoded: Sequence[int], dimensions: int, channels: int
) -> nn.Sequential:
    valid = f"{dimensions} sizes of reconstructions, each at least 4"
    require(len(decoded) == dimensions and min(decoded) >= 4, "decoded", list(decoded), valid)
    coarse, medium = (tuple(-(-each // by) for each in decoded) for by in (4, 2))
    conv = partial(CONVOLUTIONS[dimensions], kernel_size=3, padding=1)
    return nn.Sequential(
        nn.Linear(code, channels * torch.Size(coarse).numel()),
        nn.ReLU(),
        nn.Unflatten(1, (channels, *coarse)),
        conv(channels, channels),
        nn.ReLU(),
        nn.Upsample(size=medium),
        conv(channels, channels),
        nn.ReLU(),
        nn.Upsample(size=tuple(decoded)),
        conv(channels, out_channels),
    )


def _averaged(input: Tensor | sparse.SparseTensor, *, size: tuple[int, ...]) -> Tensor:
    if isinstance(input, sparse.SparseTensor):  # 1 at each occupied voxel, 0 elsewhere
        input = input.replace_feats(input.feats.new_ones(len(input), 1)).dense()
    if tuple(input.shape[2:]) == size:
        return input
    pools: dict[int, Callable[..., Tensor]] = {2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
    return pools[len(size)](input, size)
