"""The task ``profile``: what each layer of the model costs on the device at hand."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib import metadata
from itertools import islice
from typing import Any, cast

import pytorch_lightning as pl
import torch
from torch import nn

from sparsepipe.cluster import Place
from sparsepipe.errors import ConfigError, HardwareError, ProfileError
from sparsepipe.experiment.build import build_data, build_module, num_classes_of
from sparsepipe.experiment.device_profiles import workload
from sparsepipe.experiment.layer_shares import draw_shares
from sparsepipe.experiment.loaders import adapt_loaders
from sparsepipe.experiment.measured_device import find_device, prepare_device
from sparsepipe.experiment.model_names import model_name, model_settings
from sparsepipe.experiment.result import write_result
from sparsepipe.experiment.run import Run
from sparsepipe.experiment.seeding import seed_epoch
from sparsepipe.profiling import Profile
from sparsepipe.profiling.measure import measure, step_seconds
from sparsepipe.results.tables import markdown_table
from sparsepipe.runtime.throttle import Throttle
from sparsepipe.strategies.pipeline.capture import run_until_layers
from sparsepipe.strategies.pipeline.layers import find_layers

log = logging.getLogger(__name__)


def profile(
    run: Run,
    *,
    num_warmup: int = 50,
    num_measured: int = 100,
    num_batches: int = 8,
    layers: str | None = None,
    device: str | None = None,
) -> None:
    """Measures the layers on real batches; writes ``profile.json`` and the shares' picture.

    Args:
        run: configuration and directory.
        num_warmup: passes before those that count.
        num_measured: passes that count.
        num_batches: batches of the training split that take turns.
        layers: name of the ``nn.Sequential``; None: the one there is.
        device: name of the inventory's device to measure; None where it has one kind only.

    Raises:
        ProfileError: nothing is to be measured.
        ConfigError: the model has no layers to measure, or is to be trained in several processes
            or other numbers than float32; the inventory has no such device, or several kinds.
        HardwareError: the inventory's devices are not here.
        Stopped: a signal ended it.
    """
    _check(run, num_batches)
    place = find_device(run.inventory, device)
    found, steps = _measured(
        run,
        place,
        num_warmup=num_warmup,
        num_measured=num_measured,
        num_batches=num_batches,
        layers=layers,
    )
    training_s = None if steps is None else steps * float(found.meta["step_s"])
    found.save(run.directory.path / "profile.json")
    draw_shares({found.meta["device"]: found}, run.directory.shares)
    _tell(found, training_s)
    _write(run, found, training_s)


# Whatever training it serves; precision but float32 is refused.
profile.not_identity = ("optim", "trainer")  # type: ignore[attr-defined]


def _check(run: Run, num_batches: int) -> None:
    if num_batches < 1:
        raise ProfileError(
            f"task.num_batches={num_batches}: there is nothing to measure",
            remedy="give one batch or more",
        )
    run.assert_one_rank()
    precision = run.config["trainer"]["precision"]
    if str(precision) not in ("32", "32-true", "None"):
        raise ConfigError(
            f"profiles are measured in float32 so far, not with trainer.precision={precision}",
            remedy="set trainer.precision=32-true",
        )
    if run.inventory.accelerator == "cuda" and not torch.cuda.is_available():
        raise HardwareError(
            "the inventory has CUDA devices, and torch finds none on this machine",
            remedy="choose the hardware at hand (hardware=local), or profile where the GPUs are",
        )


def _measured(
    run: Run,
    place: Place,
    *,
    num_warmup: int,
    num_measured: int,
    num_batches: int,
    layers: str | None,
) -> tuple[Profile, int | None]:
    """The profile, and how many steps the training takes; None where its end is not given."""
    started_s = time.perf_counter()
    data = build_data(run.config)
    data.setup("fit")
    device, slowed = prepare_device(place, run.inventory), Throttle(place.slowdown).slowed
    module = build_module(run.config, data).to(device)
    net = cast(nn.Sequential, module.get_submodule(find_layers(module, layers)))
    seed = int(run.config["seed"])
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
        meta=_meta(run, module, data, place),
        between=_progress(run, num_warmup + num_measured),
        slowed=slowed,
    )
    steps_measured = max(1, num_measured // 5)
    step_s = step_seconds(net, batches, device=device, num_measured=steps_measured, slowed=slowed)
    told = {"step_s": step_s, "cost_s": time.perf_counter() - started_s}
    epochs = run.config["trainer"]["max_epochs"] or 0
    steps = len(loader) * epochs if epochs > 0 else None
    return Profile(layers=found.layers, meta={**found.meta, **told}), steps


def _tell(found: Profile, training_s: float | None) -> None:
    step_s, cost_s = found.meta["step_s"], found.meta["cost_s"]
    log.info("%s", _table(found))
    log.info(
        "the layers take %.1f ms one by one, a step of all %.1f ms (%.1f %%); %.0f s of measuring, "
        "%s",
        1e3 * found.compute_s,
        1e3 * step_s,
        100 * found.compute_s / step_s,
        cost_s,
        "and the training that it serves has no given end (trainer.max_epochs)"
        if training_s is None
        else f"{cost_s / training_s:.1%} of the training that it serves, on this device",
    )


def _write(run: Run, found: Profile, training_s: float | None) -> None:
    step_s, cost_s = found.meta["step_s"], found.meta["cost_s"]
    values = {
        "layers_s": found.compute_s,
        "step_s": step_s,
        "layers_share_of_step": found.compute_s / step_s,
        "profile_s": cost_s,
        "kernel_maps_s": sum(layer.kernel_map_s or 0.0 for layer in found.layers),
    }
    if training_s is not None:
        values["profile_share_of_training"] = cost_s / training_s
    write_result(run, values)


def _input_of(
    module: pl.LightningModule, net: nn.Sequential, batch: Any, device: torch.device
) -> Any:
    """What the module's training step hands to its layers."""
    batch = module.transfer_batch_to_device(batch, device, 0)
    return run_until_layers(net, lambda: module.training_step(batch, 0)).value


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
    backend = run.config["backend"]
    return {
        "model": model_name(run.config),
        "model_settings": model_settings(run.config),
        "num_classes": num_classes_of(data),
        **workload(run.config),
        "device": place.name,
        "slowdown": place.slowdown,
        "dtype": str(next(module.parameters()).dtype).removeprefix("torch."),
        "backend": str(backend["_target_"]).rpartition(".")[2] if backend else None,
        "threads": torch.get_num_threads(),
        "versions": {name: metadata.version(name) for name in ("torch", "numpy")},
        "source": "task=profile",
    }


def _table(found: Profile) -> str:
    head = ("layer", "kind", "forward ms", "backward ms", "kernel maps ms", "out KiB", "params KiB")
    rows = [
        (
            str(layer.index),
            layer.kind,
            f"{1e3 * layer.forward_s:.2f}",
            f"{1e3 * layer.backward_s:.2f}",
            f"{1e3 * layer.kernel_map_s:.2f}" if layer.kernel_map_s else "",
            f"{layer.activation_bytes / 1024:,.0f}",
            f"{layer.parameter_bytes / 1024:,.0f}",
        )
        for layer in found.layers
    ]
    return "\n" + markdown_table(head, rows)
