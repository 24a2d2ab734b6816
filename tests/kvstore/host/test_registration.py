"""Host memory registered with the device: all of it at start, in pieces, and given back; no GPU."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterable

import pytest

from holdfast.kernels.device import CpuDevice, Event, Stream
from holdfast.kvstore.host.registration import PIECE_BYTES, Registration
from holdfast.kvstore.host.slots import PAGE, SlotMemory, make_memory

BLOCK = 1 << 20
EACH = PIECE_BYTES // BLOCK


class Registering(CpuDevice):
    """A device beside the host: what is registered. ``refuses``: from the n-th on."""

    overlaps = True

    def __init__(self, refuses: int | None = None) -> None:
        self.held: dict[int, int] = {}
        self.asked = 0
        self.refuses = refuses

    def register(self, address: int, size: int) -> str:
        self.asked += 1
        if self.refuses is not None and self.asked > self.refuses:
            return "error 2"
        assert address % PAGE == 0
        assert not any(address < at + held and at < address + size for at, held in self.held.items())
        self.held[address] = size
        return ""

    def unregister(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            del self.held[address]


def memory_of(slots: int, block: int = BLOCK) -> SlotMemory:
    fd = make_memory(2 * PAGE + slots * (block + 64) + PAGE)
    memory = SlotMemory(fd, bytes(16), block)
    os.close(fd)
    return memory


def registration(device: Registering, memory: SlotMemory) -> Registration:
    return Registration(device, memory, 1 << 30)


def test_all_memory_is_registered_in_pieces_and_told() -> None:
    device, memory = Registering(), memory_of(EACH * 3 + 1)
    held = registration(device, memory)
    assert not device.held
    told: list[float] = []
    held.begin(told.append)
    assert [*device.held.values()] == [PIECE_BYTES] * 3 + [BLOCK], "the last piece is whole, and no more"
    assert held.registered == memory.slots * BLOCK
    assert told == [at * EACH / memory.slots for at in range(4)]
    held.close()
    assert not device.held


@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_refusal_is_logged_once_and_nothing_more_is_tried(
    before: int, caplog: pytest.LogCaptureFixture
) -> None:
    device, memory = Registering(refuses=before), memory_of(EACH * 5)
    held = registration(device, memory)
    with caplog.at_level(logging.WARNING):
        held.begin()
    (line,) = caplog.records
    assert f"copies of KV are slower: error 2 ({before * PIECE_BYTES >> 20} MiB are)" in line.getMessage()
    assert device.asked == before + 1 and len(device.held) == before
    held.close()
    assert not device.held


def test_blocks_smaller_than_a_page_are_registered_in_one_piece() -> None:
    """Two pieces that share a page cannot both be registered."""
    device, memory = Registering(), memory_of(100_000, block=320)
    held = registration(device, memory)
    held.begin()
    assert len(device.held) == 1 and held.registered == memory.slots * 320
    held.close()


def test_what_is_dropped_without_a_close_is_given_back_before_its_memory_is() -> None:
    device, memory = Registering(), memory_of(EACH)
    held = registration(device, memory)
    held.begin()
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
