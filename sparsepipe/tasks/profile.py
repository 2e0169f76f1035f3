"""The task ``profile``: what each layer of the model costs on the device at hand."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from itertools import islice
from typing import Any, cast

import pytorch_lightning as pl
import torch
from torch import nn

from sparsepipe.cluster import Inventory, Place
from sparsepipe.config.build import (
    build_data,
    build_module,
    num_classes_of,
    ready_data,
)
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ConfigError, HardwareError, ProfileError
from sparsepipe.partition.memory.microbatches import check_microbatches
from sparsepipe.planning.device_profiles import backend_name, dtype_of, optimizer_words, workload
from sparsepipe.planning.layer_shares import Beside, by_layer
from sparsepipe.planning.measured_device import (
    devices_beside,
    find_device,
    prepare_device,
    without_links,
    words_of_device,
)
from sparsepipe.planning.training_length import batches_of_training
from sparsepipe.profiling import Profile
from sparsepipe.profiling.measure import measure
from sparsepipe.results.files import write_text_atomic
from sparsepipe.runs.seeding import seed_epoch
from sparsepipe.runtime.microbatches import split
from sparsepipe.runtime.slowdown import Slowdown
from sparsepipe.strategies.pipeline.layers import find_layers
from sparsepipe.strategies.pipeline.step_split import run_until_layers
from sparsepipe.tasks.loaders import adapt_loaders
from sparsepipe.tasks.profile_text import layer_table, share_of_training, told
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.run import Run

log = logging.getLogger(__name__)


def profile(
    run: Run,
    *,
    num_warmup: int = 50,
    num_measured: int = 100,
    num_batches: int = 8,
    microbatches: int = 1,
    layers: str | None = None,
    device: str | None = None,
    plan: str | None = None,
    beside: dict[str, str] | None = None,
    for_plan: bool = False,
) -> None:
    """Measures the layers on real batches; writes ``profile.json``, a table and a picture.

    Args:
        run: configuration and directory.
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
        for_plan: a training asked for it, which tells by itself what share of it this took, and
            amid whose log a table would stand.

    Raises:
        ProfileError: no pass is to be measured.
        PlanError: ``plan`` is no plan, or for another number of layers.
        ConfigError: the model has no layers to measure, or is to be trained in several processes;
            the inventory has no such device, or several kinds.
        HardwareError: the device is not here.
        Stopped: a signal ended it.
    """
    run.assert_one_rank()
    place = find_device(run.inventory, device)
    others = Beside.of(plan, run.spec, run.inventory, others=beside)
    found, batches = _measured(
        run,
        place,
        others,
        num_warmup=num_warmup,
        num_measured=num_measured,
        num_batches=num_batches,
        microbatches=microbatches,
        layers=layers,
    )
    found.save(run.directory.path / "profile.json")
    others.draw(place.name, found, run.directory.shares)
    training_s = None if for_plan else _training_s(found, batches)
    _tell(run, found, training_s, for_plan=for_plan)
    _write(run, found, training_s)


def fingerprint(spec: RunSpec, inventory: Inventory) -> str:
    """What the data hold, made ready, and what the times depend on beside the configuration.

    Raises:
        ProfileError: nothing is to be measured.
        ConfigError: in other numbers than float32; or the inventory has no such device, or
            several kinds.
        HardwareError: it has no device at all, or none that is here.
    """
    _check(spec, inventory)
    task = spec.task
    place = find_device(inventory, task.get("device"))
    beside = Beside.of(task.get("plan"), spec, inventory, others=task.get("beside"))
    words = [*words_of_device(place, inventory), optimizer_words(spec), *beside.words]
    return ", ".join([ready_data(spec), *words])


def processes(spec: RunSpec, inventory: Inventory) -> int:
    """Among how many processes the cores are divided: in a training, all devices of a host."""
    return devices_beside(find_device(inventory, spec.task.get("device")), inventory)


# Whatever training it serves; precision but float32 is refused. The fingerprint tells of the plan,
# and of the optimizer what matters.
_TOLD_OTHERWISE = ("optim", "trainer", "task.beside", "task.for_plan", "task.plan")
profile.alone = True  # type: ignore[attr-defined]
profile.not_identity = _TOLD_OTHERWISE  # type: ignore[attr-defined]
profile.prepare = fingerprint  # type: ignore[attr-defined]
profile.hardware = without_links  # type: ignore[attr-defined]
profile.processes = processes  # type: ignore[attr-defined]


def _check(spec: RunSpec, inventory: Inventory) -> None:
    batches = spec.task.get("num_batches", 1)
    if batches < 1:
        raise ProfileError(
            f"task.num_batches={batches}: there is nothing to measure",
            remedy="give one batch or more",
        )
    check_microbatches(spec.task.get("microbatches", 1), name="task.microbatches")
    if dtype_of(spec) != "float32":
        precision = spec.trainer.precision
        raise ConfigError(
            f"profiles are measured in float32 so far, not with trainer.precision={precision}",
            remedy="set trainer.precision=32-true",
        )
    if inventory.accelerator == "cuda" and not torch.cuda.is_available():
        raise HardwareError(
            "the inventory has CUDA devices, and torch finds none on this machine",
            remedy="choose the hardware at hand (hardware=local), or profile where the GPUs are",
        )


def _measured(
    run: Run,
    place: Place,
    beside: Beside,
    *,
    num_warmup: int,
    num_measured: int,
    num_batches: int,
    microbatches: int,
    layers: str | None,
) -> tuple[Profile, int | None]:
    """The profile, and how many batches the training takes; None where its end is not given."""
    started_s = time.perf_counter()
    data = build_data(run.spec)
    data.setup("fit")
    device, slowed = prepare_device(place, run.inventory), Slowdown(place.slowdown).slowed
    module = build_module(run.spec, data).to(device)
    net = cast(nn.Sequential, module.get_submodule(find_layers(module, layers)))
    seed = int(run.spec.seed)
    beside.check(num_layers=len(net))
    adapt_loaders(data, seed=seed)
    seed_epoch(seed, 0)
    loader = data.train_dataloader()
    batches = [_input_of(module, net, batch, device) for batch in islice(iter(loader), num_batches)]
    found = measure(
        net,
        batches,
        device=device,
        num_warmup=num_warmup,
        num_measured=num_measured,
        meta=_meta(run, module, data, place) | {"microbatches": microbatches},
        optimizer=getattr(module, "make_optimizer", None),
        between=_progress(run, num_warmup + num_measured),
        slowed=slowed,
        cut=partial(_parts, count=microbatches),
    )
    cost_s = time.perf_counter() - started_s
    length = batches_of_training(run.spec.trainer, len(loader))
    return Profile(layers=found.layers, meta={**found.meta, "cost_s": cost_s}), length


def _tell(run: Run, found: Profile, training_s: float | None, *, for_plan: bool) -> None:
    """Writes the table, and logs it where no training asked for the profile."""
    table = layer_table(found)
    write_text_atomic(run.directory.path / "profile.txt", table + "\n")
    if for_plan:
        log.info("%s", told(found))
        return
    log.info("\n%s", table)
    log.info("%s, %s", told(found), share_of_training(found, training_s))


def _training_s(found: Profile, batches: int | None) -> float | None:
    """What so many minibatches of a training take on this device."""
    minibatch_s = float(found.meta["step_s"]) + (found.update_s or 0.0)
    return None if batches is None else batches * minibatch_s


def _write(run: Run, found: Profile, training_s: float | None) -> None:
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
    """What the module's training step hands to its layers."""
    batch = module.transfer_batch_to_device(batch, device, 0)
    return run_until_layers(net, lambda: module.training_step(batch, 0)).value


def _parts(value: Any, count: int) -> list[Any]:
    """An input of the layers cut as a synchronous pipeline cuts it, without what is empty."""
    return [part.batch for part in split(value, count) if part.samples]


def _progress(run: Run, passes: int) -> Callable[[int], None]:
    last_s = time.monotonic()

    def tell(number: int) -> None:
        nonlocal last_s
        run.watch.stop_if_asked()
        if time.monotonic() - last_s > 10:
            last_s = time.monotonic()
            log.info("pass %d of %d", number + 1, passes)

    return tell


def _meta(
    run: Run, module: pl.LightningModule, data: pl.LightningDataModule, place: Place
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
        # Of somebody's own module nobody knows which optimizer it will make.
        **({"optimizer": optimizer_words(run.spec)} if _makes_optimizer(module) else {}),
    }


def _makes_optimizer(module: pl.LightningModule) -> bool:
    return hasattr(module, "make_optimizer")
