"""How ranks of a test wait for each other: for words, so that no outcome hangs on who is faster."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from sparsepipe.runtime.collectives import process_group

LONG_S = 60.0  # a limit that no good test reaches


def post_mark(word: str) -> None:
    """Leaves a word for the other ranks."""
    process_group.store().set(word, "1")


def has_mark(word: str) -> bool:
    """Whether a rank has left a word."""
    return bool(process_group.store().check([word]))


def wait_for_marks(*words: str) -> None:
    """Waits until all words have been left."""
    process_group.store().wait([*words], timedelta(seconds=LONG_S))


def shorten_limit(limit_s: float, group: dist.ProcessGroup | None = None) -> None:
    """Sets the limit of a group's collectives from now on, by default of that of all ranks.

    So what comes before the wait that is to end in vain may take its time.
    """
    _set_pg_timeout(timedelta(seconds=limit_s), group)


@contextmanager
def held_port() -> Iterator[int]:
    """A port at which nobody listens and that nobody else is given; rank 0 may listen there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def stay() -> None:
    """Stays until the harness kills this rank, whose end would break its peers' connections."""
    time.sleep(LONG_S)
