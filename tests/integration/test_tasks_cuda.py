"""Tasks on a CUDA device, from the configuration to their files, and where its memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sparsepipe.errors import HardwareError
from sparsepipe.launch.job import run_job
from sparsepipe.profiling import Profile
from sparsepipe.utils.files import read_json
from tests.support.command_line import composed, weights

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("networks_for_ranks"),
]
HARDWARE = "hardware.accelerator=cuda"
Job = Callable[..., Path]


def name_of_device() -> str:
    return torch.cuda.get_device_name(0)


@pytest.fixture
def small_gpu() -> Iterator[None]:
    """This process may take 400 MB more of the device."""
    gc.collect()
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    allowed = torch.cuda.memory_reserved(0) + 400e6
    torch.cuda.set_per_process_memory_fraction(allowed / whole, 0)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    gc.collect()
    torch.cuda.empty_cache()


def test_a_profile_is_of_the_device(job: Job) -> None:
    path = job("task=profile", "task.num_warmup=2", "task.num_measured=4", HARDWARE)
    found = Profile.load(path / "profile.json")
    assert found.meta["device"] == name_of_device()
    assert [layer.kind for layer in found.layers] == ["Linear", "ReLU", "Dropout", "Linear"]
    assert [layer.parameter_bytes for layer in found.layers] == [4 * (64 + 8), 0, 0, 4 * (16 + 2)]
    assert all(layer.forward_s > 0 for layer in found.layers)
    assert all(layer.peak_bytes >= 4 * 4 * 2 for layer in (found.layers[0], found.layers[-1]))
    result = read_json(path / "result.json")
    assert result["kind"] == "measured"
    assert result["layers_s"] == pytest.approx(found.compute_s)
    assert result["update_s"] == found.update_s > 0


def test_a_training_ends_as_on_a_processor(job: Job) -> None:
    command = ("parallel=single", "trainer.max_epochs=2", "trainer.matmul_precision=highest")
    found, expected = (job(*command, h) for h in (HARDWARE, "hardware.accelerator=cpu"))
    assert found != expected, "another device is another run"
    torch.testing.assert_close(weights(found).cpu(), weights(expected), rtol=1e-4, atol=1e-5)
    losses = [float(read_json(path / "result.json")["test/loss"]) for path in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.usefixtures("small_gpu")
def test_a_training_that_runs_out_of_the_devices_memory_names_the_remedy(job: Job) -> None:
    # Weights take 88 MB, a batch 256 MB in each activation.
    with pytest.raises(HardwareError) as error:
        job("parallel=single", "model.width=2000000", "data.batch_size=32", HARDWARE)
    message = error.value.message
    assert message.startswith(f"{name_of_device()} (train epoch 1, batch 1) ran out of memory")
    assert " with data.batch_size=32: CUDA out of memory. Tried to allocate " in message
    assert "`sparsepipe task=fit_batch" in error.value.remedy
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)


# Weights, gradients and momentum take 264 MB, each shape 8 MB in each activation.
SMALL = (
    "parallel=single",
    "hardware.accelerator=cuda",
    "model.width=2000000",
    "task.budget_bytes=560e6",
)


def test_a_gpu_made_small_runs_out_of_memory(job) -> None:
    path = job("task=fit_batch", "task.start=1", "task.isolated=false", *SMALL)
    result = read_json(path / "result.json")
    assert 1 <= result["largest_batch"] <= 18
    assert result["limited_by"] == "out_of_memory"
    assert 264e6 < result["step_memory_bytes"] <= 560e6


def test_an_isolated_step_that_does_not_fit_is_reported(job) -> None:
    path = job("task=train_if_fits", "data.batch_size=64", *SMALL)
    result = read_json(path / "result.json")
    assert (result["fits"], result["limited_by"]) == (False, "out_of_memory")


def test_the_largest_size_within_a_budget(workplace: Path) -> None:
    words = ("experiment=bigconv", "paper/network=cnn2d", "hardware.accelerator=cuda")
    sizes = "task.sizes=[[256,256],[512,512],[4096,4096],[8192,8192]]"
    given = ("task.budget_bytes=800e6", "task.timed_steps=2")
    result = read_json(run_job(composed(*words, sizes, *given)).path / "result.json")
    small, middle, large = result["measured_sizes"]
    assert small["fits"]
    assert small["saved_bytes"] < small["peak_bytes"] < middle["peak_bytes"] <= 800e6
    assert middle["step_s"] > 0
    assert (large["fits"], large["limited_by"]) == (False, "out_of_memory")
    assert (result["largest_size"], result["refused_size"]) == ([512, 512], [4096, 4096])
