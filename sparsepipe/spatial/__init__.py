"""One sample over many devices: each holds a shard and exchanges halos; results are exact."""

from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.shard import Shard, cut
from sparsepipe.spatial.spatialize import rule, spatialize, unspatialize

__all__ = ["Grid", "Shard", "cut", "rule", "spatialize", "unspatialize"]
