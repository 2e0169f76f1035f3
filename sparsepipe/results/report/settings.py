"""What trainings have in common whose figures may be compared.

Figures are compared between trainings on the same shapes, of the same size, with the same overrides
and on like devices alone: these have a :class:`Setting` in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from sparsepipe.results.report.cell import Row

_DATA = {
    "GeneratedShapes": ("generated shapes", "shapes"),
    "NpzBundle": ("ModelNet40 as point clouds", "modelnet40_points"),
    "OffTree": ("meshes as OFF files", "modelnet40"),
    "NormalResampled": ("ModelNet40 with normals", "modelnet40_normal_resampled"),
}
"""Sources: in words, and the option of ``data`` that has them. But for the first one they are
files, in a directory that the environment variable of the option's name tells."""
USUAL = "shapes"
"""The option of ``data`` that needs no files."""
_OWN_KEYS = {
    "data.num_points": "points",
    "data.source.train_per_class": "shapes",
    "data.source.test_per_class": "tested",
    "model.width": "width",
    "trainer.max_epochs": "epochs",
    "trainer.limit_train_batches": "batches",
}
_OWN_TARGET = "data.source._target_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What trainings must have in common for their figures to be compared.

    Attributes:
        scale: of the experiment.
        data: source of the shapes.
        points: drawn of each shape; None: all.
        shapes: of each class that are trained on, where they are generated.
        tested: likewise, of each class that are tested on.
        trained: all shapes that are trained on, where they are files.
        width: of the network, as a share of the paper's.
        epochs: of the training.
        batches: of an epoch, where they are limited.
        device: names of the devices, without their number.
        threads: on which one device computes, where it is a processor; None of several devices.
        budget_bytes: within which batches were to fit, where there are several budgets.
        steps: of training, in which batches were to fit, where there are several numbers of them.
        others: overrides that neither a cell's command nor anything above tells.
    """

    scale: str | None
    data: str
    points: int | None
    shapes: int | None
    tested: int | None
    trained: int | None
    width: float | None
    epochs: int | None
    batches: float | None
    device: str
    threads: int | None = None
    budget_bytes: float | None = None
    steps: float | None = None
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: Row) -> Self:
        """Of a run, without its overrides."""
        names = str(row.get("hardware_devices", "")).split(", ")
        is_one_cpu = row.get("ranks") == 1 and row.get("hardware_accelerator") == "cpu"
        shapes = _whole(row.get("data.source.train_per_class"))
        return cls(
            scale=row.get("scale"),
            data=str(row.get(_OWN_TARGET, "")).rpartition(".")[2],
            points=_whole(row.get("data.num_points")),
            shapes=shapes,
            tested=_whole(row.get("data.source.test_per_class")),
            trained=_whole(row.get("train_shapes")) if shapes is None else None,
            width=row.get("model.width"),
            epochs=_whole(row.get("trainer.max_epochs")),
            batches=row.get("trainer.limit_train_batches"),
            device=", ".join(name.partition(" x ")[2] or name for name in names),
            threads=_whole(row.get("threads_per_rank")) if is_one_cpu else None,
        )

    @property
    def title(self) -> str:
        """In words."""
        shapes = " + ".join(str(count) for count in (self.shapes, self.tested) if count)
        parts = [
            f"scale {self.scale}" if self.scale else "",
            self.data_text,
            f"{shapes} shapes of a class" if shapes else "",
            f"{self.trained:,} shapes" if self.trained else "",
            f"width {self.width:g}" if self.width is not None else "",
            _counted("epoch", self.epochs) if self.epochs else "",
            f"epochs limited to {_share_text(self.batches)}" if self.batches else "",
            *self.others,
            f"batches within {self.budget_bytes / 1e6:,.0f} MB" if self.budget_bytes else "",
            _steps_text(self.steps),
            self.device,
            self.threads_text,
        ]
        return "; ".join(part for part in parts if part)

    @property
    def data_text(self) -> str:
        """Of which shapes, and how many points of each."""
        points = "all their points" if self.points is None else f"{self.points:,} points"
        return f"{_DATA.get(self.data, (self.data,))[0]}, {points}"

    @property
    def threads_text(self) -> str:
        """On how many threads one device computes; empty where that is not told."""
        return "" if self.threads is None else f"{_counted('thread', self.threads)} a device"

    @property
    def option(self) -> str:
        """Of ``data``, which has these shapes."""
        return _DATA.get(self.data, ("", USUAL))[1]

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the command line: the scale and the data."""
        scale = (f"scale={self.scale}",) if self.scale else ()
        return (*scale, *((f"data={self.option}",) if self.option != USUAL else ()))

    @property
    def values(self) -> dict[str, Any]:
        """What the configuration has of it, by its keys."""
        return {key: getattr(self, name) for key, name in _OWN_KEYS.items()}

    @staticmethod
    def has(key: str) -> bool:
        """Whether a setting tells a key of the configuration, so that it is no other override."""
        return key in _OWN_KEYS


def _steps_text(steps: float | None) -> str:
    if steps is None:
        return ""
    return f"batches tried by {_counted('step', steps)}"


def _share_text(batches: float) -> str:
    """Of an epoch: a number of batches, or as a float of at most 1 their share."""
    if isinstance(batches, float) and batches <= 1:
        return f"{100 * batches:g} % of their batches"
    return _counted("batch", batches, several="batches")


def _counted(what: str, count: float, *, several: str = "") -> str:
    number = str(count) if isinstance(count, int) else f"{count:g}"
    return f"{number} {what if count == 1 else several or f'{what}s'}"


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
