"""Runs a function in several processes of one thread each, which can talk over gloo."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
# Ranks are forked from a process that has imported these, hence start within milliseconds.
_CONTEXT.set_forkserver_preload(["sparsepipe.strategies", "sparsepipe.models"])


class RankFailed(Exception):
    """A process raised, died or did not end in time; the text has its traceback."""


def on_ranks(
    function: Callable[..., Any], ranks: int, *arguments: Any, limit_s: float = 600.0
) -> list[Any]:
    """Calls ``function(rank, *arguments)`` in new processes; what they return, in rank order.

    They find each other by the variables that an elastic agent sets; a single process gets
    none of them.

    Args:
        function: defined at a module's top level.
        ranks: how many.
        arguments: anything that can be pickled.
        limit_s: after which all are killed.

    Raises:
        RankFailed: one failed.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    processes, results = [], []
    for rank in range(ranks):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        variables = _variables(rank, ranks, store.port) if ranks > 1 else {}
        process = _CONTEXT.Process(
            target=_rank, args=(theirs, variables, function, rank, arguments), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        results.append(ours)
    try:
        return _collected(results, limit_s=limit_s)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def _variables(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
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
                raise RankFailed(f"rank {number} died without a word") from None
            if not good:
                raise RankFailed(f"rank {number}\n{value}")
            values[number] = value
    return [values[number] for number in range(len(results))]
