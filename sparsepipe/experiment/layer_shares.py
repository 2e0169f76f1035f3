"""The picture of where a model's costs lie, device by device (the paper's Fig. 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sparsepipe.profiling import Profile
from sparsepipe.results.shares import Costs, accumulated_shares


def draw_shares(profiles: Mapping[str, Profile], path: Path, *, cuts: Sequence[int] = ()) -> None:
    """Draws accumulated shares of compute time, activations and parameters.

    Args:
        profiles: of one model, by device: a panel each.
        path: the picture.
        cuts: first layers of a plan's stages behind the first. Those of a branching graph are
            numbers of its states, and not drawn: the curves run over its nodes.

    Raises:
        DataError: the picture cannot be written.
    """
    branches = any(profile.states for profile in profiles.values())
    costs = {device: _costs(profile) for device, profile in profiles.items()}
    accumulated_shares(costs, path, cuts=() if branches else cuts)


def _costs(profile: Profile) -> Costs:
    return Costs(
        compute_s=[layer.compute_s for layer in profile.layers],
        activation_bytes=[layer.activation_bytes for layer in profile.layers],
        parameter_bytes=[layer.parameter_bytes for layer in profile.layers],
    )
