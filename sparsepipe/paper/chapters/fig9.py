"""The paper's Fig. 9: speedups of pipelines over data parallelism on 5 to 8 different GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from sparsepipe.config.run_spec import is_below
from sparsepipe.paper.printed import CITATION, printed
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Compare, Ours, Printed
from sparsepipe.report.measurements import mean_of, unlike_notes
from sparsepipe.report.tables import cell_of, overrides_beside, tables_of
from sparsepipe.runs.ledger_table import Row, plan_text

STRATEGIES: Mapping[str, str] = {
    "dp": "DP",
    "mp": "MP",
    "paper_mp": "MP, the paper's split",
    "hete_mp": "HETE-MP",
    "exact": "exact",
}
"""Names of strategies by option of ``parallel``, in the order of the figure."""
GPUS = (5, 6, 7, 8)
_OF_CELLS = ("task", "hardware", "parallel", "task.link_bytes_per_s", "task.network")
_PARALLEL = {"MP": "paper_mp", "HETE-MP": "hete_mp"}
PRINTED: Mapping[tuple[int, str], Printed] = {
    (int(row["num_gpus"]), _PARALLEL[row["strategy"]]): Printed(
        text=row["speedup_over_dp"],
        derived=f"not printed: {row['source']}" if row["derived"] == "yes" else "",
    )
    for row in printed("fig9")
    if row["num_gpus"] != "any"
}
"""Printed speedups by number of GPUs and ``parallel``; those of MP are for the paper's splits."""

