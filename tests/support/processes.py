"""Real ranks for tests: a function in n processes with a hard limit, over gloo on loopback.

    def work(rank: int, factor: int) -> int:  # at a module's top level
        value = torch.tensor([rank])
        dist.all_reduce(value)
        return factor * int(value)

    assert run(work, 3, 10) == [30, 30, 30]

``run`` returns what the ranks returned, or ends all of them and raises the first failure.
``run_shared`` does so in ranks that start once for many calls. ``outcomes`` tells how each rank
ended. Ranks are forked by a small server that has imported torch, so that they start within
milliseconds; they inherit this process's environment, and no process outlives the call.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import torch
from torch.distributed import TCPStore

from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.failures import missing_ranks

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch.distributed",
        "torchmetrics.classification",
        "sparsepipe.sparse",
        "sparsepipe.strategies",
    ]
)
_JOIN_S = 60.0
_STORED_BYTES = 2**22  # torch 2.13.0's store refuses values of more than 8 MiB
_BUSY_S = 20.0  # for the store to answer on a busy machine, where it is on no rank
_LIMITS = (
    (missing_ranks, "_STORE_LIMIT_S"),
    (missing_ranks, "_ANSWER_S"),
    (missing_ranks, "_ROLL_CALL_S"),
    (process_group, "_STORE_LIMIT_S"),
    (process_group, "_JOIN_STORE_LIMIT_S"),
)
_own_limits: list[tuple[ModuleType, str, float]] = []


def raise_limits() -> None:
    """Raises the product's limits in this process, if the launcher keeps the store."""
    if process_group.store_rank() is None:
        _own_limits.extend((module, name, getattr(module, name)) for module, name in _LIMITS)
        for module, name in _LIMITS:
            setattr(module, name, _BUSY_S)


def restore_limits() -> None:
    """Sets the product's own limits again."""
    assert _own_limits, "they are the product's own"
    for module, name, limit_s in _own_limits:
        setattr(module, name, limit_s)
    _own_limits.clear()


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rank ended.

    Attributes:
        value: what it returned.
        error: what it raised, as itself where it can be pickled, else as text.
        trace: traceback of ``error``.
        exit_code: negative for a signal; None where it had to be killed by the harness.
        ended_s: when it had returned or raised (or was found gone), counted from the start.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exit_code: int | None = None
    ended_s: float = 0.0

    @property
    def good(self) -> bool:
        return self.error is None and self.exit_code == 0

    def __str__(self) -> str:
        if self.error is not None:
            return f"rank {self.rank} raised {self.error!r}\n{self.trace}"
        if self.exit_code is None:
            return f"rank {self.rank} did not end within the limit"
        return f"rank {self.rank} ended with exit code {self.exit_code}"


def run(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    limit_s: float = 120.0,
    join_group: bool = True,
    environment: Mapping[str, str] | None = None,
    store: TCPStore | None = None,
) -> list[Any]:
    """Calls ``function(rank, *arguments)`` in each rank; what they return, in rank order.

    Args:
        function: defined at a module's top level.
        ranks: number of processes.
        arguments: anything that can be pickled.
        limit_s: when all processes are killed.
        join_group: join a gloo group first and leave it afterwards.
        environment: variables to set in the ranks beside those of this process.
        store: where they meet; by default a new one.

    Raises:
        RankFailed: with the traceback of the first rank that failed.
    """
    started = _start(function, ranks, arguments, join_group, environment, store)
    found = _collect(started, limit_s=limit_s, awaited=range(ranks), stop_at_failure=True)
    # What the harness has ended is no cause.
    failed = sorted(
        (o for o in found if not o.good),
        key=lambda o: (o.error is None and o.exit_code is None, o.ended_s),
    )
    if failed:
        raise RankFailed(str(failed[0])) from failed[0].error
    return [outcome.value for outcome in found]


_FIRST_SEED = torch.default_generator.initial_seed()
_shared: dict[int, _Shared] = {}


