"""Blocks between an arena and slots: the same bytes both ways, zeros behind a tail, on each device."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from holdfast.kernels.device import device_of
from holdfast.kernels.reference import backend
from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.block_mover import BlockMover, Moving
from holdfast.kvstore.groups import HeadLayout, KVGroup, LatentLayout
from holdfast.kvstore.host.slots import SlotMemory, make_memory

try:
    from holdfast.kernels.cpu.backend import copy_pieces as fast
except ImportError:  # without numba
    fast = backend.copy_pieces

COPY = {"cpu": fast}
DEVICES = [
    "cpu",
    "plain",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]


@pytest.fixture(
    params=[HeadLayout(2, 8), HeadLayout(40, 8), LatentLayout(12, 4), LatentLayout(512, 64)], ids=str
)
def group(request: pytest.FixtureRequest) -> KVGroup:
    return KVGroup(id=0, layers=(0, 1), layout=request.param, dtype="bfloat16", block_tokens=4)


def parts(group: KVGroup, device: str, blocks: int = 6) -> tuple[DeviceArena, SlotMemory, BlockMover]:
    arena = DeviceArena(group, blocks, "cpu" if device == "plain" else device)
    arena.poison(range(blocks))
    fd = make_memory(1 << 20)
    memory = SlotMemory(fd, bytes(16), group.block_bytes)
    os.close(fd)
    mover = BlockMover(arena, memory, COPY.get(device, backend.copy_pieces))
    mover.registration.begin()
    return arena, memory, mover


def fill(arena: DeviceArena, block: int, tokens: int) -> bytes:
    """Random KV for the first tokens of a block; its bytes with zeros behind them."""
    cells = torch.randn(arena.group.block_shape).to(torch.bfloat16)
    arena.kv[block, ..., :tokens, :] = cells[..., :tokens, :].to(arena.kv.device)
    cells[..., tokens:, :] = 0
    return bytes(cells.view(torch.uint8).view(-1).numpy())


def wait(moving: Moving | None) -> None:
    if moving is not None:
        assert moving.done(wait=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_comes_back_as_it_went_with_zeros_behind_its_tokens(group: KVGroup, device: str) -> None:
    arena, memory, mover = parts(group, device)
    expected = {slot: fill(arena, block, tokens) for block, slot, tokens in ((0, 5, 4), (1, 0, 3), (2, 7, 1))}
    wait(mover.move([(0, 5, 4), (1, 0, 3), (2, 7, 1)], []))
    for slot, payload in expected.items():
        assert bytes(memory.payload(slot)) == payload
    assert not any(memory.payload(1)), "another slot was not touched"
    wait(mover.move([], [(5, 3), (0, 4), (7, 5)]))
    for slot, block in ((5, 3), (0, 4), (7, 5)):
        assert bytes(arena.bytes_of(block).cpu().numpy()) == expected[slot]


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_is_saved_before_it_is_loaded_over(group: KVGroup, device: str) -> None:
    arena, memory, mover = parts(group, device)
    first, second = fill(arena, 0, 4), fill(arena, 1, 4)
    wait(mover.move([(0, 0, 4)], []))
    for round_ in range(20):
        block = 1 - round_ % 2
        wait(mover.move([(1, 1, 4)] if not round_ else [], [(0, block)]))
    assert (bytes(memory.payload(0)), bytes(memory.payload(1))) == (first, second)
    assert bytes(arena.bytes_of(0).cpu().numpy()) == bytes(arena.bytes_of(1).cpu().numpy()) == first


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_saves_run_beside_the_device_s_work_but_before_what_overwrites_them() -> None:
    group = KVGroup(
        id=0, layers=tuple(range(8)), layout=HeadLayout(8, 128), dtype="bfloat16", block_tokens=16
    )
    arena = DeviceArena(group, 64, "cuda")
    fd = make_memory(64 << 20)
    memory = SlotMemory(fd, bytes(16), group.block_bytes)
    os.close(fd)
    mover = BlockMover(arena, memory)
    mover.registration.begin()
    assert mover.registration.registered
    arena.kv.copy_(torch.arange(64, device="cuda").view(-1, 1, 1, 1, 1, 1).expand_as(arena.kv))
    torch.cuda.synchronize()
    saves = [(block, block, 16) for block in range(40)]
    moving = mover.move(saves, [])
    mover.follow(np.arange(0), np.arange(40))
    arena.kv.fill_(-1)  # enqueued behind: it must not be seen
    wait(moving)
    for block in range(40):
        cells = torch.frombuffer(memory.payload(block), dtype=torch.bfloat16)
        assert (cells == block).all()
    loads = [(slot, slot) for slot in range(40)]
    mover.move([], loads)
    wait(mover.move([(7, 40, 16)], []))  # what an earlier call loads
    assert (torch.frombuffer(memory.payload(40), dtype=torch.bfloat16) == 7).all()
    mover.close()
    torch.cuda.synchronize()  # nothing is pending
    assert not mover.registration.registered


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_registration_that_cuda_refuses_leaves_no_error_behind() -> None:
    device = device_of(torch.device("cuda"))
    assert "error" in device.register(0, 4096)
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    assert device.register(memory.data_ptr(), memory.numel()) == ""
    assert device.register(memory.data_ptr(), memory.numel()) == "", "as an engine before this one left it"
    device.unregister([memory.data_ptr()] * 2)
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
