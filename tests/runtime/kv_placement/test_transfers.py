"""KV that leaves the device and comes back from the host tier, on the fake device; its rows read all of it.

A byte from the wrong slot, too early, too late or behind a tail's end gives a wrong token in the model's eyes.
"""

from __future__ import annotations

from functools import partial
from random import Random

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from holdfast.kvstore.host.slots import SlotState
from holdfast.runtime.kv_placement import transfers
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import Work
from holdfast.tests.runtime.fake_device import device_engine
from holdfast.tests.runtime.fakes import FakeDisk, fake_memory
from holdfast.tests.runtime.worlds import LAUNCH_BOMB, World, world

ONE, TWO, THREE, FOUR = ([start, start + 1, start + 2, start + 3] for start in (30, 40, 50, 60))

FULL = {(0, 4), (1, 4)}
"""Of three records of 4, 4 and 2 tokens the full ones."""


def work_of(here: World, seq: int) -> Work:
    work = here.ended[seq].work
    assert work is not None
    return work


def flood(here: World) -> None:
    """Have the pool evict all that is cached."""
    pool = here.scheduler.pool
    blocks, evicted = pool.allocate(pool.available, "flood")
    for one in evicted:
        here.scheduler._transfers.evicted(*one)
    pool.release(blocks, "flood")


def away(here: World, seq: int) -> None:
    """Take a sequence's KV from the device, its cached blocks too."""
    here.run()
    here.evict(seq)
    flood(here)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_turn_after_eviction_computes_only_what_is_new(depth: int) -> None:
    here = world(depth=depth, slots=16)
    here.open(0, ONE + TWO + [7])
    here.reply(0, 6)  # 14 of 15 tokens have KV: three blocks and two tokens
    away(here, 0)
    here.extend(0, [8, 9])
    here.reply(0, 4)
    work = work_of(here, 0)
    assert (work.prefilled, work.recomputed, work.resident, work.host) == (3, 0, 0, 14)
    assert here.scheduler.statistics()["restored"] == 14


def test_an_engine_that_starts_anew_adopts_the_slots() -> None:
    here = world(slots=16)
    here.open(0, ONE + TWO + [7])
    said = here.reply(0, 6)
    here.run()
    here.restart()
    here.open(0, ONE + TWO + [7, *said, 8, 9])
    assert here.state(0).computed == 0
    here.reply(0, 4)
    work = work_of(here, 0)
    assert (work.prefilled, work.host) == (3, 14)


def test_only_a_sequence_with_the_same_tail_finds_it() -> None:
    here = world(slots=16)
    here.open(0, [*ONE, 40, 41, 42])
    here.reply(0, 1)
    here.run()
    here.restart()
    here.open(1, [*ONE, 40, 41, 99, 98])
    here.open(2, [*ONE, 40, 41, 42, 98])
    here.reply(1, 3)
    here.reply(2, 3)
    assert (work_of(here, 1).host, work_of(here, 2).host) == (4, 7 - 4), "a block was resident by then"


def test_a_tail_replaces_the_one_before_it() -> None:
    here = world(slots=16)
    here.open(0, [*ONE, 40])
    for token in (1, 2):
        here.reply(0, 1)
        here.run()
        assert here.scheduler.statistics()["host_records"] == 2, "one block and one tail"
        here.extend(0, [token])
    here.reply(0, 1)
    here.run()
    assert here.scheduler.statistics()["host_records"] == 3


def test_a_tail_is_kept_at_its_new_length_when_it_is_cut() -> None:
    here = world(slots=16)
    here.open(0, [*ONE, 40, 41, 42])
    here.reply(0, 1)
    here.truncate(0, 6)
    away(here, 0)
    here.extend(0, [8, 9])
    here.reply(0, 3)
    work = work_of(here, 0)
    assert (work.host, work.recomputed) == (6, 0)