def run_shared(
    function: Callable[..., Any], ranks: int, *arguments: Any, limit_s: float = 120.0
) -> list[Any]:
    """As :func:`run`, in ranks that are kept for later calls: they have one group, and start once.

    For functions that leave nothing behind: no settings, patched functions, or broken connections.
    """
    kept = _shared.pop(ranks, None)
    if kept is None:
        kept = _Shared(_start(_serve, ranks, (), True, None, None))
    values = kept.call(function, arguments, limit_s=limit_s)
    _shared[ranks] = kept
    return values


def end_shared() -> None:
    """Lets the ranks that are kept end in order, so that what they have run counts as covered."""
    for kept in _shared.values():
        kept.end()
    _shared.clear()


def outcomes(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    limit_s: float = 120.0,
    awaited: Sequence[int] | None = None,
    join_group: bool = True,
    environment: Mapping[str, str] | None = None,
    store: TCPStore | None = None,
) -> list[Outcome]:
    """As :func:`run`, but tells how each rank ended instead of raising.

    Args:
        awaited: ranks to wait for (by default all); the others are killed after them,
            stopped ones too.
    """
    started = _start(function, ranks, arguments, join_group, environment, store)
    awaited = range(ranks) if awaited is None else awaited
    return _collect(started, limit_s=limit_s, awaited=awaited, stop_at_failure=False)


