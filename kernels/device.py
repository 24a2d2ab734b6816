"""The device as a step uses it: streams, events, copies between it and the host, and registered host memory.

All of the engine's use of the CUDA runtime goes through here. Kernels are launched while a device is
``active``. On a CPU every operation is complete when it returns.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Wholes = NDArray[np.int64] | NDArray[np.int32]


class Event(Protocol):
    """A point in the work of a stream, behind all that was enqueued before it."""

    @property
    def done(self) -> bool:
        """Whether all work before this point is done. Does not wait."""
        ...

    def wait(self) -> None:
        """Block until all work before this point is done."""
        ...


class Stream(Protocol):
    """A queue of work on the device, done in the order in which it was enqueued."""

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Enqueue copies: for each pair (target, source) the source's numbers go to the target, perhaps
        between host and device.

        Both must stay unchanged until an event behind the copy is done.
        """
        ...

    def record(self) -> Event:
        """Record an event behind all work that was enqueued so far, and return it."""
        ...

    def follow(self, event: Event) -> None:
        """Let work that is enqueued from now on begin after ``event``."""
        ...


class Graph(Protocol):
    """Recorded work of a device (`Device.capture`)."""

    def replay(self) -> None:
        """Enqueue the recorded work on the current stream. It reads and writes the same memory as when it was
        recorded."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's own memory, in bytes: ``total``; ``free``, which no process has; ``held``, what torch has for
    this process's tensors and keeps for later ones; ``peak``, the most that it had so far."""

    total: int
    free: int
    held: int
    peak: int


