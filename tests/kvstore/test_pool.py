"""The pool's promises one by one; random lives are in ``test_pool_machine``."""

from __future__ import annotations

from itertools import takewhile

import pytest

from holdfast.kvstore.errors import BlockMisused, LeakFound, PoolExhausted, StepOutOfOrder
from holdfast.kvstore.pool import BlockPool, BlockState


def sealed_chain(pool: BlockPool, name: str, length: int) -> list[int]:
    """Lease and seal ``length`` blocks under keys ``name:0`` on."""
    blocks = pool.allocate(length).blocks
    for at, block in enumerate(blocks):
        assert pool.join(block, f"{name}:{at}".encode()) == block
    return blocks


def audit(pool: BlockPool, held: list[int]) -> None:
    """Check all of the pool, which has these references and no others."""
    assert not any(pool.audit_in_slices([held]))


def found(pool: BlockPool, name: str, length: int) -> int:
    """How many blocks of the chain are still found."""
    return len(matched(pool, name, length))


def matched(pool: BlockPool, name: str, length: int) -> list[int]:
    """The blocks of the longest beginning of the chain that is still found."""
    here = pool.index.here
    return [
        here[key] for key in takewhile(here.__contains__, (f"{name}:{at}".encode() for at in range(length)))
    ]


def test_a_new_pool_is_free() -> None:
    pool = BlockPool(5)
    assert pool.available == 5
    assert sorted(pool.allocate(5).blocks) == [0, 1, 2, 3, 4]
    assert pool.available == 0


def test_exhaustion_says_how_much_and_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(PoolExhausted, match="2 blocks needed, 1 available"):
        pool.allocate(2)
    assert pool.available == 1
    assert pool.allocate(0).blocks == []


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    pool.release(sealed_chain(pool, "a", 2))
    assert pool.available == 4
    free = pool.allocate(2).blocks
    assert found(pool, "a", 2) == 2
    pool.allocate(1)
    assert found(pool, "a", 2) == 1
    assert pool.statistics()["evicted"] == 1
    pool.release(free)


def test_a_block_lives_as_long_as_its_last_holder() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1).blocks
    pool.share(blocks)
    pool.release(blocks)
    assert pool.references.of(blocks[0]) == 1
    assert pool.available == 1
    pool.release(blocks)
    assert pool.references.of(blocks[0]) == 0
    assert pool.available == 2


def test_the_fence_holds_until_the_last_step_in_flight_is_done() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2).blocks
    pool.launched(7)
    pool.launched(8)
    pool.release(blocks)
    assert [pool.state(block) for block in blocks] == [BlockState.FENCED, BlockState.FENCED]
    pool.launched(9)
    with pytest.raises(PoolExhausted):
        pool.allocate(1)
    pool.finished(7)
    assert pool.available == 0
    pool.finished(8)
    assert sorted(pool.allocate(2).blocks) == sorted(blocks)


def test_a_step_launched_after_the_release_fences_nothing() -> None:
    pool = BlockPool(1)
    pool.release(pool.allocate(1).blocks)
    pool.launched(1)
    assert pool.available == 1


def test_a_fenced_block_is_found_and_held_again() -> None:
    pool = BlockPool(2)
    blocks = sealed_chain(pool, "a", 2)
    pool.launched(1)
    pool.release(blocks)
    assert found(pool, "a", 2) == 2
    pool.share(blocks)
    pool.finished(1)
    assert [pool.state(block) for block in blocks] == [BlockState.HELD, BlockState.HELD]
    audit(pool, blocks)


def test_steps_come_in_order() -> None:
    pool = BlockPool(1)
    pool.launched(3)
    with pytest.raises(StepOutOfOrder, match="step 3 launched after step 3"):
        pool.launched(3)
    with pytest.raises(StepOutOfOrder, match=r"step 2 finished, in flight are \[3\]"):
        pool.finished(2)
    pool.finished(3)
    with pytest.raises(StepOutOfOrder):
        pool.finished(3)


def test_the_first_sealing_of_a_key_wins() -> None:
    pool = BlockPool(3)
    first, second, third = pool.allocate(3).blocks
    assert pool.join(first, b"k") == first
    assert pool.join(first, b"k") == first, "naming it again by the same key changes nothing"
    assert pool.join(second, b"k") == first
    assert pool.index.here.get(b"k") == first
    assert pool.state(second) is BlockState.FREE
    with pytest.raises(AssertionError, match=f"block {first} has a key already"):
        pool.join(first, b"o")
    pool.release([third])
    with pytest.raises(BlockMisused, match=f"block {third} is free: it cannot be sealed"):
        pool.join(third, b"o")


def test_joining_trades_a_second_copy_for_the_first() -> None:
    pool = BlockPool(2, debug=True)
    [first], [second] = pool.allocate(1, "a").blocks, pool.allocate(1, "b").blocks
    assert pool.join(first, b"k", "a") == first
    assert pool.join(second, b"k", "b") == first
    assert (pool.references.of(first), pool.references.of(second)) == (2, 0)
    pool.release([first], "a")
    pool.release([first], "b")
    assert pool.state(first) is BlockState.CACHED


def test_many_are_named_at_once() -> None:
    pool = BlockPool(8)
    blocks, keys = pool.allocate(3).blocks, [b"0", b"1", b"2"]
    pool.seal(blocks, keys)
    assert [pool.index.here.get(key) for key in keys] == blocks
    [one] = pool.allocate(1).blocks
    with pytest.raises(BlockMisused, match="block 7 is free: it cannot be sealed"):
        pool.seal([one, 7], [b"8", b"9"])
    assert pool.index.here.get(b"8") is None
    audit(pool, [*blocks, one])


