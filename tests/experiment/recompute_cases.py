"""A profile of the tiny network whose activations fill small devices."""

from __future__ import annotations

from pathlib import Path

from sparsepipe.profiling import LayerProfile, Profile

AUTO = "parallel.strategy.recompute=auto"


def given(tmp_path: Path, *, saved_bytes: float = 1e6) -> str:
    """An override with a profile of the tiny network's four layers, the inner ones slow."""
    layers = [
        LayerProfile(
            index=index,
            name=str(index),
            kind="Linear",
            forward_s=seconds,
            backward_s=2 * seconds,
            activation_bytes=100,
            parameter_bytes=1000,
            saved_bytes=saved_bytes,
            begin_bytes=0,
            end_bytes=100,
        )
        for index, seconds in enumerate([1.0, 2.0, 2.0, 1.0])
    ]
    found = Profile(layers=tuple(layers), meta={"model": "mlp", "source": "a test"})
    path = found.save(tmp_path / f"{saved_bytes:g}.json")
    return f"parallel.search.profiles={{core: {path}}}"