class Device(Protocol):
    """A device. ``overlaps``: whether work runs beside the host, which then waits for events."""

    @property
    def overlaps(self) -> bool: ...

    def active(self) -> AbstractContextManager[None]:
        """A context in which the calling thread's kernels, streams and events are this device's."""
        ...

    def current(self) -> Stream:
        """The stream on which torch and Triton enqueue the calling thread's work, within ``active``."""
        ...

    def stream(self) -> Stream:
        """A new stream, beside the current one."""
        ...

    def synchronize(self) -> None:
        """Block until all work that was enqueued on any stream is done."""
        ...

    def upload(self, arrays: Sequence[Wholes]) -> list[Tensor]:
        """Copy int64 and int32 arrays to the device, for work that the current stream gets from now on.
        Returns a tensor for each, of its shape and type. The arrays may change afterwards."""
        ...

    def write(self, target: Tensor, array: Ints) -> None:
        """Copy an int64 array to ``target``, on the device and of its size, behind the work that the current
        stream has. The array may change afterwards."""
        ...

    def capture(self, work: Callable[[], object]) -> Graph | None:
        """Record what ``work`` enqueues on the current stream, without running it, to be enqueued again at
        once. None: this device has no such recordings.

        ``work`` ran before, so that all its kernels are compiled. It may not upload, fetch, or wait for the
        device. What it reads and leaves lies in memory made before; what it makes itself shares its memory
        with other recordings.
        """
        ...

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` in host memory. Read it after an event recorded behind this call."""
        ...

    def register(self, address: int, size: int) -> str:
        """Pin ``size`` bytes of host memory at ``address``, so that copies from and to it run beside the
        host. Returns "", or why it failed.

        Without it copies are right, but the host waits for them. Takes some ms per 16 MiB.
        """
        ...

    def unregister(self, addresses: Iterable[int]) -> None:
        """Undo `register` for the memory at these addresses, once all work that was enqueued is done. Call it
        before the memory is freed, as its addresses may be used again."""
        ...

    def memory(self, *, anew: bool = False) -> Memory | None:
        """What is in the device's own memory now; None: it has none, and computes in the host's. ``anew``:
        first give back what torch keeps for later tensors, and count the peak from now on."""
        ...


def device_of(device: torch.device) -> Device:
    """The `Device` for a torch device: a CUDA device, else the CPU."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


ALIGNED = 2
"""Arrays are packed at multiples of this many int64 numbers, so that each begins at a multiple of 16 bytes:
Triton compiles a kernel again when a pointer's alignment changes, and an odd number of rows would compile
kernels in the middle of a step."""

REMEMBERED = 128
"""How many copies a ring remembers; those before them are of steps that are over."""

TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


class Packing:
    """How int64 and int32 arrays lie in one memory, one behind the other. ``size``: how many int64 numbers they
    take."""

    def __init__(self, arrays: Sequence[Wholes]) -> None:
        self._arrays = arrays
        much = (-(-one.nbytes // (8 * ALIGNED)) * ALIGNED for one in arrays)
        self._at = list(accumulate(much, initial=0))
        self.size = self._at[-1]

    def write(self, cells: Ints) -> None:
        """Copy the arrays into ``cells``, int64 ``[size]``."""
        for array, (first, end) in zip(self._arrays, pairwise(self._at), strict=True):
            cells[first:end].view(array.dtype)[: array.size] = array.reshape(-1)

    def views(self, packed: Tensor) -> list[Tensor]:
        """Of the same memory elsewhere, a tensor for each array, of its shape and type."""
        return [
            packed[first:end].view(TYPES[array.dtype])[: array.size].view(array.shape)
            for array, (first, end) in zip(self._arrays, pairwise(self._at), strict=True)
        ]


class Ring:
    """Host memory from which arrays go up, in order: what is taken is taken again when its copy is done.
    ``cells``: int64, pinned where the device is a GPU."""

    def __init__(self, cells: Tensor) -> None:
        self._cells = cells
        self._begin = self._next = 0  # of what was taken last
        self._sent: deque[tuple[int, int, Event]] = (
            deque()
        )  # [begin, end) of each copy under way, oldest first

    def take(self, size: int) -> Tensor | None:
        """The next ``size`` numbers of the ring. Waits while older copies leave no room. None: the ring is too
        small."""
        if size > len(self._cells):
            return None
        begin = self._next if self._next + size <= len(self._cells) else 0
        self._begin, self._next = begin, begin + size
        while self._sent and self._overlaps(begin, begin + size):
            self._sent.popleft()[2].wait()
        return self._cells[begin : begin + size]

    def sent(self, behind: Event) -> None:
        """Note that a copy of what was taken last is enqueued, with the event ``behind`` it."""
        self._sent.append((self._begin, self._next, behind))
        if len(self._sent) > REMEMBERED:
            self._sent.popleft()[2].wait()

    def _overlaps(self, begin: int, end: int) -> bool:
        return any(first < end and begin < last for first, last, _ in self._sent)


# --- this machine's processor ---------------------------------------------------------------------------------


class CpuDevice:
    """The CPU: every operation is complete when it returns, so its streams and events do nothing."""

    overlaps = False

    def active(self) -> AbstractContextManager[None]:
        """A context that does nothing."""
        return nullcontext()

    def current(self) -> Stream:
        """The one stream there is: it does each operation during the call, on the calling thread."""
        return _CALLER

    def stream(self) -> Stream:
        """The same stream as `current`: there is no second one."""
        return _CALLER

    def synchronize(self) -> None:
        """Does nothing: all work is done already."""

    def upload(self, arrays: Sequence[Wholes]) -> list[Tensor]:
        """Copies of the arrays, in host memory like all else."""
        return [torch.from_numpy(array.copy()) for array in arrays]

    def write(self, target: Tensor, array: Ints) -> None:
        """Copy the array at once."""
        target.numpy()[:] = array

    def capture(self, work: Callable[[], object]) -> Graph | None:
        """None: there is no gap between two operations to be saved."""
        return None

    def fetch(self, tensor: Tensor) -> Tensor:
        """``tensor`` itself, which is in host memory already."""
        return tensor

    def register(self, address: int, size: int) -> str:
        """Does nothing and returns "": copies within host memory need no pinning."""
        return ""

    def unregister(self, addresses: Iterable[int]) -> None:
        """Does nothing, as `register` does nothing."""

    def memory(self, *, anew: bool = False) -> Memory | None:
        """None: it has no memory of its own."""
        return None


class _Caller:
    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source)

    def record(self) -> Event:
        return _DONE

    def follow(self, event: Event) -> None:
        """Does nothing: on the CPU the work before ``event`` is done already."""


class _CompletedEvent:
    done = True

    def wait(self) -> None:
        """Does nothing: on the CPU the work before the event is done already."""


_CALLER, _DONE = _Caller(), _CompletedEvent()


# --- CUDA -----------------------------------------------------------------------------------------------------

ALREADY_REGISTERED = 712
"""The CUDA error code ``cudaErrorHostMemoryAlreadyRegistered``."""

RING_CELLS = 1 << 20
"""Int64 numbers that the ring of uploads holds: 8 MiB, several steps of the most tokens."""

PORTABLE = 1
"""The flag ``cudaHostRegisterPortable``: pinned for every CUDA context of the process."""


class CudaDevice:
    """A CUDA device. Its methods are for a thread that is within ``active``. ``runtime``: the CUDA runtime's
    functions, replaced in tests."""

    overlaps = True

    def __init__(self, device: torch.device, runtime: Runtime | None = None) -> None:
        self._index: int = torch.cuda.current_device() if device.index is None else device.index
        self._runtime = runtime or TorchRuntime()
        self._ring: Ring | None = None
        self._taken: Tensor | None = None  # of the ring; None: it is too small
        self._pool: Any = None  # torch's handle of the pool of all captures

    def active(self) -> AbstractContextManager[None]:
        """A context in which this is the calling thread's current device. Triton launches there, and new
        streams and events belong to it."""
        return torch.cuda.device(self._index)

    def current(self) -> Stream:
        """Torch's current stream on this device."""
        return _CudaStream(torch.cuda.current_stream(self._index))

    def stream(self) -> Stream:
        """A new CUDA stream on this device."""
        with self.active():
            return _CudaStream(torch.cuda.Stream(self._index))  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Block until all work on all streams of this device is done. Other Python threads run meanwhile.
        Raises what torch raises for work that failed since."""
        torch.cuda.synchronize(self._index)

    def upload(self, arrays: Sequence[Wholes]) -> list[Tensor]:
        """Enqueue one copy of all arrays, from pinned memory, in the current stream."""
        packing = Packing(arrays)
        host = self._pinned(packing.size)
        packing.write(host.numpy())
        packed = host.to(torch.device("cuda", self._index), non_blocking=True)
        self._sent()
        return packing.views(packed)

    def write(self, target: Tensor, array: Ints) -> None:
        """Enqueue a copy from pinned memory in the current stream."""
        host = self._pinned(len(array))
        host.numpy()[:] = array
        target.copy_(host, non_blocking=True)
        self._sent()

    def _pinned(self, size: int) -> Tensor:
        """Pinned memory for a copy that is enqueued next, before `_sent` is called."""
        if self._ring is None:
            self._ring = Ring(torch.empty(RING_CELLS, dtype=torch.int64, pin_memory=True))
        self._taken = self._ring.take(size)
        return torch.empty(size, dtype=torch.int64, pin_memory=True) if self._taken is None else self._taken

    def _sent(self) -> None:
        if self._ring is not None and self._taken is not None:
            self._ring.sent(self.current().record())

    def capture(self, work: Callable[[], object]) -> Graph:
        """Capture a CUDA graph. Calls of other threads do not spoil it. All graphs of the device take their
        memory from one pool, so capture the largest first."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._index)
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        except BaseException:
            torch.cuda.set_stream(stream)  # a capture that cannot be ended does not leave its own
            raise
        return graph

    def fetch(self, tensor: Tensor) -> Tensor:
        """Enqueue a copy of ``tensor`` into pinned host memory, behind the work in the current stream, and
        return that memory. Read it only after an event recorded behind this call."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def register(self, address: int, size: int) -> str:
        """Pin ``size`` bytes of host memory at ``address``; memory that is still registered is registered
        anew. Returns "", or why it failed. A failure leaves no pending error, which torch would raise at an
        unrelated launch."""
        with self.active():
            code = self._register(address, size)
            if code == ALREADY_REGISTERED:  # by an earlier engine that did not close its memory
                self._unregister(address)
                code = self._register(address, size)
        return f"cudaHostRegister of {size} bytes: error {code}" if code else ""

    def unregister(self, addresses: Iterable[int]) -> None:
        """Wait for all work on the device, then undo `register` for the memory at these addresses; one that
        is not registered is ignored."""
        with suppress(RuntimeError):  # of a lost device, on which nothing runs any more
            self.synchronize()
        with self.active():
            for address in addresses:
                self._unregister(address)

    def memory(self, *, anew: bool = False) -> Memory | None:
        """What is in the device's memory now, as torch's allocator and the driver tell."""
        if anew:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._index)
        free, total = torch.cuda.mem_get_info(self._index)
        held, peak = torch.cuda.memory_reserved(self._index), torch.cuda.max_memory_reserved(self._index)
        return Memory(total, free, held, peak)

    def _register(self, address: int, size: int) -> int:
        code = self._runtime.cudaHostRegister(address, size, PORTABLE)
        if code:
            self._runtime.cudaGetLastError()
        return code

    def _unregister(self, address: int) -> None:
        if self._runtime.cudaHostUnregister(address):
            self._runtime.cudaGetLastError()


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaEvent(event)

    def follow(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent), "of another device"
        self._stream.wait_event(event.event)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class Runtime(Protocol):
    """Functions of the CUDA runtime, by their own names; codes are ``cudaError_t``, 0 for success.

    A call that fails also leaves its code pending for the calling thread, until ``cudaGetLastError``.
    """

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int: ...  # noqa: N802

    def cudaHostUnregister(self, address: int) -> int: ...  # noqa: N802

    def cudaGetLastError(self) -> int: ...  # noqa: N802


class TorchRuntime:
    """The functions of the CUDA runtime library that torch has loaded: another copy of the library would have
    its own pending errors."""

    def __init__(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._torch = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._loaded = [ctypes.CDLL(path) for path in _loaded("libcudart")]

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Pin ``size`` bytes of host memory at ``address``. Other Python threads run meanwhile."""
        return int(self._torch.cudaHostRegister(address, size, flags))

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Undo the pinning of the memory at ``address``, which no copy uses any more."""
        return int(self._torch.cudaHostUnregister(address))

    def cudaGetLastError(self) -> int:  # noqa: N802
        """Take the calling thread's pending error: returns its code, and clears it. Torch does not offer this
        function, so the library's own is called. Where the runtime is linked into torch itself, a small
        launch takes the error instead, and 0 is returned."""
        codes = [int(library.cudaGetLastError()) for library in self._loaded]
        if not codes:
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        return max(codes, default=0)


def _loaded(name: str) -> list[str]:
    """Paths of the shared libraries in this process with file names that begin with ``name``, sorted."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if f"/{name}" in line}
    return sorted(path for path in paths if Path(path).name.startswith(name))
