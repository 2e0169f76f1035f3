"""Options of an optimizer's groups, as they were in the steps of updates yet to come."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from sparsepipe.errors import ConfigError

Options = dict[str, Any]
"""Of one group: all but its parameters."""


class PastOptions:
    """Lets an update use the options of an earlier step.

    Schedulers change options between Lightning steps, and an update is to see those of its own
    step. What an optimizer writes into its groups itself while it steps (counters, estimates)
    belongs to its updates: the next one sees it, whatever its step.

    Args:
        optimizer: whose options change.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._noted: dict[int, list[Options]] = {}
        self._warned = False

    def note(self, step: int) -> None:
        """Remembers the options as those of a step; steps count from 0 after a drain."""
        if step == 0:
            self._noted.clear()
        self._noted[step] = [_copied(_options(g)) for g in self._optimizer.param_groups]

    @contextmanager
    def as_of(self, step: int) -> Iterator[None]:
        """Within, the options are those of ``step``; no earlier one will be asked for.

        Raises:
            ConfigError: the optimizer changed what somebody else changes too.
        """
        groups = self._optimizer.param_groups
        now = [_options(group) for group in groups]
        for group, options in zip(groups, self._noted[step], strict=True):
            group.update(_copied(options))
        yield
        for earlier in [known for known in self._noted if known < step]:
            del self._noted[earlier]
        for number, group in enumerate(groups):
            before = self._noted[step][number]
            written = {
                name: value
                for name, value in _options(group).items()
                if name not in before or not _same(value, before[name])
            }
            group.update(now[number])
            if written:
                later = [options[number] for options in self._noted.values()]
                self._keep(written, before=dict(before), group=group, later=later)

    def _keep(
        self, written: Options, *, before: Options, group: Options, later: list[Options]
    ) -> None:
        """Puts what the step wrote into the present options and those of steps to come."""
        kind = type(self._optimizer).__name__
        for name in written.keys() & before.keys():
            if not all(_same(options[name], before[name]) for options in (group, *later)):
                raise ConfigError(
                    f"{kind} changes {name!r} of its groups in its steps, and so does somebody "
                    "else between them, such as a scheduler",
                    remedy=f"leave {name!r} to one of them",
                )
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{kind} keeps {', '.join(map(repr, sorted(written)))} in its groups: each stage "
                "has values of its own there, and checkpoints hold those of the first stage."
            )
        for options in (group, *later):
            options.update(_copied(written))


def _options(group: Mapping[str, Any]) -> Options:
    return {name: value for name, value in group.items() if name != "params"}


def _copied(options: Options) -> Options:
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in options.items()
    }


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)
