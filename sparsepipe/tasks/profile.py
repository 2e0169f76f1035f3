"""The task ``profile``: what each layer of the model costs on the device at hand."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import islice
from typing import Any, ClassVar, cast

import pytorch_lightning as pl
import torch
from torch import nn

from sparsepipe.cluster import Inventory, Place
from sparsepipe.config.build import build_data, num_classes_of, ready_data
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import TrainerArguments
from sparsepipe.errors import ConfigError, HardwareError, ProfileError
from sparsepipe.models import DomainSeparation
from sparsepipe.partition.memory.microbatches import check_microbatches
from sparsepipe.planning.device_profiles import backend_name, dtype_of, optimizer_words, workload
from sparsepipe.planning.devices import (
    devices_beside,
    find_device,
    prepare_device,
    without_links,
    words_of_device,
)
from sparsepipe.planning.layer_shares import OtherProfiles, by_layer
from sparsepipe.profiling import Profile
from sparsepipe.profiling.measure import measure
from sparsepipe.runs.randomness import seed_epoch
from sparsepipe.runtime.microbatches import split
from sparsepipe.runtime.slowdown import Slowdown
from sparsepipe.strategies.pipeline.stage_plan import find_layers
from sparsepipe.strategies.pipeline.steps import run_until_layers
from sparsepipe.tasks.domain_parts import State, of_domains, parts_of, state_of
from sparsepipe.tasks.loaders import adapt_loaders
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun, Task
from sparsepipe.utils.files import write_text_atomic
from sparsepipe.utils.progress import progress
from sparsepipe.utils.tables import markdown_table

log = logging.getLogger(__name__)

_PASSES_A_LOAD = 4
"""Passes over the layers for each batch whose reading is timed: amid them, for the same reason as
updates are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLayers(Task):
    """Measures the layers of the model on one device, on real batches of the training split.

    Attributes:
        num_warmup: passes before those that count.
        num_measured: passes that count.
        num_batches: batches of the training split that take turns.
        microbatches: into which each is cut for the layers to run on, one after another; times
            are those of all of them.
        layers: name of the ``nn.Sequential``; None: the one there is.
        device: name of the inventory's device to measure; None where it has one kind only.
        plan: file of a plan whose cuts are marked in the picture, which then shows the profiles
            that the inventory names of other devices as well; None: this device alone.
        beside: files of further profiles that the picture shows, by what they are called there.
        for_plan: a training needs it, which logs itself what share of it this took, and amid
            whose log a table would stand.
    """

    name: ClassVar[str] = "profile"
    alone: ClassVar[bool] = True
    # Whatever training it serves; precision but float32 is refused. The fingerprint has the plan,
    # and of the optimizer what matters.
    not_identity: ClassVar[tuple[str, ...]] = (
        "optim",
        "trainer",
        "task.beside",
        "task.for_plan",
        "task.plan",
    )

    num_warmup: int = 50
    num_measured: int = 100
    num_batches: int = 8
    microbatches: int = 1
    layers: str | None = None
    device: str | None = None
    plan: str | None = None
    beside: dict[str, str] | None = None
    for_plan: bool = False

    def run(self, run: ResolvedRun) -> None:
        """Measures; writes ``profile.json``, a table and a picture.

        Raises:
            ProfileError: no pass is to be measured.
            PlanError: ``plan`` is no plan, or for another number of layers.
            ConfigError: the model has no layers to measure, or is to be trained in several
                processes; the inventory has no such device, or several kinds.
            HardwareError: the device is not here.
            Stopped: a signal ended it.
        """
        place = find_device(run.inventory, self.device)
        others = self._others(run.spec, run.inventory)
        found, batches = self._measured(run, place, others)
        found.save(run.directory.path / "profile.json")
        others.draw(place.name, found, run.directory.shares)
        training_s = None if self.for_plan else _training_s(found, batches)
        _report(run, found, training_s, for_plan=self.for_plan)
        _write(run, found, training_s)

    def prepare(self, run: ResolvedRun) -> str:
        """Prepares the data; their fingerprint, and what else the times depend on.

        Raises:
            ProfileError: nothing is to be measured.
            ConfigError: in other numbers than float32; or the inventory has no such device, or
                several kinds.
            HardwareError: it has no device at all, or none that is here.
        """
        spec, inventory = run.spec, run.inventory
        self._check(spec, inventory)
        words = words_of_device(find_device(inventory, self.device), inventory)
        others = self._others(spec, inventory)
        return ", ".join([ready_data(spec), *words, optimizer_words(spec), *others.words])

    def hardware(self, inventory: Inventory) -> Inventory:
        """The devices alone: costs of layers do not depend on links."""
        return without_links(inventory)

    def processes(self, run: ResolvedRun) -> int:
        """All devices of the host, as in a training."""
        return devices_beside(find_device(run.inventory, self.device), run.inventory)

    def _others(self, spec: RunSpec, inventory: Inventory) -> OtherProfiles:
        return OtherProfiles.of(self.plan, spec, inventory, others=self.beside)

    def _check(self, spec: RunSpec, inventory: Inventory) -> None:
        if self.num_batches < 1:
            raise ProfileError(
                f"task.num_batches={self.num_batches}: there is nothing to measure",
                remedy="give one batch or more",
            )
        check_microbatches(self.microbatches, name="task.microbatches")
        if dtype_of(spec) != "float32":
            raise ConfigError(
                "profiles are measured in float32 so far, not with "
                f"trainer.precision={spec.trainer.precision}",
                remedy="set trainer.precision=32-true",
            )
        if inventory.accelerator == "cuda" and not torch.cuda.is_available():
            raise HardwareError(
                "the inventory has CUDA devices, and torch finds none on this machine",
                remedy="choose the hardware at hand (hardware=local), or profile where the GPUs "
                "are",
            )

    def _measured(
        self, run: ResolvedRun, place: Place, others: OtherProfiles
    ) -> tuple[Profile, int | None]:
        """The profile, and batches of the training; None: its length is not fixed."""
        started_s = time.perf_counter()
        data = build_data(_reading_here(run.spec))
        data.setup("fit")
        device, slowed = prepare_device(place, run.inventory), Slowdown(place.slowdown).slowed
        module = run.build_module(data).to(device)
        net, input_of = self._chain(module)
        seed = int(run.spec.seed)
        others.check(num_layers=len(net))
        adapt_loaders(data, seed=seed)
        seed_epoch(seed, 0)
        loader = data.train_dataloader()
        read = list(islice(iter(loader), self.num_batches))
        loads_s: list[float] = []
        more = _over_and_over(loader)
        with progress("measuring layers, passes") as advance:

            def between(number: int) -> None:
                run.watch.raise_if_stopped()
                if number % _PASSES_A_LOAD == 0:
                    begin_s = time.perf_counter()
                    if next(more, None) is not None:
                        loads_s.append(time.perf_counter() - begin_s)
                advance(self.num_warmup + self.num_measured)

            found = measure(
                net,
                [input_of(batch, device) for batch in read],
                device=device,
                num_warmup=self.num_warmup,
                num_measured=self.num_measured,
                meta=_meta(run, module, data, place) | {"microbatches": self.microbatches},
                optimizer=getattr(module, "make_optimizer", None),
                between=between,
                slowed=slowed,
                cut=partial(_parts, count=self.microbatches),
            )
        cost_s = time.perf_counter() - started_s
        length = batches_of_training(run.spec.trainer, len(loader))
        known = {"cost_s": cost_s}
        if loads_s:  # the first one begins to read, beside that
            known["load_s"] = statistics.median(loads_s[1:] or loads_s)
        return Profile(layers=found.layers, meta={**found.meta, **known}), length

    def _chain(
        self, module: pl.LightningModule
    ) -> tuple[nn.Sequential, Callable[[Any, torch.device], Any]]:
        """What is measured, and what makes its input of a batch."""
        if not isinstance(module, DomainSeparation):
            net = cast(nn.Sequential, module.get_submodule(find_layers(module, self.layers)))
            return net, partial(_input_of, module, net)
        if self.layers is not None or self.microbatches > 1:
            name = "layers" if self.layers is not None else "microbatches"
            raise ConfigError(
                f"task.{name}={getattr(self, name)} is of a chain of layers, and a network of "
                "domains is measured encoder by encoder",
                remedy=f"leave task.{name} out",
            )
        return parts_of(module), partial(_state_of, module)


