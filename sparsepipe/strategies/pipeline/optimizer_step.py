"""The optimizer's step of one stage: hooks, clipping and options as Lightning has them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.strategies.sharding import GlobalNorm

Options = dict[str, Any]
"""The options of one parameter group: all entries but its parameters."""


class OptionHistory:
    """Lets an update use the options of an earlier step.

    Schedulers change options between Lightning steps, and an update is to see those of its own
    step. What an optimizer writes into its groups itself while it steps (counters, estimates)
    belongs to its updates: the next one sees it, whatever its step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._recorded: dict[int, list[Options]] = {}
        self._warned = False

    def record(self, step: int) -> None:
        """Records the options as those of a step; steps count from 0 after a drain."""
        if step == 0:
            self._recorded.clear()
        self._recorded[step] = [_copied(_options(g)) for g in self._optimizer.param_groups]

    @contextmanager
    def as_of(self, step: int) -> Iterator[None]:
        """Within, the options are those of ``step``; those of earlier steps are dropped.

        Raises:
            ConfigError: the optimizer changes an option that a scheduler changes too.
        """
        groups = self._optimizer.param_groups
        now = [_options(group) for group in groups]
        for group, options in zip(groups, self._recorded[step], strict=True):
            group.update(_copied(options))
        yield
        for earlier in [known for known in self._recorded if known < step]:
            del self._recorded[earlier]
        for number, group in enumerate(groups):
            before = self._recorded[step][number]
            written = {
                name: value
                for name, value in _options(group).items()
                if name not in before or not _same(value, before[name])
            }
            group.update(now[number])
            if written:
                later = [options[number] for options in self._recorded.values()]
                self._keep(written, before=dict(before), group=group, later=later)

    def _keep(
        self, written: Options, *, before: Options, group: Options, later: list[Options]
    ) -> None:
        """Copies options that the step wrote into the present ones and those of later steps."""
        kind = type(self._optimizer).__name__
        for name in written.keys() & before.keys():
            if not all(_same(options[name], before[name]) for options in (group, *later)):
                raise ConfigError(
                    f"{kind} changes {name!r} of its groups in its steps, and a scheduler "
                    "or hook changes it between them",
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


class ParameterHooks:
    """Calls hooks of ``register_hook`` and ``register_post_accumulate_grad_hook`` once an update.

    On one device autograd calls them in each backward. In a pipeline that is not where an
    update's gradient is: minibatches in flight have leaves of their own, microbatches have parts of
    it, and replicas average it. So they are called with what the optimizer gets.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._suspended: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def suspend(self) -> None:
        """Keeps autograd from calling them until :meth:`resume`: it adds up parts of gradients."""
        for parameter in self._parameters:
            for hooks in _hooks_of(parameter):
                if hooks:
                    self._suspended.append((hooks, dict(hooks)))
                    hooks.clear()

    def resume(self) -> None:
        """Ends what :meth:`suspend` began, if it did."""
        for hooks, kept in self._suspended:
            hooks.update(kept)
        self._suspended.clear()

    @torch.no_grad()
    def assign(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Sets the gradient of a parameter as its hooks change it."""
        before, after = _hooks_of(parameter)
        if gradient is not None:
            for hook in tuple(before.values()):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
        parameter.grad = gradient
        if gradient is not None:
            for hook in tuple(after.values()):
                hook(parameter)


def _hooks_of(parameter: nn.Parameter) -> tuple[dict[int, Any], dict[int, Any]]:
    """Those that may change a gradient, and those that are called when it is there."""
    return parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}


_REMEDY = "use an optimizer that takes one gradient for an update, such as SGD or AdamW"


class OptimizerStep:
    """Runs hooks, clips gradients, and updates parameters.

    Schedulers change an optimizer's options between Lightning steps. Replicas of a stage may
    apply the same update in different steps, and must all use the options of one step.

    Args:
        norm: clips by norm in place of ``precision``; None: ``precision`` clips.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        precision: Precision,
        *,
        norm: GlobalNorm | None = None,
    ) -> None:
        self._module = module
        self._parameters = parameters
        self._optimizer = optimizer
        self._precision = precision
        self._norm = norm
        self._options = OptionHistory(optimizer)
        self.hooks = ParameterHooks(parameters.values())

    def record(self, step: int) -> None:
        self._options.record(step)

    def apply(self, gradients: Mapping[str, Tensor | None], *, loss: Tensor, step: int) -> None:
        """Updates the parameters with the options of ``step``, which never falls.

        Raises:
            ConfigError: the optimizer needs gradients at other weights too.
        """
        self.hooks.resume()
        for name, parameter in self._parameters.items():
            self.hooks.assign(parameter, gradients.get(name))
        self._precision.post_backward(loss, self._module)
        evaluation = _Closure(self._optimizer, self._parameters, loss)
        clipping = nullcontext() if self._norm is None else self._norm.clipping(self._precision)
        with self._options.as_of(step), clipping:
            self._precision.optimizer_step(self._optimizer, model=self._module, closure=evaluation)
        evaluation.check()


class _Closure:
    """The closure of one step: gradients are computed already, so that it can be called once."""

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], loss: Tensor
    ) -> None:
        self._kind = type(optimizer).__name__
        self._parameters = parameters
        self._loss = loss
        self._calls = 0
        self._before = self._state()

    def __call__(self) -> Tensor:
        self._calls += 1
        if self._calls > 1:
            raise ConfigError(
                f"{self._kind} evaluates the network several times for one update, and in a "
                "pipeline other minibatches are under way",
                remedy=_REMEDY,
            )
        if self._state() != self._before:
            raise ConfigError(
                f"{self._kind} changes parameters or gradients before it calls its closure",
                remedy=_REMEDY,
            )
        return self._loss

    def check(self) -> None:
        """After the step: a closure that was not called has run no hooks and clipped nothing."""
        if not self._calls:
            raise ConfigError(
                f"{self._kind} does not call the closure that its step is given",
                remedy=_REMEDY,
            )

    def _state(self) -> list[tuple[int, int]]:
        """Changes when a parameter or gradient is changed or replaced."""
        return [(p._version, id(p.grad)) for p in self._parameters.values()]
