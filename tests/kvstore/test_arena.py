"""The arena: the group's layout, contiguous blocks, offsets past 2^31, poison."""

from __future__ import annotations

import pytest
import torch

from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.groups import HeadLayout, KVGroup, LatentLayout

GROUP = KVGroup(id=0, layers=(0, 1, 2), layout=HeadLayout(2, 8), dtype="float32", block_tokens=4)
LATENT = KVGroup(id=0, layers=(0, 1, 2), layout=LatentLayout(12, 4), dtype="float32", block_tokens=4)
BIG = KVGroup(id=0, layers=tuple(range(36)), layout=HeadLayout(8, 128), dtype="bfloat16")
each_layout = pytest.mark.parametrize("group", [GROUP, LATENT], ids=["heads", "latent"])


def test_the_layout() -> None:
    arena = DeviceArena(GROUP, 5)
    assert arena.kv.shape == (5, 3, 2, 2, 4, 8)
    assert arena.kv.stride() == (384, 128, 64, 32, 8, 1)
    assert (len(arena.kv), arena.kv.dtype, arena.kv.device.type) == (5, torch.float32, "cpu")
    assert arena.kv.nbytes == 5 * GROUP.block_bytes
    assert not arena.kv.any()
    assert DeviceArena(LATENT, 5).kv.shape == (5, 3, 4, 16)


@each_layout
def test_one_block_is_one_run_of_bytes(group: KVGroup) -> None:
    arena = DeviceArena(group, 3)
    arena.kv.copy_(torch.arange(arena.kv.numel(), dtype=torch.float32).view_as(arena.kv))
    whole = arena.kv.view(torch.uint8).view(-1)
    for block in range(3):
        run = arena.bytes_of(block)
        assert run.dtype == torch.uint8
        assert run.shape == (group.block_bytes,)
        assert run.is_contiguous()
        assert run.data_ptr() == whole.data_ptr() + block * group.block_bytes
        assert torch.equal(run, whole[block * group.block_bytes : (block + 1) * group.block_bytes])


@each_layout
def test_writing_the_bytes_writes_the_block(group: KVGroup) -> None:
    source, target = DeviceArena(group, 2), DeviceArena(group, 4)
    source.kv[1] = torch.randn(group.block_shape)
    target.bytes_of(3).copy_(source.bytes_of(1))
    assert torch.equal(target.kv[3], source.kv[1])
    assert not target.kv[:3].any()


def test_a_head_of_a_block_is_one_run_too() -> None:
    arena = DeviceArena(GROUP, 2)
    assert arena.kv[1, 2, 1, 1].is_contiguous()


def test_offsets_are_counted_in_64_bits() -> None:
    """8B-class blocks: 2.25 MiB each, so int32 would wrap at block 910."""
    arena = DeviceArena(BIG, 100_000, device="meta")
    assert arena.kv[99_999].storage_offset() * arena.kv.element_size() == 235_927_240_704


def test_blocks_behind_two_gigabytes_are_written_where_they_are() -> None:
    """Memory is claimed page by page: of 4.4 GiB only the touched blocks cost any."""
    arena = DeviceArena(BIG, 2000, device="meta")
    arena.kv = torch.empty_like(arena.kv, device="cpu")
    last = 1999
    assert last * BIG.block_bytes > 2**32
    others = [last - 1, last - 2**31 // BIG.block_bytes, last - 2**32 // BIG.block_bytes]
    arena.kv[others] = 0
    arena.poison([last])
    assert arena.kv[last].isnan().all()
    arena.kv[last] = 1.5
    assert arena.bytes_of(last).view(torch.bfloat16).eq(1.5).all()
    assert not any(arena.bytes_of(block).any() for block in others)


@each_layout
def test_poison_touches_only_its_blocks(group: KVGroup) -> None:
    arena = DeviceArena(group, 4)
    arena.kv.fill_(1.0)
    arena.poison([0, 2])
    assert arena.kv[[0, 2]].isnan().all()
    assert arena.kv[[1, 3]].eq(1.0).all()
    arena.poison([])


def test_a_block_of_another_arena_has_no_bytes() -> None:
    with pytest.raises(AssertionError, match="block 1 of 1"):
        DeviceArena(GROUP, 1).bytes_of(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    arena = DeviceArena(BIG, 1000, device="cuda")
    arena.kv[999] = 1.5
    assert arena.bytes_of(999).view(torch.bfloat16).eq(1.5).all()
    arena.poison([999])
    assert arena.kv[999].isnan().all()
    assert not arena.kv[998].any()
