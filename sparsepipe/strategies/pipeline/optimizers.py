"""An optimizer over one rank's parameters, whose state is that of the whole module's.

``configure_optimizers`` runs on the whole module, so that groups and their options are
those of one process. Then each group keeps what this rank owns. Checkpoints number the
parameters as the whole optimizer does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.whole import collect

State = dict[str, Any]
"""What ``Optimizer.state_dict`` returns."""


class PrunedOptimizer:
    """An optimizer reduced to the parameters that this rank owns.

    Args:
        optimizer: over the whole module; changed in place.
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
        """The state dict of the whole optimizer.

        Args:
            parts: :meth:`local_state` of each stage.
        """
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

        Args:
            holds: this rank speaks for its stage.
        """
        mine = self.local_state()
        return self.whole_state(collect(mine if holds else {}) or [mine])

    def put_back(self, state: Mapping[int, Any]) -> None:
        """Makes the optimizer one over the whole module again.

        Args:
            state: of the whole, by the parameters' numbers in it. What this rank has of its
                own stays as it is.
        """
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
