"""Whatever pipelines train has the weights of an independent oracle in one process.

Each row is a module, a plan, a schedule and options. Each family of rows has its own oracle, and
its own full matrix, whose rows are trained by one group of ranks one after the other."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from sparsepipe.cluster import Device, Host, Inventory, Link
from sparsepipe.emulate import announce_hosts, emulated_hosts, enter_host
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.ordered_sum import ChainSum
from sparsepipe.schedule.communication import way_of
from tests.support import accumulation, asynchronous_cases
from tests.support.accumulation import Accumulation, Normed, distance, whole
from tests.support.asynchronous_cases import PLANS, leaders, num_ranks
from tests.support.namespace_cases import needs_namespaces
from tests.support.pipeline_cases import OPTIMIZERS, Net, weights
from tests.support.pipeline_cases import make_net as make_plain_net
from tests.support.processes import run, run_shared
from tests.support.synchronous_cases import NETS, Case, make_net, train_one
from tests.support.synchronous_cases import train as train_synchronously

Row = Any
Asynchronous = asynchronous_cases.Case
FP32 = {"residual": 3e-6}
"""Share of the largest element by which two orders of summing differ after two epochs, at most, if
not 1e-6. In the deepest network single biases came to 1.0e-6."""
FP64 = 1e-10
"""The same in double precision: also of the least biases, which are of 1e-6."""
LIMIT = 0.05
T = (1, 2, 3, 5, 8)
"""Microbatches: one, fewer and more than stages, and some that divide no batch."""
DEPTHS = ("1", "1-1", "1-1-1", "1-1-1-1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Rows with one oracle.

    Attributes:
        train: rows on one rank, one after the other; what it found of each.
        check: what the ranks found of a row.
        rows: those that cover the family.
        matrix: groups of rows, each of one number of ranks.
    """

    train: Callable[[int, Sequence[Row]], list[Any]]
    check: Callable[[Row, Sequence[Any]], None]
    rows: Sequence[Row]
    matrix: Mapping[str, Sequence[Row]] = dataclasses.field(default_factory=dict)


def assert_alike(state: Mapping[str, Tensor], others: Mapping[str, Tensor], row: Any) -> None:
    assert state.keys() == others.keys()
    for name, value in state.items():
        assert torch.equal(value, others[name]), f"{row}: {name}"


# Asynchronous pipelines against a replay of the weight versions that they recorded.


def replay_matrix() -> Iterator[tuple[str, list[Row]]]:
    for config, net in itertools.product(PLANS, ("dense", "sparse")):
        yield (
            f"{config} {net}",
            [
                Asynchronous(config, net=net, optimizer=optimizer, mode=mode, minibatches=number)
                for optimizer in OPTIMIZERS
                for mode in ("stash", "vertical_sync", "spectrain")
                for number in (4, 9)
                if mode != "spectrain" or optimizer != "adam"
            ],
        )


REPLAYED = Family(
    train=asynchronous_cases.train,
    check=asynchronous_cases.check,
    rows=[
        Asynchronous("1-1"),
        Asynchronous("1-1", net="sparse", optimizer="adam"),
        Asynchronous("1-1", net="residual"),
        Asynchronous("1-1", mode="spectrain", minibatches=4),
        Asynchronous("1-1", optimizer="decay", step_size=3),
        Asynchronous("2-1", optimizer="decay", minibatches=9),  # stage 0 ends in a partial round
        Asynchronous("2-1", net="residual", minibatches=6),
        Asynchronous("2-1", mode="vertical_sync", minibatches=10),
        Asynchronous("2-1", mode="spectrain", predict_backward=True, minibatches=7),
        Asynchronous("1-2", optimizer="adam"),
        Asynchronous("1-2", step_size=2),
        Asynchronous("1-2", mode="vertical_sync"),
        Asynchronous("1-1-1", optimizer="adam", net="sparse"),
        Asynchronous("1-1-1", net="unet", minibatches=4),  # skips cross both cuts
        Asynchronous("1-1-1", mode="vertical_sync"),
        Asynchronous("1-1-1", mode="spectrain", step_size=3),
        Asynchronous("1-1-1", mode="spectrain", predict_backward=True),
        Asynchronous("1-1-1", mode="none"),
        Asynchronous("1-2-1", net="sparse"),
        Asynchronous("2-1-1", minibatches=7, optimizer="decay", step_size=2),
        Asynchronous("2-1-1", minibatches=6, mode="none"),
        Asynchronous("1-3-1", minibatches=7),
        Asynchronous("1-3-1", mode="vertical_sync", minibatches=11),
        Asynchronous("2-3", optimizer="adam", minibatches=9),
        Asynchronous("2-3", mode="vertical_sync", optimizer="decay", minibatches=8),
        Asynchronous("1-3-1", net="sparse", optimizer="adam", minibatches=4),
    ],
    matrix=dict(replay_matrix()),
)


