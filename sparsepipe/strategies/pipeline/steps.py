"""Runs a module's step in two halves: before its call of ``layers``, and from that call on.

A rank that has all layers runs a step in one piece. The second half runs the code before the call
again, with the same random numbers, since what follows may use its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsepipe.errors import ConfigError
from sparsepipe.runtime import safe_pickle
from sparsepipe.runtime.microbatches import split
from sparsepipe.runtime.random_generators import (
    NUMPY,
    PYTHON,
    FormerStates,
    Generator,
    is_generator,
    set_states,
    states_before_draws,
    states_of,
    swap_states,
)
from sparsepipe.strategies.metrics import Metrics
from sparsepipe.strategies.pipeline.logging import Logged, LogRecorder, Logs, replaced_log
from sparsepipe.strategies.pipeline.provenance import LossWatch

TRAINING = "training_step"
_CUDA = "torch.cuda"  # on ranks with such a device only
_ONCE = "call layers exactly once in each step, with one positional argument"
_CONTAINERS = (list, tuple, dict)


def generators_of(module: nn.Module | None, layers: nn.Sequential) -> dict[str, Generator]:
    """Returns the random generators that a step may use outside of ``layers``, by name.

    These are the global generators of torch, NumPy and Python, and attributes of the module (if
    given) and its submodules. Names are the same on all ranks.
    """
    found: dict[str, Generator] = {
        "torch": torch.default_generator,
        "numpy": NUMPY,
        "python": PYTHON,
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found[_CUDA] = torch.cuda.default_generators[torch.cuda.current_device()]
    if module is None:
        return found
    for path, child in module.named_modules(memo={layers}):  # all but the layers
        prefix = f"self.{path}." if path else "self."
        named = vars(child).items()
        found |= {prefix + name: value for name, value in named if is_generator(value)}
    return found


class _Called(BaseException):
    """Carries the input of ``layers`` out of a step, as its only argument."""


@contextmanager
def in_place_of(layers: nn.Sequential, forward: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which a step's call of ``layers`` runs ``forward``; it must be the only call."""
    calls = 0

    def once(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ConfigError("the step calls layers twice", remedy=_ONCE)
        if len(args) != 1 or kwargs:
            given = f"{len(args)} positional and {len(kwargs)} named"
            raise ConfigError(
                f"the step calls layers with other arguments than one positional: {given}",
                remedy=_ONCE,
            )
        if any(
            isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(args)
        ):
            raise ConfigError(
                "the input of layers needs a gradient: the step uses parameters before it calls "
                "layers",
                remedy="move the modules with these parameters to the front of the Sequential",
            )
        return forward(args[0])

    layers.forward = once  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layers.forward
    if not calls:
        raise ConfigError("the step does not call layers", remedy=_ONCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The input of ``layers``, and the states that generators had before the step used them."""

    value: Any
    randomness: Mapping[str, Any]


def run_until_layers(
    layers: nn.Sequential, step: Callable[[], Any], *, module: nn.Module | None = None
) -> Opened:
    """Runs a step up to its call of ``layers``; notes which random generators it draws from."""

    def leave(value: Any) -> Any:
        raise _Called(value)

    before = states_of(generators_of(module, layers))
    try:
        with in_place_of(layers, leave):
            step()
    except _Called as called:
        (value,) = called.args
    else:
        caught = "the step catches BaseException around its call of layers"
        raise ConfigError(caught, remedy="catch only subclasses of Exception")
    after = states_of(generators_of(module, layers))
    for name in sorted(after.keys() - before.keys() - {_CUDA}):
        raise ConfigError(
            f"the step makes a random generator, {name}, but the last stage would make another",
            remedy="make it in __init__, so that every rank has it before its first step",
        )
    return Opened(value=value, randomness=states_before_draws(before, after))


def run_from_layers(
    layers: nn.Sequential,
    step: Callable[[], Any],
    *,
    run: Callable[[], Any],
    module: nn.Module | None = None,
    randomness: Mapping[str, Any] | None = None,
    input_sent: bool = True,
) -> Any:
    """Runs a step with ``run()`` in place of its call of ``layers``; returns the step's result.

    ``input_sent``: whether the batch has the data of the layers' input. Random generators of
    ``module`` start from the states in ``randomness`` (:attr:`Opened.randomness`).
    """
    own: FormerStates = []
    if randomness:
        generators = generators_of(module, layers)
        if missing := sorted(randomness.keys() - generators.keys() - {_CUDA}):
            raise ConfigError(
                f"the step draws from {missing[0]}, a random generator that the first stage has, "
                "but the last does not",
                remedy="make it in __init__, on every rank",
            )
        known = randomness.keys() & generators.keys()
        own = swap_states((generators[name], randomness[name]) for name in known)

    def forward(value: Any) -> Any:
        set_states(own)
        return run()

    cause: Exception | None = None
    try:
        with in_place_of(layers, forward):
            result = step()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if input_sent or "meta" not in str(error):
            raise
        cause = error
    else:
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if input_sent or not any(leaf.is_meta for leaf in leaves):
            return result
    raise ConfigError(
        "the step uses the input of layers for more than calling them, but the input's data stay "
        "on the first stage",
        remedy="set the strategy's send_input=true, which sends the data to the last stage too",
    ) from cause


def without_input(batch: Any, value: Any) -> Any:
    """Returns a batch whose tensors have no data (device "meta") if they share memory with the
    layers' input ``value``. Where one node of them is no list, tuple, dict or tensor, such as the
    sparse tensor that ``value`` was cast from, it loses the data of all its tensors; where several
    share memory, such as sparse labels on the sites of the input, each loses what is shared, unless
    the input was cast, so that it cannot be told from the others.
    """

    def storages(tree: Any) -> set[int]:
        tensors = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
        return {each.untyped_storage().data_ptr() for each in tensors if each.numel()} - {0}

    def emptied(tensor: Tensor) -> Tensor:
        if len(sharing) > 1 and of_input.isdisjoint(storages(tensor)):
            return tensor
        shape, stride = tensor.shape, tensor.stride()
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")

    of_input = storages(value)
    units, spec = pytree.tree_flatten(batch, is_leaf=lambda node: not isinstance(node, _CONTAINERS))
    sharing = [n for n, unit in enumerate(units) if not of_input.isdisjoint(storages(unit))]
    is_cast = not any(storages(units[number]) <= of_input for number in sharing)
    for number in sharing if len(sharing) == 1 or not is_cast else ():
        units[number] = pytree.tree_map_only(Tensor, emptied, units[number])
    return pytree.tree_unflatten(units, spec)


class ModuleSteps:
    """Runs a module's steps: up to their call of ``layers``, from there on, or as a whole.

    ``in_step`` makes the context in which the module's method runs; ``send_input`` tells whether
    the last stage gets the input of ``layers`` too, ``cut`` whether batches are microbatches.

    Attributes:
        hook: name of the step to run.
        arguments: the step's arguments after the batch.
        weight: weight of the last training step's loss among those of a minibatch's microbatches;
            None for the number of its samples.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        layers: nn.Sequential,
        *,
        metrics: Metrics,
        in_step: Callable[[], AbstractContextManager[None]],
        autocast: Callable[[], AbstractContextManager[Any]],
        send_input: bool,
        cut: bool,
    ) -> None:
        self._module, self._layers, self._metrics = module, layers, metrics
        self._in_step, self._autocast, self._send_input = in_step, autocast, send_input
        self._recorder = LogRecorder(module)
        self.hook, self.arguments = TRAINING, tuple[Any, ...]()
        self._watch = LossWatch(module) if cut else None
        self.weight: float | None = None

    def open(self, batch: Any) -> tuple[Any, Any]:
        """Runs a step up to the layers; returns their input, and the ``rest`` for :meth:`close`."""
        with replaced_log(self._module), self._autocast():
            opened = run_until_layers(self._layers, lambda: self._step(batch), module=self._module)
        drawn = safe_pickle.dumps(opened.randomness) if opened.randomness else None
        rest = batch if self._send_input else without_input(batch, opened.value)
        return opened.value, {"batch": rest, "randomness": drawn}

    def close(self, rest: Any, run: Callable[[], Any]) -> tuple[Any, Logs]:
        """Runs a step with ``run()`` for the layers; returns its loss or result, and logs."""
        batch, drawn = rest["batch"], rest["randomness"]
        with self._recorder.recording(batch, hook=self.hook) as notes, self._metrics.tracking():
            result = run_from_layers(
                self._layers,
                lambda: self._step(batch),
                run=partial(self._followed, run),
                module=self._module,
                randomness=None if drawn is None else safe_pickle.loads(drawn),
                input_sent=self._send_input,
            )
        return self._ended(result, notes, batch)

    def whole(self, batch: Any, run: Callable[[Any], Any]) -> tuple[Any, Logs]:
        """Runs a step in one piece with ``run`` for the layers; returns as :meth:`close` does."""
        with (
            self._recorder.recording(batch, hook=self.hook) as notes,
            self._metrics.tracking(),
            in_place_of(self._layers, partial(self._followed, run)),
        ):
            result = self._step(batch)
        return self._ended(result, notes, batch)

    def _ended(self, result: Any, notes: list[Logged], batch: Any) -> tuple[Any, Logs]:
        """Returns the loss in ``result`` for a training step, else ``result`` itself; and logs."""
        if self.hook != TRAINING:
            return result, tuple(notes)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"training_step returned {type(result).__name__}, without the loss as a tensor",
                remedy="return the loss, or a dictionary with it as 'loss', in every step",
            )
        if self._watch is None:
            return loss, tuple(notes)
        given = result.get("weight") if isinstance(result, Mapping) else None
        if given is None:
            given = self._watch.weight(loss, samples=split(batch, 1)[0].samples)
        self.weight = None if given is None else float(given)
        if not 0 <= (self.weight or 0) < math.inf:
            raise ConfigError(
                f"training_step returned the weight {self.weight} of its loss",
                remedy="return as 'weight' a finite number of at least 0, such as a mask's sum",
            )
        if self.weight is not None:
            of = {str(loss.item()): self.weight}  # as text, since NaN is not equal to itself
            notes = [replace(note, weight=of.get(str(note.value))) for note in notes]
        return loss, tuple(notes)

    def _followed(self, run: Callable[..., Any], *value: Any) -> Any:
        output = run(*value)
        if self._watch is not None:
            self._watch.follow(output)
        return output

    def _step(self, batch: Any) -> Any:
        with self._in_step():
            return getattr(self._module, self.hook)(batch, *self.arguments)
