"""KV on disk: when it goes there, and turns that wait for it while others run; on the fake device and disk."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.runtime.kv_placement.costs import Costs
from holdfast.runtime.kv_placement.placement import IDLE_SECONDS
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import Work
from holdfast.tests.runtime.fakes import FakeDisk, Willing, fake_memory
from holdfast.tests.runtime.worlds import VOCAB, World

PROMPT = list(range(30, 43))


def shelved(slots: int = 40, depth: int = 2) -> World:
    settings = SchedulerSettings(
        blocks=16,
        vocab_size=VOCAB,
        max_context=48,
        block_tokens=4,
        max_step_tokens=8,
        max_sequences=4,
        depth=depth,
    )
    return World(settings, memory=fake_memory(slots, 4), disk=FakeDisk(Random(1)))


def down(here: World) -> None:
    """Let everything go to disk that is on its way there."""
    here.run()
    while here.scheduler.tiers.busy:
        here.step()


def settle(here: World, seq: int) -> None:
    here.run()
    here.settle(seq, disk=True)
    shelve(here, seq)


def shelve(here: World, seq: int) -> None:
    for _ in range(10):  # what the disk refuses is asked again
        down(here)
        here.to_disk(seq)


def begin_anew(here: World) -> None:
    """Another machine with the same disk."""
    here.memory = fake_memory(40, 4)
    here.restart()


def work_of(here: World, seq: int) -> Work:
    work = here.ended[seq].work
    assert work is not None
    return work


@pytest.mark.parametrize("depth", [1, 2])
def test_a_turn_waits_for_the_disk_and_computes_only_what_is_new(depth: int) -> None:
    here = shelved(depth=depth)
    here.open(0, PROMPT)
    said = here.reply(0, 6)
    settle(here, 0)
    assert here.state(0).computed == 0
    begin_anew(here)
    assert here.disk is not None
    here.disk.chance = Random(4)
    here.open(0, [*PROMPT, *said, 7])
    here.reply(0, 4)
    work = work_of(here, 0)
    assert work.disk > 0 and work.restore_seconds > 0
    assert work.disk + work.host + work.resident + work.prefilled == 20


def test_a_session_longer_than_the_host_tier_comes_up_through_it_piece_by_piece() -> None:
    here = shelved()
    here.open(0, PROMPT)
    said = here.reply(0, 25)
    settle(here, 0)
    here.memory = fake_memory(4, 4)  # another machine with the same disk: 4 slots for 9 full blocks
    here.restart()
    assert here.disk is not None
    here.disk.chance = Willing()
    here.open(0, [*PROMPT, *said, 7])
    here.reply(0, 4)
    work = work_of(here, 0)
    assert work.disk > 30, "all of it, far more than the slots of the host tier hold"
    assert work.disk + work.host + work.resident + work.prefilled == 39


@pytest.mark.parametrize("extra", range(4), ids=lambda extra: f"{extra} tokens in the last block")
@pytest.mark.parametrize("how", ["settled", "evicted", "opened again", "in the next engine"])
def test_a_sequence_closed_without_keeping_is_on_no_tier(how: str, extra: int) -> None:
    here = shelved()
    here.open(0, PROMPT)
    said = here.reply(0, 6 + extra)
    (shelve if how == "evicted" else settle)(here, 0)
    assert here.disk is not None
    kept = set(here.disk.records)
    if how == "evicted":
        here.evict(0)  # its blocks are in the prefix cache, too, and it holds none of them
    elif how != "settled":
        here.close(0)
        if how == "in the next engine":
            begin_anew(here)
        here.open(0, [*PROMPT, *said])
    here.close(0, keep_kv=False)
    down(here)
    assert len(kept) > 3 and not here.disk.records and kept <= here.disk.dropped, "and its bytes go at once"
    here.open(1, [*PROMPT, *said, 7])
    here.reply(1, 2)
    work = work_of(here, 1)
    assert work.prefilled == len(PROMPT) + len(said) + 1


def test_what_comes_up_gives_way_on_the_device_to_a_turn_that_runs() -> None:
    here = shelved(depth=1)
    here.open(0, PROMPT)
    said = here.reply(0, 25)
    settle(here, 0)
    here.memory = fake_memory(8, 4)
    here.restart()
    assert here.disk is not None
    here.disk.chance = Willing()
    here.open(0, [*PROMPT, *said, 7])
    here.generate(0, 2)
    for _ in range(200):
        if len(here.sequence(0).table) > 4:
            break
        here.step()
    assert 0 in here.restoring() and len(here.sequence(0).table) > 4
    poll, here.disk.poll = here.disk.poll, lambda now: []  # type: ignore[method-assign]
    here.open(1, list(range(100, 140)))
    assert len(here.reply(1, 5)) == 5, "it needs more blocks than the other leaves"
    here.disk.poll = poll  # type: ignore[method-assign]
    here.run()
    assert 0 in here.ended


def test_nothing_more_is_asked_of_the_disk_for_a_turn_that_waits_no_longer() -> None:
    here = shelved()
    here.open(0, PROMPT)
    said = here.reply(0, 25)
    settle(here, 0)
    here.memory = fake_memory(8, 4)
    here.restart()
    here.open(0, [*PROMPT, *said, 7])
    here.generate(0, 2)
    assert here.disk is not None
    asked = here.disk.asked
    assert 0 < asked < len(here.disk.records)
    here.stop(0)
    here.step()
    while here.scheduler.statistics()["fetching"]:
        here.step()
    assert here.disk.asked == asked
    here.reply(0, 3)


def test_others_run_while_a_turn_waits_and_it_holds_nothing() -> None:
    here = shelved()
    here.open(0, PROMPT)
    said = here.reply(0, 6)
    settle(here, 0)
    begin_anew(here)
    assert here.disk is not None
    poll, here.disk.poll = here.disk.poll, lambda now: []  # type: ignore[method-assign]
    here.open(0, [*PROMPT, *said, 7])
    here.generate(0, 4)
    assert here.restoring() == [0] and not len(here.sequence(0).table)
    here.open(1, [3, *PROMPT])
    assert len(here.reply(1, 5)) == 5
    assert here.restoring() == [0]
    here.disk.poll = poll  # type: ignore[method-assign]
    here.run()
    assert 0 in here.ended


def test_a_turn_that_waits_for_a_disk_that_never_answers_is_computed() -> None:
    here = shelved()
    here.open(0, PROMPT)
    said = here.reply(0, 6)
    settle(here, 0)
    begin_anew(here)
    assert here.disk is not None
    here.disk.poll = lambda now: []  # type: ignore[method-assign]
    here.open(0, [*PROMPT, *said, 7])
    here.reply(0, 4)
    assert work_of(here, 0).disk == 0 and work_of(here, 0).prefilled == 20


def test_a_turn_stopped_or_closed_while_it_waits_is_over() -> None:
    here = shelved()
    here.open(0, PROMPT)
    said = here.reply(0, 6)
    settle(here, 0)
    begin_anew(here)
    for seq in (0, 1):
        here.open(seq, [*PROMPT, *said, 7])
        here.generate(seq, 4)
        assert seq in here.restoring()
    here.stop(0)
    here.close(1)
    here.run()
    here.reply(0, 3)


def test_what_a_turn_waited_for_comes_up_also_when_the_turn_is_stopped() -> None:
    """It is not computed a second time: the next turn finds it."""
    here = shelved(depth=1)
    here.open(0, PROMPT)
    said = here.reply(0, 6)
    settle(here, 0)
    begin_anew(here)
    here.open(0, [*PROMPT, *said, 7])
    here.generate(0, 4)
    assert here.restoring() == [0]
    before = here.scheduler.counters.prefilled
    here.stop(0)
    while here.scheduler.statistics()["fetching"]:
        here.step()
    here.run()
    assert here.scheduler.counters.prefilled - before < 8
    here.reply(0, 3)
    assert work_of(here, 0).prefilled < 8 and work_of(here, 0).recomputed == 0


def test_an_idle_sequence_goes_to_disk_by_itself_and_a_closed_one_at_once() -> None:
    here = shelved()
    assert here.disk is not None
    here.open(0, PROMPT)
    here.reply(0, 6)
    here.run()
    due = here.due()
    assert due is not None and 0 < due <= IDLE_SECONDS and not len(here.disk)
    here.disk.time += IDLE_SECONDS
    down(here)
    assert len(here.disk) > 0
    kept = len(here.disk)
    here.open(1, [9, *PROMPT])
    here.reply(1, 6)
    here.run()
    here.close(1)
    down(here)
    assert len(here.disk) > kept


def test_what_is_settled_before_it_was_saved_goes_to_disk_all_the_same() -> None:
    here = shelved(depth=1)
    assert here.disk is not None
    here.disk.chance = Random(4)
    here.open(0, PROMPT)
    here.reply(0, 4)  # 16 of 17 tokens have KV; the last block has just become full
    here.settle(0, disk=True)
    down(here)
    keys = here.sequence(0).keys[:4]
    assert len(keys) == 4 and all(key in here.disk for key in keys)


def test_a_host_tier_that_is_nearly_full_sends_down_what_it_would_drop() -> None:
    here = shelved(slots=12)
    assert here.disk is not None
    for seq in range(6):
        here.open(seq, [seq + 1, *PROMPT])
        here.reply(seq, 3)
        here.run()
    assert len(here.disk) > 0


def test_a_staged_sequence_is_computed_when_its_turn_begins() -> None:
    here = shelved()
    here.open(0, PROMPT)
    here.reply(0, 6)
    settle(here, 0)
    begin_anew(here)
    here.open(0, PROMPT)
    here.run()
    here.evict(0)
    here.stage(0)
    while here.scheduler.statistics()["fetching"]:
        here.step()
    here.run()
    assert here.state(0).computed == len(PROMPT) - 1
    here.reply(0, 3)
    assert work_of(here, 0).restore_seconds >= 0


SLOW_DISK = Costs(copy=1e9, token=1e-4, history=0.0, fetch=64 / 4e-4)
"""A block of 4 tokens and 64 bytes takes as long from disk as it takes to compute."""


def test_a_slow_disk_and_the_device_meet_in_the_middle() -> None:
    here = shelved(depth=1)
    here.open(0, PROMPT)
    said = here.reply(0, 6)
    settle(here, 0)
    begin_anew(here)
    assert here.disk is not None
    here.measured(SLOW_DISK)
    records, here.disk.records = here.disk.records, {}  # nothing is fetched before the turn
    here.open(0, [*PROMPT, *said, 7])
    here.disk.records = records
    here.generate(0, 4)
    assert here.sequence(0).from_tiers.compute_until == 8 and not here.restoring()
    met = False
    while here.beings[0].turn is not None:  # it stands still where it meets what has not come
        step = here.engine.step()
        met |= here.state(0).computed == 8
        for row in step.rows if step else ():
            here.check_row(row)
    work = work_of(here, 0)
    assert met and work.disk >= 8 and work.prefilled + work.disk == 20 and work.restore_seconds > 0


def test_nothing_more_is_asked_for_a_turn_that_is_closed_before_it_meets_what_comes() -> None:
    here = shelved(depth=1)
    here.open(0, PROMPT)
    said = here.reply(0, 25)
    settle(here, 0)
    here.memory = fake_memory(4, 4)
    here.restart()
    assert here.disk is not None
    here.disk.chance = Willing()
    here.measured(SLOW_DISK)
    records, here.disk.records = here.disk.records, {}
    here.open(0, [*PROMPT, *said, 7])
    here.disk.records = records
    here.generate(0, 2)
    assert here.sequence(0).from_tiers.compute_until
    asked = here.disk.asked
    assert 0 < asked < len(records)
    here.close(0)
    for _ in range(4):
        here.step()
    assert not here.scheduler.statistics()["fetching"]
    assert here.disk.asked == asked


def test_a_disk_that_is_slower_than_computing_is_not_asked() -> None:
    here = shelved()
    here.open(0, PROMPT)
    said = here.reply(0, 6)
    settle(here, 0)
    begin_anew(here)
    assert here.disk is not None
    here.measured(Costs(copy=1e9, token=1e-9, history=0.0, fetch=1.0))
    records, here.disk.records = here.disk.records, {}
    here.open(0, [*PROMPT, *said, 7])
    here.disk.records = records
    here.generate(0, 4)
    assert not here.restoring() and here.sequence(0).from_tiers.compute_until is None
    here.run()
    assert work_of(here, 0).disk == 0 and work_of(here, 0).prefilled == 20
    assert work_of(here, 0).chosen >= 16, "full blocks that lay on disk"
    here.reply(0, 2)
    assert work_of(here, 0).chosen == 0