def _report(run: ResolvedRun, found: Profile, training_s: float | None, *, for_plan: bool) -> None:
    """Writes the table, and logs it unless the profile is for a training's plan."""
    table = _layer_table(found)
    write_text_atomic(run.directory.path / "profile.txt", table + "\n")
    if for_plan:
        log.info("%s", _summary(found))
        return
    log.info("\n%s", table)
    log.info("%s, %s", _summary(found), _share_of_training(found, training_s))


def _training_s(found: Profile, batches: int | None) -> float | None:
    """Seconds that this number of minibatches takes on this device."""
    minibatch_s = float(found.meta["step_s"]) + (found.update_s or 0.0)
    return None if batches is None else batches * minibatch_s


def _write(run: ResolvedRun, found: Profile, training_s: float | None) -> None:
    step_s, cost_s = found.meta["step_s"], found.meta["cost_s"]
    values = {
        "layers_s": found.compute_s,
        "step_s": step_s,
        "layers_share_of_step": found.compute_s / step_s,
        "profile_s": cost_s,
        "kernel_maps_s": sum(layer.kernel_map_s or 0.0 for layer in found.layers),
    }
    known_s = {"update_s": found.update_s, "copy_s": found.copy_s}
    values |= {name: time_s for name, time_s in known_s.items() if time_s is not None}
    if training_s is not None:
        values["profile_share_of_training"] = cost_s / training_s
    write_result(run, values | by_layer(found))


def _input_of(
    module: pl.LightningModule, net: nn.Sequential, batch: Any, device: torch.device
) -> Any:
    """The input that the module's training step gives its layers."""
    batch = module.transfer_batch_to_device(batch, device, 0)
    return run_until_layers(net, lambda: module.training_step(batch, 0)).value


