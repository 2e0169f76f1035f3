"""The paper's Table III: how MP and HETE-MP split the layers over 5 to 8 GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sparsepipe.paper.printed import CITATION, printed, stages_of
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Compare, Ours, Printed, Row
from sparsepipe.report.commands import Commands, missing_commands

SPLIT = Column(key="split", heading="GPUs of each stage", compare=Compare.WORDS)
DEVICES = Column(key="devices", heading="devices of each stage")
BOTTLENECK = Column(key="bottleneck", heading="bottleneck", unit="ms", form="{:.1f}")

_OF_TITLE = (
    *("task.bandwidth_bytes_per_s", "task.mp_cost_model", "task.hete_cost_model"),
    "task.order",
)
"""Keys that the title of a block has."""
_PAPER = printed("table3")
_COMPUTED = "not printed: the paper's split with its best cuts, by our cost model"


def _blocks(rows: Sequence[Row], commands: Commands) -> list[Block]:
    runs = [row for row in rows if row.get("task_name") == "table3"]
    made_by = [_made_by(run, commands) for run in runs]
    anywhere = replace(commands, scales=())  # it is the same at any scale
    missing = missing_commands(anywhere, made_by)
    return [
        *(_block(run, theirs.one()) for run, theirs in zip(runs, made_by, strict=True)),
        *(replace(_block(None, theirs.one()), title=title) for title, theirs in missing.items()),
    ]


def _made_by(run: Row, commands: Commands) -> Commands:
    settings = {key: run[key] for key in _OF_TITLE if key in run}
    return commands.giving(*commands.unlike((), settings))


def _block(run: Row | None, made_by: str) -> Block:
    return Block(
        title="" if run is None else _title(run),
        cells=tuple(cell for paper in _PAPER for cell in _cells(paper, run, made_by)),
    )


def _title(run: Row) -> str:
    return (
        f"{float(run['task.bandwidth_bytes_per_s']) / 1e6:g} MB/s between all GPUs; MP by the cost "
        f"model {run['task.mp_cost_model']}; HETE-MP by {run['task.hete_cost_model']}, order "
        f"{run['task.order']}"
    )


def _cells(paper: Mapping[str, str], run: Row | None, made_by: str) -> Iterator[Cell]:
    gpus, strategy = paper["num_gpus"], paper["strategy"]
    key = f"{gpus}gpu/{strategy}"
    stages = ", ".join(stages_of(paper["stage_assignment"]))
    found = (
        (SPLIT, Printed(text=paper["split_config"]), "config", "verdict"),
        (DEVICES, Printed(text=stages) if stages else None, "devices", ""),
        (BOTTLENECK, _bottleneck(run, key), "bottleneck_ms", ""),
    )
    for column, printed_, name, note in found:
        value = None if run is None else run.get(f"{key}/{name}")
        ours = None
        if run is not None and value is not None:
            ours = Ours(value=value, runs=(run,), note=str(run.get(f"{key}/{note}", "")))
        yield Cell(row=(gpus, strategy), column=column, paper=printed_, ours=ours, command=made_by)


def _bottleneck(run: Row | None, key: str) -> Printed | None:
    value = None if run is None else run.get(f"{key}/paper_bottleneck_ms")
    return None if value is None else Printed(text=f"{value:.1f}", derived=_COMPUTED)


TABLE3 = Chapter(
    name="table3",
    title="Table III: splits of the layers over unlike GPUs",
    about=(
        "How MP (PipeDream's optimizer, for which all GPUs are alike) and HETE-MP split a sparse "
        "VGG16 over 5 to 8 GPUs, computed from the layer times that the authors measured. The "
        "paper prints no bandwidth; one is assumed for the whole table. The verdict: the same "
        "split and cuts (equal), another split whose slowest stage takes as long (co-optimal), or "
        "it differs. The slowest stage is the bottleneck."
    ),
    heads=("GPUs", "strategy"),
    find=_blocks,
    citation=CITATION,
    pictured=(BOTTLENECK.key,),
)
