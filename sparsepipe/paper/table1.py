"""The task ``table1``: compares the paper's GPUs with a device of this machine, which it measures.

Zhai et al., SparsePipe, Table I: two servers with three kinds of GPU (``hardware=paper_8gpu``).
The printed figures are those of data sheets; ours are measured with a product of matrices and a
copy.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from sparsepipe.cluster import Inventory, Place
from sparsepipe.paper.plans import paper_inventory
from sparsepipe.planning.devices import find_device, memory_of, prepare_device, words_of_machine
from sparsepipe.profiling.timing import Speed, copy_speed, multiply_speed
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun, Task
from sparsepipe.utils.files import markdown_table, write_csv, write_text_atomic

log = logging.getLogger(__name__)

Count = Annotated[int, Field(ge=1, le=2**40)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table1(Task):
    """Compares the GPUs of the paper's Table I with a measured device of this machine.

    Attributes:
        device: name of the device to measure; None: the inventory's only kind of device. A CPU is
            measured as a whole, with all threads of this process.
        matrix_size: rows and columns of the float32 matrices that ``torch.mm`` multiplies.
        copy_bytes: size of the copied tensor; each byte counts as read and as written.
        warmups: number of products and copies before those that count.
        repeats: number of products and copies from which medians and quartiles are taken.
    """

    alone: ClassVar[bool] = True
    chooses_devices: ClassVar[bool] = True  # task.device chooses among all kinds
    # No data are read, no network is made.
    not_identity: ClassVar[tuple[str, ...]] = (
        *("backend", "data", "loss", "model", "optim", "representation", "trainer"),
    )

    device: str | None = None
    matrix_size: Count = 4096
    copy_bytes: Count = 2**30
    warmups: Annotated[int, Field(ge=0, le=10_000)] = 3
    repeats: Annotated[int, Field(ge=1, le=10_000)] = 20

    def run(self, run: ResolvedRun) -> None:
        """Measures one device; writes ``table.md`` and ``table.csv``."""
        place = find_device(run.inventory, self.device)
        here = torch.device("cpu")
        if place.accelerator == "cuda":
            here = prepare_device(place, run.inventory)
        effort = {"warmups": self.warmups, "repeats": self.repeats}
        multiplied = multiply_speed(here, size=self.matrix_size, **effort)
        copied = copy_speed(here, size_bytes=self.copy_bytes, **effort)
        rows = table(place, run.inventory, multiplied=multiplied, copied=copied)
        method = (
            "The paper's figures are from data sheets. Measured here: products of float32 matrices "
            f"of {self.matrix_size:,} by {self.matrix_size:,} (torch.mm), 2 n^3 operations each, "
            f"and copies of {self.copy_bytes:,} bytes, read once and written once; median of "
            f"{self.repeats} ± the distance between the quartiles."
        )
        text = markdown_table(list(rows[0]), [list(row.values()) for row in rows])
        log.info("%s\n\n%s", method, text)
        write_csv(run.directory.path / "table.csv", rows)
        write_text_atomic(run.directory.path / "table.md", f"{text}\n\n{method}\n")
        write_result(
            run,
            {
                "measured_device": place.name,
                "flops_per_s": multiplied.per_s,
                "flops_spread_per_s": multiplied.spread_per_s,
                "copied_bytes_per_s": copied.per_s,
                "copied_spread_bytes_per_s": copied.spread_per_s,
                "memory_bytes": _memory_bytes(place, run.inventory),
            },
        )

    def prepare(self, run: ResolvedRun) -> str:
        """The properties of the machine on which the measurements depend, as text."""
        del run
        return ", ".join([*words_of_machine(), f"{torch.get_num_threads()} threads"])


def table(
    place: Place, inventory: Inventory, *, multiplied: Speed, copied: Speed
) -> list[dict[str, str]]:
    """A row for each quantity, with columns for the GPUs of the paper and the measured device."""
    columns = []
    for device in (device for host in paper_inventory(8).hosts for device in host.devices):
        rates = (device.tflops, device.memory_bytes, device.memory_bytes_per_s)
        cells = [
            "" if rate is None else f"{rate / scale:g}"
            for rate, scale in zip(rates, (1.0, 1e9, 1e9), strict=True)
        ]
        columns.append((f"{device.name} (paper)", [str(device.count), *cells]))
    memory_bytes = _memory_bytes(place, inventory)
    threads = f", {torch.get_num_threads()} threads" if place.accelerator == "cpu" else ""
    ours = (
        f"{place.name}{threads} (measured here)",
        [
            "1",
            _with_spread(multiplied, 1e12),
            "" if memory_bytes is None else f"{memory_bytes / 1e9:.3g}",
            _with_spread(copied, 1e9),
        ],
    )
    quantities = ("devices", "float32 TFLOP/s", "memory (GB)", "memory bandwidth (GB/s)")
    return [
        {"": quantity, **{name: cells[number] for name, cells in [*columns, ours]}}
        for number, quantity in enumerate(quantities)
    ]


def _with_spread(speed: Speed, scale: float) -> str:
    return f"{speed.per_s / scale:.3g} ± {speed.spread_per_s / scale:.3g}"


def _memory_bytes(place: Place, inventory: Inventory) -> int | None:
    """Bytes of memory of a GPU, or of all cores of a CPU's host together; None: unknown."""
    if place.accelerator != "cpu":
        return memory_of(place, inventory)
    (host,) = [host for host in inventory.hosts if host.name == place.host]
    shares = [(device.count, device.memory_bytes) for device in host.devices]
    known = [count * each for count, each in shares if each is not None]
    return int(sum(known)) if len(known) == len(shares) else None