def new_store() -> TCPStore:
    """Where ranks meet, as an elastic agent has one."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@dataclass(slots=True)
class _Started:
    processes: list[Any]
    results: list[Connection]
    store: TCPStore  # what the ranks meet at; it lives as long as they do
    started_s: float


class _Shared:
    """Ranks that serve one call after the other, over the store at which they have joined."""

    def __init__(self, started: _Started) -> None:
        self._started = started
        self._calls = itertools.count()

    def call(
        self, function: Callable[..., Any], arguments: Sequence[Any], *, limit_s: float
    ) -> list[Any]:
        number, store = next(self._calls), self._started.store
        store.set(f"test/call/{number}", pickle.dumps((function, arguments)))
        deadline_s, found = time.monotonic() + limit_s, dict[int, Any]()
        try:
            while len(found) < len(self._started.processes):
                for rank, process in enumerate(self._started.processes):
                    key = f"test/answer/{number}/{rank}"
                    if rank not in found and store.check([key]):
                        parts = [store.get(f"{key}/{n}") for n in range(int(store.get(key)))]
                        found[rank], error, trace = pickle.loads(b"".join(parts))
                        if error is not None:
                            raise RankFailed(f"rank {rank} raised {error!r}\n{trace}") from error
                    elif rank not in found and not process.is_alive():
                        raise RankFailed(f"rank {rank} ended with exit code {process.exitcode}")
                if time.monotonic() > deadline_s:
                    raise RankFailed(f"{function.__name__} did not end within the limit")
                time.sleep(0.002)
        except BaseException:
            for process in self._started.processes:
                process.kill()
                process.join()
            raise
        return [found[rank] for rank in range(len(found))]

    def end(self) -> None:
        self._started.store.set(f"test/call/{next(self._calls)}", pickle.dumps(_END))
        for process in self._started.processes:
            process.join(_JOIN_S)
            process.kill()
            process.join()


_END = None, ()


def _serve(rank: int) -> None:
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    for number in itertools.count():
        store.wait([f"test/call/{number}"], timedelta(days=1))
        function, arguments = pickle.loads(store.get(f"test/call/{number}"))
        if function is None:
            return
        torch.manual_seed(_FIRST_SEED)
        os.environ.pop("PL_GLOBAL_SEED", None)  # of an earlier call; Lightning shuffles by it
        try:
            answer = pickle.dumps((function(rank, *arguments), None, ""))
        except BaseException as error:
            answer = pickle.dumps((None, _portable(error), traceback.format_exc()))
        key, begins = f"test/answer/{number}/{rank}", range(0, len(answer), _STORED_BYTES)
        for place, begin in enumerate(begins):
            store.set(f"{key}/{place}", answer[begin : begin + _STORED_BYTES])
        store.set(key, str(len(begins)))


def _start(
    function: Callable[..., Any],
    ranks: int,
    arguments: Sequence[Any],
    join_group: bool,
    environment: Mapping[str, str] | None,
    store: TCPStore | None,
) -> _Started:
    store = store or new_store()
    shared = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks are its clients only
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    started = _Started([], [], store, time.monotonic())
    for rank in range(ranks):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = _CONTEXT.Process(
            target=_rank,
            args=(theirs, variables, sys.path, join_group, function, rank, arguments),
            daemon=True,
        )
        process.start()
        theirs.close()
        started.processes.append(process)
        started.results.append(ours)
    started.started_s = time.monotonic()  # the fork server imported torch before the first one
    return started


def _rank(
    results: Connection,
    variables: Mapping[str, str],
    path: list[str],
    join_group: bool,
    function: Callable[..., Any],
    rank: int,
    arguments: Sequence[Any],
) -> None:
    gc.freeze()  # what the server had imported stays, and its pages are shared
    os.environ.update(variables)
    sys.path[:] = path
    torch.set_num_threads(1)
    raise_limits()
    try:
        if join_group:
            process_group.join("gloo", timeout_s=_JOIN_S)
            _await_all(process_group.store(), rank, int(variables["WORLD_SIZE"]))
        value = function(rank, *arguments)
        if join_group:
            process_group.leave()
        message = pickle.dumps((value, None, "", time.monotonic()))
    except BaseException as error:
        ended_s = time.monotonic()  # of all processes: whoever is late to ask finds the order
        trace = traceback.format_exc()
        results.send_bytes(pickle.dumps((None, _portable(error), trace, ended_s)))
        os._exit(1)  # no clean-up that might wait for a rank
    results.send_bytes(message)


def _await_all(store: Any, rank: int, ranks: int) -> None:
    """Nobody may end, as planned, while another is still connecting to it."""
    store.set(f"test/joined/{rank}", "1")
    store.wait([f"test/joined/{other}" for other in range(ranks)], timedelta(seconds=_JOIN_S))


def _portable(error: BaseException) -> BaseException:
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return copy if isinstance(copy, BaseException) else RuntimeError(repr(error))


def _collect(
    started: _Started, *, limit_s: float, awaited: Sequence[int], stop_at_failure: bool
) -> list[Outcome]:
    """Waits for the awaited ranks, then kills what is left."""
    found: dict[int, Outcome] = {}
    pending = set(awaited)
    try:
        while pending and (left_s := started.started_s + limit_s - time.monotonic()) > 0:
            ready = wait([started.results[rank] for rank in pending], timeout=left_s)
            for rank in [r for r in pending if started.results[r] in ready]:
                found[rank] = _result(started, rank)
                pending.discard(rank)
            if stop_at_failure and any(o.error or o.exit_code for o in found.values()):
                break
        codes: dict[int, int | None] = {}
        for rank, process in enumerate(started.processes):
            if rank in found:  # it may still be on its way out
                process.join(max(1.0, started.started_s + limit_s - time.monotonic()))
            codes[rank] = process.exitcode  # of those that ended by themselves
    finally:
        for process in started.processes:
            process.kill()
            process.join()
    return [
        replace(found.get(rank, Outcome(rank=rank)), exit_code=code) for rank, code in codes.items()
    ]


def _result(started: _Started, rank: int) -> Outcome:
    ended_s = time.monotonic() - started.started_s
    try:
        value, error, trace, now_s = pickle.loads(started.results[rank].recv_bytes())
    except EOFError:  # it died without a word
        process = started.processes[rank]
        process.join(10)
        return Outcome(rank=rank, exit_code=process.exitcode, ended_s=ended_s)
    ended_s = now_s - started.started_s
    return Outcome(rank=rank, value=value, error=error, trace=trace, ended_s=ended_s)