# Synchronous pipelines against gradient accumulation over the same microbatches.


def accumulated_matrix() -> Iterator[tuple[str, list[Row]]]:
    schedules, optimizers = ("gpipe", "1f1b", "eager_1f1b"), itertools.cycle(OPTIMIZERS)
    nets = ("dense", "drop", "sparse", "sparse_drop")
    for config, net, schedule in itertools.product(DEPTHS, nets, schedules):
        samples = 34 if net in ("dense", "sparse") else 39
        rows = [
            Case(config, parts, schedule, net=net, optimizer=next(optimizers), samples=samples)
            for parts in T
        ]
        yield f"{config} {net} {schedule}", rows
    replicated = ("2-1", "1-2", "2-2", "1-2-1", "2-1-1", "1-3-1", "2-3")
    for config, net in itertools.product(replicated, ("dense", "drop", "sparse_drop")):
        least, readers = max(map(int, config.split("-"))), int(config[0])
        rows = [
            Case(config, parts, schedule, net=net, samples=34 * readers)
            for parts in T
            if parts >= least
            for schedule in schedules
        ]
        yield f"{config} {net}", rows


ACCUMULATED = Family(
    train=train_synchronously,
    check=accumulation.check,
    rows=[
        Case("1", 1),
        Case("1", 4),
        Case("1", 3, "1f1b", net="dense", samples=34),
        Case("1", 8),
        Case("1-1", 4),
        Case("1-1", 3, "1f1b", net="dense", samples=34),
        Case("1-1", 7, "eager_1f1b"),
        Case("1-1", 8, "1f1b"),  # of the last batch's 5 samples, three microbatches have none
        Case("1-1", 3, net="sparse_drop", optimizer="adam", samples=22, epochs=1),
        Case("1-1", 1, net="dense"),
        Case("1-1-1", 8, optimizer="decay"),
        Case("1-1-1", 5, "1f1b", net="sparse", samples=22, epochs=1),
        Case("1-1", 3, "1f1b", net="unet", samples=22, epochs=1),
        Case("2-1", 4, "1f1b", samples=56),
        Case("2-1", 5, net="dense", optimizer="adam", samples=68),
        Case("2-1", 4, dealt=3),  # in the last step the second device has no batch
        Case("1-2", 3),
        Case("1-2-1", 7, "1f1b"),
        Case("1-2-1", 8, "eager_1f1b", net="drop"),
        Case("1-1-1-1", 6, "1f1b", net="dense", samples=34),
        Case("1-1-1-1", 8, net="drop"),
    ],
    matrix=dict(accumulated_matrix()),
)


# Networks without batch norms against one process that takes each minibatch in one piece.


def check_normless(case: Case, found: Sequence[Any]) -> None:
    oracle = Accumulation(dataclasses.replace(case, config="1", microbatches=1))
    oracle.train()
    expected, first = oracle.state(), weights(make_net(case).layers)
    moved = min(distance(value, first[name]) for name, value in expected.items())
    assert moved > 1e-4, "or nothing is learnt that could differ"
    for state, told, _ in found:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert distance(value, expected[name]) < 1e-6, f"{case} {case.recompute}: {name}"
        assert told["step"] == pytest.approx(oracle.step_loss, rel=1e-6), str(case)


