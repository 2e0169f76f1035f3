"""What the paper prints of its Fig. 9: speedups over data parallelism.

Zhai et al., SparsePipe, Fig. 9 and its text: VGG16 with batch normalization, 50³, batch 64, two
servers. Three of the eight bars of MP and HETE-MP have no figure in the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparsepipe.results.paper import printed

_PARALLEL = {"MP": "paper_mp", "HETE-MP": "hete_mp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSpeedup:
    """A bar of the paper.

    Attributes:
        text: speedup over data parallelism, digit by digit.
        source: what the text says of it.
        derived: it follows from figures that are printed.
    """

    text: str
    source: str
    derived: bool = False

    @property
    def value(self) -> float:
        """As a number."""
        return float(self.text)


FIG9: Mapping[tuple[int, str], PaperSpeedup] = {
    (int(row["num_gpus"]), _PARALLEL[row["strategy"]]): PaperSpeedup(
        text=row["speedup_over_dp"], source=row["source"], derived=row["derived"] == "yes"
    )
    for row in printed("fig9")
    if row["num_gpus"] != "any"
}
"""By GPUs and ``parallel``. MP are the paper's own splits."""

(SMALLEST_HETE_MP,) = (
    float(row["speedup_over_dp"]) for row in printed("fig9") if row["num_gpus"] == "any"
)
"""Printed of HETE-MP over 5 to 8 GPUs, not of which: by the others, of 6 or 7."""
