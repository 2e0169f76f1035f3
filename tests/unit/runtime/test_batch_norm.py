from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsepipe.errors import ConfigError
from sparsepipe.models.chain import ChainBlock
from sparsepipe.runtime.batch_norm import MinibatchNorms, Moments, NormMode, check_norms, norms_of
from sparsepipe.runtime.collectives.replicas import Replicas
from sparsepipe.runtime.stage import StageLayers
from sparsepipe.sparse import BatchNorm, SparseTensor
from tests.support.processes import run

ALONE = Replicas(None, {})
DEFERRED, RUNNING = NormMode.DEFERRED, NormMode.RUNNING

KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "rows": (lambda: nn.BatchNorm1d(5), ()),
    "sequences": (lambda: nn.BatchNorm1d(5, momentum=0.3), (7,)),
    "images": (lambda: nn.BatchNorm2d(5, eps=0.1), (4, 3)),
    "volumes": (lambda: nn.BatchNorm3d(5, momentum=None), (2, 3, 4)),
    "bare": (lambda: nn.BatchNorm1d(5, affine=False), ()),
    "sparse": (lambda: BatchNorm(5, momentum=None), ()),
}


def minibatches(shape: tuple[int, ...] = (), *, samples: int = 13, of: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    scale = torch.tensor([1.0, 30.0, 0.01, 5.0, 2.0]).view(1, 5, *[1] * len(shape))
    return [3 * scale + scale * torch.randn(samples, 5, *shape, generator=draw) for _ in range(of)]


def gathered(
    norm: nn.Module,
    parts: Sequence[Any],
    mode: NormMode,
    backward: Callable[[list[Any]], None] = lambda outputs: None,
) -> list[Any]:
    """What comes out of the parts of one minibatch, after which the statistics move."""
    norms = MinibatchNorms(norms_of(norm), mode)
    with norms.gathering():
        outputs = [norm(part) for part in parts]
        backward(outputs)
        norms.move(ALONE)
    return outputs


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", [DEFERRED, RUNNING])
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_move_as_by_the_whole_minibatch(kind: str, mode: NormMode) -> None:
    make, shape = KINDS[kind]
    norm = make()
    # torch itself, in double precision, on the whole minibatch.
    expected = copy.deepcopy(norm).double()
    for x in minibatches(shape):
        gathered(norm, x.tensor_split(4), mode)
        expected(x.double())
        for name, value in norm.named_buffers():
            same(value.double(), expected.get_buffer(name).double())


@pytest.mark.parametrize("mode", [DEFERRED, RUNNING])
def test_layers_that_checkpoint_themselves_count_once(mode: NormMode) -> None:
    plain = ChainBlock(nn.Conv1d(5, 5, 3), nn.BatchNorm1d(5), nn.Tanh())
    again = ChainBlock(*copy.deepcopy(list(plain)), checkpointing=True)

    def backward(outputs: list[Any]) -> None:
        for output in outputs:
            output.square().sum().backward()

    for x in minibatches((7,)):
        for net in (plain, again):
            gathered(net, x.tensor_split(4), mode, backward)
    for mine, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    for mine, theirs in zip(again.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_deferred_norms_normalise_by_the_microbatch(kind: str) -> None:
    make, shape = KINDS[kind]
    norm, plain = make(), make()
    for x in minibatches(shape):
        parts = x.tensor_split(4)
        for found, part in zip(gathered(norm, parts, DEFERRED), parts, strict=True):
            assert torch.equal(found, plain(part))


@pytest.mark.parametrize("kind", KINDS)
def test_running_statistics_normalise_as_constants(kind: str) -> None:
    make, shape = KINDS[kind]
    norm = make()
    for x in minibatches(shape):
        plain = copy.deepcopy(norm).eval()
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        outputs = gathered(norm, mine.tensor_split(4), RUNNING, squared)
        expected = plain(theirs)
        assert torch.equal(torch.cat(outputs), expected)
        squared([expected])
        assert mine.grad is not None
        assert theirs.grad is not None
        same(mine.grad, theirs.grad)
        for ours, whole in zip(norm.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert whole.grad is not None
            torch.testing.assert_close(ours.grad, whole.grad, rtol=1e-5, atol=1e-4)
            ours.grad = None


def squared(outputs: list[Tensor]) -> None:
    for output in outputs:
        output.square().sum().backward()


def test_rows_of_sparse_tensors_count_whatever_their_samples() -> None:
    torch.manual_seed(0)
    coords = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0]]).int()
    x = SparseTensor(torch.randn(4, 5), coords, spatial_shape=(4, 4, 4), batch_size=2)
    lone = SparseTensor(torch.randn(1, 5), coords[:1], spatial_shape=(4, 4, 4), batch_size=1)
    norm = BatchNorm(5, momentum=1.0)
    outputs = gathered(norm, [x, lone], DEFERRED)
    assert isinstance(outputs[0], SparseTensor)
    rows = torch.cat([x.feats, lone.feats]).double()
    same(norm.running_mean.double(), rows.mean(0))
    same(norm.running_var.double(), rows.var(0))
    # A single row has no variance: it is normalised by what was known before.
    same(outputs[1].feats, lone.feats / (1 + norm.eps) ** 0.5)


