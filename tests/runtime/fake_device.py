"""A device that works beside the host, without a GPU: the real runner and mover over it, any order of events.

What is enqueued is a closure; each stream runs its own in order, and which stream goes next is up to
``chance``, but for events. A copy reads its source when it runs, not when it is enqueued; what it brings to the
host is garbage until then. Torch's own operations are put off like that, too, by a dispatch mode, so the
code under test is that of the runner as it stands.

Memory is torch's on CUDA: what an operation returns is freed with its last tensor, and then belongs to later
work on the main stream, so garbage is written to it there; another stream that still reads it, reads garbage.
The host memory that an upload leaves from is used again once the copy is done. A copy from or to host memory
that is not registered holds up the host. And each call may be refused, as for want of memory (`refuse`).

The decoder over it is that of `fakes`: KV is (position, digest), a token is a digest of all that was read.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, lru_cache
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.kernels import batch
from holdfast.kernels.batch import PagedBatch
from holdfast.kernels.device import Ints, Packing, Ring, Wholes
from holdfast.kernels.reference import backend, seeded_sampling
from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.block_mover import BlockMover
from holdfast.kvstore.groups import HeadLayout, KVGroup
from holdfast.kvstore.host.slots import SlotMemory
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.keys import BlockHasher
from holdfast.kvstore.pool import BlockPool
from holdfast.kvstore.tiers import Tiers
from holdfast.runtime.adapters import AdapterTable
from holdfast.runtime.columns import NO_ADAPTER
from holdfast.runtime.engine import Engine
from holdfast.runtime.execution.runner import TorchRunner
from holdfast.runtime.kv_placement.costs import CostBook
from holdfast.runtime.plan import Handle, Outcomes, Plan
from holdfast.runtime.scheduler.scheduler import Scheduler
from holdfast.runtime.settings import SchedulerSettings, StepSize
from holdfast.runtime.verbs import Sampling
from holdfast.tests.runtime.fakes import (
    MASK,
    SECRET,
    SPACE,
    ChanceDrafter,
    FakeAdapters,
    FakeDisk,
    draw,
    leave_out,
    mix,
    passing,
    salt_of,
    take_in,
    weigh,
    widest,
)

GARBAGE, NAN = 0x5A, 0xFF
"""Bytes of memory that holds nothing: of integers, and of numbers that are not any."""
RING = 1 << 8
CHUNKS = 4
"""A context goes through fp32 in pieces of 16 bits."""
SPOILED = -1
"""The position in a cell of KV that is not finite."""


class FakeStream:
    """Closures, run in order. One that returns False waits for an event, and is tried again."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.queue: deque[Callable[[], bool]] = deque()
        self.enqueued = self.done = 0
        self._freed: deque[tuple[int, np.ndarray]] = deque()  # memory, and how many closures may use it

    def enqueue(self, act: Callable[[], object]) -> None:
        if self.device.recorded is not None:
            assert self is self.device.main
            self.device.recorded.acts.append(act)
            return
        self.device.call()
        self.add(lambda: (act(), True)[1])

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        assert self.device.recorded is None, "a copy from or to the host in a capture"
        for target, source in pairs:
            to, by = self.device.unowned(target), self.device.unowned(source)
            self.enqueue(lambda to=to, by=by: to.copy_(by))
            if not (self.device.reaches(target) and self.device.reaches(source)):
                FakeEvent(self, self.enqueued).wait()

    def record(self) -> FakeEvent:
        assert self.device.is_active or self is not self.device.main, (
            "an event of whichever device is current"
        )
        assert self.device.recorded is None, "an event in a capture"
        self.device.call()
        return FakeEvent(self, self.enqueued)

    def follow(self, event: FakeEvent) -> None:
        self.device.call()
        self.add(lambda: event.reached)

    def spoil(self, memory: np.ndarray) -> None:
        """Let other things stand in ``memory`` behind all that was enqueued so far."""
        self._freed.append((self.enqueued, memory))
        self._spoil()

    def _spoil(self) -> None:
        while self._freed and self._freed[0][0] <= self.done:
            self._freed.popleft()[1].view(np.uint8).fill(GARBAGE)

    def add(self, act: Callable[[], bool]) -> None:
        self.queue.append(act)
        self.enqueued += 1
        self.device.stir()

    def advance(self) -> bool:
        """Run the next closure; False: there is none, or it waits."""
        if not self.queue or not self.device.run(self.queue[0]):
            return False
        self.queue.popleft()
        self.done += 1
        if self._freed:
            self._spoil()
        return True


