"""A tiny model on two cores, and profiles of it, for trainings whose plan is searched for."""

from __future__ import annotations

from pathlib import Path

from sparsepipe.config.build import build_inventory
from sparsepipe.profiling import LayerProfile, Profile
from tests.support.command_line import composed

MODEL = ("experiment=tiny", "model.width=64", "data.batch_size=2")
TWO = ("hardware.accelerator=cpu", "hardware.cpu_devices=2")
# So slow that a cut, which few bytes cross, is better than an all-reduce.
SLOW = "parallel.search.bandwidth_bytes_per_s=1e4"


def profile(times_s: list[float], *, model: str = "mlp", parameter_bytes: float = 1000) -> Profile:
    """Of the tiny model's four layers, or as many as there are times."""
    layers = [
        LayerProfile(
            index=index,
            name=str(index),
            kind="Linear",
            forward_s=time_s / 3,
            backward_s=2 * time_s / 3,
            activation_bytes=100,
            parameter_bytes=parameter_bytes,
        )
        for index, time_s in enumerate(times_s)
    ]
    return Profile(layers=tuple(layers), meta={"model": model, "source": "a test"})


def given(tmp_path: Path, found: Profile, name: str = "given.json") -> str:
    """An override that names the profile of the one device that there is."""
    found.save(tmp_path / name)
    device = build_inventory(composed(*MODEL, *TWO)).hosts[0].devices[0].name
    return f"parallel.search.profiles={{{device}: {tmp_path / name}}}"
