"""What the table says of a row of the paper that is not ours."""

from __future__ import annotations

import pytest

from sparsepipe.paper.table3 import _verdict


@pytest.mark.parametrize(
    ("printed_s", "verdict"),
    [
        (1.0 + 1e-10, "co-optimal"),
        (1.0 - 1e-10, "co-optimal"),
        (1.0 + 1e-6, "differs"),
        (1.0 - 1e-6, "the paper's is better"),
    ],
)
def test_a_better_row_is_not_called_co_optimal(printed_s: float, verdict: str) -> None:
    assert _verdict(False, printed_s, 1.0) == verdict
    assert _verdict(True, printed_s, 1.0) == "equal"
