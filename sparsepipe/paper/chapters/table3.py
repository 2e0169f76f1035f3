"""The paper's Table III: how MP and HETE-MP split the layers over 5 to 8 GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sparsepipe.paper.printed import CITATION, printed, stages_of
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Compare, Ours, Printed
from sparsepipe.runs.ledger_table import Row

SPLIT = Column(key="split", heading="GPUs of each stage", compare=Compare.WORDS)
DEVICES = Column(key="devices", heading="devices of each stage")
BOTTLENECK = Column(key="bottleneck", heading="bottleneck", unit="ms", form="{:.1f}")
_COMPUTED = "not printed: the paper's split with its best cuts, by our cost model"


def _table3_blocks(rows: Sequence[Row]) -> list[Block]:
    """A block with all rows of the table for each run of ``task=table3``."""
    blocks = []
    for run in [row for row in rows if row["task_name"] == "table3"] or [{}]:
        title = ""
        if run:
            title = (
                f"{run['task.bandwidth_bytes_per_s'] / 1e6:g} MB/s between all GPUs; MP by the "
                f"cost model {run['task.mp_cost_model']}; HETE-MP by "
                f"{run['task.hete_cost_model']}, order {run['task.order']}"
            )
        cells = tuple(cell for paper in printed("table3") for cell in _table3_cells(paper, run))
        blocks.append(Block(title=title, cells=cells))
    return blocks


def _table3_cells(paper: Mapping[str, str], run: Row) -> Iterator[Cell]:
    key = f"{paper['num_gpus']}gpu/{paper['strategy']}"
    stages = ", ".join(stages_of(paper["stage_assignment"]))
    theirs_ms = run.get(f"{key}/paper_bottleneck_ms")
    computed = None
    if theirs_ms is not None:
        computed = Printed(text=f"{theirs_ms:.1f}", derived=_COMPUTED)
    for column, printed_, name, note in (
        (SPLIT, Printed(text=paper["split_config"]), "config", "verdict"),
        (DEVICES, Printed(text=stages) if stages else None, "devices", ""),
        (BOTTLENECK, computed, "bottleneck_ms", ""),
    ):
        value = run.get(f"{key}/{name}")
        ours = None
        if value is not None:
            ours = Ours(value=value, runs=(run,), note=str(run.get(f"{key}/{note}", "")))
        row = (paper["num_gpus"], paper["strategy"])
        yield Cell(row=row, column=column, paper=printed_, ours=ours)


TABLE3 = Chapter(
    name="table3",
    title="Table III: splits of the layers over unlike GPUs",
    about=(
        "How MP (PipeDream's optimizer, for which all GPUs are alike) and HETE-MP split a sparse "
        "VGG16 over 5 to 8 GPUs, computed from the layer times that the authors measured. The "
        "paper prints no bandwidth; one is assumed for the whole table. The verdict is 'equal' "
        "(the same split and cuts), 'co-optimal' (another split, but the same bottleneck, which is "
        "the time of the slowest stage), 'differs', or that the paper's split is better."
    ),
    heads=("GPUs", "strategy"),
    find=_table3_blocks,
    citation=CITATION,
    pictured=(BOTTLENECK.key,),
)
