"""A cost model: links carry other traffic as well, and lend a pipeline half of their bandwidth.

Used by ``parallel.search.cost_model=cost_model.SharedLinks``, or ``task.cost_model`` of
``task=partition``.
"""

from sparsepipe.partition.costs.model import CostModel


class SharedLinks(CostModel):
    """As PipeDream's, with twice the time for each byte between devices."""

    def __init__(self) -> None:
        super().__init__(
            name="shared_links", sync=4.0, sync_is_shared=True, cut=2.0, cut_is_shared=True
        )

    def sync_s_per_byte(self, replicas: int, *, bytes_per_s: float) -> float:
        return super().sync_s_per_byte(replicas, bytes_per_s=bytes_per_s / 2)

    def cut_s_per_byte(self, receivers: int, *, bytes_per_s: float) -> float:
        return super().cut_s_per_byte(receivers, bytes_per_s=bytes_per_s / 2)
