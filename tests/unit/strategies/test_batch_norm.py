"""Batch norms of ranks that train in microbatches, against one process with the whole minibatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from sparsepipe.errors import ConfigError
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support.norm_cases import Normed, distance, whole
from tests.support.pipeline_cases import CLASSES, QUIET, Net, dense_layers, plain_trainer, weights
from tests.support.processes import run
from tests.support.synchronous_cases import Case, loader, make_net, train

RUNNING = ("running_mean", "running_var")


FP32 = {"dense": 1e-6, "sparse": 1e-6, "residual": 3e-6}
"""Share of the largest element by which two orders of summing differ after two epochs, at most. In
the deepest network single biases came to 1.0e-6."""


FP64 = 1e-10
"""The same in double precision: also of the least biases, which are of 1e-6."""


def check(case: Case, found: Sequence[Any]) -> None:
    oracle = Normed(case)
    oracle.train()
    expected = oracle.state()
    for state, _, _ in found:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            statistic = name.endswith(RUNNING)
            if case.batch_norm == "deferred" and not statistic:
                # No gradient hangs on what is summed in another order.
                assert torch.equal(value, expected[name]), f"{case}: {name}"
            elif name.endswith("num_batches_tracked"):
                assert torch.equal(value, expected[name]), f"{case}: {name}"
            else:
                assert distance(value, expected[name]) < FP32[case.net], f"{case}: {name}"
    check_same([state for state, _, _ in found], case)
    if is_whole(case) and case.net == "dense":
        check_whole(case, found[0][0], FP32[case.net])


def is_whole(case: Case) -> bool:
    """Whether it has the gradients of whole minibatches of one reader."""
    return case.batch_norm == "running" and case.replicas[0] == 1


def check_same(states: Sequence[dict[str, Tensor]], case: Any) -> None:
    for state in states[1:]:
        for name, value in state.items():
            assert torch.equal(value, states[0][name]), f"{case}: {name}"


def check_whole(case: Case, state: dict[str, Tensor], bound: float) -> None:
    """Against the minibatch in one piece, in double precision.

    A deep network has to be trained in double precision, too: of its many values one next to 0
    may have the other sign in single precision. Then a ReLU lets a gradient pass in one of the
    two only, which is no rounding any more.
    """
    oracle = whole(case, by_hand=case.net == "dense")
    oracle.train()
    for name, value in oracle.state().items():
        assert distance(state[name], value) < bound, f"{case}, whole: {name}"


def check_all(cases: Sequence[Case]) -> list[dict[str, Tensor]]:
    """Trains cases of as many ranks in the same processes, one after the other.

    Those with the gradients of whole minibatches are trained in double precision as well.

    Returns:
        The final state of each case.
    """
    ranks = sum(cases[0].replicas)
    doubled = [dataclasses.replace(c, precision="64-true") for c in cases if is_whole(c)]
    every = [*cases, *doubled]
    if ranks == 1:
        everyone = [train(0, every)]
    else:
        everyone = run(train, ranks, every, limit_s=60 + 20 * len(every))
    found = list(zip(*everyone, strict=True))
    for case, ranks_found in zip(cases, found, strict=False):
        check(case, ranks_found)
    for case, ((state, _, _), *_) in zip(doubled, found[len(cases) :], strict=True):
        check_whole(case, state, FP64)
    return [state for state, _, _ in everyone[0][: len(cases)]]


def of(mode: str, config: str, parts: int, schedule: str = "gpipe", **options: Any) -> Case:
    net = options.pop("net", "dense")
    samples = options.pop("samples", 34)
    return Case(config, parts, schedule, net=net, samples=samples, batch_norm=mode, **options)


COVERING = {
    1: [of("deferred", "1", 3), of("running", "1", 1)],
    2: [
        of("deferred", "1-1", 3, "1f1b", net="sparse", samples=23, epochs=1),
        of("deferred", "1-1", 4, recompute="all"),
        of("running", "1-1", 8, samples=39),  # three microbatches of the last batch are empty
    ],
    3: [
        of("deferred", "2-1", 4, samples=68),
        of("deferred", "2-1", 2, dealt=3),  # in the last step the second device has no batch
        of("running", "1-2", 3, "1f1b", recompute="all"),
    ],
}


@pytest.mark.parametrize("ranks", COVERING)
def test_norms_are_those_of_one_process(ranks: int) -> None:
    check_all(COVERING[ranks])


@pytest.mark.full
@pytest.mark.parametrize("mode", ["deferred", "running"])
@pytest.mark.parametrize("net", ["dense", "sparse", "residual"])
def test_every_depth_and_number_of_microbatches(net: str, mode: str) -> None:
    """Against one process, and to the last bit against each other where only the plan differs."""
    found: dict[int, list[Any]] = {}
    for config in ("1", "1-1", "1-1-1", "1-1-1-1"):
        cases = [
            of(mode, config, T, schedule, net=net, optimizer=optimizer)
            for T in (1, 2, 3, 5, 8)
            for schedule, optimizer in [("1f1b", "momentum") if T % 2 else ("gpipe", "decay")]
        ]
        for case, state in zip(cases, check_all(cases), strict=True):
            found.setdefault(case.microbatches, []).append(state)
    for T, states in found.items():
        check_same(states, T)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["deferred", "running"])
@pytest.mark.parametrize("net", ["dense", "sparse"])
@pytest.mark.parametrize("config", ["2-1", "1-2", "2-2", "1-2-1"])
def test_replicas(config: str, net: str, mode: str) -> None:
    readers = int(config[0])
    check_all(
        [
            of(mode, config, parts, schedule, net=net, samples=34 * readers)
            for parts in (2, 3, 4)
            for schedule in ("gpipe", "1f1b")
        ]
    )


@pytest.mark.parametrize("net", ["dense", "sparse"])
def test_how_a_minibatch_is_cut_changes_no_gradient(net: str) -> None:
    """In double precision, where nothing is left of rounding that could hide anything."""
    cases = [of("running", "1", parts, net=net, samples=23) for parts in (1, 3, 6)]
    found = [weights(fitted(case, 2, precision="64-true")[1]) for case in cases]
    for state in found[1:]:
        for name, value in state.items():
            assert distance(value, found[0][name]) < 1e-12, name
    other = fitted(of("deferred", "1", 2, net=net, samples=23), 2, precision="64-true")[1]
    first = next(name for name in found[0] if name.endswith(("weight", "kernel")))
    assert distance(weights(other)[first], found[0][first]) > 1e-3


STOPPED = of("running", "1-1", 3)


def fitted(
    case: Case, epochs: int, *, precision: Any = None, ckpt_path: str | None = None
) -> tuple[pl.Trainer, Net]:
    strategy = SynchronousPipelineStrategy(
        microbatches=case.microbatches,
        batch_norm=case.batch_norm,  # type: ignore[arg-type]
        config=case.config,
        cuts=case.cuts,
        timeout_s=60,
    )
    trainer = pl.Trainer(
        **QUIET,
        devices=sum(case.replicas),
        max_epochs=epochs,
        precision=precision,
        limit_val_batches=0 if precision else None,  # its input would be of single precision
        strategy=strategy,
    )
    net = make_net(case)
    trainer.fit(net, loader(case, 0), loader(case, 0), ckpt_path=ckpt_path)
    return trainer, net


def saving(rank: int, path: Path) -> tuple[dict[str, Tensor], float, list[str]]:
    """A run of one epoch that leaves a checkpoint."""
    trainer, net = fitted(STOPPED, 1)
    trainer.save_checkpoint(path)
    patched = [name for name, module in net.named_modules() if "forward" in vars(module)]
    assert [type(layer) for layer in net.layers] == [type(layer) for layer in dense_layers()]
    return weights(net), float(trainer.callback_metrics["val_loss"]), patched


def test_checkpoints_are_those_of_any_run(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    (state, loss, patched), _ = run(saving, 2, path)
    assert not patched
    # A plain Trainer has the same to load, and normalises by it in evaluation.
    plain = make_net(STOPPED)
    assert state.keys() == plain.state_dict().keys()
    trainer = plain_trainer()
    (told,) = trainer.validate(plain, loader(STOPPED, 0), ckpt_path=str(path), verbose=False)
    assert told["val_loss"] == pytest.approx(loss, rel=1e-6)
    # Another plan goes on as if nothing had happened: a minibatch leaves nothing but buffers.
    alone = dataclasses.replace(STOPPED, config="1")
    _, resumed = fitted(alone, 2, ckpt_path=str(path))
    _, straight = fitted(alone, 2)
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_unknown_norms_are_refused_in_training_only() -> None:
    case = of("deferred", "1", 2)
    net = Net(nn.Sequential(nn.Linear(6, 8), Own(8), nn.Linear(8, CLASSES)))
    strategy = SynchronousPipelineStrategy(microbatches=2, batch_norm="deferred")
    trainer = pl.Trainer(**QUIET, devices=1, max_epochs=1, strategy=strategy)
    trainer.validate(net, loader(case, 0), verbose=False)
    with pytest.raises(ConfigError, match=r"layers\.1 is a Own with a forward of its own"):
        trainer.fit(net, loader(case, 0))


def test_another_batch_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_norm='sync' is unknown") as refused:
        SynchronousPipelineStrategy(batch_norm="sync")  # type: ignore[arg-type]
    assert refused.value.remedy == "use one of microbatch, deferred, running"
