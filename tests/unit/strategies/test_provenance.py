"""What hooks and losses compute from what, by the operations that they do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsepipe.errors import ConfigError
from sparsepipe.strategies.pipeline.provenance import LossWatch, UpdateWatch

Hook = Callable[[list[nn.Parameter]], Any]


def _drop(every: list[nn.Parameter], when: bool) -> None:
    if when:
        nn.ParameterList(every).zero_grad()


def _each_by_its_own(every: list[nn.Parameter]) -> None:
    for p in every:
        if p.grad.norm() > 1 and float(p.norm()) > 0:
            p.grad.mul_(p.norm().item() / p.grad.norm().item())
        if p.grad.abs().max() > 5:
            p.grad = None


def _clamped(every: list[nn.Parameter]) -> None:
    torch._foreach_clamp_max_([p.grad for p in every], 0.1)
    torch._foreach_mul_([p.grad for p in every], torch._foreach_norm([p.grad for p in every]))
    for p in every:
        p.data.add_(p.grad, alpha=0.1).clamp_(-1, 1)


def _logged(every: list[nn.Parameter]) -> Any:
    norms = [p.grad.norm() for p in every]
    total = torch.stack(norms).norm()
    return total, total.item(), [norm.item() for norm in norms], [float(n) for n in norms]


def _logged_and_clamped(every: list[nn.Parameter]) -> None:
    assert [p.grad.norm().item() for p in every]
    _clamped(every)


REFUSED: list[Hook] = [
    lambda every: nn.utils.clip_grad_norm_(every, 0.1),
    lambda every: nn.utils.clip_grad_norm_(every, 0.1, foreach=False),
    lambda every: _drop(every, bool(torch.stack([p.grad.norm() for p in every]).norm() > 9)),
    lambda every: _drop(every, sum(p.grad.norm().item() ** 2 for p in every) > 99),
    lambda every: _drop(every, sum(float(p.grad.norm()) ** 2 for p in every) > 0),
    lambda every: _drop(every, math.sqrt(sum(p.grad.norm().item() ** 2 for p in every)) > 1),
    lambda every: _drop(every, max(float(p.grad.detach().numpy().max()) for p in every) > 0),
    lambda every: _drop(every, any(bool((p.grad > 0).any()) for p in every)),
    lambda every: _drop(every, all(bool((p.grad > 0).any()) for p in every)),
    lambda every: every[0].grad.mul_(min([float(p.grad.norm()) for p in every])),
    lambda every: every[0].grad.copy_(torch.cat([p.grad.flatten() for p in every])[:6].view(2, 3)),
    lambda every: setattr(every[0], "grad", every[0].grad * every[1].grad.norm()),
    lambda every: every[0].data.mul_(torch.tensor([p.grad.norm() for p in every]).max()),
]


def watched(hook: Hook, *, within: str = "on_before_optimizer_step") -> None:
    every = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))]
    module: Any = SimpleNamespace(_current_fx_name=within)
    named = {"layers.0.weight": every[0], "layers.2.bias": every[1]}
    watch = UpdateWatch(
        module, named, layer_of=lambda name: name.split(".")[1], notice=lambda: None
    )
    for p in every:
        p.grad = torch.full_like(p, 2)
    with watch:
        hook(every)


@pytest.mark.parametrize("hook", REFUSED)
def test_an_update_by_several_layers_is_refused(hook: Hook) -> None:
    with pytest.raises(ConfigError, match="of several layers, such as their norm"):
        watched(hook)


@pytest.mark.parametrize("hook", [_each_by_its_own, _clamped, _logged, _logged_and_clamped])
def test_what_each_parameter_needs_alone_is_accepted(hook: Hook) -> None:
    watched(hook)


class Lars(torch.optim.SGD):
    """Scales gradients by norms of each parameter, of which one is 0, then updates all."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.norm() != 0 and p.grad.norm().item() > 0:
                p.grad.mul_(p.norm().item() / p.grad.norm().item())
        return super().step(closure)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [Lars, torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_by_parameter_are_accepted(kind: Any, options: dict[str, Any]) -> None:
    def step(every: list[nn.Parameter]) -> None:
        every[1].data.zero_()
        kind(every, lr=0.1, **options).step()

    watched(step, within="optimizer_step")


CLASSES = torch.tensor([1.0, 2.0, 4.0])
PENALISED = nn.Parameter(torch.ones(3))
LABELS = torch.tensor([[0, 1, 2, 1], [2, 2, 1, 0]])  # of two microbatches
MASKS = torch.tensor([[0.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 1.0]])
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: list[tuple[Loss, list[float | None], bool]] = [
    (lambda z, y, m: F.cross_entropy(z, y), [None, None], False),
    (
        lambda z, y, m: F.cross_entropy(z, y, label_smoothing=0.1) + z.std(1).mean(),
        [None] * 2,
        False,
    ),
    (lambda z, y, m: (z.sum(1) / z.norm(dim=1)).sum() / len(z), [None, None], False),
    (lambda z, y, m: z[torch.arange(4), y].mean() / torch.tensor(3.0), [None, None], False),
    (lambda z, y, m: z.square().mean() + PENALISED.square().sum(), [None, None], False),
    (lambda z, y, m: torch.stack([z.mean(), z.square().mean()]).sum(), [None, None], False),
    (lambda z, y, m: F.cross_entropy(z, y, weight=CLASSES), [9, 11], False),
    (lambda z, y, m: 2 * F.cross_entropy(z, y, CLASSES, label_smoothing=0.1), [9, 11], False),
    (lambda z, y, m: F.nll_loss(z.log_softmax(1), y, ignore_index=1), [2, 3], False),
    (lambda z, y, m: F.cross_entropy(z[y > 1], y[y > 1]), [1, 2], False),
    (lambda z, y, m: F.cross_entropy(torch.stack([z, z], 2), _voxels(y)), [2, 2], False),
    (lambda z, y, m: F.cross_entropy(torch.cat([z, z]), torch.cat([y, y])), [8, 8], False),
    (lambda z, y, m: F.cross_entropy(z, y, weight=CLASSES) + z.mean(), [9, 11], True),
    (lambda z, y, m: (z.sum(1) * m).sum() / m.sum(), [None, None], True),
    (lambda z, y, m: (z.sum(1) * m).sum() / m.sum().item(), [None, None], True),
    (lambda z, y, m: (z.sum(1) * (m / m.sum())).sum(), [None, None], True),
    (lambda z, y, m: z[m > 0].square().mean(), [None, None], True),
    (lambda z, y, m: F.cross_entropy(z, y, reduction="sum"), [None, None], True),
    (lambda z, y, m: z.square().mean(1).topk(2).values.mean(), [None, None], True),
    (lambda z, y, m: 1 - (z * z).sum() / (z.abs() + 1).sum(), [None, None], True),  # Dice
    (lambda z, y, m: 1 - ((z * z).sum(0) / (z.abs() + 1).sum(0)).mean(), [None, None], True),
]


def _voxels(y: Tensor) -> Tensor:
    return torch.stack([y, y * 0 - 100], 1)


@pytest.mark.parametrize(("loss", "weights", "warns"), LOSSES)
def test_weights_of_losses(loss: Loss, weights: list[float | None], warns: bool) -> None:
    watch: Any = LossWatch(nn.Module())  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for y, m, weight in zip(LABELS, MASKS, weights, strict=True):
            z = torch.randn(len(y), 3, generator=draw).requires_grad_()
            watch.follow(z)
            assert watch.weight(loss(z, y, m), samples=len(y)) == weight
    assert len(caught) == warns
