"""The task ``profile``: what each layer of the model costs on the device at hand."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import islice
from typing import Annotated, Any, ClassVar, cast

import pytorch_lightning as pl
import torch
from pydantic import Field
from torch import nn

from sparsepipe.cluster import Inventory, Place
from sparsepipe.config.build import num_classes_of, ready_data
from sparsepipe.config.schema import TrainerArguments
from sparsepipe.errors import ConfigError, HardwareError
from sparsepipe.models import DomainSeparation
from sparsepipe.partition.memory import check_microbatches
from sparsepipe.planning.device_profiles import (
    OtherProfiles,
    backend_name,
    by_layer,
    dtype_of,
    optimizer_words,
    workload,
)
from sparsepipe.planning.devices import (
    devices_beside,
    find_device,
    prepare_device,
    without_links,
    words_of_device,
)
from sparsepipe.profiling import Profile
from sparsepipe.profiling.measure import measure
from sparsepipe.runs.randomness import seed_epoch
from sparsepipe.runtime.microbatches import split
from sparsepipe.runtime.slowdown import Slowdown
from sparsepipe.sparse.backends.auto import chosen
from sparsepipe.strategies.pipeline.stage_plan import find_layers
from sparsepipe.strategies.pipeline.steps import run_until_layers
from sparsepipe.tasks.domain_parts import of_domains, parts_of, state_of
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun, Task
from sparsepipe.utils.files import markdown_table, write_text_atomic
from sparsepipe.utils.progress import progress

log = logging.getLogger(__name__)

_PASSES_A_LOAD = 4
"""Number of passes over the layers after each timed read of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLayers(Task):
    """Measures the layers of the model on one device, on real batches of the training split.

    ``conf/task/profile.yaml`` describes the settings.

    With ``for_plan``, a training needs the profile for its plan, and logs how long profiling took.
    """

    name: ClassVar[str] = "profile"
    alone: ClassVar[bool] = True
    # A profile does not depend on the training that it is for. The fingerprint covers the plan and
    # what matters of the optimizer and the trainer: a given ``matmul_precision``; a ``precision``
    # other than float32 is refused.
    not_identity: ClassVar[tuple[str, ...]] = (
        "loss",
        "optim",
        "trainer",
        "task.beside",
        "task.for_plan",
        "task.plan",
    )

    num_warmup: int = 50
    num_measured: int = 100
    num_batches: Annotated[int, Field(ge=1)] = 8
    microbatches: int = 1
    layers: str | None = None
    device: str | None = None
    plan: str | None = None
    beside: dict[str, str] | None = None
    for_plan: bool = False

    def run(self, run: ResolvedRun) -> None:
        """Measures the layers; writes ``profile.json``, a table and a picture."""
        place = find_device(run.inventory, self.device)
        others = OtherProfiles.of(self.plan, run.spec, run.inventory, others=self.beside or {})
        found, batches = self._measured(run, place, others)
        found.save(run.directory.path / "profile.json")
        others.draw(place.name, found, run.directory.shares)
        table = _layer_table(found)
        write_text_atomic(run.directory.path / "profile.txt", table + "\n")
        if not self.for_plan:
            log.info("\n%s", table)
        step_s, cost_s = found.meta["step_s"], found.meta["cost_s"]
        told = "the layers take %.1f ms one by one, a step %.1f ms; measuring took %.0f s"
        log.info(told, 1e3 * found.compute_s, 1e3 * step_s, cost_s)
        values = {
            "layers_s": found.compute_s,
            "step_s": step_s,
            "layers_share_of_step": found.compute_s / step_s,
            "profile_s": cost_s,
            "kernel_maps_s": sum(layer.kernel_map_s or 0.0 for layer in found.layers),
        }
        known_s = {"update_s": found.update_s, "copy_s": found.copy_s}
        values |= {name: time_s for name, time_s in known_s.items() if time_s is not None}
        if batches is not None and not self.for_plan:
            share = cost_s / (batches * (float(step_s) + (found.update_s or 0.0)))
            values["profile_share_of_training"] = share
            log.info("measuring takes %.1f %% of the time of this training", 100 * share)
        write_result(run, values | by_layer(found))

    def prepare(self, run: ResolvedRun) -> str:
        """Prepares the data; returns a fingerprint of everything that the times depend on."""
        spec, inventory = run.spec, run.inventory
        check_microbatches(self.microbatches, name="task.microbatches")
        if dtype_of(spec) != "float32":
            raise ConfigError(
                "profiles are measured in float32 only, not with "
                f"trainer.precision={spec.trainer.precision}",
                remedy="set trainer.precision=32-true",
            )
        if inventory.accelerator == "cuda" and not torch.cuda.is_available():
            raise HardwareError(
                "the inventory has CUDA devices, but torch finds none on this machine",
                remedy="choose the hardware of this machine (hardware=local), or profile on the "
                "machine with the GPUs",
            )
        words = words_of_device(find_device(inventory, self.device), inventory)
        if (precision := spec.trainer.matmul_precision) is not None:
            words.append(f"matmul_precision {precision}")
        others = OtherProfiles.of(self.plan, spec, inventory, others=self.beside or {})
        return ", ".join([ready_data(spec), *words, optimizer_words(spec), *others.words])

    def hardware(self, inventory: Inventory) -> Inventory:
        """Returns the inventory without links, on which the costs of layers do not depend."""
        return without_links(inventory)

    def processes(self, run: ResolvedRun) -> int:
        """Returns the number of devices on the host, since in a training all share its cores."""
        return devices_beside(find_device(run.inventory, self.device), run.inventory)

    def _measured(
        self, run: ResolvedRun, place: Place, others: OtherProfiles
    ) -> tuple[Profile, int | None]:
        """Returns the profile, and the number of batches of a whole training (None: no limit)."""
        started_s = time.perf_counter()
        if "num_workers" in run.spec.data.arguments:  # reading by one process is timed
            one_process = run.spec.data.replace(num_workers=0)
            data = replace(run, spec=run.spec.replace(data=one_process)).load_data("fit")
        else:
            data = run.load_data("fit")
        device, slowed = prepare_device(place, run.inventory), Slowdown(place.slowdown).slowed
        module = run.build_module(data).to(device)
        net, input_of = self._chain(module)
        others.check(num_layers=len(net))
        seed_epoch(int(run.spec.seed), 0)
        loader = data.train_dataloader()
        read = list(islice(iter(loader), self.num_batches))
        loads_s: list[float] = []
        more = iter(loader)
        with progress("measuring layers, passes") as advance:

            def between(number: int) -> None:
                nonlocal more
                run.watch.raise_if_stopped()
                if number % _PASSES_A_LOAD == 0:
                    begin_s = time.perf_counter()
                    batch = next(more, None)
                    if batch is None:  # a stream may have no second pass
                        more = iter(loader)
                        batch = next(more, None)
                    if batch is not None:
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
                cut=lambda value: [
                    part.batch for part in split(value, self.microbatches) if part.samples
                ],
            )
        cost_s = time.perf_counter() - started_s
        length = batches_of_training(run.spec.trainer, len(loader))
        known = {"cost_s": cost_s}
        if loads_s:  # the first read includes the loader's start
            known["load_s"] = statistics.median(loads_s[1:] or loads_s)
        return Profile(layers=found.layers, meta={**found.meta, **known}), length

    def _chain(
        self, module: pl.LightningModule
    ) -> tuple[nn.Sequential, Callable[[Any, torch.device], Any]]:
        """Returns the layers to measure, and a function that makes their input from a batch."""
        if isinstance(module, DomainSeparation):
            if self.layers is not None or self.microbatches > 1:
                name = "layers" if self.layers is not None else "microbatches"
                raise ConfigError(
                    f"task.{name} is for a chain of layers, but a domain separation network is "
                    "measured by its encoders and decoders",
                    remedy=f"leave task.{name} out",
                )

            def state(batch: Any, device: torch.device) -> Any:
                batch = batch[0] if isinstance(batch, tuple) else batch  # a combined loader's
                return state_of(module, module.transfer_batch_to_device(batch, device, 0))

            return parts_of(module), state
        net = cast(nn.Sequential, module.get_submodule(find_layers(module, self.layers)))

        def input_of(batch: Any, device: torch.device) -> Any:
            batch = module.transfer_batch_to_device(batch, device, 0)
            return run_until_layers(net, lambda: module.training_step(batch, 0)).value

        return net, input_of


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
        "matmul_precision": run.matmul_precision,
        "backend": backend_name(run.spec, run.accelerator)
        or (run.spec.backend and type(chosen(run.own_device)).__name__),
        "threads": torch.get_num_threads(),
        "versions": {name: metadata.version(name) for name in ("torch", "numpy")},
        "source": "task=profile",
        **(of_domains(module) if isinstance(module, DomainSeparation) else {}),
        # It is unknown which optimizer a user's own module will make.
        **({"optimizer": optimizer_words(run.spec)} if hasattr(module, "make_optimizer") else {}),
    }


def batches_of_training(trainer: TrainerArguments, loaded: int) -> int | None:
    """Returns a training's number of batches (None: no limit); ``loaded``: those of an epoch."""
    limit = trainer.overfit_batches or trainer.limit_train_batches
    epoch = loaded
    if limit is not None:  # as in Lightning: an integer counts batches, a fraction is a share
        epoch = min(loaded, limit) if isinstance(limit, int) else int(loaded * limit)
    accumulated = int(trainer.accumulate_grad_batches)
    max_epochs, max_steps = trainer.max_epochs or -1, int(trainer.max_steps)
    ends = []
    if max_epochs >= 0:
        ends.append(max_epochs * epoch)
    if max_steps >= 0:
        # The last step of an epoch takes the batches that remain.
        epochs, steps = divmod(max_steps, max(1, -(-epoch // accumulated)))
        ends.append(epochs * epoch + steps * accumulated)
    return min(ends) if ends and min(ends) > 0 else None


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