@dataclass(frozen=True)
class FakeEvent:
    """Where a stream stood: behind so many closures."""

    stream: FakeStream
    number: int

    @property
    def reached(self) -> bool:
        return self.stream.done >= self.number

    @property
    def done(self) -> bool:
        self.stream.device.call()
        self.stream.device.stir()
        return self.reached

    def wait(self) -> None:
        device = self.stream.device
        device.call()
        device.stir()
        while not self.reached:
            assert self.stream.advance() or device.advance(), "an event that nothing leads to"


class FakeGraph:
    """What was enqueued while it was recorded. What it made lies in memory that other graphs have in turn: it
    is garbage whenever a replay begins."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.acts: list[Callable[[], object]] = []
        self.made: list[np.ndarray] = []

    def replay(self) -> None:
        assert self.device.recorded is None
        self.device.call()
        self.device.replays += 1
        for memory in self.made:
            self.device.main.add(lambda memory=memory: (memory.fill(GARBAGE), True)[1])
        for act in self.acts:
            self.device.main.add(lambda act=act: (act(), True)[1])


class FakeHasher(Executor):
    """A thread beside the device: what it is given runs at any time."""

    def __init__(self, device: FakeDevice) -> None:
        self._stream = device.stream()

    def submit(self, act: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = _Later(self._stream)
        self._stream.enqueue(lambda: future.set_result(act(*args, **kwargs)))
        return future


class _Later(Future[Any]):
    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self._stream = stream

    def done(self) -> bool:
        self._stream.device.stir()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        while not super().done():
            assert self._stream.advance(), "a thread that is never done"
        return super().result(0)


class FakeDevice:
    """Implements `kernels.device.Device`. ``chance``: what runs when; ``late``: nothing runs before it must.

    ``host``: the address and length of the host memory that copies may leave from or go to. ``calls``: how many
    calls it took so far, each of which may be refused.
    """

    overlaps = True

    def __init__(
        self, chance: Random | None = None, *, late: bool = False, host: tuple[int, int] = (0, 0)
    ) -> None:
        self.chance = chance or Random(0)
        self.late = late
        self.is_active = False
        self.running = False
        self.main = FakeStream(self)
        self.streams = [self.main]
        self.registered: dict[int, int] = {}
        self.host = host
        self.calls = 0
        self.doomed: int | None = None  # the call of the next launch to refuse, see `BombedRunner`
        self._refused_at: int | None = None
        self.recorded: FakeGraph | None = None  # under way
        self.replays = 0
        self.ring = Ring(torch.empty(RING, dtype=torch.int64))
        self._memory: dict[int, np.ndarray] = {}  # of tensors that are not freed yet, by address

    def refuse(self, call: int | None) -> None:
        """Refuse the ``call``-th call from now on, 0 for the next; None: none."""
        self._refused_at = None if call is None else self.calls + call

    def call(self) -> None:
        """Each call of the device's: raises if it is the one to be refused."""
        self.calls += 1
        if self.calls - 1 == self._refused_at:
            raise torch.OutOfMemoryError(f"CUDA out of memory, at call {self.calls}")

    @property
    def holds(self) -> int:
        """How many tensors have memory of the device's."""
        return len(self._memory)

    @contextmanager
    def active(self) -> Iterator[None]:
        before, self.is_active = self.is_active, True
        try:
            with _PutOff(self):
                yield
        finally:
            self.is_active = before

    def current(self) -> FakeStream:
        assert self.is_active, "work for whichever device is current"
        return self.main

    def stream(self) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def synchronize(self) -> None:
        while any(stream.queue for stream in self.streams):
            assert self.advance(), "streams that wait for each other"

    def die(self) -> None:
        """With its process: what is enqueued never runs, whoever waits for it."""
        for stream in self.streams:
            stream.queue.clear()
            stream.done = stream.enqueued

    def upload(self, arrays: Sequence[Wholes]) -> list[Tensor]:
        packing = Packing(arrays)
        host, made = self._pinned(packing.size), self.allocate((packing.size,), (1,), torch.int64)
        packing.write(host.numpy())
        self._send(made, host)
        with torch._C._DisableTorchDispatch():
            return packing.views(made)

    def write(self, target: Tensor, array: Ints) -> None:
        host = self._pinned(len(array))
        host.numpy()[:] = array
        self._send(target, host)

    def _pinned(self, size: int) -> Tensor:
        """Of a ring of host memory that holds few steps; else memory that is used again once it is copied."""
        assert self.recorded is None, "an upload in a capture"
        with torch._C._DisableTorchDispatch():
            self._taken = self.ring.take(size)
            return torch.empty(size, dtype=torch.int64) if self._taken is None else self._taken

    def _send(self, target: Tensor, host: Tensor) -> None:
        to, taken = self.unowned(target), self._taken is not None

        def act() -> None:
            to.copy_(host)
            if not taken:
                host.fill_(GARBAGE)

        self.main.enqueue(act)
        if taken:
            self.ring.sent(self.main.record())

    def capture(self, work: Callable[[], object]) -> FakeGraph:
        self.call()
        assert self.recorded is None and self.is_active
        self.recorded = graph = FakeGraph(self)
        try:
            work()
        finally:
            self.recorded = None
        return graph

    def fetch(self, tensor: Tensor) -> Tensor:
        host = garbage(tensor.shape, tensor.stride(), tensor.dtype)
        self.current().copy([(host, tensor)])
        return host

    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in memory of the device's, with garbage in it, which is freed with the last tensor in it."""
        if self.recorded is None:
            self.call()
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else 0
        memory = np.full((last + 1) * dtype.itemsize, NAN if dtype.is_floating_point else GARBAGE, np.uint8)
        owner = memory[:]  # torch keeps this one, and what is enqueued only the memory
        with torch._C._DisableTorchDispatch():
            made = torch.frombuffer(owner, dtype=dtype).as_strided(shape, stride)
        if self.recorded is not None:
            self.recorded.made.append(memory)
            return made
        place = made.data_ptr()
        self._memory[place] = memory
        weakref.finalize(owner, self._free, place)
        return made

    def _free(self, place: int) -> None:
        self.main.spoil(self._memory.pop(place))

    def unowned(self, tensor: Tensor) -> Tensor:
        """The same numbers at the same place, which do not keep the device's memory from being freed."""
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        if memory is None:
            return tensor
        with torch._C._DisableTorchDispatch():
            cells = torch.frombuffer(memory, dtype=tensor.dtype)
            return cells.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def reaches(self, tensor: Tensor) -> bool:
        """Whether a copy of the tensor runs beside the host: not if it is in host memory that is not
        registered."""
        (start, size), first = self.host, tensor.data_ptr()
        pinned = any(
            at <= first and first + tensor.nbytes <= at + held for at, held in self.registered.items()
        )
        return pinned or not start <= first < start + size

    def register(self, address: int, size: int) -> str:
        self.registered[address] = size
        return ""

    def unregister(self, addresses: Iterable[int]) -> None:
        self.synchronize()
        for address in addresses:
            del self.registered[address]

    def run(self, act: Callable[[], bool]) -> bool:
        """What runs now is not put off, and may change what an inference made."""
        before, self.running = self.running, True
        try:
            with torch._C._DisableTorchDispatch(), torch.inference_mode():
                return act()
        finally:
            self.running = before

    def stir(self) -> None:
        """Time passes."""
        while not self.late and not self.running and self.chance.random() < 0.4 and self.advance():
            pass

    def advance(self) -> bool:
        """One closure of any stream that does not wait."""
        return any(stream.advance() for stream in self.chance.sample(self.streams, len(self.streams)))


