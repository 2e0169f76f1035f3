"""The optimizer's step of one stage: hooks, clipping and options as Lightning has them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group

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


class GlobalNorm:
    """Clips by the norm of the gradients of all stages, as one process does.

    Ranks exchange the norms of single parameters' gradients, from which
    ``torch.nn.utils.clip_grad_norm_`` computes the norm of the whole network. They are combined in
    the order of the whole optimizer, so that gradients have the bits of one process.

    Clipping is collective: every rank has to clip as often as the others.

    Args:
        parameters: of the whole optimizer, in its order; those of other stages need no values.
        is_first_replica: whether this rank contributes the norms of its stage; one replica of each
            stage does, since all of them have the same gradients.
    """

    def __init__(self, parameters: Sequence[Tensor], *, is_first_replica: bool) -> None:
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._dtypes = [parameter.dtype.to_real() for parameter in parameters]
        self._is_first_replica = is_first_replica

    @contextmanager
    def clipping(self, precision: Precision) -> Iterator[None]:
        """``precision`` clips so within the block; its own ``clip_grad_by_norm`` is refused."""
        own = type(precision).clip_grad_by_norm is not Precision.clip_grad_by_norm
        vars(precision)["clip_grad_by_norm"] = partial(_refuse if own else self._clip, precision)
        try:
            yield
        finally:
            del vars(precision)["clip_grad_by_norm"]

    def _clip(self, precision: Precision, optimizer: Optimizer, clip_val: float) -> None:
        mine = [(p, p.grad) for p in precision.main_params(optimizer) if p.grad is not None]
        norms = self._norms(mine)
        if mine:
            together = torch.stack(norms).to(mine[0][1].device)
            total = torch.linalg.vector_norm(together, 2.0)
            clip_grads_with_norm_([p for p, _ in mine], clip_val, total)

    @torch.no_grad()
    def _norms(self, mine: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The norm of each parameter of the whole optimizer that has a gradient; a collective."""
        norms_P2 = torch.zeros(len(self._dtypes), 2, dtype=torch.float64)  # norm, whether there
        if mine and self._is_first_replica:
            # As torch takes them, so that they are the same on every kind of device.
            found = torch._foreach_norm([gradient for _, gradient in mine], 2.0)
            numbers = [self._number(parameter) for parameter, _ in mine]
            norms_P2[numbers, 0] = torch.stack([norm.double() for norm in found]).cpu()
            norms_P2[numbers, 1] = 1.0
        # Zeros of all ranks but one are added to each norm, which changes no bit of it.
        process_group.add_(norms_P2, what="taking the norm of all stages' gradients")
        return [
            norm.to(dtype)
            for (norm, there), dtype in zip(norms_P2, self._dtypes, strict=True)
            if there
        ]

    def _number(self, parameter: Tensor) -> int:
        number = self._numbers.get(id(parameter))
        if number is None:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} came into the optimizer after the "
                "run had begun, and the other stages do not know it when gradients are clipped",
                remedy="give the optimizer all parameters in configure_optimizers, with lr=0 "
                "where they are to learn later",
            )
        return number


def _refuse(precision: Precision, *_: Any, **__: Any) -> None:
    """Replaces a ``clip_grad_by_norm`` that would take the norm of this stage's gradients only."""
    kind = type(precision).__name__
    raise ConfigError(
        f"{kind} has a clip_grad_by_norm of its own, which on each rank knows the gradients of one "
        "stage only, and all stages are to be clipped by one norm",
        remedy=f"remove it from {kind}: Lightning's is replaced by one that knows all stages; or "
        "clip by value (trainer.gradient_clip_algorithm=value), or not at all",
    )


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
