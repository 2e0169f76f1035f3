"""Gives hooks and ``torch.autograd.grad`` the gradients of whole samples while ranks have parts.

In a backward pass of ranks that share samples or domains, each rank has a part of every parameter's
gradient. Hooks of parameters are called when the ranks' parts have been added up; what else would
see a part is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives.halo import add_up, added_up
from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.normalization import recomputing
from sparsepipe.spatial.shard import Shard, alike, local_of, shard_of
from sparsepipe.spatial.spatialize import inside_layers

_IN_PARTS = (
    *("sparsepipe.spatial.", "sparsepipe.domains.", "sparsepipe.runtime.collectives."),
    "torch.utils.checkpoint",
)
"""Modules with autograd functions that exchange parts, or hide such functions."""


def _refused(what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{what} would see this rank's part of gradients, not the gradients of whole samples",
        remedy=remedy,
    )


def check_module_hooks(module: nn.Module) -> None:
    """Raises a ConfigError if ``module``, or a module in it, has a backward hook."""
    of_all = (
        nn.modules.module._global_backward_hooks or nn.modules.module._global_backward_pre_hooks
    )
    for name, each in module.named_modules():
        if each._backward_hooks or each._backward_pre_hooks or of_all:
            raise _refused(
                f"the backward hook of {name or 'the module'}",
                "change gradients of parameters, in Tensor.register_hook",
            )


@dataclass(eq=False, slots=True)
class PartGradients:
    """Watches the backward passes of a Trainer on ranks that have parts of gradients.

    Args:
        module: the module that is trained.
        parameters: returns the parameters that are trained, inside and outside of the module.
        grid: grid whose ranks all compute the same losses, so that a gradient is the mean of the
            ranks' gradients; None: all that has parts is refused.
        within: returns whether users' code is running, outside of which nothing is watched.
    """

    module: pl.LightningModule
    parameters: Callable[[], Iterable[Tensor]]
    grid: Grid | None
    within: Callable[[], bool] = lambda: True
    _finish: Callable[[], None] | None = None

    def seen(self) -> bool:
        """Returns whether users' code looks at gradients after each backward pass."""
        callbacks = self.module.trainer.callbacks  # type: ignore[attr-defined]
        name = "on_after_backward"
        return (
            any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters())
            or is_overridden(name, self.module)
            or any(is_overridden(name, each, pl.Callback) for each in callbacks)
        )

    @contextmanager
    def finished_by(self, finish: Callable[[], None]) -> Iterator[None]:
        """Context for one backward pass into parameters, after which ``finish`` adds up parts."""
        self._finish = finish
        try:
            yield
        finally:
            self._finish = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which all functions of ``torch.autograd`` are watched, on this process."""
        run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        register, retain = Tensor.register_hook, Tensor.retain_grad
        grad: Any = cast(Any, Tensor.grad).__get__
        rule = Shard.rules[grad]

        def watching(outputs: Any, *args: Any, accumulate_grad: bool, **more: Any) -> Any:
            inner = recomputing() or not self.within()  # such as a checkpoint's
            if inner or torch._C._are_functorch_transforms_active():  # which refuse shards
                return run(outputs, *args, accumulate_grad=accumulate_grad, **more)
            if not accumulate_grad:
                return self._gradients(run, outputs, *args)
            finish, self._finish = self._finish, None
            if finish is None and self._has_parts(outputs):
                raise _refused(
                    "backward(), called by hand,",
                    "call self.manual_backward(loss), once for each loss",
                )
            if finish is None:
                return run(outputs, *args, accumulate_grad=True, **more)
            check_module_hooks(self.module)
            with _hooks_later(self.parameters()):
                run(outputs, *args, accumulate_grad=True, **more)
                finish()
            return None

        def grad_of(function: Any, shard: Shard) -> Tensor | None:
            if (found := rule(function, shard)) is None or recomputing():
                return found  # type: ignore[no-any-return]
            raise _refused("the attribute grad of a shard", "use torch.autograd.grad")

        def retaining(value: Tensor) -> None:
            if self.grid is not None and not (value.is_leaf or isinstance(value, Shard)):
                value.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
            retain(value)  # the mean, which that hook returns

        torch.autograd._engine_run_backward = watching  # type: ignore[attr-defined, assignment]
        Tensor.register_hook = lambda value, hook: self._register(register, value, hook)  # type: ignore[method-assign]
        Tensor.retain_grad = retaining  # type: ignore[method-assign, assignment]
        Shard.rules[grad] = grad_of
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
            Tensor.register_hook = register  # type: ignore[method-assign]
            Tensor.retain_grad = retain  # type: ignore[method-assign]
            Shard.rules[grad] = rule

    def _gradients(self, run: Any, outputs: Sequence[Any], seeds: Any, *args: Any) -> Any:
        """Returns what ``torch.autograd.grad`` does, for whole samples.

        All ranks backpropagate from each plain output, but from their own part of each shard.
        """
        inputs, grid = args[2], self.grid
        if not self._has_parts(outputs, inputs):
            return run(outputs, seeds, *args, accumulate_grad=False)
        own = {id(each) for each in self.parameters()}
        if grid is None or any(
            not isinstance(each, Tensor) or (id(each) in own and each._backward_hooks)
            for each in inputs
        ):
            what = "torch.autograd.grad, or a hook of a parameter in it,"
            raise _refused(what, "use gradients in on_before_optimizer_step instead")
        pairs = zip(outputs, seeds, strict=True)
        seeds = tuple(local_of(s) * grid.size if isinstance(o, Shard) else s for o, s in pairs)
        found = run(outputs, seeds, *args, accumulate_grad=False)
        return tuple(
            None
            if gradient is None
            else alike(gradient / grid.size, value)
            if isinstance(value, Shard)
            else self._mean(gradient)
            for gradient, value in zip(found, inputs, strict=True)
        )

    def _mean(self, gradient: Tensor) -> Tensor:
        assert self.grid is not None
        total = added_up if torch.is_grad_enabled() and gradient.requires_grad else add_up
        return total(gradient, self.grid.group, what="gradients") / self.grid.size

    def _has_parts(self, outputs: Sequence[Any], inputs: Sequence[Any] | None = None) -> bool:
        """Returns whether a backward pass from ``outputs``, to ``inputs`` or all leaves, may give
        ranks parts of gradients.
        """
        if any(isinstance(each, Shard) for each in outputs):
            return True
        own = {id(each) for each in self.parameters()} if self.grid is None else set()
        ends = {getattr(each, "grad_fn", None) for each in inputs or ()}
        if inputs is not None:
            own &= {id(each) for each in inputs}
        pending: list[Any] = [getattr(each, "grad_fn", None) for each in outputs]
        known = {None, *ends}
        while pending:
            if (node := pending.pop()) not in known:
                known.add(node)
                made_by = getattr(type(node), "_forward_cls", type(None)).__module__
                if made_by.startswith(_IN_PARTS) or id(getattr(node, "variable", None)) in own:
                    return True
                pending += [each for each, _ in node.next_functions]
        return False

    def _register(self, register: Any, value: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        """Registers a hook, which gets the whole's gradient; that of a shard as a shard."""
        if (grid := self.grid) is None:
            is_own = getattr(hook, "__module__", "").startswith("sparsepipe.")
            if isinstance(value, Shard) or (inside_layers.get() and not (is_own or value.is_leaf)):
                raise _refused("a hook of a tensor within layers", "use one in the step instead")
            return register(value, hook)
        if any(value is each for each in self.parameters()):
            return register(value, hook)  # which is called after the backward pass
        if not isinstance(value, Shard):
            return register(value, lambda gradient: hook(self._mean(gradient)))
        like = (grid, value.dims, value.full)  # not the shard, which would keep itself

        def of_whole(gradient: Tensor) -> Tensor | None:
            found = hook(shard_of(gradient / grid.size, *like))
            return None if found is None else local_of(found) * grid.size

        with torch._C.DisableTorchFunctionSubclass():
            return register(value, of_whole)


@contextmanager
def _hooks_later(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Context without hooks of parameters, which are called at its end."""
    inverse = reversed(list(parameters))  # about as a backward pass gets to them
    seen = [p for p in inverse if p._backward_hooks or p._post_accumulate_grad_hooks]
    # Copies, since a gradient may be DDP's buffer, in which the next one will be.
    before = [None if p.grad is None else p.grad.clone() for p in seen]
    hooks = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in seen]
    for p in seen:  # torch would not forget the latter at None
        p._backward_hooks, p._post_accumulate_grad_hooks, p.grad = None, OrderedDict(), None
    try:
        yield
    finally:
        for p, (first, last) in zip(seen, hooks, strict=True):
            p._backward_hooks, p._post_accumulate_grad_hooks = first, last
    with torch.no_grad():
        for p, old, (first, last) in zip(seen, before, hooks, strict=True):
            if (new := p.grad) is None:
                p.grad = old
                continue
            for hook in (first or {}).values():
                changed = hook(new)
                new = new if changed is None else changed
            p.grad = new if old is None else old + new
            for hook in (last or {}).values():
                hook(p)
