"""Modules and optimizers of which each rank holds a part; checkpoints hold the whole.

Used for pipelines, whose ranks hold stages, and for domains, whose ranks hold private encoders.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies.strategy import Strategy
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import LBFGS, Optimizer
from torch.utils import _pytree as pytree
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.halo import add_up
from sparsepipe.runtime.collectives.process_group import broadcast_tensors_, gather_objects
from sparsepipe.strategies import trainer_internals as internals

State = dict[str, Any]
"""State of an optimizer, as ``Optimizer.state_dict`` returns it."""
_GATHERING = "putting the stages' states together"


class ShardedOptimizer:
    """Reduces ``optimizer``, in place, to this rank's parameters, whose ``id()`` is in ``owned``.

    Attributes:
        whole: the optimizer's former parameters, in order; those of other ranks are empty tensors.
    """

    def __init__(self, optimizer: Optimizer, *, owned: Collection[int]) -> None:
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "LBFGS evaluates the whole network several times, but a rank holds only a part",
                remedy="use an optimizer with a state for each parameter, such as SGD or AdamW",
            )
        self.optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._sizes = list(map(len, self._groups))
        self.whole: list[Tensor] = [each for group in self._groups for each in group]
        self._numbers: list[list[int]] = []  # this rank's indices in ``whole``, by group
        numbers = itertools.count()
        for group in optimizer.param_groups:
            owns = [(next(numbers), p) for p in group["params"]]
            self._numbers.append([number for number, p in owns if id(p) in owned])
            group["params"] = [p for p in group["params"] if id(p) in owned]
        self._own = [list(group["params"]) for group in optimizer.param_groups]
        if len(owned) < len(self.whole):
            self._refuse_copies()
        for parameter in self.whole:
            if id(parameter) not in owned:
                optimizer.state.pop(parameter, None)
        # Early stages may first update after the scheduler's first step; torch would warn.
        optimizer._opt_called = True  # type: ignore[attr-defined]

    def _refuse_copies(self) -> None:
        """Refuses an optimizer that pairs its parameters with tensors by their place in a list."""
        sizes = {each.numel() for each in self.whole} - {1}
        known = {id(each) for each in self.whole}

        def pairs(value: Any, *, listed: bool = False, depth: int = 0) -> bool:
            inside: Collection[Any] = ()
            if isinstance(value, Tensor):
                return listed and id(value) not in known and value.numel() in sizes
            if isinstance(value, Mapping):  # but for one by parameter
                by_place = [k for k in value if not (isinstance(k, Tensor) or k in known)]
                inside, listed = [value[k] for k in by_place], True
            elif isinstance(value, list | tuple):
                inside, listed = value, True
            elif not isinstance(value, nn.Module) and hasattr(value, "__dict__") and depth < 2:
                inside, listed, depth = vars(value).values(), False, depth + 1
            return any(pairs(each, listed=listed, depth=depth) for each in inside)

        if pairs(self.optimizer):
            raise ConfigError(
                f"{type(self.optimizer).__name__} keeps tensors for its parameters in a list, but "
                "a rank's optimizer has only a part of the parameters, and would pair others",
                remedy="keep them in optimizer.state[parameter], or train with parallel=dp",
            )

    def check(self, module: pl.LightningModule) -> None:
        """Raises a ConfigError if a hook has replaced the optimizer or its parameters."""
        present = module.trainer.optimizers
        groups = [[id(p) for p in group["params"]] for group in self.optimizer.param_groups]
        own = [[id(p) for p in group] for group in self._own]
        if [id(each) for each in present] != [id(self.optimizer)] or groups != own:
            raise ConfigError(
                "the optimizer, or the parameters in its groups, changed after the run began, but "
                "each rank updates its own parameters with the optimizer that it had then",
                remedy="return the optimizer with all parameters from configure_optimizers, with "
                "lr=0 for those that are not to learn yet; change options with schedulers",
            )

    @contextmanager
    def whole_groups(self) -> Iterator[None]:
        """Context in which the optimizer's groups have the parameters of all ranks."""
        groups = self.optimizer.param_groups
        own = [group["params"] for group in groups]
        for group, parameters in zip(groups, self._groups, strict=True):
            group["params"] = list(parameters)
        try:
            yield
        finally:
            for group, parameters in zip(groups, own, strict=True):
                group["params"] = parameters

    def collect(self, *, given: Collection[int]) -> State:
        """Returns the whole optimizer's state on rank 0, this rank's on others; a collective call.

        ``given``: ``id()`` of each parameter whose state this rank sends.
        """
        local = self.optimizer.state_dict()
        numbers = [n for group in self._numbers for n in group]
        mine = {
            numbers[n]: pytree.tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), entry)
            for n, entry in local["state"].items()
        }
        sent = {n: entry for n, entry in mine.items() if id(self.whole[n]) in given}
        parts = gather_objects(sent, what=_GATHERING, everywhere=False) or [mine]
        groups, start = [], 0
        for size, group in zip(self._sizes, local["param_groups"], strict=True):
            groups.append({**group, "params": list(range(start, start + size))})
            start += size
        state = {n: entry for part in parts for n, entry in part.items()}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def restore(self, state: Mapping[int, Any]) -> None:
        """Gives the optimizer all parameters again; ``state``: states by index in ``whole``."""
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = list(parameters)
        for number, parameter in enumerate(self.whole):
            if number in state and parameter not in self.optimizer.state:
                self.optimizer.state[parameter] = state[number]

    def load(self, whole: State) -> None:
        """Loads this rank's part of a whole optimizer's state."""
        sizes = [len(group["params"]) for group in whole["param_groups"]]
        if sizes != self._sizes:
            raise ConfigError(
                f"the checkpoint's optimizer has groups of {sizes} parameters, but this run's has "
                f"groups of {self._sizes}",
                remedy="configure the same optimizer, or load only the weights",
            )
        saved = [n for group in whole["param_groups"] for n in group["params"]]
        state: dict[int, Any] = {}
        groups, first = [], 0
        for group, numbers in zip(whole["param_groups"], self._numbers, strict=True):
            groups.append({**group, "params": list(range(first, first + len(numbers)))})
            for local, number in enumerate(numbers, start=first):
                if saved[number] in whole["state"]:
                    state[local] = whole["state"][saved[number]]
            first += len(numbers)
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


