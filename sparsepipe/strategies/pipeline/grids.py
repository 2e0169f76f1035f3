"""Stages whose ranks share each sample: a grid of them counts as one replica of its stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives.halo import ProcessGroup
from sparsepipe.runtime.stage import Around
from sparsepipe.schedule import Plan
from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.spatialize import check_rules, spatialize_layers, through_shards


def check_grids(plan: Plan, module: nn.Module, name: str) -> None:
    """Refuses a grid of layers that it cannot run; every rank has all layers of ``name`` then.

    Raises:
        ConfigError: the only stage is a grid, layers have no rule for shards, or parameters outside
            of the layers are trained in a last stage that is a grid.
    """
    if plan.num_stages == 1 and plan.has_grids:
        raise ConfigError(
            "the only stage is a grid, and there is no pipeline",
            remedy="choose spatial parallelism: parallel=spatial, or SpatialStrategy",
        )
    layers = module.get_submodule(name)
    for stage in plan.stages:
        if stage.grid is not None:
            first, last = stage.layers
            for layer in list(layers.children())[first : last + 1]:
                check_rules(layer)
    if plan.stages[-1].grid is None:
        return
    for key, parameter in module.named_parameters():
        if parameter.requires_grad and not key.startswith(f"{name}."):
            raise ConfigError(
                f"{key} is trained outside of the layers, and the last stage is a grid, of which "
                "each rank would have its whole gradient",
                remedy="make it part of an entry of the Sequential, or give the last stage one "
                "device",
            )


def on_shards(
    layers: Sequence[nn.Module], shape: Sequence[int], group: ProcessGroup | None
) -> Around:
    """Lets the layers of a stage work on shards of the samples that the stage is given.

    Args:
        layers: of the stage.
        shape: of its grid.
        group: of its ranks.
    """
    grid = Grid(tuple(shape), group)
    for layer in layers:
        spatialize_layers(layer, grid)
    return partial(through_shards, grid)