def test_what_stands_behind_a_tail_leaves_as_zeros() -> None:
    here = world(slots=16)
    here.open(0, [*ONE, 40, 41, 42])
    here.reply(0, 3)
    here.run()
    assert here.memory is not None
    records = [here.memory.record(slot) for slot in range(here.memory.slots)]
    (tail,) = [slot for slot, record in enumerate(records) if here.memory.state(slot) and record.tokens < 4]
    cells = np.frombuffer(here.memory.payload(tail), np.uint64)
    used = records[tail].tokens
    assert not cells[4 + used :].any() and cells[4 : 4 + used].all()


def test_a_changed_byte_is_computed_again() -> None:
    here = world(slots=16)
    here.open(0, ONE + TWO + THREE + [7])
    here.reply(0, 2)
    away(here, 0)
    assert here.memory is not None
    for slot in range(here.memory.slots):
        if here.memory.record(slot).key == here.sequence(0).keys[1]:
            here.memory.payload(slot)[5] ^= 4
    here.extend(0, [8])
    here.reply(0, 4)
    work = work_of(here, 0)
    assert (work.host, work.recomputed) == (4, 10)
    assert here.scheduler.statistics()["host_damaged"] == 1


@pytest.mark.parametrize(
    ("which", "claims"),
    [(which, claims) for which in range(3) for claims in (0, 1, 3, 4, 5, 64) if (which, claims) not in FULL],
)
def test_a_record_that_says_it_is_of_another_length_is_computed_again(which: int, claims: int) -> None:
    here = world(slots=16)
    here.open(0, ONE + TWO + [7, 8])
    here.reply(0, 1)
    away(here, 0)
    tier, sequence = here.scheduler.tiers.host, here.sequence(0)
    assert sequence.tail is not None
    slot = tier.here.get([*sequence.keys[:2], sequence.tail[0]][which])
    assert slot is not None and tier.tokens_of(slot) == [4, 4, 2][which]
    tokens_of = tier.tokens_of
    vars(tier)["tokens_of"] = lambda asked: claims if asked == slot else tokens_of(asked)
    here.extend(0, [9, 10, 11])
    here.reply(0, 4)
    work = work_of(here, 0)
    assert (work.host, work.recomputed) == (4 * which, 10 - 4 * which)


def test_a_record_is_found_only_when_its_bytes_are_there() -> None:
    here = world(late=True, slots=16, max_step_tokens=4, max_sequences=2)
    here.open(0, ONE + TWO + [7])
    here.run()
    assert here.memory is not None
    states = here.memory.directory["state"]
    here.extend(0, [8, 9, 10, 11])
    for _ in range(3):
        here.step()
        for slot in np.nonzero(states == SlotState.READY)[0].tolist():
            assert xxh3_64_intdigest(here.memory.payload(slot)) == here.memory.record(slot).digest
    away(here, 0)
    here.reply(0, 3)
    assert here.scheduler.statistics()["host_damaged"] == 0


def test_moves_of_a_step_that_failed_are_not_trusted() -> None:
    here = world(slots=16, max_step_tokens=32)
    here.open(0, ONE + TWO + [7])
    here.reply(0, 2)
    away(here, 0)
    here.open(1, [LAUNCH_BOMB, 7])
    here.generate(1, 4)
    here.generate(0, 4)  # restored in the step that never runs
    here.open(2, ONE + TWO + [9])
    here.run()
    here.reply(2, 4)
    assert here.scheduler.counters.isolations > 0


def test_saves_of_a_step_that_failed_are_not_found() -> None:
    here = world(slots=16, depth=1, max_step_tokens=32)
    here.open(0, ONE + TWO + [7])
    here.step()  # its blocks are sealed, and saved by the next step, which never runs
    here.open(1, [LAUNCH_BOMB, 7])
    here.generate(1, 4)
    here.run()
    away(here, 0)
    here.reply(0, 4)
    assert here.scheduler.counters.isolations > 0 and work_of(here, 0).recomputed > 0


def test_sessions_that_evict_each_other_prefill_only_what_is_new() -> None:
    """A pool for one at a time, three of them by turns; the second tier holds all."""
    here = world(blocks=6, max_context=24, slots=40)
    lengths = {}
    for seq in range(3):
        here.open(seq, [seq * 10 + 1, *ONE])
        here.reply(seq, 3)
        lengths[seq] = 7
    for round_ in range(3):
        for seq in range(3):
            here.extend(seq, [70 + round_])
            here.reply(seq, 3)
            work = work_of(here, seq)
            assert (work.prefilled, work.recomputed) == (2, 0)
            assert work.host + work.resident == lengths[seq]
            lengths[seq] += 4
    assert here.scheduler.statistics()["restored"] > 0