def test_what_is_not_kept_is_forgotten_but_not_under_others() -> None:
    pool = BlockPool(4)
    shared, own = sealed_chain(pool, "a", 2)
    pool.share([shared])
    pool.release([shared, own], keep=False)
    assert found(pool, "a", 2) == 1
    assert (pool.state(shared), pool.state(own)) == (BlockState.HELD, BlockState.FREE)


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [
        ([3], "block 3 is free: it cannot be released"),
        ([0, 0], "block 0 is named twice: it cannot be released"),
        ([0, -1], "block -1 is not of this pool: it cannot be used"),
        ([0, 99], "block 99 is not of this pool: it cannot be used"),
    ],
)
def test_a_wrong_release_changes_nothing(blocks: list[int], complaint: str) -> None:
    pool = BlockPool(4)
    held = pool.allocate(2).blocks
    with pytest.raises(BlockMisused, match=complaint):
        pool.release(blocks)
    audit(pool, held)


def test_a_wrong_share_changes_nothing() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2).blocks
    with pytest.raises(BlockMisused, match="block 3 is free: it cannot be shared"):
        pool.share([*held, 3])
    audit(pool, held)


def test_only_an_owner_releases() -> None:
    pool = BlockPool(2, debug=True)
    blocks = pool.allocate(1, 7).blocks
    with pytest.raises(BlockMisused, match=r"held by \[7\]: it cannot be released by 8"):
        pool.release(blocks, owner=8)
    pool.release(blocks, owner=7)
    assert pool.available == 2


def test_the_audit_names_block_count_and_owner() -> None:
    pool = BlockPool(4, debug=True)
    leaked = pool.allocate(2, 7).blocks
    audit(pool, leaked)
    with pytest.raises(LeakFound, match=rf"block {leaked[1]} is held 1 times by \[7\], 0 accounted for"):
        audit(pool, leaked[:1])
    with pytest.raises(LeakFound, match="block 3 is held 0 times"):
        audit(pool, [*leaked, 3])


def test_statistics_count() -> None:
    pool = BlockPool(4)
    blocks = sealed_chain(pool, "a", 3)
    pool.release(blocks)
    pool.share(blocks[:1])
    pool.allocate(2)
    now = pool.statistics()
    assert (now["allocated"], now["found"], now["evicted"]) == (5, 1, 1)
    assert (now["free"], now["held"], now["cached"], now["sealed"]) == (0, 3, 1, 2)


def test_a_hot_prompt_outlives_a_flood_of_one_off_prefixes() -> None:
    pool = BlockPool(32)
    pool.release(sealed_chain(pool, "prompt", 4))
    for visit in range(20):
        for stranger in range(4):
            pool.release(sealed_chain(pool, f"{visit}/{stranger}", 8))
        match = matched(pool, "prompt", 4)
        if visit == 0:
            assert match == [], "never found again, it was a one-off too"
            pool.release(sealed_chain(pool, "prompt", 4))
            pool.share(matched(pool, "prompt", 4))
            pool.release(matched(pool, "prompt", 4))
        else:
            assert len(match) == 4
            pool.share(match)
            pool.release(match)


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    pool = BlockPool(6)
    pool.launched(1)
    pool.release(sealed_chain(pool, "a", 6))
    pool.finished(1)
    for gone in range(1, 7):
        pool.allocate(1)
        assert found(pool, "a", 6) == 6 - gone


def test_a_hit_deep_in_a_chain_is_a_hit_of_what_is_behind_it() -> None:
    pool = BlockPool(8)
    chain = sealed_chain(pool, "a", 3)
    pool.release(chain[2:])
    for _ in range(4):
        pool.share(chain[2:], behind=chain[:2])
        pool.release(chain[2:])
    pool.release(chain[:2])
    pool.allocate(5 + 2)
    assert found(pool, "a", 3) == 1


def test_joining_is_no_hit_or_the_end_would_outlive_its_beginning() -> None:
    pool = BlockPool(8)
    chain = sealed_chain(pool, "a", 2)
    for _ in range(4):
        [standing] = pool.allocate(1).blocks
        standing = pool.join(standing, b"a:1")
        assert standing == chain[1]
        pool.release([standing])
    pool.release(chain)
    pool.allocate(7)
    assert found(pool, "a", 2) == 1


def test_a_block_that_is_not_wanted_here_is_free_at_once_or_behind_the_fence() -> None:
    pool = BlockPool(4)
    blocks = sealed_chain(pool, "a", 2)
    pool.release(blocks[1:])
    pool.distrust(blocks[1:])
    assert pool.state(blocks[1]) is BlockState.FREE and found(pool, "a", 2) == 1
    pool.launched(1)
    pool.release(blocks[:1])
    pool.distrust(blocks[:1])
    assert pool.state(blocks[0]) is BlockState.FENCED and found(pool, "a", 2) == 0
    pool.finished(1)
    assert pool.state(blocks[0]) is BlockState.FREE
    audit(pool, [])


def test_blocks_that_are_evicted_first_are_said_to_be_unwanted_until_found_again() -> None:
    pool = BlockPool(4)
    blocks = sealed_chain(pool, "a", 4)
    pool.release(blocks)
    pool.evict_first(blocks[1:])
    pool.share([blocks[2]])
    pool.release([blocks[2]])
    told = [(key, wanted) for _, key, wanted in pool.allocate(4).evicted]
    assert sorted(told) == [(b"a:0", True), (b"a:1", False), (b"a:2", True), (b"a:3", False)]
