"""Trainings of the paper's network on shapes: which runs are of which row of Table II and Fig. 8.

Figures are compared between trainings on the same shapes, of the same size and on like devices
alone: these have a :class:`Setting` in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from sparsepipe.results.report.exhibit import Ours, Row
from sparsepipe.results.report.rows import mean_of, same_seeds

_DATA = {
    "GeneratedShapes": ("generated shapes", "shapes"),
    "NpzBundle": ("ModelNet40 as point clouds", "modelnet40_points"),
    "OffTree": ("meshes as OFF files", "modelnet40"),
    "NormalResampled": ("ModelNet40 with normals", "modelnet40_normal_resampled"),
}
"""Sources: in words, and the option of ``data`` that has them."""
_USUAL = "shapes"
_TRAININGS, _FITTING = ("train", "train_if_fits"), "fit_batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A row: which training.

    Attributes:
        resolution: voxels along each side of the grid.
        devices: how many; of several each takes a share of the data.
        network: sparse or dense.
        point_ratio: share of the points that are kept.
    """

    resolution: int
    devices: int = 1
    network: str
    point_ratio: float = 1.0

    def runs(self, rows: Sequence[Row], *, task: str = "train") -> list[Row]:
        """Those that are of this row, whatever their seed."""
        return [row for row in rows if row.get("task_name") == task and self._is_of(row)]

    def _is_of(self, row: Row) -> bool:
        ways = str(row.get("parallel.strategy._target_", "")).rpartition(".")[2]
        return (
            row.get("kind", "measured") == "measured"
            and row.get("data.resolution") == self.resolution
            and row.get("representation") == self.network
            and row.get("data.point_ratio", 1.0) == self.point_ratio
            and row.get("ranks") == self.devices
            and (self.devices == 1 or ways == "DataParallelStrategy")
        )

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the command line."""
        ratio = "" if self.point_ratio == 1 else f"_p{100 * self.point_ratio:03.0f}"
        return (f"network={self.network}{ratio}", f"data.resolution={self.resolution}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What trainings must have in common for their figures to be compared.

    Attributes:
        scale: of the experiment.
        data: source of the shapes.
        points: drawn of each shape; None: all.
        shapes: of each class that are trained on, where they are generated.
        width: of the network, as a share of the paper's.
        epochs: of the training.
        batches: of an epoch, where they are limited.
        device: names of the devices, without their number.
        threads: on which one device computes, where it is a processor; None of several devices.
    """

    scale: str | None
    data: str
    points: int | None
    shapes: int | None
    width: float | None
    epochs: int | None
    batches: float | None
    device: str
    threads: int | None = None

    @classmethod
    def of(cls, row: Row) -> Self:
        """Of a run."""
        names = str(row.get("hardware_devices", "")).split(", ")
        is_one_cpu = row.get("ranks") == 1 and row.get("hardware_accelerator") == "cpu"
        return cls(
            scale=row.get("scale"),
            data=str(row.get("data.source._target_", "")).rpartition(".")[2],
            points=_whole(row.get("data.num_points")),
            shapes=_whole(row.get("data.source.train_per_class")),
            width=row.get("model.width"),
            epochs=_whole(row.get("trainer.max_epochs")),
            batches=row.get("trainer.limit_train_batches"),
            device=", ".join(name.partition(" x ")[2] or name for name in names),
            threads=_whole(row.get("threads_per_rank")) if is_one_cpu else None,
        )

    @property
    def without_threads(self) -> Self:
        """The same, on however many threads one device computes."""
        return replace(self, threads=None)

    @property
    def of_memory(self) -> Self:
        """The same, however long and on however many threads is trained."""
        return replace(self, epochs=None, batches=None, threads=None)

    @property
    def title(self) -> str:
        """In words."""
        points = "all their points" if self.points is None else f"{self.points:,} points"
        parts = [
            f"scale {self.scale}" if self.scale else "",
            f"{_DATA.get(self.data, (self.data,))[0]}, {points}",
            f"{self.shapes} shapes of a class" if self.shapes else "",
            f"width {self.width:g}" if self.width is not None else "",
            f"{self.epochs} epochs" if self.epochs else "",
            f"epochs limited to {self.batches:g}" if self.batches else "",
            self.device,
            _threads_text(self.threads),
        ]
        return "; ".join(part for part in parts if part)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the command line, but for the widths and lengths that a scale stands for."""
        option = _DATA.get(self.data, ("", _USUAL))[1]
        scale = (f"scale={self.scale}",) if self.scale else ()
        return (*scale, *((f"data={option}",) if option != _USUAL else ()))


def settings_of(rows: Sequence[Row]) -> dict[Setting, list[Row]]:
    """Trainings, and what was measured for them, by what they have in common.

    Trainings on several devices belong to all on one that are alike but for its threads. What fits
    into memory depends neither on threads nor on how long is trained.
    """
    found: dict[Setting, list[Row]] = {}
    several, fittings = [], []
    for row in rows:
        task, ranks = row.get("task_name"), row.get("ranks")
        if task in _TRAININGS and ranks == 1:
            found.setdefault(Setting.of(row), []).append(row)
        elif task in _TRAININGS and ranks is not None:
            several.append(row)
        elif task == _FITTING and ranks is not None:
            fittings.append(row)
    for row in several:
        own = Setting.of(row)
        alike = [each for each in found if each.without_threads == own]
        for setting in alike or [own]:
            found.setdefault(setting, []).append(row)
    for row in fittings:
        own = Setting.of(row)
        alike = [each for each in found if each.of_memory == own.of_memory]
        for setting in alike or [own.without_threads]:
            found.setdefault(setting, []).append(row)
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(setting: Setting) -> tuple[str, ...]:
    return tuple(str(getattr(setting, each.name)) for each in fields(Setting))


def accuracy(runs: Sequence[Row], split: str) -> Ours | None:
    """Mean accuracy over seeds, in percent.

    Args:
        runs: trainings of one row.
        split: train or test.
    """
    return mean_of(runs, f"{split}/accuracy", scale=100)


def seed_notes(asked: Asked, runs: Sequence[Row]) -> list[str]:
    """What is to be said of a row's runs with a seed in common."""
    name = " ".join(asked.overrides)
    return [f"{name}: {note}" for note in same_seeds(runs)]


def budget_notes(rows: Sequence[Row]) -> list[str]:
    """Under which budgets of memory batches were tried."""
    budgets = dict.fromkeys(row["budget_bytes"] for row in rows if "budget_bytes" in row)
    return [
        f"A batch fits where a training step takes at most {budget / 1e6:,.0f} MB."
        for budget in sorted(budgets)
    ]


def _threads_text(threads: int | None) -> str:
    if threads is None:
        return ""
    return "1 thread a device" if threads == 1 else f"{threads} threads a device"


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
