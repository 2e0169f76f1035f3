"""Which runs of the paper's Fig. 9 came about alike: by kind, link and overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sparsepipe.results.fig9_settings import (
    EXPECTED,
    Setting,
    setting_of,
    strategy_of,
)
from sparsepipe.results.report.cell import Row
from sparsepipe.results.report.commands import Commands
from sparsepipe.results.report.fig9_hardware import is_on_its_gpus
from sparsepipe.results.report.overridden import is_made_by, overrides_of
from sparsepipe.results.report.wanted import Wanted

_SIMULATED = "task.parallel."
_OF_CELLS = (
    *("parallel.plan.file", "parallel.search.search", "parallel.strategy._target_"),
    *("parallel.devices", "parallel.num_nodes"),
)
_NO_MATTER = (
    *("parallel.grace_s", "parallel.max_restarts", "parallel.search.measure"),
    *("parallel.strategy.process_group_backend", "parallel.strategy.timeout_s"),
)
_OF_SIMULATIONS = (
    *("task.all_reduce", "task.inbox", "task.microbatches", "task.outbox", "task.overlap"),
    "task.schedule",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What runs have in common whose figures may be compared.

    Attributes:
        setting: kind and link.
        others: overrides that neither the setting nor a cell tells.
    """

    setting: Setting
    others: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """In words."""
        return "; ".join((self.setting.title, *self.others))

    @property
    def simulated(self) -> Group | None:
        """What is simulated over the same link; None of simulations, and of links without limit."""
        if self.setting.network != "namespaces":
            return None
        link = self.setting.link_bytes_per_s
        return replace(self, setting=Setting(kind="simulated", link_bytes_per_s=link))

    @property
    def task(self) -> tuple[str, ...]:
        """What makes such figures, as overrides."""
        return (*_task(self.setting), *self.others)


def groups_of(rows: Sequence[Row], commands: Commands) -> dict[Group, list[Row]]:
    """Runs by what they have in common; those of the whole sweep come also without any run.

    So do those of overrides that a sweep was asked for and has left no run of.

    A run belongs to each group whose command for its bar gives its configuration.

    Args:
        rows: finished runs; those that are no bar of the figure are left out.
        commands: of the experiment; they tell overrides from what is usual, if anybody knows.
    """
    bars = [row for row in rows if _is_bar(row) and is_on_its_gpus(row, commands.usual)]
    own = [_group(row, commands) for row in bars]
    asked = ((), *filter(None, map(_others, commands.wanted)))
    expected = (Group(setting=each, others=others) for others in asked for each in EXPECTED)
    found = dict.fromkeys((*expected, *own))
    pairs = list(zip(bars, own, strict=True))
    return {
        group: [row for row, mine in pairs if _belongs(row, mine, group, commands)]
        for group in sorted(found, key=lambda each: (each.setting.order, each.others))
    }


def elsewhere(rows: Sequence[Row], commands: Commands) -> list[Row]:
    """Runs that would be bars of the figure, were it not for their hardware."""
    return [row for row in rows if _is_bar(row) and not is_on_its_gpus(row, commands.usual)]


def _is_bar(row: Row) -> bool:
    is_of_kind = row.get("kind") in ("simulated", "emulated")
    return bool(is_of_kind and row.get("minibatches_per_s") and strategy_of(row))


def matters(key: str) -> bool:
    """Whether a key of the configuration counts."""
    if key in _OF_SIMULATIONS:
        return True
    dropped = (*_OF_CELLS, *_NO_MATTER)
    below = any(key == name or key.startswith(f"{name}.") for name in dropped)
    return key.startswith("parallel.") and not below


def _others(wanted: Wanted) -> tuple[str, ...]:
    """Overrides that a sweep was asked for, as far as they count."""
    return tuple(word for word in wanted.overrides or () if matters(word.partition("=")[0]))


def _group(row: Row, commands: Commands) -> Group:
    setting = setting_of(row)
    if commands.usual is None:
        return Group(setting=setting)
    others = overrides_of(_asked(row), _command(row, setting), commands.usual, matters)
    return Group(setting=setting, others=others)


def _belongs(row: Row, own: Group, group: Group, commands: Commands) -> bool:
    if own.setting != group.setting or own == group or commands.usual is None:
        return own == group
    command = _command(row, own.setting)
    return is_made_by(_asked(row), command, group.others, commands.usual, matters)


def _command(row: Row, setting: Setting) -> tuple[str, ...]:
    """Of a bar; its GPUs change nothing that counts here."""
    return ("experiment=fig9", *_task(setting), f"parallel={strategy_of(row)}")


def _asked(row: Row) -> Mapping[str, object]:
    """The row with ``parallel`` as it was asked for, which simulations keep in their task."""
    if row["kind"] != "simulated":
        return {key: value for key, value in row.items() if not key.startswith("task.")}
    kept = {key: value for key, value in row.items() if not key.startswith("parallel.")}
    return {key.removeprefix("task.") if key.startswith(_SIMULATED) else key: value
            for key, value in kept.items()}  # fmt: skip


def _task(setting: Setting) -> tuple[str, ...]:
    link = setting.link_bytes_per_s
    if setting in EXPECTED:
        own = "emulated" if setting.kind == "emulated" else f"simulated_{(link or 0) / 1e6:g}"
        return (f"task=fig9/{own}",)
    own = "emulated" if setting.kind == "emulated" else "simulated_125"
    network = (f"task.network={setting.network}",) if setting.network else ()
    speed = (f"task.link_bytes_per_s={link:g}",) if link is not None else ()
    return (f"task=fig9/{own}", *network, *speed)
