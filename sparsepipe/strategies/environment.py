"""Where a rank finds its place: the variables torch's elastic agent and torchrun set."""

from __future__ import annotations

import os

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from typing_extensions import override

from sparsepipe.errors import ConfigError


class RankEnvironment(LightningEnvironment):
    """A cluster environment for ranks that were started from outside.

    Lightning's own environment for the elastic agent insists on the same number of devices
    on every host; this one takes rank and world size as the agent gives them.
    """

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return "LOCAL_RANK" in os.environ

    @override
    def global_rank(self) -> int:
        return int(os.environ.get("RANK", super().global_rank()))

    @override
    def set_global_rank(self, rank: int) -> None:
        super().set_global_rank(int(os.environ.get("RANK", rank)))

    @override
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", super().world_size()))

    @override
    def set_world_size(self, size: int) -> None:
        super().set_world_size(int(os.environ.get("WORLD_SIZE", size)))

    @override
    def teardown(self) -> None:
        """Leaves the environment alone: the agent set it, and a second fit needs it."""


def check_ranks(environment: ClusterEnvironment, *, nodes: int, devices: int) -> None:
    """Refuse to train on other ranks than the Trainer asks for.

    Args:
        environment: knows how many there are.
        nodes: of the Trainer.
        devices: of the Trainer on this node; other nodes may have other numbers.

    Raises:
        ConfigError: there are more or fewer.
    """
    there_are = environment.world_size()
    unequal = (
        nodes > 1
        and os.environ.get("LOCAL_WORLD_SIZE") == str(devices)
        and os.environ.get("GROUP_WORLD_SIZE", str(nodes)) == str(nodes)
    )
    if there_are != nodes * devices and not unequal:
        raise ConfigError(
            f"the Trainer has devices={devices} and num_nodes={nodes}, but {there_are} ranks run",
            remedy="start as many ranks as the Trainer has devices; all Trainers of a script that "
            "starts ranks need the same number",
        )
