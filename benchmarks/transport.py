"""What overlapping and pooling gain between two stages on this machine.

Two processes of one thread each, gloo on loopback, the asynchronous schedule of two stages:
stage 0 computes F(m+1) and B(m) while stage 1 computes F and B of another minibatch; an
activation goes down, a gradient of the same size comes up.

- *overlapped*: the network of the house, a thread for each channel and direction.
- *plain*: both transfers posted at once and waited for by the worker, between its two
  computations, into buffers made beforehand for a size known beforehand; no header.
- *alone*: the same computations and nothing sent. No exchange can be faster.

Then receiving into pooled against fresh buffers. All ways are repeated in turn; medians of
the time for a minibatch are printed as ratios. A ratio says how many times slower.

    python benchmarks/transport.py
    python benchmarks/transport.py --mib 1 16 64 --compute-ms 20 --minibatches 40
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.transport import Kind, Message, Network
from sparsepipe.runtime.transport.channel import BufferPool, Line, Wire
from sparsepipe.runtime.transport.serialization import encode
from sparsepipe.schedule import Plan

Ways = dict[str, Callable[[], None]]
DEVICE = torch.device("cpu")
PLAN = Plan.of(config="1-1", cuts=[1], num_layers=2)
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Load:
    """Computing for a while: products of two matrices that fit into a core's cache."""

    products: int

    @classmethod
    def of(cls, seconds: float) -> Load:
        """As many products as take ``seconds`` on this machine, alone."""
        trial = cls(200)
        trial()
        started_s = time.perf_counter()
        trial()
        return cls(max(1, round(200 * seconds / (time.perf_counter() - started_s))))

    def __call__(self) -> None:
        a = torch.ones(192, 192)
        for _ in range(self.products):
            torch.mm(a, a)


class FreshPool(BufferPool):
    """Makes every buffer anew."""

    def give_back(self, buffer: Tensor) -> None:
        """Lets the buffer go."""
        self.in_use -= 1


def overlapped(rank: int, load: Load, size: int, minibatches: int, network: Network) -> None:
    """The schedule with the house's network."""
    x = torch.ones(size)
    if rank == 0:
        load()
        network.send(Kind.ACTIVATION, 1, Message(minibatch=0, tree=x))
    for m in range(minibatches):
        if rank == 0:
            if m + 1 < minibatches:
                load()
                network.send(Kind.ACTIVATION, 1, Message(minibatch=m + 1, tree=x))
            network.receive(Kind.GRADIENT, 1, minibatch=m)
            load()
        else:
            network.receive(Kind.ACTIVATION, 0, minibatch=m)
            load()
            load()
            network.send(Kind.GRADIENT, 0, Message(minibatch=m, tree=x))
        network.release(m)


def plain(rank: int, load: Load, size: int, minibatches: int) -> None:
    """The schedule with transfers that the worker waits for."""
    x, received = torch.ones(size), torch.empty(size)
    for m in range(minibatches + 1):
        works = []
        if rank == 0:
            if m < minibatches:
                load()
            works += [dist.isend(x, 1)] if m < minibatches else []
            works += [dist.irecv(received, 1)] if m > 0 else []
        else:
            works += [dist.irecv(received, 0)] if m < minibatches else []
            works += [dist.isend(x, 0)] if m > 0 else []
        for work in works:
            assert work is not None
            work.wait()
        for _ in range(2 if rank and m < minibatches else int(not rank and m > 0)):
            load()


def alone(load: Load, minibatches: int) -> None:
    """The schedule's computations."""
    for _ in range(2 * minibatches):
        load()


def stream(rank: int, size: int, messages: int, wire: Wire, pool: BufferPool) -> None:
    """Messages in one direction, read once as a stage would."""
    x = torch.ones(size)
    for m in range(messages):
        if rank == 0:
            packet = encode([(Kind.ACTIVATION, Message(minibatch=m, tree=x))])
            wire.end(packet, wire.begin(packet), None)
        else:
            arrival = wire.receive()
            assert arrival is not None
            arrival.messages[0][1].tree.sum()
            buffers, arrival.messages = arrival.buffers, ()
            for buffer in buffers:
                pool.give_back(buffer)
            del buffers, arrival


def timed(function: Callable[[], None], minibatches: int) -> float:
    """Milliseconds a minibatch, of the slower rank."""
    dist.barrier()
    started_s = time.perf_counter()
    function()
    dist.barrier()
    return (time.perf_counter() - started_s) * 1000 / minibatches


def measure(rank: int, options: argparse.Namespace) -> None:
    """What each of the two processes does; rank 0 prints."""
    trials = process_group.gather_objects(Load.of(options.compute_ms / 2000).products)
    load = Load(max(trials))  # the same on both; whatever else runs makes a trial too short
    for mib in options.mib:
        size = mib * (1 << 20) // 4
        network = Network(PLAN, rank, timeout_s=TIMEOUT_S)
        n = options.minibatches
        ways: Ways = {
            "alone": partial(alone, load, n),
            "plain": partial(plain, rank, load, size, n),
            "overlapped": partial(overlapped, rank, load, size, n, network),
        }
        found = repeated(ways, options.repeats, n)
        network.close()
        if rank == 0:
            base = found["alone"]
            print(
                f"{mib:5d} MiB each way, {base:6.1f} ms of computing: "
                f"plain {found['plain'] / base:5.2f}x, "
                f"overlapped {found['overlapped'] / base:5.2f}x of computing alone; "
                f"plain / overlapped {found['plain'] / found['overlapped']:5.2f}"
            )
    for mib in options.mib:
        compare_pools(rank, mib * (1 << 20) // 4, options)


def compare_pools(rank: int, size: int, options: argparse.Namespace) -> None:
    """Pooled against fresh receive buffers."""
    connection = dist.new_group([0, 1], backend="gloo")
    assert connection is not None
    ways: Ways = {}
    for name, pool in (("pooled", BufferPool()), ("fresh", FreshPool())):
        wire = Wire(Line(connection, 1 - rank), pool=pool, carrier=None, device=DEVICE)
        ways[name] = partial(stream, rank, size, options.minibatches, wire, pool)
    found = repeated(ways, options.repeats, options.minibatches)
    if rank == 0:
        print(
            f"{size * 4 >> 20:5d} MiB one way, {found['pooled']:6.1f} ms a message: "
            f"fresh / pooled {found['fresh'] / found['pooled']:5.2f}"
        )


def repeated(ways: Ways, repeats: int, minibatches: int) -> dict[str, float]:
    """Median over repetitions, in which the ways take turns; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, function in ways.items():
            taken = timed(function, minibatches)
            if repeat:
                times[name].append(taken)
    return {name: statistics.median(values) for name, values in times.items()}


def process(rank: int, port: int, options: argparse.Namespace) -> None:
    """One rank."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(1)
    process_group.join("gloo", timeout_s=TIMEOUT_S)
    measure(rank, options)
    process_group.leave()


def main(arguments: Sequence[str] | None = None) -> None:
    """Starts the two processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 8, 53], help="message sizes")
    parser.add_argument("--compute-ms", type=float, default=40.0, help="per stage and minibatch")
    parser.add_argument("--minibatches", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=process, args=(r, store.port, options)) for r in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