def normless(config: str, parts: int, net: str, recompute: str = "none") -> Case:
    schedule = ("gpipe", "1f1b")[parts % 2]
    return Case(config, parts, schedule, net=net, samples=34, recompute=recompute)


NORMLESS = Family(
    train=train_synchronously,
    check=check_normless,
    rows=[
        *(normless("1", parts, net) for parts in (2, 7) for net in ("normless", "sparse_normless")),
        normless("1-1", 3, "normless", "all"),
    ],
    matrix={
        f"{config} {net}": [
            normless(config, parts, net, recompute)
            for parts in range(1, 9)
            for recompute in ("none", "all")
        ]
        for config in DEPTHS
        for net in ("normless", "sparse_normless")
    },
)


# Clipping by the norm of all stages against one process that clips: not even rounding differs.


def clipped(config: str, parts: int, schedule: str = "gpipe", **options: Any) -> Case:
    options = {"net": "dense", "samples": 34, "epochs": 2, **options}
    return Case(config, parts, schedule, clip=LIMIT, **options)


def check_clipped(case: Case, found: Sequence[Any]) -> None:
    oracle = Accumulation(case)
    oracle.train()
    assert min(oracle.norms) > 2 * LIMIT, f"{case}: nothing is clipped"
    for state, *_ in found:
        assert_alike(state, oracle.state(), case)


def clipped_matrix() -> Iterator[tuple[str, list[Row]]]:
    configs = ("1", "1-1", "1-1-1", "2-1", "1-2", "2-2", "1-2-1")
    for config, net in itertools.product(configs, ("dense", "sparse", "frozen")):
        options: dict[str, Any] = {"net": net, "samples": 34 * int(config[0])}
        optimizers = itertools.cycle(("momentum", "groups", "adam"))
        rows = [
            clipped(config, parts, schedule, optimizer=optimizer, **options)
            for parts in (2, 3, 5)
            for schedule, optimizer in zip(("gpipe", "1f1b"), optimizers, strict=False)
        ]
        yield f"{config} {net}", rows


CLIPPED = Family(
    train=train_synchronously,
    check=check_clipped,
    rows=[
        clipped("1", 3),
        clipped("1", 4, "1f1b", optimizer="groups"),
        clipped("1-1", 3),
        clipped("1-1", 4, "1f1b", optimizer="groups"),  # first no matrices, of all stages
        clipped("1-1", 2, net="frozen"),  # the first stage has no gradients
        clipped("1-1-1", 4, "1f1b", net="bare"),  # the second stage has no parameters
        clipped("2-1", 4, samples=68),
        clipped("1-2", 3, "1f1b", optimizer="adam"),
    ],
    matrix=dict(clipped_matrix()),
)


# Batch norms that move once a minibatch against one process with the whole minibatch.


def normed(mode: str, config: str, parts: int, schedule: str = "gpipe", **options: Any) -> Case:
    net = options.pop("net", "dense")
    samples = options.pop("samples", 34)
    return Case(config, parts, schedule, net=net, samples=samples, batch_norm=mode, **options)


def train_normed(rank: int, cases: Sequence[Case]) -> list[Any]:
    """Those with the gradients of whole minibatches are trained in double precision as well."""
    found = []
    for case in cases:
        doubled = dataclasses.replace(case, precision="64-true") if is_whole(case) else None
        state, *_ = train_one(case, rank)
        found.append((state, None if doubled is None else train_one(doubled, rank)[0]))
    return found


def is_whole(case: Case) -> bool:
    """Whether it has the gradients of whole minibatches of one reader."""
    return case.batch_norm == "running" and case.replicas[0] == 1


