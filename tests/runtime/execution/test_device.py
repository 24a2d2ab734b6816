"""Which of torch's errors end the engine: those after which a CUDA process has no device any more."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from holdfast.kernels.device import CpuDevice
from holdfast.runtime.errors import EngineDied
from holdfast.runtime.execution.device import device_watched, is_lost


def accelerator(text: str, code: int | None = None) -> Exception:
    error = torch.AcceleratorError(text)
    if code is not None:
        error.error_code = code
    return error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (accelerator("CUDA error: an illegal memory access was encountered\nFor debugging…", 700), True),
        (accelerator("CUDA error: device-side assert triggered", 710), True),
        (accelerator("CUDA error: unspecified launch failure"), True),
        (accelerator("CUDA error: invalid configuration argument", 9), False),
        (accelerator("CUDA error: invalid argument"), False),
        (accelerator("CUDA error: part or all of the requested memory range is already mapped", 712), False),
        (accelerator("CUDA error: pointer does not correspond to a registered memory region"), False),
        (accelerator("CUDA error: operation not supported", 801), False),
        (RuntimeError("CUDA error: operation not supported\nCompile with…"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), False),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA error: not one of torch's"), False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_lost_is_told_from_what_is_refused(error: Exception, lost: bool) -> None:
    assert is_lost(error) is lost
    with pytest.raises(EngineDied if lost else type(error)) as raised, device_watched(CpuDevice()):
        raise error
    if lost:
        assert "the device is lost" in raised.value.message and "\n" not in raised.value.message


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nSee…"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=str,
)
def test_a_step_without_memory_says_what_to_lower(error: Exception) -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised, device_watched(CpuDevice()):
        raise error
    told = str(raised.value)
    assert told.startswith(str(error).split("\n")[0]) and "\n" not in told
    for option in ("max-step-tokens", "max-sequences", "kv-bytes", "gpu-memory-utilization"):
        assert f"--{option}" in told


def test_a_device_that_is_not_done_with_a_failed_step_is_lost() -> None:
    """What it still does cannot be waited for."""

    class Stuck(CpuDevice):
        def synchronize(self) -> None:
            raise ValueError("no answer")

    with pytest.raises(EngineDied, match="no answer"), device_watched(Stuck()):
        raise torch.OutOfMemoryError("CUDA out of memory")


LOSE = """
import torch
from holdfast.kernels.device import device_of
from holdfast.runtime.execution.device import device_watched
from holdfast.runtime.errors import EngineDied
table = torch.zeros(4, device="cuda")
torch.cuda.synchronize()
try:
    with device_watched(device_of(table.device)):
        torch.embedding(table[:, None], torch.tensor([10**9], device="cuda"))  # asserts on the device
        torch.cuda.synchronize()
except EngineDied as fault:
    print(fault.message)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_assertion_on_the_device_ends_the_engine() -> None:
    done = subprocess.run([sys.executable, "-c", LOSE], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("the device is lost: ")
