"""What a run says that it keeps, beside what torch saves when microbatches really go forward."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sparsepipe.config.schema import Synchronous
from sparsepipe.models import cnn_5x5
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.profiling import LayerProfile, Profile
from sparsepipe.profiling.memory import border_bytes, saved_bytes
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.stage import StageLayers
from sparsepipe.schedule import Plan
from sparsepipe.tasks.result import kept_bytes, kept_values
from sparsepipe.utils.files import read_json
from tests.support.command_line import composed
from tests.support.planned_cases import profile
from tests.support.resolved import resolved

CUT, BATCH, PARTS = 7, 32, 8
IN_FLIGHT = [("gpipe", (PARTS, PARTS)), ("1f1b", (2, 1)), ("eager_1f1b", (3, 1))]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return cnn_5x5(10, convolutions=6, width=0.25)


def profiled(layers: nn.Sequential, x: Tensor) -> Profile:
    """Its bytes; times do not matter."""
    saved, (begins, ends) = saved_bytes(layers, x), border_bytes(layers, x)
    outputs = [layers[: number + 1](x) for number in range(len(layers))]
    return Profile(
        layers=tuple(
            LayerProfile(
                index=index,
                name=str(index),
                kind=type(layer).__name__,
                forward_s=1.0,
                backward_s=2.0,
                activation_bytes=float(outputs[index].nbytes),
                parameter_bytes=float(sum(p.nbytes for p in layer.parameters())),
                saved_bytes=saved[index],
                begin_bytes=begins[index],
                end_bytes=ends[index],
            )
            for index, layer in enumerate(layers)
        ),
        meta={"input_bytes": float(x.nbytes)},
    )


def told_of(
    plan: Plan, found: Profile, schedule: str, parts: int = PARTS, **details: Any
) -> list[float]:
    names = {device: found for stage in plan.stages for device in stage.devices}
    model = MemoryModel(stash=False, gradients=0.0)
    return kept_bytes(replace(plan, details=details), names, model, Synchronous(schedule, parts))


def saved_by(stage: nn.Sequential, parts: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    """Bytes of the storages that microbatches keep, beside parameters; and what they give."""
    own = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()

    with saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = [stage(part) for part in parts]
    sizes = (t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)
    return sum(sizes), outputs


@pytest.mark.parametrize(("schedule", "in_flight"), IN_FLIGHT)
def test_it_is_what_torch_saves_of_the_microbatches_in_flight(
    schedule: str, in_flight: tuple[int, int]
) -> None:
    layers, x = network(), torch.rand(BATCH, 1, 28, 28)
    plan = Plan.of(config="1-1", cuts=(CUT,), num_layers=len(layers))
    told = told_of(plan, profiled(layers, x), schedule)
    parts: list[Tensor] = [part.clone() for part in x.chunk(PARTS)]
    for stage, (first, end) in enumerate([(0, CUT), (CUT, len(layers))]):
        own = nn.Sequential(*list(layers)[first:end])
        weights = 2 * sum(p.nbytes for p in own.parameters())  # and momentum
        saved, _ = saved_by(own, parts[: in_flight[stage]])
        _, outputs = saved_by(own, parts)
        parts = [output.detach().requires_grad_() for output in outputs]
        assert told[stage] == pytest.approx(weights + saved, rel=0.1)


def kept_by(
    stage: nn.Sequential, parts: Sequence[Tensor], spans: Sequence[range]
) -> tuple[int, list[Tensor]]:
    """Bytes of the storages that the runtime's stage keeps where it recomputes, and its outputs.

    These are in it, and what is inside of a span while one microbatch goes backward.
    """
    leaves = {name: p.detach().clone().requires_grad_() for name, p in stage.named_parameters()}
    own = {t.untyped_storage().data_ptr() for t in (*leaves.values(), *stage.buffers())}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    runs = StageLayers(stage, stage, first=0, last=len(stage) - 1, recomputed=spans)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        flights = [runs.forward(p, minibatch=n, leaves=leaves) for n, p in enumerate(parts)]
    outputs: list[Tensor] = [flight.output for flight in flights]
    kept |= {output.untyped_storage().data_ptr(): output for output in outputs}
    sizes = (t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)
    return sum(sizes) + max(inside_of(stage, span, parts[0]) for span in spans), outputs


def inside_of(stage: nn.Sequential, span: range, part: Tensor) -> int:
    """What layers save while they run again, beside their input, which stays anyway."""
    begin = stage[: span.start](part).detach().clone().requires_grad_()
    layers = stage[span.start : span.stop]
    assert isinstance(layers[0], nn.Conv2d), "which saves its input"
    return saved_by(layers, [begin])[0] - begin.nbytes


@pytest.mark.parametrize(("schedule", "in_flight"), IN_FLIGHT)
def test_recomputed_spans_keep_their_inputs_and_the_inside_of_one(
    schedule: str, in_flight: tuple[int, int]
) -> None:
    layers, x = network(), torch.rand(BATCH, 1, 28, 28)
    spans = ([range(CUT)], [range(2), range(2, 8)])
    bounds = [[0, CUT - 1], [CUT, CUT + 1], [CUT + 2, CUT + 7]]
    plan = Plan.of(config="1-1", cuts=(CUT,), num_layers=len(layers))
    found = profiled(layers, x)
    told, plain = told_of(plan, found, schedule, recomputed=bounds), told_of(plan, found, schedule)
    parts: list[Tensor] = [part.clone() for part in x.chunk(PARTS)]
    for stage, (first, end) in enumerate([(0, CUT), (CUT, len(layers))]):
        own = nn.Sequential(*list(layers)[first:end])
        weights = 2 * sum(p.nbytes for p in own.parameters())  # and momentum
        kept, _ = kept_by(own, parts[: in_flight[stage]], spans[stage])
        _, outputs = kept_by(own, parts, spans[stage])
        parts = [output.detach().clone().requires_grad_() for output in outputs]
        assert told[stage] == pytest.approx(weights + kept, rel=0.1)
        if in_flight[stage] > 1:
            assert told[stage] < 0.8 * plain[stage]


def test_no_reader_has_the_most_and_the_largest_microbatches() -> None:
    """Of four, three readers have one each of their whole batch, but for the first: two halves."""
    layers, x = network(), torch.rand(3 * BATCH, 1, 28, 28)
    plan = Plan.of(config="3-1", cuts=(CUT,), num_layers=len(layers))
    told = told_of(plan, profiled(layers, x[:BATCH]), "gpipe", 4)
    first, half = nn.Sequential(*list(layers)[:CUT]), BATCH // 2
    weights = 4 * sum(p.nbytes for p in first.parameters())
    saved, _ = saved_by(first, [x[:half].clone(), x[half:BATCH].clone()])
    assert told[:3] == pytest.approx([weights + saved] * 3, rel=0.1)
    second = nn.Sequential(*list(layers)[CUT:])
    outputs = [first(x[a * half : b * half]) for a, b in [(0, 1), (2, 4), (4, 6), (1, 2)]]
    saved, _ = saved_by(second, [output.detach().requires_grad_() for output in outputs])
    weights = 2 * sum(p.nbytes for p in second.parameters())
    assert told[3] == pytest.approx(weights + saved, rel=0.1)


def test_several_readers_have_larger_microbatches() -> None:
    """Two devices of the first stage read a batch each, and cut both into T together."""
    layers, x = network(), torch.rand(2 * BATCH, 1, 28, 28)
    plan = Plan.of(config="2-1", cuts=(CUT,), num_layers=len(layers))
    told = told_of(plan, profiled(layers, x[:BATCH]), "gpipe")
    parts = [part.clone() for part in x.chunk(PARTS)]
    first, second = (nn.Sequential(*list(layers)[a:b]) for a, b in [(0, CUT), (CUT, len(layers))])
    # Beside weights and momentum replicas have two buffers for the sums of their gradients.
    weights = 4 * sum(p.nbytes for p in first.parameters())
    saved, _ = saved_by(first, parts[::2])
    assert told[0] == told[1] == pytest.approx(weights + saved, rel=0.1)
    _, outputs = saved_by(first, parts)
    saved, _ = saved_by(second, [output.detach().requires_grad_() for output in outputs])
    weights = 2 * sum(p.nbytes for p in second.parameters())
    assert told[2] == pytest.approx(weights + saved, rel=0.1)


Job = Callable[..., Path]
WORDS = "kept_bytes is left out"


def counted(layers: int = 4, **meta: Any) -> Profile:
    """Of the tiny network on its batches, with the bytes that its layers save."""
    found = profile([1.0] * layers)
    saving = [
        replace(layer, saved_bytes=800.0, begin_bytes=0.0, end_bytes=0.0) for layer in found.layers
    ]
    return Profile(layers=tuple(saving), meta={**found.meta, "batch_size": 4, **meta})


def on(path: Path | None) -> tuple[str, ...]:
    """One device, whose profile is there."""
    known = "" if path is None else f", profile: {{mlp: {path}}}"
    device = f"{{name: core, count: 1, accelerator: cpu{known}}}"
    hosts = f"hardware.value.hosts=[{{name: here, devices: [{device}]}}]"
    return ("hardware=cores", hosts, "trainer.max_epochs=1")


@pytest.mark.parametrize("strategy", ["single", "pipeline"])
def test_parameters_momentum_and_what_layers_save(
    strategy: str, job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counted().save(tmp_path / "mine.json")
    with caplog.at_level("INFO"):
        told = read_json(job(f"parallel={strategy}", *on(tmp_path / "mine.json")) / "result.json")
    assert told["kept_bytes"] == told["kept_bytes_of_device"] == 4 * (2 * 1000 + 800)
    assert WORDS not in caplog.text


def test_no_error_about_what_was_kept_ends_a_run(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a plan file whose layers are others than those that it has recomputed."""
    counted().save(tmp_path / "mine.json")
    settings = ("parallel=gpipe", "parallel.strategy.recompute=all", *on(tmp_path / "mine.json"))
    directory = RunDir(job(*settings))
    assert read_json(directory.result)["kept_bytes"] > 0
    plan = read_json(directory.plan)
    directory.plan.write_text(json.dumps({**plan, "recomputed": [[0, 9]]}))
    config = composed("experiment=tiny", *settings)
    run = resolved(config, directory=directory)
    with caplog.at_level("INFO"):
        assert kept_values(run) == {}
    assert "the last layer of the network is 3, not 9" in caplog.text
    assert WORDS in caplog.text


@pytest.mark.parametrize("known", [None, counted(batch_size=8)])
def test_without_a_profile_of_its_batches_there_are_no_kept_bytes(
    known: Profile | None, job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = None
    if known is not None:
        path = tmp_path / "mine.json"
        known.save(path)
    with caplog.at_level("INFO"):
        told = read_json(job("parallel=single", *on(path)) / "result.json")
    assert "kept_bytes" not in told
    assert WORDS not in caplog.text


@pytest.mark.parametrize(
    ("strategy", "known", "why"),
    [
        ("pipeline", counted(layers=3), "the plan covers 4 layers, but the profiles have 3"),
        ("single", counted(model_settings={"width": 5}), "is a profile of mlp with width=5"),
        ("single", None, "none.json"),
    ],
)
def test_a_profile_that_cannot_be_counted_by_is_named(
    strategy: str,
    known: Profile | None,
    why: str,
    job: Job,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / ("none.json" if known is None else "mine.json")
    if known is not None:
        known.save(path)
    with caplog.at_level("INFO"):
        told = read_json(job(f"parallel={strategy}", *on(path)) / "result.json")
    assert "kept_bytes" not in told
    (said,) = [message for message in caplog.messages if WORDS in message]
    assert why in said