def check_normed(case: Case, found: Sequence[Any]) -> None:
    oracle = Normed(case)
    oracle.train()
    expected, bound = oracle.state(), FP32.get(case.net, 1e-6)
    for state, _ in found:
        assert_alike(state, found[0][0], case)
        assert state.keys() == expected.keys()
        for name, value in state.items():
            statistic = name.endswith(("running_mean", "running_var"))
            # Gradients of deferred norms hang on nothing that is summed in another order.
            exact = case.batch_norm == "deferred" and not statistic
            if exact or name.endswith("num_batches_tracked"):
                assert torch.equal(value, expected[name]), f"{case}: {name}"
            else:
                assert distance(value, expected[name]) < bound, f"{case}: {name}"
    if not is_whole(case):
        return
    # A deep network has to be trained in double precision, too: of its many values one next to 0
    # may have the other sign in single precision, and then a ReLU lets a gradient pass in one only.
    state, doubled = found[0]
    oracle = whole(case, by_hand=case.net == "dense")
    oracle.train()
    for name, value in oracle.state().items():
        assert distance(doubled[name], value) < FP64, f"{case}, whole: {name}"
        if case.net == "dense":
            assert distance(state[name], value) < bound, f"{case}, whole: {name}"


NORMED = Family(
    train=train_normed,
    check=check_normed,
    rows=[
        normed("deferred", "1", 3),
        normed("running", "1", 1),
        normed("deferred", "1-1", 3, "1f1b", net="sparse", samples=23, epochs=1),
        normed("deferred", "1-1", 4, recompute="all"),
        normed("running", "1-1", 8, samples=39),  # three microbatches of the last batch are empty
        normed("deferred", "2-1", 4, samples=68),
        normed("deferred", "2-1", 2, dealt=3),  # in the last step the second device has no batch
        normed("running", "1-2", 3, "1f1b", recompute="all"),
    ],
    matrix={
        f"{config} {net} {mode}": [
            normed(mode, config, parts, schedule, net=net, samples=34 * int(config[0]))
            for parts in (2, 3, 4)
            for schedule in ("gpipe", "1f1b")
        ]
        for config in ("2-1", "1-2", "2-2", "1-2-1")
        for net in ("dense", "sparse")
        for mode in ("deferred", "running")
    },
)


# Recomputation against the same training without it.


SPANS: dict[str, Any] = {
    "norm_drop": {"layers": [[1, 3], 5, [6, 8]]},
    "drop": {"layers": [1, 2, [4, 7]]},
    "dense": {"layers": [[0, 2], [3, 5]]},
    "sparse_drop": {"layers": [[0, 5], [6, 9], 11, [15, 20]]},  # one across a cut of two stages
}