def garbage(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in host memory that is not written yet."""
    with torch._C._DisableTorchDispatch():
        tensor = torch.empty_strided(shape, stride, dtype=dtype)
        return tensor.fill_(float("nan") if dtype.is_floating_point else GARBAGE)


class _PutOff(TorchDispatchMode):
    """Torch's operations are enqueued; what they return is garbage until they run. Views are made at once."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and the guard against it costs as much as the operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = self._device
        assert not device.running, "what runs is not put off"
        kind = _kind(func)
        if kind is _Kind.AT_ONCE:
            if not any(isinstance(one, Tensor) for one in args):
                device.call()  # it takes memory
            return func(*args, **kwargs)
        if kind is _Kind.COMPOSITE:
            with self:
                return func.decompose(*args, **kwargs)
        if kind is _Kind.WRITE:
            values, named = (
                self._unowned(args),
                dict(zip(kwargs, self._unowned(kwargs.values()), strict=True)),
            )
            device.main.enqueue(lambda: func(*values, **named))
            return kwargs.get("out", args[0])
        layouts = _returned(
            func, *_layouts(args), **dict(zip(kwargs, _layouts(kwargs.values()), strict=True))
        )
        made = [device.allocate(one.shape, one.stride, one.dtype) for one in layouts]
        values, named = self._unowned(args), dict(zip(kwargs, self._unowned(kwargs.values()), strict=True))
        targets = self._unowned(made)

        def act() -> None:
            found = func(*values, **named)
            for target, source in zip(targets, [found] if isinstance(found, Tensor) else found, strict=True):
                target.copy_(source)

        device.main.enqueue(act)
        return made[0] if len(func._schema.returns) == 1 else tuple(made)

    def _unowned(self, values: Iterable[Any]) -> list[Any]:
        return [
            self._device.unowned(one)
            if isinstance(one, Tensor)
            else self._unowned(one)
            if isinstance(one, list | tuple)
            else one
            for one in values
        ]


class _Kind(Enum):
    """What becomes of an operation: run now, made of others, enqueued for what it writes or for its results."""

    AT_ONCE = auto()
    COMPOSITE = auto()
    WRITE = auto()
    PURE = auto()


@cache
def _kind(func: Any) -> _Kind:
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if composite in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite):
        return _Kind.COMPOSITE
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    takes_tensors = any("Tensor" in str(one.type) for one in func._schema.arguments)
    if not takes_tensors or (alias is not None and not alias.is_write):
        return _Kind.AT_ONCE
    assert all(isinstance(one.type, torch.TensorType) for one in returns), f"{func} makes the host wait"
    return _Kind.PURE if alias is None else _Kind.WRITE


