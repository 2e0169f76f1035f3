"""Two hosts with profiles of a small network, for emulated trainings."""

from __future__ import annotations

from pathlib import Path

from sparsepipe.config.build import build_inventory
from sparsepipe.profiling import LayerProfile, Profile
from sparsepipe.tasks.emulate import as_emulated
from sparsepipe.tasks.task import task_of
from tests.support.command_line import composed
from tests.support.resolved import run_directory

FORWARD_S, BACKWARD_S = 0.004, 0.008
ACTIVATION_BYTES, PARAMETER_BYTES = 200_000, 400_000
LAYERS = 4


def profile(
    *,
    slower: float = 1.0,
    parameter_bytes: float = PARAMETER_BYTES,
    update_s: float | None = None,
    batch_size: int | None = 16,
) -> Profile:
    """Four like layers of the tiny network."""
    layers = tuple(
        LayerProfile(
            index=index,
            name=str(index),
            kind="Linear",
            forward_s=slower * FORWARD_S,
            backward_s=slower * BACKWARD_S,
            activation_bytes=ACTIVATION_BYTES,
            parameter_bytes=parameter_bytes,
            update_s=update_s,
        )
        for index in range(LAYERS)
    )
    meta = {"model": "mlp", "source": "a test"}
    told = {} if batch_size is None else {"batch_size": batch_size}
    return Profile(layers=layers, meta={**meta, **told})


def hosts(tmp_path: Path, *, fast: int = 1, slow: int = 2, bytes_per_s: float = 20e6) -> list[str]:
    """Overrides: one host with fast devices and one with slow ones."""
    profile().save(tmp_path / "fast.json")
    profile(slower=2.0).save(tmp_path / "slow.json")
    listed = ", ".join(
        f"{{name: {name}-host, link: {{bytes_per_s: 1e9}}, devices: [{{name: {name}, "
        f"count: {count}, accelerator: cuda, profile: {{mlp: {tmp_path / name}.json}}}}]}}"
        for name, count in (("fast", fast), ("slow", slow))
    )
    return [
        "experiment=tiny",
        "hardware=cores",
        f"hardware.value.hosts=[{listed}]",
        f"+hardware.value.link={{bytes_per_s: {bytes_per_s}}}",
        "hardware.emulate=true",
    ]


def path_of(*overrides: str) -> Path:
    """The directory of the run that the overrides ask for."""
    config = as_emulated(composed(*overrides))
    inventory = build_inventory(config)
    config = task_of(config).configured(config, inventory)
    return run_directory(config, inventory).path
