"""The search for the largest size that fits, against every oracle there is."""

from __future__ import annotations

import contextlib
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepipe.tasks.fitting.fit_batch import largest_that_fits

MOST = 40


@pytest.mark.parametrize("start", [1, 2, 3, 8, 40, 100])
@pytest.mark.parametrize("most", [1, 2, 7, 32, MOST])
def test_finds_every_limit(most: int, start: int) -> None:
    for limit in range(MOST + 2):
        asked: list[int] = []

        def fits(size: int, limit: int = limit, asked: list[int] = asked) -> bool:
            asked.append(size)
            return size <= limit

        found = largest_that_fits(fits, most=most, start=start)
        expected = max((size for size in range(most + 1) if size <= limit), default=0)
        assert found.largest == expected
        assert found.refused == (None if limit >= most else expected + 1)
        assert len(asked) == len(set(asked)), "each probe is a process"
        assert all(1 <= size <= most for size in asked)
        # As many as doubling and bisection take, in both directions.
        assert len(asked) <= 2 * most.bit_length() + 1


@given(
    limit=st.integers(0, 5000),
    most=st.integers(1, 4096),
    start=st.integers(1, 4096),
    precision=st.floats(0, 1),
)
def test_the_largest_batch_is_found_within_the_precision(limit, most, start, precision) -> None:
    found = largest_that_fits(
        lambda size: size <= limit, most=most, start=start, precision=precision
    )
    assert found.largest <= min(limit, most)
    if found.refused is None:
        assert found.largest == most
    else:
        assert found.refused > limit
        assert found.refused - found.largest <= max(1, precision * found.largest)


@pytest.mark.parametrize("answers", list(product([False, True], repeat=7)))
def test_where_fitting_is_not_monotonic_both_ends_are_what_was_seen(answers) -> None:
    found = largest_that_fits(lambda size: answers[size - 1], most=7, start=2)
    assert found.largest == 0 or answers[found.largest - 1]
    assert found.refused is None or not answers[found.refused - 1]
    assert found.refused in (None, found.largest + 1)


def test_kept_answers_lead_on_where_it_was() -> None:
    def asked(known: dict[int, bool], *, most_new: int) -> list[int]:
        new: list[int] = []

        def fits(size: int) -> bool:
            if size not in known:
                if len(new) == most_new:
                    raise KeyboardInterrupt
                new.append(size)
                known[size] = size <= 21
            return known[size]

        with contextlib.suppress(KeyboardInterrupt):
            assert largest_that_fits(fits, most=64, start=4).largest == 21
        return new

    whole = asked({}, most_new=100)
    for cut in range(len(whole)):
        known: dict[int, bool] = {}
        assert asked(known, most_new=cut) + asked(known, most_new=100) == whole
