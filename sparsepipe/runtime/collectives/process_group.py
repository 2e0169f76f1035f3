"""The process group, and the few collectives that are needed outside of training steps."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from sparsepipe.errors import ConfigError, TransportError
from sparsepipe.runtime import safe_pickle
from sparsepipe.runtime.collectives.meeting_point import choose_interfaces, keep_store, on_one_host
from sparsepipe.runtime.failures.missing_ranks import (
    REMEDY_UNREACHED,
    call_within,
    collective,
    new_group,
    rank_name,
)
from sparsepipe.runtime.failures.missing_ranks import store as store  # noqa: PLC0414
from sparsepipe.runtime.failures.rank_reports import is_backend_error

_Value = TypeVar("_Value")
_FOREVER = timedelta(days=30)
# A busy machine may take that long to answer. When the launcher is gone, an open connection breaks
# at once, but attempts to open one go on until then.
_STORE_LIMIT_S = 10.0
_JOIN_STORE_LIMIT_S = 2.0
_FAILED = "sparsepipe/failed"
_stores: dict[tuple[str, str], Any] = {}  # kept, since other ranks may be waiting for them
_joins = itertools.count()
_numbers = [0]
"""One entry: the present rank of the process that was started as rank 0 and keeps the store."""
ranks_per_sample = 1
"""Number of consecutive ranks that share samples and read the same batches; strategies set it."""
_host_groups: list[dist.ProcessGroup] = []
"""At most one entry: a gloo group of all ranks, so that they agree without waiting for devices."""


def started_externally() -> bool:
    """Whether a launcher (``torchrun``, or our own) has started this process as a rank."""
    return "LOCAL_RANK" in os.environ and "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """This process's rank; 0 if it is alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0")) if started_externally() else 0


def local_rank() -> int:
    """This process's rank on its host; 0 if it is alone."""
    return int(os.environ.get("LOCAL_RANK", "0")) if started_externally() else 0


def world_size() -> int:
    """Number of ranks; 1 if this process is alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if started_externally() else 1


def reader() -> int:
    """Index of the reader to which this rank belongs: ranks that share samples are one reader."""
    return rank() // ranks_per_sample


def assert_world_size(expected: int) -> None:
    """Raises a ConfigError if the number of ranks is not ``expected``, as configured."""
    actual = world_size()
    if actual != expected:
        raise ConfigError(
            f"the configuration needs a world size of {expected}, but that of this run is {actual}",
            remedy=f"start as many ranks as configured, or set parallel.devices={actual} "
            "(and parallel.num_nodes to match)",
        )


@contextmanager
def leader_first(*, of_host: bool) -> Iterator[None]:
    """Context that a rank leaves after rank 0 or, with ``of_host``, the first rank of its host.

    The wait has no limit: limits are those of a group, and none has been joined yet.
    """
    leads = local_rank() == 0 if of_host else rank() == 0
    key = f"sparsepipe/{os.environ.get('GROUP_RANK', '0') if of_host else 'all'}/done"
    store = _attempt_store(_FOREVER)
    yield
    if leads:
        store.set(key, "1")
    else:
        store.wait([key], _FOREVER)


def other_rank_failed(*, announced: bool) -> bool:
    """Whether another rank has announced that it failed; False if no store answers.

    With ``announced``, this rank announces its own failure.
    """
    add = [partial(store.add, _FAILED, int(announced)) for store in _stores.values()]
    found = [call_within(_STORE_LIMIT_S, each) for each in add]
    return any(number is not None and number > announced for number in found)


def first_to_report(text: str) -> bool:
    """Whether this rank should report the error ``text``, which any rank may meet before joining.

    The first rank to ask should, since a launcher ends all ranks when one has ended. If no launcher
    keeps the store, rank 0 should.
    """
    if store_rank() is not None:
        return rank() == 0
    key = f"sparsepipe/reported/{hashlib.sha256(text.encode()).hexdigest()}"
    limit = timedelta(seconds=_STORE_LIMIT_S)
    return call_within(_STORE_LIMIT_S, lambda: _attempt_store(limit).add(key, 1)) in (1, None)


def join(backend: str, *, timeout_s: float, device: torch.device | None = None) -> None:
    """Joins the group that the launcher's environment variables describe.

    Every later collective ends within ``timeout_s`` or raises. Each attempt and each join has keys
    of its own in the store for the addresses of ranks: the elastic agent restarts ranks with the
    store of the first attempt, where gloo would otherwise find addresses of dead ranks.
    """
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    mine, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place: Any = None
    try:
        place = PrefixStore(f"join{next(_joins)}", _attempt_store(timeout))
        place.set_timeout(timeout)
        place.set(f"sparsepipe/came/{mine}", "1")
        dist.init_process_group(
            backend,
            store=place,
            rank=mine,
            world_size=count,
            timeout=timeout,
            device_id=device if device is not None and device.type == "cuda" else None,
        )
        if dist.get_backend() != "gloo":
            _host_groups.append(dist.new_group(backend="gloo", timeout=timeout))
    except RuntimeError as error:
        if not is_backend_error(type(error).__name__, str(error)):
            raise
        missing = None
        if place is not None:
            missing = call_within(
                _JOIN_STORE_LIMIT_S,
                lambda: [r for r in range(count) if not place.check([f"sparsepipe/came/{r}"])],
            )
        me, keeper = rank_name(mine), store_rank()
        who = "the launcher" if keeper is None else rank_name(keeper)
        reason = f"{who}, which keeps the store that all ranks join, did not answer {me}"
        if missing:
            reason = f"{' and '.join(map(rank_name, missing))} did not join {me}"
        elif missing is not None or keeper == mine:
            reason = f"not all of {count} ranks connected to {me}"
        message = f"{reason} within {timeout_s:g} s ({str(error).splitlines()[0]})"
        raise TransportError(message, remedy=REMEDY_UNREACHED) from error


def _attempt_store(timeout: timedelta) -> Any:
    """The store of the ranks since their last restart, which the launcher or rank 0 keeps."""
    place = address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if place not in _stores:
        one_host = on_one_host(os.environ)
        choose_interfaces(address, one_host=one_host)
        count, number = int(os.environ["WORLD_SIZE"]), int(port)
        # As torch's own ``env://`` makes it, except for where it listens.
        if store_rank() is None or os.environ["RANK"] != "0":
            store = TCPStore(address, number, count, False, timeout)
        else:
            store = keep_store(
                address, number, timeout=timeout, clients=count, across_hosts=not one_host
            )
        restart_count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _stores[place] = PrefixStore(f"attempt{restart_count}", store)
    return _stores[place]


def store_rank() -> int | None:
    """The rank whose process keeps the store; None: the launcher does."""
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else _numbers[0]


def renumber(numbers: Sequence[int]) -> None:
    """Leaves the group; the next :func:`join` is as rank ``numbers[rank()]``. A collective."""
    with collective("renumbering the ranks", host_group()):
        dist.barrier(group=host_group())
    mine = numbers[rank()]
    leave()
    _numbers[:] = [numbers[number] for number in _numbers]
    os.environ["RANK"] = str(mine)


def leave() -> None:
    """Leaves the group, if this process is in one."""
    _host_groups.clear()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def host_group() -> dist.ProcessGroup | None:
    """The gloo group for values on the host; None: the default group, which uses gloo itself."""
    return _host_groups[0] if _host_groups else None


def make_stage_group(stages: Iterable[Iterable[int]], *, backend: str, timeout_s: float) -> Any:
    """Makes a group of the ranks of each stage that has several; every rank must call it.

    Returns this rank's group, or None if its stage has one rank. Raises a TransportError if a rank
    does not take part within ``timeout_s``, which also limits the group's collectives.
    """
    mine = None
    for ranks in map(list, stages):
        if len(ranks) > 1:
            made = new_group(ranks, backend=backend, timeout_s=timeout_s)
            mine = made if rank() in ranks else mine
    return mine


def destroy_group(made: Any) -> None:
    if made is not None and dist.is_initialized():
        dist.destroy_process_group(made)


def broadcast_object(
    value: _Value, *, source: int = 0, what: str = "broadcasting a value of rank 0"
) -> _Value:
    """Returns rank ``source``'s ``value`` on every rank, sent with :mod:`.safe_pickle`."""
    if world_size() == 1:
        return value
    group, is_source = host_group(), rank() == source
    data = _packed(value, what) if is_source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    with collective(what, group):
        dist.broadcast(size, src=source, group=group)
        data = data if is_source else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=source, group=group)
    return value if is_source else safe_pickle.loads(data.numpy().tobytes())


