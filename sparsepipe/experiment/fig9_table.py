"""The figures of the paper's Fig. 9: speedups over data parallelism, as rows and as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from sparsepipe.experiment.fig9_jobs import GPUS, STRATEGIES, Cell, Job, Setting, cell_of, notes
from sparsepipe.results.fig9_paper import FIG9, SMALLEST_HETE_MP
from sparsepipe.results.fig9_settings import dp_minibatch_s
from sparsepipe.results.tables import markdown_table

Place = tuple[Setting, int, str]
"""Of a bar: how it came about, GPUs, strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fig9Table:
    """All that a sweep has of the figure.

    Attributes:
        cells: by their places; of several runs for one, the last.
        notes: what is missing, and why.
        failed: jobs without a run.
    """

    cells: Mapping[Place, Cell]
    notes: tuple[str, ...]
    failed: tuple[Job, ...]

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Self:
        """From the jobs of a sweep, finished or failed."""
        found = [cell for job in jobs if (cell := cell_of(job)) is not None]
        return cls(
            cells={(cell.setting, cell.gpus, cell.strategy): cell for cell in found},
            notes=tuple(notes(jobs, found)),
            failed=tuple(job for job in jobs if job.run is None),
        )

    @property
    def settings(self) -> list[Setting]:
        """Those that there are, simulated ones first."""
        return sorted({cell.setting for cell in self.cells.values()}, key=lambda each: each.order)

    def title(self, setting: Setting) -> str:
        """A setting in words, with the scales of time at which it was emulated."""
        scales: dict[float, list[str]] = {}
        for cell in sorted(self.cells.values(), key=_order):
            if cell.setting == setting and cell.time_scale is not None:
                names = scales.setdefault(cell.time_scale, [])
                names.append(STRATEGIES.get(cell.strategy, cell.strategy))
        if not scales:
            return setting.title
        most, *others = sorted(scales, key=lambda scale: -len(scales[scale]))
        told = [f"{', '.join(dict.fromkeys(scales[scale]))} {scale:g}" for scale in others]
        return f"{setting.title}, time scale {most:g}" + (f" ({'; '.join(told)})" if told else "")

    def gpus(self, setting: Setting) -> list[int]:
        """Those of the figure, and others that were run."""
        return sorted({*GPUS, *(gpus for other, gpus, _ in self.cells if other == setting)})

    def dp_s(self, setting: Setting, gpus: int) -> float | None:
        """Seconds of a minibatch by data parallelism: of its own job, or as another one tells."""
        own = self.cells.get((setting, gpus, "dp"))
        told = self._told(setting, gpus, "dp_s")
        return dp_minibatch_s([] if own is None else [own.minibatch_s], told)

    def dp_without_overlap_s(self, setting: Setting, gpus: int) -> float | None:
        """The same with sums after the backward, which simulations tell."""
        return dp_minibatch_s([], self._told(setting, gpus, "dp_without_overlap_s"))

    def _told(self, setting: Setting, gpus: int, name: str) -> list[float | None]:
        cells = [c for c in self.cells.values() if (c.setting, c.gpus) == (setting, gpus)]
        return [getattr(cell, name) for cell in cells]

    def speedup(self, cell: Cell) -> float | None:
        """Over data parallelism that came about in the same way; None where that is missing."""
        dp_s = self.dp_s(cell.setting, cell.gpus)
        return None if dp_s is None else dp_s / cell.minibatch_s

    def speedup_without_overlap(self, cell: Cell) -> float | None:
        """Over data parallelism that sums gradients after the backward."""
        dp_s = self.dp_without_overlap_s(cell.setting, cell.gpus)
        return None if dp_s is None else dp_s / cell.minibatch_s

    def over_hete_mp(self, cell: Cell) -> float | None:
        """How many times as fast as HETE-MP."""
        other = self.cells.get((cell.setting, cell.gpus, "hete_mp"))
        return None if other is None else other.minibatch_s / cell.minibatch_s

    def simulated(self, cell: Cell) -> Cell | None:
        """The simulation beside what was emulated, over the same link; None where there is none."""
        if cell.setting.network != "namespaces":
            return None  # it is a simulation itself, or its link was not limited
        beside = Setting(kind="simulated", link_bytes_per_s=cell.setting.link_bytes_per_s)
        return self.cells.get((beside, cell.gpus, cell.strategy))

    def off_percent(self, cell: Cell) -> float | None:
        """By how much what was emulated is faster than its simulation."""
        beside = self.simulated(cell)
        return None if beside is None else 100 * (beside.minibatch_s / cell.minibatch_s - 1)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each bar, and one for each failed job, all with the same keys."""
        ordered = sorted(self.cells.values(), key=_order)
        finished = [self._row(cell) for cell in ordered]
        names = list(finished[0]) if finished else ["strategy", "status", "run"]
        empty = dict.fromkeys(names)
        return [
            *finished,
            *({**empty, "strategy": job.name, "status": "failed"} for job in self.failed),
        ]

    def _row(self, cell: Cell) -> dict[str, Any]:
        setting, paper = cell.setting, FIG9.get((cell.gpus, cell.strategy))
        beside = self.simulated(cell)
        link = setting.link_bytes_per_s
        return {
            "kind": setting.kind,
            "network": setting.network,
            "time_scale": cell.time_scale,
            "link_mb_per_s": None if link is None else link / 1e6,
            "gpus": cell.gpus,
            "strategy": cell.strategy,
            "plan": cell.plan,
            "minibatches_per_s": 1 / cell.minibatch_s,
            "steady_steps": cell.steady_steps,
            "speedup_over_dp": self.speedup(cell),
            "speedup_over_dp_without_overlap": self.speedup_without_overlap(cell),
            "over_hete_mp": self.over_hete_mp(cell),
            "simulated_minibatches_per_s": None if beside is None else 1 / beside.minibatch_s,
            "emulated_off_simulated_percent": self.off_percent(cell),
            "paper_speedup": None if paper is None else paper.value,
            "paper_source": None if paper is None else paper.source,
            "status": "finished",
            "run": cell.run,
        }

    def text(self) -> str:
        """Markdown: a table for each setting, emulated beside simulated, plans, what is missing."""
        parts = [_INTRODUCTION]
        for setting in self.settings:
            parts += [f"## {_capital(self.title(setting))}", self._speedups(setting)]
        for setting in self.settings:
            if rows := list(self._beside(setting)):
                head = (
                    "GPUs",
                    "strategy",
                    "simulated, 1/s",
                    "emulated, 1/s",
                    "difference",
                    "time scale",
                )
                parts += [
                    f"## Minibatches a second, {self.title(setting)}, beside the simulation",
                    markdown_table(head, rows),
                ]
        parts += ["## Plans", markdown_table(("GPUs", "strategy", "plan"), list(self._plans()))]
        if self.notes:
            parts += ["## What is missing", "\n".join(f"- {note}" for note in self.notes)]
        return "\n\n".join(parts) + "\n"

    def _speedups(self, setting: Setting) -> str:
        others = [strategy for strategy in STRATEGIES if strategy != "dp"]
        head = ["GPUs", "DP, ms"]
        for strategy in others:
            head.append(STRATEGIES[strategy])
            if any(name == strategy for _, name in FIG9):
                head.append("the paper's")
        return markdown_table(
            [*head, "exact over HETE-MP"],
            [self._speedup_row(setting, gpus, others) for gpus in self.gpus(setting)],
        )

    def _speedup_row(self, setting: Setting, gpus: int, others: Sequence[str]) -> list[str]:
        dp_s, apart_s = self.dp_s(setting, gpus), self.dp_without_overlap_s(setting, gpus)
        row = [str(gpus), _pair(dp_s, apart_s, scale=1e3, form="{:.1f}")]
        for strategy in others:
            cell = self.cells.get((setting, gpus, strategy))
            row.append(
                "no run"
                if cell is None
                else _pair(self.speedup(cell), self.speedup_without_overlap(cell), form="{:.2f}x")
            )
            if any(name == strategy for _, name in FIG9):
                row.append(_printed(gpus, strategy))
        best = self.cells.get((setting, gpus, "exact"))
        row.append(_number(None if best is None else self.over_hete_mp(best), "{:.2f}x"))
        return row

    def _beside(self, setting: Setting) -> Iterator[list[str]]:
        cells = [cell for cell in self.cells.values() if cell.setting == setting]
        for cell in sorted(cells, key=_order):
            if (beside := self.simulated(cell)) is not None:
                yield [
                    str(cell.gpus),
                    STRATEGIES.get(cell.strategy, cell.strategy),
                    f"{1 / beside.minibatch_s:.3f}",
                    f"{1 / cell.minibatch_s:.3f}",
                    _number(self.off_percent(cell), "{:+.1f} %"),
                    _number(cell.time_scale, "{:g}"),
                ]

    def _plans(self) -> Iterator[list[str]]:
        """Of each strategy on each number of GPUs; several where settings have unlike ones."""
        found: dict[tuple[int, str], dict[str, None]] = {}
        for cell in sorted(self.cells.values(), key=lambda cell: _order(cell)[1:]):
            found.setdefault((cell.gpus, cell.strategy), {})[cell.plan] = None
        for (gpus, strategy), plans in found.items():
            yield [str(gpus), STRATEGIES.get(strategy, strategy), " or ".join(plans)]


_INTRODUCTION = f"""\
# Fig. 9: speedups over data parallelism

The pace of training over that of data parallelism (DP) on the same GPUs and links. DP sums
gradients while the backward runs; in brackets: over DP that sums them after it, where that was
simulated. DP, ms: between two minibatches. A figure of the paper in brackets is not printed itself,
but follows from what is. As the smallest of HETE-MP the paper prints {SMALLEST_HETE_MP}, and not
for how many GPUs."""


def _order(cell: Cell) -> tuple[tuple[bool, float, str], int, int, str]:
    names = list(STRATEGIES)
    number = names.index(cell.strategy) if cell.strategy in names else len(names)
    return cell.setting.order, cell.gpus, number, cell.strategy


def _printed(gpus: int, strategy: str) -> str:
    paper = FIG9.get((gpus, strategy))
    if paper is None:
        return "-"
    return f"({paper.value:.2f}x)" if paper.derived else f"{paper.value:.2f}x"


def _pair(value: float | None, other: float | None, *, form: str, scale: float = 1.0) -> str:
    text = _number(None if value is None else scale * value, form)
    return text if other is None else f"{text} ({form.format(scale * other)})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
