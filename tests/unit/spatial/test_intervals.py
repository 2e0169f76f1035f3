"""The algebra of shards, beside a count of every tap."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sparsepipe.spatial.intervals import (
    EMPTY,
    Interval,
    Window,
    exchanges,
    shares,
    window_exchanges,
)

WINDOWS = st.builds(
    Window,
    kernel=st.integers(1, 7),
    stride=st.integers(1, 4),
    before=st.integers(0, 4),
    after=st.integers(0, 4),
    dilation=st.integers(1, 3),
    transposed=st.booleans(),
)


def taps(window: Window, output: int, size: int) -> set[int]:
    """The inputs of one output, one tap after the other."""
    found = set()
    for tap in range(window.kernel):
        if window.transposed:
            place, rest = divmod(output + window.before - tap * window.dilation, window.stride)
            if rest:
                continue
        else:
            place = output * window.stride - window.before + tap * window.dilation
        if 0 <= place < size:
            found.add(place)
    return found


@given(size=st.integers(0, 40), parts=st.integers(1, 9))
def test_shards_are_balanced_and_cover_the_whole(size: int, parts: int) -> None:
    held = shares(size, parts)
    assert [p for each in held for p in range(each.start, each.stop)] == list(range(size))
    assert max(each.size for each in held) - min(each.size for each in held) <= 1


@settings(deadline=None)
@given(window=WINDOWS, size=st.integers(1, 20), parts=st.integers(1, 5))
def test_needs_are_the_hull_of_all_taps(window: Window, size: int, parts: int) -> None:
    assume(window.output_size(size) > 0)
    for outputs in shares(window.output_size(size), parts):
        seen = {t for o in range(outputs.start, outputs.stop) for t in taps(window, o, size)}
        needed = window.needs(outputs, size)
        assert seen <= set(range(needed.start, needed.stop))
        if outputs.size and not window.transposed:
            first = outputs.start * window.stride - window.before
            last = (outputs.stop - 1) * window.stride - window.before + window.reach
            assert needed.size <= len(range(max(first, 0), min(last, size)))


@settings(deadline=None)
@given(window=WINDOWS, size=st.integers(1, 20), first=st.integers(0, 19), count=st.integers(1, 20))
def test_no_other_outputs_are_reached(window: Window, size: int, first: int, count: int) -> None:
    assume(window.output_size(size) > 0)
    inputs = Interval(first, first + count) & Interval(0, size)
    reached = window.reached(inputs)
    for output in range(window.output_size(size)):
        if taps(window, output, size) & set(range(inputs.start, inputs.stop)):
            assert reached.start <= output < reached.stop


@given(
    start=st.integers(0, 9),
    size=st.integers(0, 9),
    other=st.integers(0, 9),
    width=st.integers(0, 9),
)
def test_what_is_before_and_behind(start: int, size: int, other: int, width: int) -> None:
    whole, cut = Interval(start, start + size), Interval(other, other + width)
    before, behind = whole.without(cut)
    everything = [
        *range(before.start, before.stop),
        *range((whole & cut).start, (whole & cut).stop),
    ]
    assert [*everything, *range(behind.start, behind.stop)] == list(range(start, start + size))


@settings(deadline=None)
@given(window=WINDOWS, size=st.integers(1, 24), parts=st.integers(1, 6))
def test_what_is_sent_is_what_is_expected(window: Window, size: int, parts: int) -> None:
    assume(window.output_size(size) > 0)
    plans = window_exchanges(window, size, parts)
    for rank, plan in enumerate(plans):
        for peer, other in enumerate(plans):
            if peer != rank:
                sent = [each.interval for each in plan.sends if each.rank == peer]
                expected = [each.interval for each in other.pieces if each.rank == rank]
                assert sent == expected
                assert all(each & plan.held == each for each in sent)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_output_sizes_are_those_of_pytorch(
    kernel: int, stride: int, padding: int, ceil_mode: bool
) -> None:
    window = Window(
        kernel=kernel, stride=stride, before=padding, after=padding, ceil_mode=ceil_mode
    )
    for size in range(kernel, 20):
        pooled = F.max_pool1d(torch.zeros(1, 1, size), kernel, stride, padding, 1, ceil_mode)
        assert window.output_size(size) == pooled.shape[-1]


def test_thin_shards_get_their_halo_from_several_ranks() -> None:
    plan = window_exchanges(Window(kernel=7, before=3, after=3), 4, 4)[0]
    assert [piece.rank for piece in plan.pieces] == [0, 1, 2, 3]


def test_an_empty_shard_needs_nothing() -> None:
    assert shares(1, 3)[0].size == 0
    assert exchanges(3, ((EMPTY,), (Interval(0, 3),)))[0].pieces == ()