def test_without_room_below_blocks_are_dropped_and_nothing_waits() -> None:
    here = world(blocks=6, max_context=24, slots=2)
    for seq in range(3):
        here.open(seq, [seq * 10 + 1, *ONE, *TWO])
        here.reply(seq, 4)
    for seq in range(3):
        here.extend(seq, [70])
        here.reply(seq, 4)
    assert here.scheduler.statistics()["host_dropped"] > 0


def test_a_sequence_closed_without_keeping_is_not_found_below() -> None:
    here = world(slots=16)
    here.open(0, ONE + TWO + [7])
    here.reply(0, 2)
    here.run()
    here.close(0, keep_kv=False)
    here.run()
    assert here.scheduler.statistics()["host_records"] == 0
    here.open(1, ONE + TWO + [7])
    here.reply(1, 2)
    assert work_of(here, 1).host == 0


def test_tenants_share_no_slots() -> None:
    here = world(slots=16)
    here.open(0, ONE + TWO + [7], salt=b"a")
    here.reply(0, 2)
    away(here, 0)
    here.open(1, ONE + TWO + [7], salt=b"b")
    here.reply(1, 2)
    assert work_of(here, 1).host == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_what_the_host_tier_gave_up_goes_down_again_when_the_device_gives_it_up(depth: int) -> None:
    """Two tiers that do not hold the same: eight slots are enough for what is on the device no more."""
    here = world(depth=depth, slots=8)
    here.open(0, ONE + TWO + [7])
    here.reply(0, 6)
    here.run()
    for key in here.sequence(0).keys:
        here.scheduler.tiers.host.drop(key)  # as for want of room
    here.evict(0)
    here.open(1, [*range(100, 140)])
    here.reply(1, 8)
    here.open(2, [*range(150, 170)])
    here.reply(2, 8)  # blocks of the first are handed out in the very plan that saves them
    here.run()
    assert all(here.scheduler.pool.index.here.get(key) is None for key in here.sequence(0).keys)
    here.extend(0, [8])
    here.reply(0, 2)
    assert work_of(here, 0).host > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_kv_of_closed_sessions_pushes_nothing_out_of_a_full_host_tier(depth: int) -> None:
    """Ten slots for a session that left the device; many others come, are closed, and leave it too."""
    here = world(depth=depth, slots=10)
    here.open(0, ONE + TWO + THREE + FOUR + [7])
    here.reply(0, 6)
    away(here, 0)
    for seq in range(1, 6):
        here.open(seq, [*range(seq * 40, seq * 40 + 30)])
        here.reply(seq, 2)
        here.run()
        here.close(seq)
    flood(here)
    here.run()
    here.extend(0, [8])
    here.reply(0, 2)
    work = work_of(here, 0)
    assert (work.host, work.recomputed) == (22, 0)


def test_a_step_that_fails_half_way_changes_no_slot_that_is_used_again() -> None:
    """Its saves are under way when a later call is refused; then the disk fills a slot that they had."""
    failed = 0
    for call in range(8):
        numbers = {"blocks": 16, "max_context": 48, "block_tokens": 4, "max_step_tokens": 8, "depth": 2}
        settings = SchedulerSettings(vocab_size=259, max_sequences=4, **numbers)
        disk = FakeDisk(Random(3))
        here = World(settings, memory=fake_memory(5, 4), disk=disk, late=True, make=LATE)
        here.open(0, ONE + TWO + [7])
        here.reply(0, 3)
        here.settle(0, disk=True)
        here.run()
        while here.following:
            here.step()
        here.open(1, THREE + FOUR + [7])
        here.reply(1, 3)
        here.device.doomed = call
        here.step()  # of saves alone
        failed += here.engine.statistics()["isolations"]
        if here.engine.statistics()["isolations"]:
            assert not any(stream.queue for stream in here.device.streams), f"call {call}: copies still run"
        here.stage(0)
        while here.following:
            here.step()
        here.reply(1, 3)
        here.device.synchronize()  # what is still under way comes now
        away(here, 0)
        here.reply(0, 3)
        assert here.scheduler.statistics()["host_damaged"] == 0, f"call {call}"
    assert failed > 3