@pytest.mark.parametrize("mode", [DEFERRED, RUNNING])
def test_digits_of_the_variance_stay_where_the_mean_is_large(mode: NormMode) -> None:
    norm = nn.BatchNorm1d(5, momentum=1.0)
    x = (torch.randn(900, 5, generator=torch.Generator().manual_seed(1)) + 3000).float()
    gathered(norm, x.tensor_split(7), mode)
    torch.testing.assert_close(norm.running_var.double(), x.double().var(0), rtol=1e-6, atol=0)


def test_modules_are_as_before_even_after_an_error() -> None:
    norm = nn.BatchNorm1d(5)
    norms = MinibatchNorms({"": norm}, DEFERRED)
    before = copy.deepcopy(norm.state_dict())

    def broken() -> None:
        with norms.gathering():
            norm(torch.randn(6, 5))
            assert "forward" in vars(norm)
            norm(torch.randn(6, 4))

    with pytest.raises(RuntimeError):
        broken()
    assert type(norm) is nn.BatchNorm1d
    assert "forward" not in vars(norm)
    assert norm.training
    state = norm.state_dict()
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in before)
    # What the minibatch left behind is in no later one.
    x = minibatches()[0]
    with norms.gathering():
        norm(x)
        norms.move(ALONE)
    same(norm.running_mean, 0.1 * x.mean(0))


@pytest.mark.parametrize("mode", [DEFERRED, RUNNING])
def test_recomputed_batches_count_once(mode: NormMode) -> None:
    draw = torch.Generator().manual_seed(5)
    parts = [torch.randn(6, 4, generator=draw) for _ in range(3)]
    found = []
    for spans in ([], [range(3)], [range(1), range(1, 3)]):
        torch.manual_seed(2)
        layers = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=None), nn.Tanh())
        stage = StageLayers(layers, layers, first=0, last=2, recomputed=spans)
        norms = MinibatchNorms(norms_of(layers), mode)
        for _ in range(2):
            with norms.gathering():
                flights = [stage.forward(x, minibatch=0, leaves={}) for x in parts]
                for flight in reversed(flights):
                    flight.backward([torch.ones(6, 5)], leaves={})
                norms.move(ALONE)
        gradients = [p.grad for p in layers.parameters()]
        found.append([*gradients, *layers.buffers()])
        assert int(layers[1].num_batches_tracked) == 2
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def in_replicas(rank: int) -> dict[str, Tensor]:
    group = torch.distributed.group.WORLD
    layers = nn.Sequential(nn.BatchNorm1d(5), nn.Tanh(), nn.BatchNorm1d(5, momentum=None))
    norms = MinibatchNorms(norms_of(layers), DEFERRED)
    for number, x in enumerate(minibatches(of=2)):
        parts = x.tensor_split(5)[rank::3]
        if number == 1 and rank == 2:
            parts = ()  # as where a reader has no batch in a partial last round
        with norms.gathering():
            for part in parts:
                layers(part)
            norms.move(Replicas(group, {}))
    return dict(layers.state_dict())


def test_replicas_move_by_the_minibatch_of_all_of_them() -> None:
    states = run(in_replicas, 3)
    expected = nn.BatchNorm1d(5).double()
    first, second = minibatches(of=2)
    expected(first.double())
    seen = second.tensor_split(5)
    expected(torch.cat([seen[i] for i in (0, 1, 3, 4)]).double())
    for state in states:
        same(state["0.running_mean"].double(), expected.running_mean)
        same(state["0.running_var"].double(), expected.running_var)
        assert int(state["2.num_batches_tracked"]) == 2
        for name, value in state.items():
            assert torch.equal(value, states[0][name])


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.abs())


def patched() -> nn.Module:
    norm = nn.BatchNorm1d(5)
    norm.forward = lambda x: x  # type: ignore[method-assign]
    return norm


REFUSED: dict[str, tuple[Callable[[], nn.Module], NormMode]] = {
    "0 is a Own with a forward of its own": (lambda: Own(5), DEFERRED),
    "0 is a SyncBatchNorm with a forward of its own": (lambda: nn.SyncBatchNorm(5), RUNNING),
    "0 is a BatchNorm1d with a forward of its own": (patched, DEFERRED),
    "0 (BatchNorm1d) has no running statistics": (
        lambda: nn.BatchNorm1d(5, track_running_stats=False),
        RUNNING,
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    make, mode = REFUSED[message]
    with pytest.raises(ConfigError) as refused:
        check_norms(nn.Sequential(make()), mode)
    assert message in refused.value.message
    assert "batch_norm=microbatch" in refused.value.remedy


def test_moments_of_parts_and_of_none() -> None:
    x = minibatches()[0].double()
    empty = Moments(count=0, mean_C=torch.zeros(5).double(), squares_C=torch.zeros(5).double())
    parts = [Moments.of(part) for part in x.split(6)]
    for mixed in ([*parts, empty], [empty, *parts], [Moments.together([empty, empty]), *parts]):
        found = Moments.together(mixed)
        assert found.count == 13
        torch.testing.assert_close(found.mean_C, x.mean(0))
        torch.testing.assert_close(found.squares_C, x.var(0, correction=0) * 13)
