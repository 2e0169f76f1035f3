"""The paper's model on the paper's GPUs: what its Table III and its Fig. 9 are computed from."""

from __future__ import annotations

from functools import cache

import yaml

from sparsepipe.cluster import Inventory
from sparsepipe.config.compose import config_dir
from sparsepipe.partition.costs.model import cost_model
from sparsepipe.partition.problem import Problem
from sparsepipe.planning.device_profiles import load_profiles
from sparsepipe.profiling import Profile

MODEL = "sparse_vgg16_bn"
MP_DEVICE = "RTX 2080 Ti"
"""As which MP counts all GPUs."""


def paper_inventory(gpus: int) -> Inventory:
    """The GPUs of a row of Table III."""
    path = config_dir() / "hardware" / f"paper_{gpus}gpu.yaml"
    return Inventory.from_dict(yaml.safe_load(path.read_text(encoding="utf-8"))["value"])


def paper_problem(gpus: int, model: str, bandwidth: float) -> Problem:
    """How to split the model over them.

    Args:
        gpus: how many, 5 to 8.
        model: of costs.
        bandwidth: of all links, bytes/s.
    """
    inventory, profiles = _inputs(gpus)
    return Problem.of(
        inventory,
        profiles,
        model=cost_model(model),
        bandwidth_bytes_per_s=bandwidth,
    )


@cache
def _inputs(gpus: int) -> tuple[Inventory, dict[str, Profile]]:
    """Read once: tables ask for them many times."""
    inventory = paper_inventory(gpus)
    return inventory, load_profiles(inventory, MODEL, given={})
