"""What the paper prints of its Fig. 9: speedups over data parallelism.

Zhai et al., SparsePipe, Fig. 9 and its text: VGG16 with batch normalization, 50³, batch 64, two
servers. Three of the eight bars of MP and HETE-MP have no figure in the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSpeedup:
    """A bar of the paper.

    Attributes:
        value: speedup over data parallelism.
        source: what the text says of it.
        derived: it follows from figures that are printed.
    """

    value: float
    source: str
    derived: bool = False


FIG9: Mapping[tuple[int, str], PaperSpeedup] = {
    (5, "paper_mp"): PaperSpeedup(value=2.03, source="printed"),
    (5, "hete_mp"): PaperSpeedup(value=3.11, source="printed, the largest of HETE-MP"),
    (6, "paper_mp"): PaperSpeedup(value=2.27, source="printed, the largest of MP"),
    (8, "paper_mp"): PaperSpeedup(value=1.33, source="printed, the smallest of MP"),
    (8, "hete_mp"): PaperSpeedup(value=2.63, source="1.98 times MP, printed", derived=True),
}
"""By GPUs and ``parallel``. MP are the paper's own splits."""

SMALLEST_HETE_MP = 2.41
"""Printed of HETE-MP over 5 to 8 GPUs, not of which: by the others, of 6 or 7."""
