"""Host memory registered with the device: ahead of its use, off the step, and given back; no GPU."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterable

import pytest

from holdfast.kernels.device import CpuDevice, Event, Stream
from holdfast.kvstore.host.registration import AHEAD, PIECE_BYTES, Registration
from holdfast.kvstore.host.slots import PAGE, SlotMemory, make_memory

BLOCK = 1 << 20
EACH = PIECE_BYTES // BLOCK


class Registering(CpuDevice):
    """A device beside the host: what is registered, and by which threads. ``refuses``: from the n-th on."""

    overlaps = True

    def __init__(self, refuses: int | None = None) -> None:
        self.held: dict[int, int] = {}
        self.threads: set[str] = set()
        self.asked = 0
        self.refuses = refuses
        self.changed = threading.Condition()

    def register(self, address: int, size: int) -> str:
        with self.changed:
            self.asked += 1
            self.threads.add(threading.current_thread().name)
            self.changed.notify_all()
            if self.refuses is not None and self.asked > self.refuses:
                return "error 2"
            assert address % PAGE == 0
            assert not any(address < at + held and at < address + size for at, held in self.held.items())
            self.held[address] = size
            return ""

    def unregister(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            del self.held[address]

    def wait_for(self, pieces: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.held) >= pieces, timeout=30)


def memory_of(slots: int, block: int = BLOCK) -> SlotMemory:
    fd = make_memory(2 * PAGE + slots * (block + 64) + PAGE)
    memory = SlotMemory(fd, bytes(16), block)
    os.close(fd)
    return memory


def registration(device: Registering, memory: SlotMemory) -> Registration:
    return Registration(device, memory, 1 << 30)


def test_the_first_pieces_are_registered_when_the_tier_is_set_up() -> None:
    device, memory = Registering(), memory_of(EACH * (AHEAD + 3))
    held = registration(device, memory)
    assert not device.held
    held.begin()
    assert held.registered == AHEAD * PIECE_BYTES == sum(device.held.values())
    assert device.threads == {threading.current_thread().name}
    held.close()
    assert not device.held


def test_a_step_registers_nothing_itself_and_pieces_behind_it_are_registered_meanwhile() -> None:
    device, memory = Registering(), memory_of(EACH * (AHEAD + 3))
    held = registration(device, memory)
    held.begin()
    device.threads.clear()
    held.use(2 * EACH)
    device.wait_for(AHEAD + 2)
    assert device.threads == {"register-host-memory"}
    held.use(EACH * (AHEAD + 3) - 1)
    device.wait_for(AHEAD + 3)
    assert held.registered == (AHEAD + 3) * PIECE_BYTES, "the last piece is whole, and no more"
    held.close()
    assert not device.held


def test_a_piece_that_is_being_registered_is_not_registered_twice() -> None:
    """It would be taken away from under the copies, to be registered anew."""
    memory = memory_of(EACH * 3)

    class Asking(Registering):
        def register(self, address: int, size: int) -> str:
            held.use(0)
            return super().register(address, size)

    device = Asking()
    held = registration(device, memory)
    held.begin()
    assert device.asked == 3 == len(device.held)
    held.close()


@pytest.mark.parametrize("before", [0, 1, AHEAD - 1])
def test_a_refusal_is_logged_once_and_nothing_more_is_tried(
    before: int, caplog: pytest.LogCaptureFixture
) -> None:
    device, memory = Registering(refuses=before), memory_of(EACH * (AHEAD + 3))
    held = registration(device, memory)
    with caplog.at_level(logging.WARNING):
        held.begin()
        held.use(EACH * AHEAD)
        held.advance()
    (line,) = caplog.records
    assert "copies of KV are slower: error 2" in line.getMessage()
    assert device.asked == before + 1 and len(device.held) == before
    held.close()
    assert not device.held


def test_blocks_smaller_than_a_page_are_registered_in_one_piece() -> None:
    """Two pieces that share a page cannot both be registered."""
    device, memory = Registering(), memory_of(100_000, block=320)
    held = registration(device, memory)
    held.begin()
    assert held.pieces == 1 == len(device.held)
    held.close()


def test_what_a_thread_registered_is_given_back_too_when_it_is_dropped() -> None:
    device, memory = Registering(), memory_of(EACH * (AHEAD + 3))
    held = registration(device, memory)
    held.begin()
    others = set(threading.enumerate())
    held.use(EACH * (AHEAD + 2))
    device.wait_for(AHEAD + 1)
    for thread in set(threading.enumerate()) - others:
        thread.join()
    del held
    gc.collect()
    assert not device.held


def test_what_is_dropped_without_a_close_is_given_back_before_its_memory_is() -> None:
    device, memory = Registering(), memory_of(EACH)
    held = registration(device, memory)
    held.use(0)
    held.advance()
    assert device.held
    del held
    gc.collect()
    assert not device.held


def test_a_cpu_registers_nothing() -> None:
    class Refusing(CpuDevice):
        def register(self, address: int, size: int) -> str:
            raise AssertionError

        def current(self) -> Stream:
            raise AssertionError

        def record(self) -> Event:
            raise AssertionError

    held = Registration(Refusing(), memory_of(EACH), 1 << 30)
    held.begin()
    held.close()
    assert held.registered == 0