(SMALLEST_HETE_MP,) = (
    float(row["speedup_over_dp"]) for row in printed("fig9") if row["num_gpus"] == "any"
)
"""The smallest printed speedup of HETE-MP, whose number of GPUs, 6 or 7, is not printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fig9Setting:
    """How the figures of a block were obtained.

    Attributes:
        kind: ``simulated`` or ``emulated``.
        link_bytes_per_s: bandwidth between hosts; None: unknown.
        network: for emulations, ``namespaces`` or ``loopback``; None: simulated.
        overrides: overrides other than those that choose a bar or one of these settings.
    """

    kind: str
    link_bytes_per_s: float | None
    network: str | None = None
    overrides: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        link = "link unknown"
        if self.link_bytes_per_s is not None:
            link = f"{self.link_bytes_per_s / 1e6:g} MB/s between hosts"
        if self.network == "loopback":
            link = "links not limited"
        kind = self.kind if self.network is None else f"{self.kind} ({self.network})"
        return "; ".join((f"{kind}, {link}", *self.overrides))

    @classmethod
    def of(cls, row: Row) -> Fig9Setting:
        is_simulated = row["kind"] == "simulated"
        link = row.get("task.link_bytes_per_s" if is_simulated else "link_bytes_per_s")
        link = link or row.get("hardware.value.link.bytes_per_s")
        return cls(
            kind=row["kind"],
            link_bytes_per_s=None if link is None else float(link),
            network=None if is_simulated else str(row.get("network")),
            overrides=overrides_beside(row, _OF_CELLS),
        )


_SWEPT = (
    *(Fig9Setting(kind="simulated", link_bytes_per_s=link) for link in (50e6, 100e6, 125e6)),
    Fig9Setting(kind="emulated", link_bytes_per_s=125e6, network="namespaces"),
)
"""Settings of the complete sweep, which have a block even without runs."""

SPEEDUP = Column(key="speedup", heading="speedup over DP", unit="x", compare=Compare.RATIO)
APART = Column(
    key="speedup_without_overlap", heading="over DP without overlap", unit="x", printed=False
)
OVER_HETE_MP = Column(key="over_hete_mp", heading="over HETE-MP", unit="x", printed=False)
TIME = Column(key="minibatch", heading="minibatch", unit="ms", form="{:.1f}", printed=False)
OFF = Column(
    key="off_simulation", heading="off the simulation", unit="%", form="{:+.1f}", printed=False
)
TIME_SCALE = Column(key="time_scale", heading="time scale", unit="x", printed=False)
PLAN = Column(key="plan", heading="plan", printed=False)

Bars = Mapping[tuple[int, str], Sequence[Row]]
"""Runs of a setting by number of GPUs and strategy."""


def _fig9_blocks(rows: Sequence[Row]) -> list[Block]:
    rated = [
        row
        for row in rows
        if row.get("kind") in ("simulated", "emulated") and row.get("minibatches_per_s")
    ]
    tables = tables_of(rated, lambda row: {"setting": Fig9Setting.of(row)})
    found = {key["setting"]: runs for key, runs in tables}
    found = {setting: [] for setting in _SWEPT} | found

    def order(setting: Fig9Setting) -> tuple[bool, float, str, tuple[str, ...]]:
        link = math.inf if setting.link_bytes_per_s is None else setting.link_bytes_per_s
        return setting.kind != "simulated", link, setting.network or "", setting.overrides

    by_bar: dict[Fig9Setting, Bars] = {}
    for setting in sorted(found, key=order):
        places: dict[tuple[int, str], list[Row]] = {(g, s): [] for g in GPUS for s in STRATEGIES}
        for row in found[setting]:
            places.get(cell_of(row, "gpus", "parallel"), []).append(row)
        by_bar[setting] = places
    blocks = []
    for setting, bars in by_bar.items():
        simulated = None
        if setting.network == "namespaces":
            over_same_link = replace(setting, kind="simulated", network=None)
            simulated = by_bar.get(over_same_link, {})
        cells = [each for place in bars for each in _fig9_cells(setting, place, bars, simulated)]
        notes = [
            f"{STRATEGIES[strategy]} on {gpus} GPUs: {note}"
            for (gpus, strategy), runs in bars.items()
            for note in unlike_notes(runs, lambda key: is_below(key, ("parallel", "task")))
        ]
        blocks.append(Block(title=setting.title, cells=tuple(cells), notes=tuple(notes)))
    return blocks


def _fig9_cells(
    setting: Fig9Setting, place: tuple[int, str], bars: Bars, simulated: Bars | None
) -> Iterator[Cell]:
    gpus, strategy = place
    own, of_dp = bars[place], bars[gpus, "dp"]
    of_gpus = [row for (count, _), rows in bars.items() if count == gpus for row in rows]

    def told(key: str) -> list[float]:
        """Seconds of a data-parallel minibatch, which runs on ``gpus`` GPUs have under ``key``."""
        return list(dict.fromkeys(row[key] for row in of_gpus if row.get(key)))

    times = [_minibatch_s(row) for row in of_dp] or told("dp_minibatch_s")
    found: list[tuple[Column, Ours | None]] = [(SPEEDUP, _over(own, times, of_dp))]
    if setting.kind == "simulated":
        found.append((APART, _over(own, told("dp_without_overlap_minibatch_s"), ())))
    if strategy != "hete_mp":
        base = bars[gpus, "hete_mp"]
        found.append((OVER_HETE_MP, _over(own, [_minibatch_s(row) for row in base], base)))
    found.append((TIME, mean_of(own, _minibatch_s, scale=1e3)))
    if simulated is not None:
        base = simulated.get(place, ())
        ratio = _over(own, [_minibatch_s(row) for row in base], base)
        if ratio is not None:  # percent by which the emulation is faster than its simulation
            spread = ratio.spread and (100 * (ratio.spread[0] - 1), 100 * (ratio.spread[1] - 1))
            ratio = replace(ratio, value=100 * (float(ratio.value) - 1), spread=spread)
        found.append((OFF, ratio))
    if setting.kind == "emulated":
        known = tuple(row for row in own if row.get("time_scale"))
        scales = dict.fromkeys(f"{row['time_scale']:g}" for row in known)
        found.append((TIME_SCALE, Ours(value=" or ".join(scales), runs=known) if known else None))
    plans = dict.fromkeys(
        plan_text(str(row.get("plan_config") or gpus), row.get("plan_cuts") or ()) for row in own
    )
    found.append((PLAN, Ours(value=" or ".join(plans), runs=tuple(own)) if own else None))
    for column, ours in found:
        yield Cell(
            row=(str(gpus), STRATEGIES[strategy]),
            column=column,
            paper=PRINTED.get(place) if column is SPEEDUP else None,
            ours=ours,
            # If a bar has runs, only these columns can lack a value: they need another bar's runs.
            expected=not own or column in (SPEEDUP, OVER_HETE_MP, OFF),
        )


def _minibatch_s(row: Row) -> float:
    return 1 / float(row["minibatches_per_s"])


def _over(rows: Sequence[Row], base_s: Sequence[float], base: Sequence[Row]) -> Ours | None:
    """Mean speedup of ``rows`` over ``base_s``, the seconds of a minibatch of the runs ``base``."""
    if not base_s:
        return None
    found = mean_of(rows, lambda row: fmean(base_s) / _minibatch_s(row))
    if found is None:
        return None
    others = [run for run in base if not any(run is each for each in found.runs)]
    return replace(found, runs=(*found.runs, *others))


FIG9 = Chapter(
    name="fig9",
    title="Fig. 9: pipelines over data parallelism on unlike GPUs",
    about=(
        "Speedups of pipelines over data parallelism (DP) for a sparse VGG16 at 50³ in batches of "
        "64, on 5 to 8 GPUs of the two servers of Table I. Layers take as long as the authors "
        "measured; nothing ran on GPUs of ours. The paper prints five of its bars, and "
        f"{SMALLEST_HETE_MP} as the smallest speedup of HETE-MP, on an unknown number of GPUs. It "
        "does not print the speed of the link between the servers, so several are shown. MP uses "
        "the split of our search, and in a row of its own that of the paper (its Table III), with "
        "which the printed value is compared. DP sums gradients during the backward; DP without "
        "overlap, which is only simulated, sums them after it."
    ),
    heads=("GPUs", "strategy"),
    find=_fig9_blocks,
    citation=CITATION,
    pictured=(SPEEDUP.key, APART.key),
)
