"""A module and its optimizer, of which each rank holds its shard; checkpoints hold the whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.process_group import broadcast_tensors_, gather_to_rank_0
from sparsepipe.strategies.pipeline.layers import Placement, Shard
from sparsepipe.strategies.pipeline.optimizer_step import GlobalNorm

State = dict[str, Any]
"""What ``Optimizer.state_dict`` returns."""


class ShardedOptimizer:
    """An optimizer reduced to the parameters that this rank owns.

    Args:
        optimizer: the optimizer of the whole module; changed in place.
        owned: ids of the parameters to keep.

    Raises:
        ConfigError: an optimizer that couples its parameters.
    """

    def __init__(self, optimizer: Optimizer, *, owned: Collection[int]) -> None:
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "LBFGS evaluates the whole network several times for one update",
                remedy="use an optimizer with a state for each parameter, such as SGD or AdamW",
            )
        self.optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._sizes = list(map(len, self._groups))
        self._numbers: list[list[int]] = []
        number = 0
        for group in optimizer.param_groups:
            mine = []
            for parameter in group["params"]:
                if id(parameter) in owned:
                    mine.append((number, parameter))
                else:
                    optimizer.state.pop(parameter, None)
                number += 1
            self._numbers.append([n for n, _ in mine])
            group["params"] = [p for _, p in mine]
        # Early stages update for the first time after the learning rate's first step.
        optimizer._opt_called = True  # type: ignore[attr-defined]

    @property
    def whole(self) -> list[Tensor]:
        """Parameters of the whole optimizer in its order, those of other ranks without values."""
        return [parameter for group in self._groups for parameter in group]

    def local_state(self) -> dict[int, Any]:
        """States of the parameters of this rank, by their number in the whole, on the host."""
        local = self.optimizer.state_dict()
        whole = [n for numbers in self._numbers for n in numbers]
        return {whole[n]: _to_host(entry) for n, entry in local["state"].items()}

    def whole_state(self, parts: Iterable[Mapping[int, Any]]) -> State:
        """The state dict of the whole optimizer."""
        state = {n: entry for part in parts for n, entry in part.items()}
        groups = []
        start = 0
        for size, group in zip(
            self._sizes, self.optimizer.state_dict()["param_groups"], strict=True
        ):
            groups.append({**group, "params": list(range(start, start + size))})
            start += size
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def collect(self, *, holds: bool) -> State:
        """The whole optimizer's state on rank 0, this rank's on others; all ranks call it.

        One replica of each stage ``holds`` its state, and gives it.
        """
        mine = self.local_state()
        return self.whole_state(gather_to_rank_0(mine if holds else {}) or [mine])

    def restore(self, state: Mapping[int, Any]) -> None:
        """Makes the optimizer whole again; what this rank has of its own stays."""
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = list(parameters)
        for number, parameter in enumerate(self.whole):
            if number in state and parameter not in self.optimizer.state:
                self.optimizer.state[parameter] = state[number]

    def load(self, whole: State) -> None:
        """Takes this rank's part of a whole optimizer's state.

        Raises:
            ConfigError: it is of an optimizer with other groups.
        """
        sizes = [len(group["params"]) for group in whole["param_groups"]]
        if sizes != self._sizes:
            raise ConfigError(
                f"the checkpoint's optimizer has groups of {sizes} parameters, this run's of "
                f"{self._sizes}",
                remedy="configure the same optimizer, or load only the weights",
            )
        saved = [n for group in whole["param_groups"] for n in group["params"]]
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for group, numbers in zip(whole["param_groups"], self._numbers, strict=True):
            first = sum(len(g["params"]) for g in groups)
            groups.append({**group, "params": list(range(first, first + len(numbers)))})
            for local, number in enumerate(numbers, start=first):
                if saved[number] in whole["state"]:
                    state[local] = whole["state"][saved[number]]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _to_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _to_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_host(item) for item in value)
    return value


class ShardedModule:
    """Gives every rank the values of rank 0, and then keeps those of its own stage only.

    All methods but those that load are collective: every rank must call them.

    Args:
        module: the LightningModule; layers of other stages are removed from it.
        optimizer: over the whole module; parameters of other stages are removed from it. None where
            nothing is trained.
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
        self._is_first_replica = placement.plan.rank_of(self._stage, 0) == rank
        broadcast_tensors_([*module.parameters(), *module.buffers()], source=0)
        state = module.state_dict()
        self._names = list(state)
        self._versions = getattr(state, "_metadata", None)  # torch keeps them beside the state
        self.shard = Shard(placement, stage=self._stage)
        owned = {id(parameter) for _, parameter in self.shard.parameters()}
        self.shard.prune()
        self._optimizer = None if optimizer is None else ShardedOptimizer(optimizer, owned=owned)

    @property
    def has_optimizer(self) -> bool:
        """Whether something is trained, so that the optimizer is sharded as well."""
        return self._optimizer is not None

    def global_norm(self) -> GlobalNorm:
        """Clips gradients by their norm over all stages."""
        assert self._optimizer is not None
        return GlobalNorm(self._optimizer.whole, is_first_replica=self._is_first_replica)

    def state_dict(self) -> dict[str, Any]:
        """The module's state under the names of one process: whole on rank 0, else this shard."""
        with self.shard.absence.silent():
            local = self._module.state_dict()
        mine = {
            name: value.detach().cpu() if isinstance(value, Tensor) else value
            for name, value in local.items()
            if self._placement.stage_of(name) == self._stage
        }
        parts = gather_to_rank_0(mine if self._is_first_replica else {}) or [mine]
        found = {name: value for part in parts for name, value in part.items()}
        order = [name for name in self._names if name in found]
        late = [name for name in found if name not in self._names]  # made since the run began
        state = OrderedDict((name, found[name]) for name in [*order, *late])
        if self._versions is not None:
            state._metadata = self._versions  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Takes this rank's part of a whole state dict, as tuners have one in a run's middle."""
        with self.shard.absence.silent():
            mine = self._module.state_dict().keys()
            part = {name: value for name, value in state.items() if name in mine}
            self._module.load_state_dict(part, strict=strict)

    def optimizer_state(self) -> dict[str, Any]:
        """The whole optimizer's on rank 0, this rank's on others."""
        assert self._optimizer is not None
        return self._optimizer.collect(holds=self._is_first_replica)

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Takes this rank's part of a whole optimizer's state."""
        assert self._optimizer is not None
        self._optimizer.load(state)

    def fill(self) -> None:
        """After :meth:`Shard.unprune`: every rank gets the values of all stages.

        The optimizer is whole again too, so that a script can save all of it after a run.
        """
        plan = self._placement.plan
        for stage in range(plan.num_stages):
            broadcast_tensors_(self._placement.tensors_of(stage), source=plan.rank_of(stage, 0))
        if self._optimizer is not None:
            state = self.optimizer_state()["state"]
            self._optimizer.restore(process_group.broadcast_object(state))