LATE = partial(device_engine, registered=True, beside=True)
"""A device on which nothing runs before it must."""


@pytest.mark.parametrize("at_once", [1, 256])
def test_a_turn_waits_for_its_own_blocks_and_holds_up_nobody(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "AT_ONCE", at_once)
    here = world(slots=16, blocks=24, late=True, make=LATE)
    here.open(0, ONE + TWO + [7])
    here.reply(0, 3)
    away(here, 0)
    here.run()
    here.open(1, [*THREE, 7])
    here.generate(1, 30)
    here.step()
    here.extend(0, [8, 9])
    here.generate(0, 3)
    here.step()
    for _ in range(6):
        before = len(here.beings[1].shadow.tokens)
        here.step()
        assert len(here.beings[1].shadow.tokens) == before + 1 and here.moving
        assert 0 not in here.flying(), "its row would keep the other one waiting"
    here.device.synchronize()
    here.run()
    assert (work_of(here, 0).host, work_of(here, 0).prefilled) == (11, 3)


def test_a_turn_that_runs_alone_in_its_step_waits_for_its_blocks_there() -> None:
    """As after a failure: it is known at once which sequence failed."""
    here = world(slots=16, late=True, make=LATE)
    here.open(0, ONE + TWO + [7, LAUNCH_BOMB])
    here.run()
    away(here, 0)
    here.run()
    here.generate(0, 3)
    here.run()
    assert here.ended[0].error


def sound(here: World) -> int:
    """How many records the host tier has; the bytes of all are those that were hashed."""
    tier = here.scheduler.tiers.host
    for slot in tier.here.values():
        assert xxh3_64_intdigest(tier.memory.payload(slot)) == tier.memory.record(slot).digest
    return len(tier.here)


def test_a_record_is_found_once_all_its_bytes_are_in_their_slot() -> None:
    here = world(slots=16, late=True, make=LATE)
    here.open(0, ONE + TWO + [7])
    here.reply(0, 3)
    here.settle(0)
    here.step()
    assert here.moving and not sound(here)
    here.run()
    assert sound(here) == 3


def test_so_is_one_of_a_step_that_runs_alone_after_a_failure() -> None:
    here = world(slots=16, late=True, make=LATE)
    here.open(0, ONE + TWO + [7])
    here.run()
    block, revoke = here.sequence(0).table.held[0], here.scheduler.revoke
    save = partial(here.scheduler._transfers.save, b"k" * 16, block, 4)
    vars(here.scheduler)["revoke"] = lambda plans, now: (revoke(plans, now), save())[0]
    here.generate(0, 3)
    here.device.doomed = 0
    here.run()
    assert here.scheduler.counters.isolations == 1 and b"k" * 16 in here.scheduler.tiers.host.here
    assert sound(here) > 1


def test_moves_of_which_it_is_not_known_whether_they_were_made_are_dropped() -> None:
    """As where the device refuses to tell: what they were to fill is not found or used, and filled again."""
    here = world(slots=16, late=True, make=LATE)
    here.open(0, ONE + TWO + [7])
    here.reply(0, 3)
    here.settle(0)
    here.step()
    here.device.refuse(0)
    here.run()
    assert 0 < sound(here) < 3, "of several plans the first was lost"
    here.reply(0, 3)
    away(here, 0)
    here.run()
    assert sound(here) == 4
    before = here.scheduler.statistics()
    here.generate(0, 3)
    here.step()
    here.device.refuse(0)
    here.run()
    after = here.scheduler.statistics()
    assert [after[name] - before[name] for name in ("host_loaded", "restored")] == [4, 2 * 14]
    assert here.ended[0].finish and not after["host_damaged"]
