"""A node of the configuration with ``_target_``: what is called, and with which arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sparsepipe.config.signature import locate, parameters_of
from sparsepipe.config.source_signature import Parameters
from sparsepipe.errors import ConfigError, SparsePipeError


@dataclass(frozen=True, slots=True)
class Target:
    """A callable by its dotted name, with the arguments that the configuration gives it.

    Args:
        path: dotted name of a class or function.
        arguments: by name, as plain values; Hydra's instructions, such as ``_partial_``, are among
            them.
    """

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, node: Mapping[str, Any]) -> Self:
        """From a mapping with ``_target_``."""
        return cls(node["_target_"], {k: v for k, v in node.items() if k != "_target_"})

    def to_dict(self) -> dict[str, Any]:
        """The mapping with ``_target_`` that this was parsed from."""
        return {"_target_": self.path, **self.arguments}

    @property
    def name(self) -> str:
        """The name without its module."""
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
        """What the callable takes.

        Raises:
            ConfigError: it cannot be imported or called.
        """
        return parameters_of(self.path)

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, or ``default`` where the configuration gives none of this name."""
        return self.arguments.get(name, default)

    def replace(self, **arguments: Any) -> Target:
        """The same callable with these arguments in place of its own, or beside them."""
        return Target(self.path, {**self.arguments, **arguments})

    def locate(self) -> Any:
        """The callable itself.

        Raises:
            ConfigError: it cannot be imported or called.
        """
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
        """As :meth:`build`, with those further arguments that it takes and has not been given."""
        target = self.parameters
        taken = {key: value for key, value in offered.items() if target.open or key in target.types}
        return self.build(**{k: v for k, v in taken.items() if k not in self.arguments})
