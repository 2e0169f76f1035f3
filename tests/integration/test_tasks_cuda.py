"""Tasks on a CUDA device, from the configuration to their files, and where its memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sparsepipe.errors import HardwareError
from sparsepipe.profiling import Profile
from sparsepipe.utils.files import read_json
from tests.support.command_line import weights

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
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
    command = ("parallel=single", "trainer.max_epochs=2")
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
