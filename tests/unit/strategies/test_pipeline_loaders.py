"""Every rank walks through as many steps, whoever reads."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies.pipeline import dataloaders as loaders
from sparsepipe.strategies.pipeline.dataloaders import (
    ELSEWHERE,
    Elsewhere,
    Lengths,
    Padded,
    is_elsewhere,
)


class Promises:
    """Says how long it is, and may be wrong."""

    def __init__(self, length: int, *, really: int | None = None) -> None:
        self.length, self.really = length, length if really is None else really

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.really))


def adapted(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], loader: Any, *, reader: int | None
) -> tuple[Lengths, Any]:
    """What a rank gets when the readers have so many batches, and one rank does not read."""
    said: list[tuple[int | None, int]] = [(None, 77), *enumerate(lengths)]
    monkeypatch.setattr(process_group, "gather_objects", lambda mine: said)
    known = Lengths(readers=len(lengths), reader=reader)
    return known, known.adapt(loader)


@pytest.mark.parametrize("lengths", [[4], [4, 4], [4, 3], [4, 4, 3]])
def test_all_ranks_take_as_many_steps(monkeypatch: Any, lengths: list[int]) -> None:
    for reader in (None, *range(len(lengths))):
        length = 77 if reader is None else lengths[reader]
        known, loader = adapted(monkeypatch, lengths, Promises(length), reader=reader)
        batches = list(loader)
        assert len(batches) == len(loader) == 4
        real = 0 if reader is None else lengths[reader]
        assert batches == [*range(real), *[ELSEWHERE] * (4 - real)]
        counts = [known.count([loader], step) for step in range(4)]
        assert sum(counts) == sum(lengths)
        assert counts[:3] == [len(lengths)] * 3


def test_a_loader_that_suits_stays_as_it_is(monkeypatch: Any) -> None:
    loader = DataLoader(list(range(8)), batch_size=2)  # type: ignore[arg-type]
    assert adapted(monkeypatch, [4, 4], loader, reader=1)[1] is loader
    padded = adapted(monkeypatch, [5, 4], loader, reader=1)[1]
    assert isinstance(padded, Padded)
    assert padded.sampler is loader.sampler
    assert not hasattr(padded, "worker_init_fn")


@pytest.mark.parametrize("really", [2, 6])
def test_a_loader_that_is_wrong_about_its_length(monkeypatch: Any, really: int) -> None:
    _, loader = adapted(monkeypatch, [4], Promises(4, really=really), reader=0)
    assert len(list(itertools.islice(loader, 9))) == 4


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([5, 3], "have 5, 3 batches"), ([3, 4], "have 3, 4 batches"), ([4, -1], "not known")],
)
def test_refused_lengths(monkeypatch: Any, lengths: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        adapted(monkeypatch, lengths, Promises(4), reader=0)
    assert refused.value.remedy


def test_loaders_side_by_side(monkeypatch: Any) -> None:
    known, first = adapted(monkeypatch, [4, 4], Promises(4), reader=0)
    second = known.adapt(Promises(4))
    assert known.count([first, second], 3) == 2
    monkeypatch.setattr(process_group, "gather_objects", lambda mine: [(0, 3), (1, 2)])
    third = known.adapt(Promises(3))
    with pytest.raises(ConfigError, match="side by side"):
        known.count([first, third], 0)


@pytest.mark.parametrize("length", [4, 3], ids=["as it is", "padded"])
def test_a_loader_is_forgotten_with_its_successor(monkeypatch: Any, length: int) -> None:
    """A Trainer that makes new loaders in each epoch does not keep the old ones."""
    known, first = adapted(monkeypatch, [4, length], Promises(length), reader=1)
    gone = weakref.ref(first)
    second = known.adapt(Promises(length))
    del first
    gc.collect()
    assert gone() is None
    assert known.count([second], 3) == (2 if length == 4 else 1)


class Slotted:
    """Cannot be watched."""

    __slots__ = ()

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_a_loader_that_cannot_be_watched(monkeypatch: Any) -> None:
    monkeypatch.setattr(loaders, "_exact", lambda loader: True)
    known, loader = adapted(monkeypatch, [4], Slotted(), reader=0)
    assert known.count([loader], 3) == 1


def test_stand_ins() -> None:
    assert is_elsewhere(ELSEWHERE)
    assert is_elsewhere({"one": [1, Elsewhere()]})
    assert not is_elsewhere({"one": [1, 2]})
    assert ELSEWHERE.to("cuda") is ELSEWHERE