@contextmanager
def clipping_by_norm(
    precision: Precision, clip: Callable[[Precision, Optimizer, float], None]
) -> Iterator[None]:
    """Context in which ``clip(precision, optimizer, limit)`` takes the place of the method."""
    vars(precision)["clip_grad_by_norm"] = partial(clip, precision)
    try:
        yield
    finally:
        del vars(precision)["clip_grad_by_norm"]


class GlobalNorm:
    """Clips gradients by their norm over all ranks, bit for bit as one process does; collective.

    Ranks exchange the norm of each parameter's gradient, and combine these as
    ``torch.nn.utils.clip_grad_norm_`` does, in the order of the whole optimizer.

    Args:
        parameters: all parameters of the whole optimizer, in its order.
        given: ``id()`` of each parameter whose norm this rank sends; no other rank sends it.
    """

    def __init__(self, parameters: Sequence[Tensor], *, given: Collection[int]) -> None:
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._dtypes = [parameter.dtype.to_real() for parameter in parameters]
        self._given = frozenset(given)

    @torch.no_grad()
    def clip(self, precision: Precision, optimizer: Optimizer, clip_val: float) -> None:
        """Clips by the norm over all ranks, as the method of ``precision`` does by one's own."""
        mine = [(p, p.grad) for p in precision.main_params(optimizer) if p.grad is not None]
        if unknown := [p for p, _ in mine if id(p) not in self._numbers]:
            raise ConfigError(
                f"a parameter of shape {tuple(unknown[0].shape)} was added to the optimizer after "
                "the run began, but other ranks must know it to clip gradients",
                remedy="give the optimizer all parameters in configure_optimizers, with lr=0 "
                "for those that are not to learn yet",
            )
        norms_P2 = torch.zeros(len(self._dtypes), 2, dtype=torch.float64)  # norm, 1 if it is given
        given = [(self._numbers[id(p)], grad) for p, grad in mine if id(p) in self._given]
        if given:
            # As torch computes them, so that they are the same on every kind of device.
            found = torch._foreach_norm([gradient for _, gradient in given], 2.0)
            numbers = [number for number, _ in given]
            norms_P2[numbers, 0] = torch.stack([norm.double() for norm in found]).cpu()
            norms_P2[numbers, 1] = 1.0
        # Zeros of all ranks but one are added to each norm, which changes no bit of it.
        what = "taking the norm of all ranks' gradients"
        norms_P2 = add_up(norms_P2, process_group.host_group(), what=what)
        pairs = zip(norms_P2, self._dtypes, strict=True)
        norms = [norm.to(dtype) for (norm, is_there), dtype in pairs if is_there]
        if mine:
            together = torch.stack(norms).to(mine[0][1].device)
            total = torch.linalg.vector_norm(together, 2.0)
            clip_grads_with_norm_([p for p, _ in mine], clip_val, total)


