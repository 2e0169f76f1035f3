"""What a person reads of a profile."""

from __future__ import annotations

from sparsepipe.profiling import Profile
from sparsepipe.results.tables import markdown_table


def told(found: Profile) -> str:
    """What layers, a step and an update take, in a line."""
    step_s, cost_s = found.meta["step_s"], found.meta["cost_s"]
    update = "" if found.update_s is None else f", an update {1e3 * found.update_s:.1f} ms"
    copy = "" if found.copy_s is None else f", a copy of the weights {1e3 * found.copy_s:.1f} ms"
    return (
        f"the layers take {1e3 * found.compute_s:.1f} ms one by one, a step of all "
        f"{1e3 * step_s:.1f} ms ({found.compute_s / step_s:.1%}){update}{copy}; "
        f"{cost_s:.0f} s of measuring"
    )


def share_of_training(found: Profile, training_s: float | None) -> str:
    """What measuring took beside the training that it serves.

    Args:
        found: tells what it took.
        training_s: None: the training has no given end.
    """
    if training_s is None:
        return "and the training that it serves has no given end (trainer.max_epochs, max_steps)"
    share = found.meta["cost_s"] / training_s
    return f"{share:.1%} of the training that it serves, on this device"


def layer_table(found: Profile) -> str:
    """A row for each layer."""
    head = (
        *("layer", "kind", "forward ms", "spread", "backward ms", "spread", "kernel maps ms"),
        *("update ms", "out KiB", "params KiB", "peak MiB"),
    )
    rows = [
        (
            str(layer.index),
            layer.kind,
            f"{1e3 * layer.forward_s:.2f}",
            f"{1e3 * (layer.forward_spread_s or 0.0):.2f}",
            f"{1e3 * layer.backward_s:.2f}",
            f"{1e3 * (layer.backward_spread_s or 0.0):.2f}",
            f"{1e3 * layer.kernel_map_s:.2f}" if layer.kernel_map_s else "",
            f"{1e3 * layer.update_s:.2f}" if layer.update_s else "",
            f"{layer.activation_bytes / 1024:,.0f}",
            f"{layer.parameter_bytes / 1024:,.0f}",
            f"{(layer.peak_bytes or 0.0) / 2**20:,.1f}",
        )
        for layer in found.layers
    ]
    return markdown_table(head, rows)