@dataclass(frozen=True, slots=True)
class _Layout:
    """A tensor without its content."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _layouts(values: Iterable[Any]) -> tuple[Any, ...]:
    """The values, with layouts instead of tensors and tuples instead of lists."""
    return tuple(
        _Layout(tuple(one.shape), one.stride(), one.dtype)
        if isinstance(one, Tensor)
        else _layouts(one)
        if isinstance(one, list | tuple)
        else one
        for one in values
    )


@lru_cache(maxsize=1 << 14, typed=True)
def _returned(func: Any, *args: Any, **kwargs: Any) -> tuple[_Layout, ...]:
    """The layouts of what an operation returns for arguments of such layouts."""
    found = func(*map(_bare, args), **{name: _bare(one) for name, one in kwargs.items()})
    return _layouts([found] if isinstance(found, Tensor) else found)


def _bare(value: Any) -> Any:
    if isinstance(value, _Layout):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return [_bare(one) for one in value]
    return torch.device("meta") if isinstance(value, torch.device) else value


# --- what computes on it --------------------------------------------------------------------------------------


class DigestDecoder:
    """A decoder with the KV and the tokens of `fakes.FakeRunner`; its own kernels, too.

    ``poison``: tokens that make their KV NaN, and that of all tokens behind them: so are the logits.
    ``adapters``: their slots. ``windows``: of the KV groups.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        device: FakeDevice,
        vocab_size: int,
        poison: frozenset[int],
        adapters: FakeAdapters | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self._windows = windows
        self._device = device
        self._adapters = adapters or FakeAdapters()
        self.weights = SimpleNamespace(adapts=len(self._adapters.slots) > 1)
        self._vocab_size = vocab_size
        self._poison = poison

    @property
    def kernels(self) -> DigestDecoder:
        return self

    by_slot = True
    lay_out = staticmethod(batch.lay_out)
    look_up = staticmethod(backend.look_up)
    allow = staticmethod(backend.allow)
    log_probabilities = staticmethod(seeded_sampling.log_probabilities)

    def copy_blocks(
        self, arena: Tensor, sources: Iterable[int], targets: Iterable[int], device: object = None
    ) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._device.main.enqueue(lambda source=source, target=target: arena[target].copy_(arena[source]))

    @property
    def groups(self) -> int:
        return len(self._windows)

    def hidden(self, ids: Tensor, batches: Sequence[PagedBatch], arena: Tensor) -> Tensor:
        """Of each token the context behind it, the position behind it, and whether the row is sound to
        there."""
        reference, farthest = widest(self._windows)
        rows = batches[reference]
        assert self._device.is_active, "kernels for whichever device is current"
        out = self._device.allocate((len(ids), CHUNKS + 2), (CHUNKS + 2, 1), torch.float32)

        def act() -> None:
            cells = arena.view(torch.int64)  # [block, 1, position | digest, 1, slot, 1]
            starts, size = rows.row_starts.tolist(), arena.shape[4]

            def read(line: int, group: int, position: int) -> tuple[int, int]:
                block = batches[group].tables[line, position // size]
                at, digest = cells[block, 0, :, 0, position % size, 0].tolist()
                return at, (digest ^ salt_of(group)) & MASK

            for slot in [one for each in batches for one in each.slots[starts[-1] :].tolist()]:  # of padding
                if slot >= 0:
                    cells[slot // size, 0, 0, 0, slot % size] = SPOILED
            for row, length in enumerate(rows.context_lengths.tolist()):
                tokens = ids[starts[row] : starts[row + 1]].tolist()
                if not tokens or rows.slots[starts[row]] < 0:
                    continue
                table = rows.tables[int(rows.lines[row])]
                first = length - len(tokens)
                low = max(0, first + 1 - farthest)
                kept = (
                    cells[table[: -(-first // size)], 0, :, 0, :, 0]
                    .transpose(0, 1)
                    .reshape(2, -1)[:, low:first]
                )
                given = NO_ADAPTER if rows.adapters is None else int(rows.adapters[starts[row]])
                context = int(self._adapters.slots[given])  # of the last slot without one
                for at, (position, digest) in enumerate(kept.T.tolist(), low):
                    digest = (digest ^ salt_of(reference)) & MASK
                    context = (context + (digest ^ mix(position & MASK)) * weigh(at)) & MASK
                sound = SPOILED not in kept[0]
                line = int(rows.lines[row])
                for position, token in enumerate(tokens, first):
                    sound = sound and token not in self._poison
                    for group, window in enumerate(self._windows):
                        for seen in range(max(0, position + 1 - window) if window else position, position):
                            if read(line, group, seen) != read(line, reference, seen):
                                context ^= 1 << seen % 64
                    digest, context = take_in(context, position, token)
                    for group, layout in enumerate(batches):
                        block = layout.tables[line, position // size]
                        slot = int(layout.slots[starts[row] + position - first])
                        assert slot == block * size + position % size
                        cell = cells[block, 0, :, 0, position % size, 0]
                        salted = digest ^ salt_of(group)
                        cell[0] = position if sound else SPOILED
                        cell[1] = salted - (salted >> 63 << 64)  # the same bits, signed
                    for gone in passing(position, farthest):
                        context = leave_out(context, gone, read(line, reference, gone)[1])
                    told = out[starts[row] + position - first]
                    told[:CHUNKS] = torch.tensor([context >> 16 * at & 0xFFFF for at in range(CHUNKS)])
                    told[CHUNKS], told[CHUNKS + 1] = position + 1, sound

        self._device.main.enqueue(act)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """The greedy token's is the greatest; behind the vocabulary stands the context, for other draws."""
        width = self._vocab_size + CHUNKS
        out = self._device.allocate((len(hidden), width), (width, 1), torch.float32)

        def act() -> None:
            out.zero_()
            for line, (*chunks, length, sound) in zip(out, hidden.tolist(), strict=True):
                if sound != 1:  # it is 0, or garbage: of padding
                    line.fill_(float("nan"))
                    continue
                line[self._vocab_size :] = torch.tensor(chunks)
                line[draw(_joined(chunks), int(length), Sampling(), self._vocab_size)] = 1e9

        self._device.main.enqueue(act)
        return out

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        **limits: object,
    ) -> Tensor:
        out = self._device.allocate((len(logits),), (1,), torch.int64)

        def act() -> None:
            numbers = zip(temperature.tolist(), seeds.tolist(), positions.tolist(), strict=True)
            for row, (heat, seed, position) in enumerate(numbers):
                chunks = logits[row, self._vocab_size :].nan_to_num().tolist()
                sampling = Sampling(temperature=heat, seed=seed)
                out[row] = draw(_joined(chunks), position, sampling, self._vocab_size)

        self._device.main.enqueue(act)
        return out


def _joined(chunks: Sequence[float]) -> int:
    return sum(int(chunk) << 16 * at for at, chunk in enumerate(chunks))


class DeviceAdapters(FakeAdapters):
    """Adapters that are copied into their slots by work on the device."""

    def __init__(self, device: FakeDevice, slots: int) -> None:
        super().__init__(slots, device.chance)
        self._device = device

    def fill(self, slot: int, number: int) -> None:
        self._device.main.enqueue(lambda adds=self._held[number]: self.slots.__setitem__(slot, adds))

    def spoil(self) -> None:
        if len(self.slots) > 1:
            self._device.main.enqueue(super().spoil)


class PoisoningTier(HostTier):
    """A slot that is to be filled is garbage from then on: the disk's process may be writing it."""

    def reserve(self, key: bytes, tokens: int, tenant: int = 0, *, spare: bool = False) -> int | None:
        slot = super().reserve(key, tokens, tenant, spare=spare)
        if slot is not None:
            self.memory.payload(slot)[:] = bytes([GARBAGE]) * self.memory.block_bytes
        return slot


@dataclass(frozen=True)
class _Bombed:
    handle: Handle
    runner: BombedRunner
    bomb: bool

    def draw(self) -> None:
        self.handle.draw()

    def tokens(self) -> Outcomes:
        outcomes = self.handle.tokens()
        if self.bomb:
            self.runner.device.doomed = None  # the next launch finds out which sequence it was
            self.runner.device.synchronize()
            self.runner.adapters.spoil()
            raise RuntimeError("a bomb in flight")
        return outcomes

    def moved(self, *, wait: bool = False) -> bool:
        return self.handle.moved(wait=wait)


class BombedRunner:
    """A runner that fails on steps with some tokens: at any call of their launch, or when they are waited for.
    Also where `FakeDevice.doomed` says so."""

    def __init__(
        self,
        runner: TorchRunner,
        device: FakeDevice,
        launch_bombs: frozenset[int],
        late_bombs: frozenset[int],
        adapters: FakeAdapters,
    ) -> None:
        self.adapters = adapters
        self.runner = runner
        self.device = device
        self.launch_bombs = launch_bombs
        self.late_bombs = late_bombs
        self._most = 1  # calls of a launch so far

    def launch(self, plan: Plan) -> Handle:
        tokens = set(plan.tokens.tolist())
        bomb = not self.launch_bombs.isdisjoint(tokens)
        doomed, self.device.doomed, before = self.device.doomed, None, self.device.calls
        self.device.refuse(self.device.chance.randrange(self._most) if bomb else doomed)
        try:
            handle = self.runner.launch(plan)
        except BaseException:
            self.device.refuse(None)
            self.adapters.spoil()
            raise
        finally:
            self.device.refuse(None)
            self._most = max(self._most, self.device.calls - before)
        return _Bombed(handle, self, bomb or not self.late_bombs.isdisjoint(tokens))


def place_of(memory: SlotMemory) -> tuple[int, int]:
    """The address of the memory in this process, and its length."""
    cells = torch.frombuffer(memory.map, dtype=torch.uint8)
    return cells.data_ptr(), len(cells)


def digest_arena(blocks: int, block_tokens: int) -> DeviceArena:
    """Of 16 bytes a token, as `fakes.slot_bytes` has it; all of it garbage."""
    group = KVGroup(0, (0,), layout=HeadLayout(1, 2), dtype="float32", block_tokens=block_tokens)
    arena = DeviceArena(group, blocks)
    arena.kv.view(torch.uint8).fill_(GARBAGE)
    return arena


def device_engine(
    settings: SchedulerSettings,
    *,
    chance: Random | None,
    memory: SlotMemory | None,
    disk: FakeDisk | None,
    clock: Callable[[], float],
    vocab_size: int,
    late: bool = False,
    ledger: object = None,
    poison: frozenset[int] = frozenset(),
    launch_bombs: frozenset[int] = frozenset(),
    late_bombs: frozenset[int] = frozenset(),
    registered: bool | None = None,
    beside: bool | None = None,
    table: AdapterTable | None = None,
    adapters: FakeAdapters | None = None,
) -> tuple[Engine, FakeDevice]:
    """As `fakes.fake_engine`, by the real runner and mover. ``registered``: so are the slots; ``beside``: rows
    wait for their loads before they are planned; None: by chance. ``adapters``: how many slots they have."""
    device = FakeDevice(chance, late=late, host=(0, 0) if memory is None else place_of(memory))
    arena = digest_arena(settings.blocks, settings.block_tokens)
    mover = None if memory is None else BlockMover(arena, memory, device=device, hasher=FakeHasher(device))
    by_chance = device.chance.random() < 0.5, device.chance.random() < 0.8
    if mover is not None and (by_chance[0] if registered is None else registered):
        mover.registration.begin()
    held = DeviceAdapters(device, 0 if adapters is None else len(adapters.slots) - 1)
    decoder = DigestDecoder(device, vocab_size, poison, held, settings.windows)
    runner = TorchRunner(decoder, arena, mover=mover, device=device, adapters=held)  # type: ignore[arg-type]
    if device.chance.random() < 0.7:
        rows, tokens = settings.max_sequences, settings.max_step_tokens
        some = [(device.chance.randint(1, tokens), device.chance.randint(1, rows)) for _ in range(4)]
        now = device.chance.random() < 0.6
        runner.capture((StepSize(max(one), min(one)) for one in [*some, (rows, rows), (1, 1)]), now=now)
    pool = BlockPool(settings.blocks, debug=True)
    hasher = BlockHasher(SECRET, settings.block_tokens)
    disk = None if memory is None else disk
    if disk is not None and memory is not None:
        disk.begin(memory)
    host = None if memory is None else PoisoningTier(memory)
    tiers = Tiers(host, () if disk is None else disk.below)
    costs = CostBook(None, beside=by_chance[1] if beside is None else beside)
    guesses = ChanceDrafter(device.chance, vocab_size) if device.chance.random() < 0.3 else None
    parts = {"drafter": guesses, "adapters": table}
    scheduler = Scheduler(settings, pool, hasher, SPACE, tiers, costs, **parts)  # type: ignore[arg-type]
    time = clock if disk is None else disk.clock
    bombed = BombedRunner(runner, device, launch_bombs, late_bombs, held)
    return Engine(scheduler, bombed, debug=True, clock=time, adapters=held), device
