"""Runs a function in several processes of one thread each, which can talk over gloo."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from sparsepipe.utils.process import keep_freed_memory

_CONTEXT = multiprocessing.get_context("forkserver")
# Ranks are forked from a process that has imported these, hence start within milliseconds.
_CONTEXT.set_forkserver_preload(["sparsepipe.strategies", "sparsepipe.models"])


GLIBCS_OWN = {"MALLOC_MMAP_MAX_": "65536"}
"""Says what glibc does anyhow, so that nobody changes what it does with freed memory."""


class RankFailed(Exception):
    """A process raised, died or did not end in time; the text has its traceback."""


@dataclass(frozen=True, slots=True)
class Crew:
    """Processes that call the same function, and find each other.

    Args:
        function: defined at a module's top level; called with the rank first.
        ranks: how many processes.
        arguments: that follow, anything that can be pickled.
        keeps_freed: memory, as runs of ``sparsepipe`` on processors do.
    """

    function: Callable[..., Any]
    ranks: int
    arguments: tuple[Any, ...]
    keeps_freed: bool = True


class Turns:
    """Several processes meet time and again, and use no processor while they wait.

    Args:
        parties: how many processes.
        limit_s: of every wait.
    """

    def __init__(self, parties: int, *, limit_s: float) -> None:
        self._barrier, self._limit_s = _CONTEXT.Barrier(parties), limit_s

    def meet(self) -> None:
        """Waits until all have come.

        Raises:
            threading.BrokenBarrierError: one did not come in time.
        """
        self._barrier.wait(self._limit_s)


def on_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    keeps_freed: bool = True,
    limit_s: float = 600.0,
) -> list[Any]:
    """Calls ``function(rank, *arguments)`` in new processes; what they return, in rank order.

    They find each other by the variables that an elastic agent sets; a single process gets
    none of them.

    Args:
        function: defined at a module's top level.
        ranks: how many.
        arguments: anything that can be pickled.
        keeps_freed: memory, as runs of ``sparsepipe`` on processors do.
        limit_s: after which all are killed.

    Raises:
        RankFailed: one failed.
    """
    crew = Crew(function, ranks, arguments, keeps_freed=keeps_freed)
    return on_crews([crew], limit_s=limit_s)[0]


def on_crews(crews: Sequence[Crew], *, limit_s: float = 600.0) -> list[list[Any]]:
    """The same of several crews at once, none of which knows of the others.

    Args:
        crews: what each does.
        limit_s: after which all are killed.

    Returns:
        Of each crew, what its ranks return.

    Raises:
        RankFailed: one failed.
    """
    stores: list[Any] = []  # whose lives are those of the processes
    processes, results = [], []
    for crew in crews:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        stores.append(store)
        for rank in range(crew.ranks):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            variables = _variables(rank, crew, store.port)
            process = _CONTEXT.Process(
                target=_rank,
                args=(theirs, variables, crew.function, rank, crew.arguments),
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            results.append(ours)
    try:
        found = iter(_collected(results, limit_s=limit_s))
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
    return [[next(found) for _ in range(crew.ranks)] for crew in crews]


def _variables(rank: int, crew: Crew, port: int) -> Mapping[str, str]:
    memory = {} if crew.keeps_freed else GLIBCS_OWN
    if crew.ranks == 1:
        return memory
    return {
        **memory,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(crew.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _rank(
    results: Connection,
    variables: Mapping[str, str],
    function: Callable[..., Any],
    rank: int,
    arguments: Sequence[Any],
) -> None:
    os.environ.update(variables)
    keep_freed_memory()
    torch.set_num_threads(1)
    try:
        results.send((True, function(rank, *arguments)))
    except BaseException:
        results.send((False, traceback.format_exc()))
        results.close()
        os._exit(1)  # no clean-up that might wait for another rank


def _collected(results: Sequence[Connection], *, limit_s: float) -> list[Any]:
    deadline_s = time.monotonic() + limit_s
    values: dict[int, Any] = {}
    while len(values) < len(results):
        pending = [r for number, r in enumerate(results) if number not in values]
        ready = wait(pending, timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise RankFailed(f"not done after {limit_s:.0f} s")
        for number in [n for n, result in enumerate(results) if result in ready]:
            try:
                good, value = results[number].recv()
            except EOFError:
                raise RankFailed(f"process {number} died without a word") from None
            if not good:
                raise RankFailed(f"process {number}\n{value}")
            values[number] = value
    return [values[number] for number in range(len(results))]