def gather_objects(
    value: _Value, *, what: str = "gathering a value of each rank", everywhere: bool = True
) -> list[_Value]:
    """Returns all ranks' values in rank order, leaving out None; sent with :mod:`.safe_pickle`.

    Unless ``everywhere``, ranks other than 0 get an empty list.
    """
    found: list[_Value] = [value]
    if world_size() > 1:
        group, data = host_group(), _packed(value, what)
        own = torch.tensor([data.numel()])
        sizes = [torch.empty_like(own) for _ in range(world_size())]
        with collective(what, group):
            dist.all_gather(sizes, own, group=group)
            sent = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
            sent[: data.numel()] = data
            parts = [torch.empty_like(sent) for _ in sizes] if everywhere or rank() == 0 else []
            if everywhere:
                dist.all_gather(parts, sent, group=group)
            else:
                dist.gather(sent, parts or None, dst=0, group=group)
        pairs = zip(parts, sizes, strict=False)
        found = [safe_pickle.loads(each[: int(size)].numpy().tobytes()) for each, size in pairs]
    return [each for each in found if each is not None]


def _packed(value: Any, what: str) -> Tensor:
    try:
        data = safe_pickle.dumps(value)
    except safe_pickle.Unsendable as error:
        raise ConfigError(
            f"{what}: this rank's value holds {error.what}", remedy=error.remedy
        ) from None
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def highest(number: int) -> int:
    """The highest ``number`` of all ranks; a collective, over gloo."""
    if world_size() == 1 or not dist.is_initialized():
        return number
    value = torch.tensor([number], dtype=torch.int32)
    with collective("agreeing on whether to stop", host_group()):
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=host_group())
    return int(value.item())


def average_(tensors: Iterable[Tensor]) -> None:
    """Replaces each floating-point tensor with its mean over all ranks; a single collective."""
    if world_size() == 1 or not dist.is_initialized():
        return
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floats:
        return
    flat = torch.cat([tensor.detach().double().reshape(-1) for tensor in floats])
    with collective("averaging buffers"):
        dist.all_reduce(flat)
    flat /= world_size()
    parts = flat.split_with_sizes([tensor.numel() for tensor in floats])
    for tensor, part in zip(floats, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def broadcast_tensors_(tensors: Iterable[Tensor], *, source: int) -> None:
    """Overwrites tensors with those of rank ``source``; all ranks give them in the same order."""
    if world_size() == 1:
        return
    with collective("broadcasting the module's tensors", host_group()):
        for tensor in tensors:
            if not tensor.numel():
                continue
            host = tensor.detach().cpu().contiguous()
            dist.broadcast(host, src=source, group=host_group())
            if rank() != source:
                tensor.copy_(host)
