"""Nodes of the configuration with ``_target_``: the callable, its parameters and arguments."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sparsepipe.config.source_signature import Parameters, Unreadable, source_parameters
from sparsepipe.errors import ConfigError, SparsePipeError

_TASKS = {
    "config.listing.list_options": ("listing.list_options", "config.listing.list_options"),
    "paper.report_task.Report": ("report_task.report", "paper.report_task.report"),
    "paper.table1.Table1": ("table1.table1", "paper.table1.table1"),
    "paper.table3.Table3": ("table3.table3", "paper.table3.table3"),
    "tasks.bandwidth.Bandwidth": ("bandwidth.bandwidth", "tasks.bandwidth.bandwidth"),
    "tasks.emulate.TrainEmulated": ("emulated.train_emulated", "tasks.emulated.train_emulated"),
    "tasks.evaluate.Evaluate": ("evaluate.evaluate", "tasks.evaluate.evaluate"),
    "tasks.fitting.fit_batch.FitBatch": (
        "fitting.fit_batch.fit_batch",
        "tasks.fitting.fit_batch.fit_batch",
    ),
    "tasks.fitting.train_if_fits.TrainIfFits": (
        "fitting.train_if_fits.train_if_fits",
        "tasks.fitting.train_if_fits.train_if_fits",
    ),
    "tasks.partition.Partition": ("partition.partition", "tasks.partition.partition"),
    "tasks.profile.ProfileLayers": ("profile.profile", "tasks.profile.profile"),
    "tasks.simulate.Simulate": ("simulate.simulate", "tasks.simulate.simulate"),
    "tasks.train.Train": ("train.train", "tasks.train.train"),
    "tracking.loggers.wandb_logger": ("loggers.wandb_logger", "tracking.loggers.wandb_logger"),
}
"""Present names of tasks and loggers, below ``sparsepipe``; with each the name that identities of
runs have, below ``sparsepipe.experiment``, and the name of the function that the task was."""
_FORMER = {
    f"sparsepipe.{now}": f"sparsepipe.experiment.{first}" for now, (first, _) in _TASKS.items()
}
_PRESENT = {
    former: f"sparsepipe.{now}"
    for now, (first, second) in _TASKS.items()
    for former in (f"sparsepipe.experiment.{first}", f"sparsepipe.{second}")
}


@dataclass(frozen=True, slots=True)
class Target:
    """A callable by its dotted name, with the arguments that the configuration gives it."""

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, node: Mapping[str, Any]) -> Self:
        """Parses a mapping with ``_target_``."""
        return cls(node["_target_"], {k: v for k, v in node.items() if k != "_target_"})

    def to_dict(self) -> dict[str, Any]:
        return {"_target_": self.path, **self.arguments}

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments, without instructions and without nodes that build objects."""
        return {
            key: value
            for key, value in self.arguments.items()
            if not key.startswith("_") and not (isinstance(value, Mapping) and "_target_" in value)
        }

    @property
    def parameters(self) -> Parameters:
        """The parameters of the callable.

        Raises:
            ConfigError: it cannot be imported or called.
        """
        return parameters_of(self.path)

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, or ``default``."""
        return self.arguments.get(name, default)

    def replace(self, **arguments: Any) -> Target:
        """The same callable with these arguments in place of its own, or beside them."""
        return Target(self.path, {**self.arguments, **arguments})

    def locate(self) -> Any:
        """The callable itself. Raises a ConfigError where it cannot be imported or called."""
        return locate(self.path)

    def build(self, **given: Any) -> Any:
        """Calls it with its arguments and further ones.

        Raises:
            SparsePipeError: what the target itself raised for the user.
            ConfigError: the target cannot be called like that.
        """
        from hydra.errors import InstantiationException
        from hydra.utils import instantiate

        try:
            return instantiate(self.to_dict(), _convert_="all", **given)
        except InstantiationException as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, SparsePipeError):
                    raise cause from None
                cause = cause.__cause__
            raise ConfigError(
                f"{self.path} cannot be built: {error.__cause__ or error}",
                remedy="correct its arguments; `sparsepipe --cfg job` prints them",
            ) from error

    def build_with(self, **offered: Any) -> Any:
        """Like :meth:`build`, with the offered arguments that it takes and has not been given."""
        target = self.parameters
        taken = {key: value for key, value in offered.items() if target.open or key in target.types}
        return self.build(**{k: v for k, v in taken.items() if k not in self.arguments})


def parameters_of(target: str) -> Parameters:
    """The signature of ``target``: as its source shows it, else as it is once imported.

    Raises:
        ConfigError: it does not exist or cannot be called.
    """
    try:
        return source_parameters(present_name(target))
    except Unreadable:
        return imported_parameters(target)


def imported_parameters(target: str) -> Parameters:
    """Imports ``target`` and reads its signature.

    Raises:
        ConfigError: it does not exist or cannot be called.
    """
    found = locate(target)
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return Parameters(types={}, required=(), open=True)  # builtins have no signature
    kinds = inspect.Parameter
    named = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    hints = _hints(found)
    return Parameters(
        types={name: hints.get(name, Any) for name in named},
        required=tuple(name for name, value in named.items() if value.default is kinds.empty),
        open=any(p.kind is kinds.VAR_KEYWORD for p in signature.parameters.values()),
    )


def present_name(target: str) -> str:
    """The present name of a task or logger, which may be given by its former one."""
    return _PRESENT.get(target, target)


def identity_name(target: str) -> str:
    """The name of a task in the identity of a run, which does not change when modules move."""
    return _FORMER.get(target, target)


def locate(target: str) -> Any:
    """The object with this dotted name, which of a task may be a former one.

    Raises:
        ConfigError: it does not exist or cannot be called.
    """
    parts = present_name(target).split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and module_name.startswith(error.name):
                continue  # the tail may be a class
            raise _unusable(target, f"its module needs {error.name}, which is missing") from error
        for name in parts[length:]:
            if not hasattr(found, name):
                raise _unusable(target, f"{module_name} has no {name}")
            found = getattr(found, name)
        if not callable(found):
            raise _unusable(target, "it cannot be called")
        return found
    raise _unusable(target, f"there is no module {parts[0]}")


def _unusable(target: str, reason: str) -> ConfigError:
    return ConfigError(
        f"'{target}' cannot be used: {reason}",
        remedy="give the full dotted name of a class or function that can be imported",
    )


def _hints(found: Any) -> dict[str, Any]:
    while isinstance(found, functools.partial):
        found = found.func  # a partial has no hints of its own
    # The constructor of a dataclass names inherited fields' types as their own modules do.
    plain = inspect.isclass(found) and not dataclasses.is_dataclass(found)
    source = inspect.unwrap(found.__init__ if plain else found)
    try:
        return typing.get_type_hints(source, include_extras=True)
    except Exception:
        return {}  # names that only a type checker sees: then types are not checked
