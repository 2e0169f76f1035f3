"""A module and its optimizer, of which each rank holds its share; checkpoints hold the whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torch.optim import Optimizer

from sparsepipe.runtime import group
from sparsepipe.runtime.whole import collect, spread_
from sparsepipe.strategies.pipeline.clipping import WholeNorm
from sparsepipe.strategies.pipeline.layers import Placement, Share
from sparsepipe.strategies.pipeline.optimizers import PrunedOptimizer


class SpreadModule:
    """Gives every rank rank 0's values, and then its own share of them only.

    All ranks make one, and call its methods, at the same time (but for the loading).

    Args:
        module: the LightningModule; layers of other stages leave it.
        placement: says who owns what.
        rank: this one.
        optimizer: over the whole module; parameters of other stages leave it. None where
            nothing is trained.

    Attributes:
        share: of the module.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        placement: Placement,
        rank: int,
        optimizer: Optimizer | None,
    ) -> None:
        self._module = module
        self._placement = placement
        self._stage = placement.plan.stage_of(rank)
        self._speaks = placement.plan.replica_of(rank) == 0  # for its stage
        spread_([*module.parameters(), *module.buffers()], source=0)
        state = module.state_dict()
        self._names = list(state)
        self._versions = getattr(state, "_metadata", None)  # which torch keeps beside it
        self.share = Share(placement, stage=self._stage)
        owned = {id(parameter) for _, parameter in self.share.parameters()}
        self.share.prune()
        self._pruned = None if optimizer is None else PrunedOptimizer(optimizer, owned=owned)

    @property
    def has_optimizer(self) -> bool:
        """Whether something is trained, so that the optimizer is spread as well."""
        return self._pruned is not None

    def whole_norm(self) -> WholeNorm:
        """Clips by the norm of what all stages train."""
        assert self._pruned is not None
        return WholeNorm(self._pruned.whole, speaks=self._speaks)

    def state_dict(self) -> dict[str, Any]:
        """The module's, under the names of one process: whole on rank 0, else this share."""
        mine = {
            name: value.detach().cpu() if isinstance(value, Tensor) else value
            for name, value in self._module.state_dict().items()
            if self._placement.stage_of(name) == self._stage
        }
        parts = collect(mine if self._speaks else {}) or [mine]
        found = {name: value for part in parts for name, value in part.items()}
        order = [name for name in self._names if name in found]
        late = [name for name in found if name not in self._names]  # made since the run began
        state = OrderedDict((name, found[name]) for name in [*order, *late])
        if self._versions is not None:
            state._metadata = self._versions  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Takes this rank's part of a whole state dict, as tuners have one in a run's middle."""
        mine = self._module.state_dict().keys()
        part = {name: value for name, value in state.items() if name in mine}
        self._module.load_state_dict(part, strict=strict)

    def optimizer_state(self) -> dict[str, Any]:
        """The whole optimizer's on rank 0, this rank's on others."""
        assert self._pruned is not None
        return self._pruned.collect(holds=self._speaks)

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Takes this rank's part of a whole optimizer's state.

        Raises:
            ConfigError: it is of another optimizer.
        """
        assert self._pruned is not None
        self._pruned.load(state)

    def put_back(self) -> None:
        """The module has all its layers again, those of other stages without values."""
        self.share.unprune()

    def fill(self) -> None:
        """After :meth:`put_back`: every rank gets the values of the stages that own them.

        The optimizer is whole again too, so that what a script saves after a run is all of it.
        """
        plan = self._placement.plan
        for stage in range(plan.num_stages):
            spread_(self._placement.tensors_of(stage), source=plan.rank_of(stage, 0))
        if self._pruned is not None:
            state = self.optimizer_state()["state"]
            self._pruned.put_back(group.broadcast_object(state))