def _reading_here(spec: RunSpec) -> RunSpec:
    """The same without loader workers: what is timed is the reading of a batch by one process."""
    if "num_workers" not in spec.data.arguments:
        return spec
    return spec.replace(data=spec.data.replace(num_workers=0))


def _over_and_over(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches of as many passes as are asked for; ends where a pass has none, as of a stream."""
    empty = False
    while not empty:
        empty = True
        for batch in loader:
            empty = False
            yield batch


def _state_of(module: DomainSeparation, batch: Any, device: torch.device) -> State:
    """Of a minibatch of all domains, to which a combined loader adds numbers."""
    batch = batch[0] if isinstance(batch, tuple) else batch
    return state_of(module, module.transfer_batch_to_device(batch, device, 0))


def _parts(value: Any, count: int) -> list[Any]:
    """An input cut as a synchronous pipeline cuts it, without empty parts."""
    return [part.batch for part in split(value, count) if part.samples]


def _meta(
    run: ResolvedRun, module: pl.LightningModule, data: pl.LightningDataModule, place: Place
) -> dict[str, Any]:
    return {
        "model": run.spec.model.name,
        "model_settings": run.spec.model.settings,
        "num_classes": num_classes_of(data),
        **workload(run.spec),
        "device": place.name,
        "slowdown": place.slowdown,
        "dtype": str(next(module.parameters()).dtype).removeprefix("torch."),
        "backend": backend_name(run.spec),
        "threads": torch.get_num_threads(),
        "versions": {name: metadata.version(name) for name in ("torch", "numpy")},
        "source": "task=profile",
        **(of_domains(module) if isinstance(module, DomainSeparation) else {}),
        # It is unknown which optimizer a user's own module will make.
        **({"optimizer": optimizer_words(run.spec)} if hasattr(module, "make_optimizer") else {}),
    }


def batches_of_training(trainer: TrainerArguments, loaded: int) -> int | None:
    """Batches of a whole training; None where its settings do not limit it."""
    epoch = _limited(loaded, trainer.overfit_batches or trainer.limit_train_batches)
    accumulated = int(trainer.accumulate_grad_batches)
    max_epochs, max_steps = trainer.max_epochs or -1, int(trainer.max_steps)
    ends = []
    if max_epochs >= 0:
        ends.append(max_epochs * epoch)
    if max_steps >= 0:
        # An epoch's last step takes what is left of it.
        epochs, steps = divmod(max_steps, max(1, -(-epoch // accumulated)))
        ends.append(epochs * epoch + steps * accumulated)
    return min(ends) if ends and min(ends) > 0 else None


def _limited(loaded: int, limit: float | None) -> int:
    """As in Lightning: an integer counts batches, a fraction is a share of the epoch."""
    if limit is None:
        return loaded
    return min(loaded, limit) if isinstance(limit, int) else int(loaded * limit)


def _summary(found: Profile) -> str:
    """Times of layers, a step and an update, in a line."""
    step_s, cost_s = found.meta["step_s"], found.meta["cost_s"]
    update = "" if found.update_s is None else f", an update {1e3 * found.update_s:.1f} ms"
    copy = "" if found.copy_s is None else f", a copy of the weights {1e3 * found.copy_s:.1f} ms"
    load = "" if found.load_s is None else f", reading a batch {1e3 * found.load_s:.1f} ms"
    return (
        f"the layers take {1e3 * found.compute_s:.1f} ms one by one, a step of all "
        f"{1e3 * step_s:.1f} ms ({found.compute_s / step_s:.1%}){update}{copy}{load}; "
        f"{cost_s:.0f} s of measuring"
    )


def _share_of_training(found: Profile, training_s: float | None) -> str:
    """Measuring time as a share of the training's; empty where its length is not fixed."""
    if training_s is None:
        return "and the training that it serves has no given end (trainer.max_epochs, max_steps)"
    share = found.meta["cost_s"] / training_s
    part = f"{share:.1%} of" if share < 1 else f"{share:,.1f} times"
    return f"{part} the training that it serves, on this device"


def _layer_table(found: Profile) -> str:
    head = (
        *("layer", "kind", "forward ms", "spread", "backward ms", "spread", "kernel maps ms"),
        *("update ms", "out KiB", "params KiB", "peak MiB"),
    )
    rows = [
        (
            str(layer.index),
            layer.kind,
            f"{1e3 * layer.forward_s:.2f}",
            f"{1e3 * (layer.forward_spread_s or 0.0):.2f}",
            f"{1e3 * layer.backward_s:.2f}",
            f"{1e3 * (layer.backward_spread_s or 0.0):.2f}",
            f"{1e3 * layer.kernel_map_s:.2f}" if layer.kernel_map_s else "",
            f"{1e3 * layer.update_s:.2f}" if layer.update_s else "",
            f"{layer.activation_bytes / 1024:,.0f}",
            f"{layer.parameter_bytes / 1024:,.0f}",
            f"{(layer.peak_bytes or 0.0) / 2**20:,.1f}",
        )
        for layer in found.layers
    ]
    return markdown_table(head, rows)
