"""What trainings have in common whose figures may be compared, and which runs have it.

Figures are compared between trainings on the same shapes, of the same size and on like devices
alone: these have a :class:`Setting` in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from sparsepipe.results.report.cell import Row
from sparsepipe.results.report.commands import Commands

_DATA = {
    "GeneratedShapes": ("generated shapes", "shapes"),
    "NpzBundle": ("ModelNet40 as point clouds", "modelnet40_points"),
    "OffTree": ("meshes as OFF files", "modelnet40"),
    "NormalResampled": ("ModelNet40 with normals", "modelnet40_normal_resampled"),
}
"""Sources: in words, and the option of ``data`` that has them. But for the first one they are
files, in a directory that the environment variable of the option's name tells."""
_USUAL = "shapes"
_TRAININGS, _FITTING = ("train", "train_if_fits"), "fit_batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What trainings must have in common for their figures to be compared.

    Attributes:
        scale: of the experiment.
        data: source of the shapes.
        points: drawn of each shape; None: all.
        shapes: of each class that are trained on, where they are generated.
        tested: likewise, of each class that are tested on.
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
    tested: int | None
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
            tested=_whole(row.get("data.source.test_per_class")),
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
        """The same, however long and on however many threads is trained, and whatever tested."""
        return replace(self, epochs=None, batches=None, tested=None, threads=None)

    @property
    def title(self) -> str:
        """In words."""
        points = "all their points" if self.points is None else f"{self.points:,} points"
        shapes = " + ".join(str(count) for count in (self.shapes, self.tested) if count)
        parts = [
            f"scale {self.scale}" if self.scale else "",
            f"{_DATA.get(self.data, (self.data,))[0]}, {points}",
            f"{shapes} shapes of a class" if shapes else "",
            f"width {self.width:g}" if self.width is not None else "",
            f"{self.epochs} epochs" if self.epochs else "",
            f"epochs limited to {self.batches:g}" if self.batches else "",
            self.device,
            _threads_text(self.threads),
        ]
        return "; ".join(part for part in parts if part)

    @property
    def option(self) -> str:
        """Of ``data``, which has these shapes."""
        return _DATA.get(self.data, ("", _USUAL))[1]

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the command line: the scale and the data."""
        scale = (f"scale={self.scale}",) if self.scale else ()
        return (*scale, *((f"data={self.option}",) if self.option != _USUAL else ()))

    @property
    def values(self) -> dict[str, Any]:
        """What the configuration has of it, by its keys."""
        return {
            "data.num_points": self.points,
            "data.source.train_per_class": self.shapes,
            "data.source.test_per_class": self.tested,
            "model.width": self.width,
            "trainer.max_epochs": self.epochs,
            "trainer.limit_train_batches": self.batches,
        }


def commands_of(setting: Setting, rows: Sequence[Row], commands: Commands) -> Commands:
    """Commands whose runs come into the same setting.

    Args:
        setting: which.
        rows: runs of it.
        commands: as they are for any setting.
    """
    root = () if setting.option == _USUAL else (f"data.root=${setting.option.upper()}",)
    return commands.giving(
        *setting.overrides,
        *root,
        *commands.unlike(setting.overrides, setting.values),
        environment=_thread_limit(rows),
    )


def data_notes(commands: Commands) -> list[str]:
    """What a reader is to put into commands."""
    roots = [word for word in commands.given if word.startswith("data.root=$")]
    return [
        f"In commands {word.partition('=')[2]} stands for the directory of the data."
        for word in roots
    ]


def _thread_limit(rows: Sequence[Row]) -> tuple[str, ...]:
    """As the environment says it; nothing where one device computes on all cores."""
    alone = [row for row in rows if row.get("task_name") in _TRAININGS and row.get("ranks") == 1]
    told = [
        (row.get("threads_per_rank"), row.get("machine_cores"))
        for row in alone
        if row.get("hardware_accelerator") == "cpu"
    ]
    limits = {int(threads) for threads, cores in told if threads and cores and threads < cores}
    return tuple(f"OMP_NUM_THREADS={limit}" for limit in sorted(limits)[:1])


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


def _threads_text(threads: int | None) -> str:
    if threads is None:
        return ""
    return "1 thread a device" if threads == 1 else f"{threads} threads a device"


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
