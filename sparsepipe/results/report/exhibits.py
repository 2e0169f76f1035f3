"""All tables and figures of the paper, and a study of others, that can be reported on."""

from __future__ import annotations

from collections.abc import Mapping

from sparsepipe.results.report.exhibit import Exhibit
from sparsepipe.results.report.fig7 import FIG7
from sparsepipe.results.report.fig8 import FIG8
from sparsepipe.results.report.fig9 import FIG9
from sparsepipe.results.report.pipeline_depth import PIPELINE_DEPTH
from sparsepipe.results.report.table1 import TABLE1
from sparsepipe.results.report.table2 import TABLE2
from sparsepipe.results.report.table3 import TABLE3

EXHIBITS: Mapping[str, Exhibit] = {
    exhibit.name: exhibit for exhibit in (TABLE1, TABLE2, TABLE3, FIG7, FIG8, FIG9, PIPELINE_DEPTH)
}
"""By name, in the order of the paper page."""
