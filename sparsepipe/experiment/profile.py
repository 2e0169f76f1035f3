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

from sparsepipe.experiment.build import build_data, build_module
from sparsepipe.experiment.loaders import adapt_loaders
from sparsepipe.experiment.model_names import model_name
from sparsepipe.experiment.result import write_result
from sparsepipe.experiment.run import Run
from sparsepipe.experiment.seeding import seed_epoch
from sparsepipe.profiling import Profile
from sparsepipe.profiling.measure import measure, step_seconds
from sparsepipe.results.shares import Costs, accumulated_shares
from sparsepipe.results.tables import markdown_table
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
) -> None:
    """Measures the layers on real batches; writes ``profile.json`` and the shares' picture.

    Args:
        run: configuration and directory.
        num_warmup: passes before those that count.
        num_measured: passes that count.
        num_batches: batches of the training split that take turns.
        layers: name of the ``nn.Sequential``; None: the one there is.

    Raises:
        ProfileError: nothing is to be measured.
        ConfigError: the model has no layers to measure.
        Stopped: a signal ended it.
    """
    started_s = time.perf_counter()
    data = build_data(run.config)
    data.setup("fit")
    device = torch.device(run.inventory.accelerator)
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
        meta=_meta(run, module),
        between=_progress(run, num_warmup + num_measured),
    )
    step_s = step_seconds(net, batches, device=device, num_measured=max(1, num_measured // 5))
    cost_s = time.perf_counter() - started_s
    epochs = run.config["trainer"]["max_epochs"] or 1
    training_s = step_s * len(loader) * epochs
    found = Profile(layers=found.layers, meta={**found.meta, "step_s": step_s, "cost_s": cost_s})
    found.save(run.directory.path / "profile.json")
    accumulated_shares({found.meta["device"]: _costs(found)}, run.directory.path / "shares.png")
    log.info("%s", _table(found))
    log.info(
        "the layers take %.1f ms one by one, a step of all %.1f ms (%.1f %%); %.0f s of measuring, "
        "%.1f %% of a training of %d epochs on this device",
        1e3 * found.compute_s,
        1e3 * step_s,
        100 * found.compute_s / step_s,
        cost_s,
        100 * cost_s / training_s,
        epochs,
    )
    write_result(
        run,
        {
            "layers_s": found.compute_s,
            "step_s": step_s,
            "layers_share_of_step": found.compute_s / step_s,
            "profile_s": cost_s,
            "profile_share_of_training": cost_s / training_s,
            "kernel_maps_s": sum(layer.kernel_map_s or 0.0 for layer in found.layers),
        },
    )


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


def _meta(run: Run, module: pl.LightningModule) -> dict[str, Any]:
    data, backend = run.config["data"], run.config["backend"]
    return {
        "model": model_name(run.config),
        "batch_size": data.get("batch_size"),
        "resolution": data.get("resolution"),
        "point_ratio": data.get("point_ratio"),
        "device": run.inventory.hosts[0].devices[0].name,
        "dtype": str(next(module.parameters()).dtype).removeprefix("torch."),
        "backend": str(backend["_target_"]).rpartition(".")[2] if backend else None,
        "threads": torch.get_num_threads(),
        "versions": {name: metadata.version(name) for name in ("torch", "numpy")},
        "source": "task=profile",
    }


def _costs(found: Profile) -> Costs:
    return Costs(
        compute_s=[layer.compute_s for layer in found.layers],
        activation_bytes=[layer.activation_bytes for layer in found.layers],
        parameter_bytes=[layer.parameter_bytes for layer in found.layers],
    )


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
