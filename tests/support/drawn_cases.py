"""Windows and sparse batches that hypothesis draws."""

from __future__ import annotations

from hypothesis import strategies as st

from sparsepipe.sparse import KernelSpec
from tests.support.sparse_references import Case

KERNEL_AND_STRIDE = [*((k, s) for k in (1, 2, 3, 5) for s in (1, 2)), (3, 3)]


@st.composite
def cases(draw: st.DrawFn, *, pooling: bool = False) -> Case:
    """Windows of every kind on small grids, empty and full ones among them."""
    axes = [draw(st.sampled_from(KERNEL_AND_STRIDE)) for _ in range(3)]
    if draw(st.booleans()):
        axes = [axes[0]] * 3
    size, stride = zip(*axes, strict=True)
    dilation = draw(st.sampled_from([1, 1, 2, 3]))
    return Case(
        shape=(draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 9))),
        batch_size=draw(st.integers(1, 3)),
        occupancy=draw(st.sampled_from([0.0, 0.03, 0.2, 0.6, 1.0])),
        channels=draw(st.sampled_from([1, 3, 5, 8])),
        width=draw(st.sampled_from([1, 4, 6])),
        spec=KernelSpec.for_pooling(size, stride=stride)
        if pooling
        else KernelSpec.of(size, stride=stride, dilation=dilation),
        seed=draw(st.integers(0, 2**20)),
    )
