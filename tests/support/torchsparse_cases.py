"""Tensors, windows and gradients on which backends are compared."""

import torch

from sparsepipe.sparse import KernelSpec, NativeBackend, SparseTensor

NATIVE = NativeBackend()
SPECS = [
    KernelSpec.of(1),
    KernelSpec.of(2),
    KernelSpec.of(3),
    KernelSpec.of((3, 1, 5)),
    KernelSpec.of((1, 2, 2)),
    KernelSpec.of(1, stride=2),
    KernelSpec.of(2, stride=2),
    KernelSpec.of((2, 2, 1), stride=(2, 2, 1)),
    KernelSpec.of(2, stride=3),
    KernelSpec.of(3, stride=2),
    KernelSpec.of(3, stride=3),
    KernelSpec.of(5, stride=5),
    KernelSpec.of((3, 1, 1), stride=(3, 1, 1)),
    KernelSpec.of(3, stride=(1, 2, 1)),
    KernelSpec.of(5, stride=2),
    KernelSpec.of(3, dilation=2),
    KernelSpec.of(4),
]


def scattered(extent=(5, 6, 7), *, stride=1, channels=2, share=0.2, shape=True, seed=0):
    """A batch of two with a random share of the grid's sites, in random order."""
    random = torch.Generator().manual_seed(seed)
    sites = torch.cartesian_prod(torch.arange(2), *map(torch.arange, extent))
    chosen = sites[torch.rand(len(sites), generator=random) < share].int()
    chosen = chosen[torch.randperm(len(chosen), generator=random)]
    feats = torch.randn(len(chosen), channels, generator=random)
    return SparseTensor(
        feats, chosen, stride=stride, spatial_shape=extent if shape else None, batch_size=2
    )


def weights(spec, channels=2, seed=1, *, bias=True):
    random = torch.Generator().manual_seed(seed)
    kernel = torch.randn(spec.volume, channels, 3, generator=random).requires_grad_()
    return kernel, torch.randn(3, generator=random).requires_grad_() if bias else None


def gradients(conv, x, spec):
    kernel, bias = (w.detach().to(x.device).requires_grad_() for w in weights(spec))
    feats = x.feats.detach().clone().requires_grad_()
    out = conv(x.replace_feats(feats), kernel, bias, spec)
    pulled = torch.linspace(-1, 1, out.feats.numel(), device=x.device).reshape(out.feats.shape)
    return out, torch.autograd.grad(out.feats, (feats, kernel, bias), pulled)
