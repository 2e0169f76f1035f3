"""Tasks that only tell something: they need no data and no model, and make no run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparsepipe.config.check import check_task
from sparsepipe.config.listing import Source, directories_of
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.signature import locate, present_name
from sparsepipe.config.source_signature import Unreadable, has_attribute_in_source
from sparsepipe.errors import ConfigError

_WIDTH = (100, 24)  # where there is no terminal


def told_by(config: DictConfig, sources: Iterable[Source]) -> str | None:
    """What the task tells where that is all that it does; None where it makes a run.

    Args:
        config: composed. But for the task it is neither resolved nor checked: that may import much
            and want what is not there.
        sources: where Hydra found the configuration.

    Raises:
        ConfigError: an argument of the task cannot be used.
    """
    task = _teller(config)
    if task is None:
        return None
    resolved = OmegaConf.to_container(config.task, resolve=True)
    assert isinstance(resolved, dict)
    node = {str(key): value for key, value in resolved.items()}
    check_task(node)
    node.pop("_target_")
    width = shutil.get_terminal_size(_WIDTH).columns
    return str(task(directories_of(sources), width=width, **node))


def refuse_run(spec: RunSpec) -> None:
    """Refuses to make a run of a task that only tells something.

    Raises:
        ConfigError: it does.
    """
    if _tells(spec.task.path):
        raise ConfigError(
            "every job of a sweep would tell the same", remedy="give this task without -m"
        )


def _teller(config: DictConfig) -> Callable[..., Any] | None:
    try:
        target = str(OmegaConf.select(config, "task._target_"))
        return locate(target) if _tells(target) else None
    except (ConfigError, OmegaConfBaseException):
        return None  # the check of the whole configuration says what is wrong


def _tells(target: str) -> bool:
    """Whether a task tells something and makes no run; others are not imported for this."""
    try:
        return has_attribute_in_source(present_name(target), "tells")
    except Unreadable:
        return bool(getattr(locate(target), "tells", False))