class Runs(pl.Callback):
    """How often each layer of this rank began to run in training.

    The last one of a span that runs again ends as soon as nothing more is needed.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Net)
        for number, layer in enumerate(pl_module.layers):
            layer.register_forward_pre_hook(partial(self._count, number))

    def _count(self, number: int, *_: Any) -> None:
        self.counts[number] = self.counts.get(number, 0) + 1


def kinds_of(case: Case) -> list[Case]:
    """The case without recomputation, and with some kinds of it."""
    hows = ("none", "all", SPANS[case.net], {"stages": [len(case.replicas) - 1]})
    return [dataclasses.replace(case, recompute=how) for how in hows]


def train_recomputed(rank: int, cases: Sequence[Case]) -> list[Any]:
    """Of each kind of each case weights and statistics, losses, and how often layers ran."""
    found = []
    for case in cases:
        kinds = []
        for kind in kinds_of(case):
            runs = Runs()
            kinds.append((*train_one(kind, rank, callbacks=[runs]), runs.counts))
        found.append(kinds)
    return found


def recomputed_layers(case: Case) -> set[int]:
    """By the documents, not by the code."""
    length = len(NETS[case.net]())
    if isinstance(case.recompute, str):
        return set(range(length)) if case.recompute == "all" else set()
    spans = [[n, n] if isinstance(n, int) else n for n in case.recompute.get("layers", [])]
    found = {layer for first, last in spans for layer in range(first, last + 1)}
    bounds = [0, *case.cuts, length]
    for stage in case.recompute.get("stages", []):
        found |= {*range(bounds[stage], bounds[stage + 1])}
    return found


def check_recomputed(case: Case, found: Sequence[Any]) -> None:
    """The first kind keeps all; of the others layers ran twice, and nothing else differs."""
    for (state, told, most, counts), *others in found:
        for kind, (its_state, its_told, its_most, its_counts) in zip(
            kinds_of(case)[1:], others, strict=True
        ):
            assert its_state.keys() == state.keys()
            for name, value in its_state.items():
                assert torch.equal(value, state[name]), f"{kind} {kind.recompute}: {name}"
            assert its_told == told, f"{kind} {kind.recompute}"
            assert most in (None, its_most), "but where a plain Trainer runs"
            twice = recomputed_layers(kind)
            expected = {n: (1 + (n in twice)) * runs for n, runs in counts.items()}
            assert its_counts == expected, str(kind)


def recomputed_matrix() -> Iterator[tuple[str, list[Row]]]:
    configs, schedules = (*DEPTHS, "2-1", "1-2"), ("gpipe", "1f1b", "eager_1f1b")
    for config, net, schedule in itertools.product(configs, SPANS, schedules):
        least, readers = max(map(int, config.split("-"))), int(config[0])
        samples = {"drop": 39, "sparse_drop": 22}.get(net, 34) * readers
        rows = [
            Case(config, parts, schedule, net=net, samples=samples, unkeyed=unkeyed)
            for parts in (1, 2, 3, 8)
            if parts >= least
            for unkeyed in ([False, True] if net.endswith("drop") else [False])
        ]
        yield f"{config} {net} {schedule}", rows


RECOMPUTED = Family(
    train=train_recomputed,
    check=check_recomputed,
    rows=[
        Case("1", 1, net="norm_drop", samples=34),  # what would be a plain run otherwise
        Case("1", 3, "1f1b", net="norm_drop", unkeyed=True, samples=34),
        Case("1", 4, net="norm_drop", optimizer="adam", samples=34),
        Case("1", 3, net="norm_drop", batch_norm="deferred", samples=34),
        Case("1", 3, "1f1b", net="norm_drop", batch_norm="running", samples=34),
        Case("1-1", 4, "1f1b", net="norm_drop", unkeyed=True, samples=34),
        Case("1-1", 3, net="sparse_drop", samples=22, epochs=1),
    ],
    matrix=dict(recomputed_matrix()),
)


# Stages that are grids, whose shards add up in another order.


def train_grids(rank: int, cases: Sequence[Row]) -> list[Any]:
    devices = torch.distributed.get_world_size()
    kinds = {Asynchronous: asynchronous_cases.train, Case: train_synchronously}
    return [kinds[type(case)](rank, [case], devices=devices)[0] for case in cases]


def check_grids(case: Row, found: Sequence[Any]) -> None:
    if isinstance(case, Asynchronous):
        asynchronous_cases.check(case, leaders(found, case), rounding=1e-5)  # in single precision
    else:
        accumulation.check(case, leaders(found, case), rounding=1e-10)


GRIDS = Family(train=train_grids, check=check_grids, rows=asynchronous_cases.grid_rows())

FAMILIES = {
    "replay": REPLAYED,
    "accumulation": ACCUMULATED,
    "normless": NORMLESS,
    "clipping": CLIPPED,
    "batch norm": NORMED,
    "recomputation": RECOMPUTED,
    "grids": GRIDS,
}


def train(rank: int, family: str, group: str | None, numbers: Sequence[int]) -> list[Any]:
    """Trains some rows of a family, or of a group of its matrix, on one rank."""
    chosen = FAMILIES[family].rows if group is None else FAMILIES[family].matrix[group]
    return FAMILIES[family].train(rank, [chosen[number] for number in numbers])


@pytest.mark.parametrize(
    ("family", "number"),
    [
        pytest.param(
            name,
            number,
            marks=[pytest.mark.full] if num_ranks(row) > 4 else [],
            id=f"{name}: {number} {row}",
        )
        for name, family in FAMILIES.items()
        for number, row in enumerate(family.rows)
    ],
)
def test_a_row(family: str, number: int) -> None:
    row = FAMILIES[family].rows[number]
    everyone = run_shared(train, num_ranks(row), family, None, [number])
    FAMILIES[family].check(row, [found[0] for found in everyone])


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "group"),
    [(name, group) for name, family in FAMILIES.items() for group in family.matrix],
)
def test_the_matrix(family: str, group: str) -> None:
    rows = FAMILIES[family].matrix[group]
    numbers, limit_s = range(len(rows)), 60.0 + 20 * len(rows)
    ranks = num_ranks(rows[0])
    everyone = run_shared(train, ranks, family, group, numbers, limit_s=limit_s)
    for number, row in enumerate(rows):
        FAMILIES[family].check(row, [found[number] for found in everyone])


@pytest.mark.full
@pytest.mark.parametrize("mode", ["deferred", "running"])
@pytest.mark.parametrize("net", ["dense", "sparse", "residual"])
def test_batch_norms_do_not_depend_on_the_plan(net: str, mode: str) -> None:
    """Against one process, and to the last bit against each other where only the plan differs."""
    first: dict[int, Any] = {}
    for config in DEPTHS:
        rows = [
            normed(mode, config, parts, schedule, net=net, optimizer=optimizer)
            for parts in T
            for schedule, optimizer in [("1f1b", "momentum") if parts % 2 else ("gpipe", "decay")]
        ]
        everyone = run_shared(train_normed, num_ranks(rows[0]), rows, limit_s=300)
        for number, row in enumerate(rows):
            found = [each[number] for each in everyone]
            check_normed(row, found)
            assert_alike(found[0][0], first.setdefault(row.microbatches, found[0][0]), row)


HOSTS = ["a", "a", "a", "b", "b"]  # of each rank: the second stage has two on one, one on the other
CASE = Asynchronous(
    "1-3-1", net="wide", minibatches=7
)  # the last round of the second stage is partial
ROUNDS = 3


def servers() -> Inventory:
    hosts = tuple(
        Host(name=name, devices=(Device(name="CPU", count=HOSTS.count(name)),))
        for name in dict.fromkeys(HOSTS)
    )
    return Inventory(hosts=hosts, link=Link(bytes_per_s=500e6))


def train_on_its_host(rank: int) -> tuple[Any, int]:
    """What a rank has found, and how many sums went through a chain there."""
    enter_host()
    chains = 0
    run_chain = ChainSum.run

    def counted(self: ChainSum) -> None:
        nonlocal chains
        chains += 1
        run_chain(self)

    ChainSum.run = counted  # type: ignore[method-assign]
    process_group.join("gloo", timeout_s=60.0)
    (found,) = asynchronous_cases.train(rank, [CASE])
    process_group.leave()
    return found, chains


def test_the_second_stage_is_one_that_sums_in_a_chain() -> None:
    """As far as its hosts and size tell."""
    first, last = CASE.cuts
    stage = make_plain_net(CASE.net).layers[first:last]
    num_bytes = sum(4 * parameter.numel() for parameter in stage.parameters())
    assert way_of(HOSTS[1:4], num_bytes) == "chain"
    assert way_of(["a"] * 3, num_bytes) == "direct"


@needs_namespaces
@pytest.mark.full
def test_weights_are_those_of_a_replay() -> None:
    with emulated_hosts(servers()) as layout, announce_hosts(layout, HOSTS):
        everyone = run(train_on_its_host, len(HOSTS), join_group=False)
    sums = CASE.epochs * ROUNDS
    assert [chains for _, chains in everyone] == [0, sums, sums, sums, 0]
    asynchronous_cases.check(CASE, [found for found, _ in everyone])