class ModulePart:
    """The part of a module that this rank holds.

    ``holds`` tells whether this rank holds the named parameter or buffer, ``source`` which rank
    sends it to others. ``prune`` frees what this rank does not hold, ``unprune`` allocates it
    again, filled with NaN. Within ``silent``, SparsePipe's own code may read parameters.
    """

    holds: Callable[[str], bool]
    source: Callable[[str], int]
    prune: Callable[[], None]
    unprune: Callable[[], None]
    silent: Callable[[], AbstractContextManager[None]]


_Part = TypeVar("_Part", bound=ModulePart)


class ShardedModule(Generic[_Part]):
    """Gives every rank the module's values on rank 0, then frees all but this rank's part.

    The constructor and all methods are collective: every rank must call them.

    Attributes:
        optimizer: the sharded optimizer; None if nothing is trained.
        given: ``id()`` of each parameter that this rank sends to others.
        norm: clips by the norm of all ranks' gradients.
    """

    def __init__(
        self, module: pl.LightningModule, *, part: _Part, rank: int, optimizer: Optimizer | None
    ) -> None:
        self._module, self.part, self._rank = module, part, rank
        broadcast_tensors_([*module.parameters(), *module.buffers()], source=0)
        state = module.state_dict()
        self._names = list(state)
        self._versions = getattr(state, "_metadata", None)  # torch keeps them on the state dict
        named = dict(module.named_parameters())
        owned = {id(p) for name, p in named.items() if p.requires_grad and part.holds(name)}
        self.given = {id(p) for name, p in named.items() if part.source(name) == rank}
        part.prune()
        self.optimizer = None if optimizer is None else ShardedOptimizer(optimizer, owned=owned)
        parameters = [] if self.optimizer is None else self.optimizer.whole
        self.norm = GlobalNorm(parameters, given=self.given)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the whole module on rank 0, of this rank's part on others."""
        with self.part.silent():
            local = self._module.state_dict()
        mine = {
            name: value.detach().cpu() if isinstance(value, Tensor) else value
            for name, value in local.items()
            if self.part.holds(name)
        }
        given = {name: v for name, v in mine.items() if self.part.source(name) == self._rank}
        parts = gather_objects(given, what=_GATHERING, everywhere=False) or [mine]
        found = {n: v for part in parts for n, v in part.items()}
        names = [*self._names, *(name for name in found if name not in self._names)]
        state = OrderedDict((name, found[name]) for name in names if name in found)
        if self._versions is not None:
            state._metadata = self._versions  # type: ignore[attr-defined]
        return state

    def fill(self) -> None:
        """Gives every rank the values of the whole module, after :meth:`ModulePart.unprune`.

        The optimizer gets all its parameters and states too, for scripts that save it after a run.
        """
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        sources = {name: self.part.source(name) for name, _ in named}
        for rank in sorted({*sources.values()}):
            broadcast_tensors_([each for name, each in named if sources[name] == rank], source=rank)
        if self.optimizer is not None:
            state = self.optimizer.collect(given=self.given)["state"]
            self.optimizer.restore(process_group.broadcast_object(state))


def reading_parameters(strategy: Strategy) -> AbstractContextManager[None]:
    """Returns the context in which SparsePipe's own code may go through a rank's parameters."""
    sharded = strategy._sharded if isinstance(strategy, ShardedCheckpoints) else None
    return nullcontext() if sharded is None else sharded.part.silent()


class ShardedCheckpoints(Strategy):
    """A strategy that saves the whole module and optimizer, but loads only this rank's part."""

    _sharded: ShardedModule[Any] | None = None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._sharded is None:
            return super().lightning_module_state_dict()
        return self._sharded.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._sharded is None or self._sharded.optimizer is None:
            return super().optimizer_state(optimizer)  # of an earlier run, and whole
        return self._sharded.optimizer.collect(given=self._sharded.given)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._sharded is None:
            super().load_model_state_dict(checkpoint, strict=strict)
            return
        module, part = self.lightning_module, self._sharded.part
        assert module is not None
        with part.silent():
            # Only entries of this rank's part: a tuner loads a whole state while a run goes on.
            names = {name for name in module.state_dict() if part.holds(name)}
            state = {name: v for name, v in checkpoint["state_dict"].items() if name in names}
            module.load_state_dict(state, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._sharded is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self._sharded.optimizer is not None
        self._sharded.optimizer.load(checkpoint["optimizer_states"][0])
        internals.move_optimizer(self.optimizers[0], self.root_device)
