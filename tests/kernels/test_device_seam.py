"""The CUDA device without a GPU: over a runtime that refuses, and over recorded torch calls."""

from __future__ import annotations

import ctypes.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from holdfast.kernels import device as seam
from holdfast.kernels.device import CpuDevice, CudaDevice, Packing, device_of


@dataclass
class StubRuntime:
    """Registers as CUDA does: what overlaps is refused with 712, and an error is pending until it is taken.

    ``refusals``: the codes of the first calls.
    """

    refusals: list[int] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    pending: int = 0
    calls: int = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls += 1
        overlaps = any(address < at + length and at < address + size for at, length in self.held.items())
        code = self.refusals.pop(0) if self.refusals else 712 if overlaps else 0
        if code:
            self.pending = code
        else:
            self.held[address] = size
        return code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if self.held.pop(address, None) is None:
            self.pending = 713
            return 713
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        code, self.pending = self.pending, 0
        return code

    def launch(self) -> None:
        """As torch's check behind every launch: raises what is pending."""
        code = self.cudaGetLastError()
        if code:
            raise torch.AcceleratorError(f"CUDA error: {code}")


@dataclass
class Calls:
    """What was asked of `torch.cuda`: the current device, and that of each stream and event as it was made."""

    current: int = 0
    lost: bool = False
    made: list[tuple[str, int]] = field(default_factory=list)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """`torch.cuda` of a machine with several GPUs, which does nothing."""
    calls = Calls()

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, calls.current = calls.current, index
        try:
            yield
        finally:
            calls.current = before

    class Stream:
        def __init__(self, index: int | None = None) -> None:
            self.index = calls.current if index is None else index
            calls.made.append(("stream", self.index))

        def wait_event(self, event: object) -> None:
            calls.made.append(("wait", self.index))

    class Event:
        def query(self) -> bool:
            return not calls.lost

        def record(self, stream: Stream) -> None:
            assert stream.index == calls.current, "an event belongs to the device that is current"
            calls.made.append(("event", stream.index))

    def synchronize(index: int) -> None:
        calls.made.append(("synchronize", index))
        if calls.lost:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    fakes = {"device": device, "Stream": Stream, "Event": Event, "current_stream": Stream}
    for name, fake in {**fakes, "synchronize": synchronize}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: calls.current)
    return calls


def cuda(runtime: StubRuntime, index: int = 0) -> CudaDevice:
    return CudaDevice(torch.device("cuda", index), runtime)


def test_a_capture_that_cannot_be_ended_does_not_leave_its_own_stream(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch leaves it: what follows would be captured, or refused."""
    current = ["usual"]

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        current.append("capturing")
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    with pytest.raises(RuntimeError, match="not permitted"):
        cuda(StubRuntime()).capture(lambda: None)
    assert current[-1] == "usual"


@pytest.mark.parametrize("code", [1, 2, 801])
def test_a_refused_registration_is_told_and_leaves_no_error_for_the_next_launch(
    code: int, calls: Calls
) -> None:
    runtime = StubRuntime([code])
    assert f"error {code}" in cuda(runtime).register(4096, 4096)
    runtime.launch()
    assert not runtime.held


def test_memory_that_an_engine_before_left_registered_is_registered_anew(calls: Calls) -> None:
    runtime = StubRuntime(held={4096: 8192})
    assert cuda(runtime).register(4096, 4096) == ""
    assert runtime.held == {4096: 4096}
    runtime.launch()


def test_memory_that_overlaps_another_registration_is_refused(calls: Calls) -> None:
    runtime = StubRuntime(held={0: 8192})
    assert "error 712" in cuda(runtime).register(4096, 4096)
    runtime.launch()


def test_unregistering_what_is_not_registered_leaves_no_error(calls: Calls) -> None:
    runtime = StubRuntime(held={4096: 4096})
    cuda(runtime).unregister([4096, 8192])
    assert not runtime.held
    runtime.launch()


def test_streams_events_and_registrations_are_of_the_device_and_not_of_the_current_one(calls: Calls) -> None:
    device = cuda(StubRuntime(), index=1)
    side = device.stream()
    with device.active():
        assert calls.current == 1
        event = device.current().record()
        side.follow(event)
        assert event.done
    assert calls.current == 0
    assert calls.made and {index for _, index in calls.made} == {1}


def test_a_device_without_a_number_is_the_current_one(calls: Calls) -> None:
    calls.current = 3
    with CudaDevice(torch.device("cuda"), StubRuntime()).active():
        assert calls.current == 3


def test_a_copy_on_a_cpu_is_complete_on_return() -> None:
    device = device_of(torch.device("cpu"))
    assert isinstance(device, CpuDevice) and not device.overlaps
    target, source = torch.zeros(3), torch.ones(3)
    device.stream().copy([(target, source)])
    assert target.tolist() == [1, 1, 1] and device.fetch(target) is target
    event = device.current().record()
    event.wait()
    assert event.done


def test_the_library_that_is_loaded_is_found_by_its_name() -> None:
    """As torch's CUDA runtime is: its pending error is not that of another copy of the library."""
    (path,) = seam._loaded("libpython3") or seam._loaded("libc.so") or seam._loaded("libc-")
    assert ctypes.CDLL(path)._handle
    assert not seam._loaded("libcudart_that_is_not_there")


def test_an_upload_keeps_shapes_values_and_types() -> None:
    narrow = np.arange(3, dtype=np.int32)
    arrays = [np.arange(6).reshape(2, 3), narrow, np.zeros(0, dtype=np.int64), np.array([7])]
    parts = CpuDevice().upload(arrays)
    assert [part.tolist() for part in parts] == [[[0, 1, 2], [3, 4, 5]], [0, 1, 2], [], [7]]
    assert [part.dtype for part in parts] == [torch.int64, torch.int32, torch.int64, torch.int64]
    arrays[0][:] = 9
    assert parts[0][0, 0] == 0


@pytest.mark.parametrize("rows", range(1, 6))
def test_every_uploaded_array_is_aligned_whatever_stands_before_it(rows: int) -> None:
    """To 16 bytes: for a pointer that is not, Triton compiles every kernel that takes it once more."""
    narrow = np.zeros((rows, 3), dtype=np.int32)
    arrays = [np.arange(rows), narrow, np.arange(rows + 1), np.zeros((rows, 3), dtype=np.int64), np.arange(2)]
    packing = Packing(arrays)
    packed = torch.zeros(packing.size, dtype=torch.int64)
    packing.write(packed.numpy())
    for part, array in zip(packing.views(packed), arrays, strict=True):
        offset = part.data_ptr() - packed.data_ptr()
        assert offset % 16 == 0 and part.tolist() == array.tolist()
    for part in CpuDevice().upload(arrays):
        assert part.data_ptr() % 16 == 0


@pytest.mark.parametrize("lost", [False, True])
def test_memory_is_unregistered_once_the_device_is_done_or_lost(lost: bool, calls: Calls) -> None:
    runtime, calls.lost = StubRuntime(held={4096: 4096}), lost
    cuda(runtime, index=1).unregister([4096])
    assert calls.made == [("synchronize", 1)] and not runtime.held
