"""What the steps of a probe are taken on."""

from __future__ import annotations

import pytest

from sparsepipe.runs.out_of_memory import ran_out
from sparsepipe.utils.files import read_json


@pytest.mark.full
@pytest.mark.usefixtures("networks_for_ranks")
def test_steps_of_data_without_a_length_are_of_whole_batches(job) -> None:
    streamed = (
        "data._target_=tests.support.tinyhouse.StreamedData",
        "data.train_size=6",
        "parallel=single",
    )
    path = job("task=fit_batch", *streamed, "task.budget_bytes=1e9", "task.start=4")
    result = read_json(path / "result.json")
    assert (result["largest_batch"], result["limited_by"]) == (6, "data")
    assert result["probed_batches"] == [4, 6, 7, 8]
    assert result["probed_outcomes"] == 2 * ["fits"] + 2 * ["too_few_shapes"]
    path = job("task=train_if_fits", *streamed, "task.budget_bytes=1e9", "data.batch_size=8")
    assert read_json(path / "result.json")["fits"], "a training takes what there is"


@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory",
        "std::bad_alloc",
    ],
)
def test_errors_for_want_of_memory_are_known_by_their_words(said: str) -> None:
    assert ran_out(RuntimeError(said))
    assert not ran_out(RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"))


def test_a_convolution_without_an_engine_wants_memory_where_much_was_taken() -> None:
    error = RuntimeError("GET was unable to find an engine to execute this computation")
    assert ran_out(error, filled=0.6)
    assert not ran_out(error, filled=0.1), "no GPU of this kind can do it"
    assert not ran_out(error)
