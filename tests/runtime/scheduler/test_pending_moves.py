"""Stage and settle that are waited for: the one answer, what it says, and that it always comes."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from holdfast.kvstore.tier import Record
from holdfast.runtime.scheduler.pending_moves import AGAIN_SECONDS, PATIENCE_SECONDS
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import Moved, Settle, Stage
from holdfast.tests.runtime.fakes import FakeDisk, fake_memory
from holdfast.tests.runtime.worlds import VOCAB, World

PROMPT = list(range(30, 43))


def one(*, slots: int | None = 40, disk: bool = False) -> World:
    """A sequence of 19 tokens, 18 of which have KV: four blocks and a tail of two."""
    numbers = {"blocks": 16, "max_context": 48, "block_tokens": 4, "max_step_tokens": 8, "max_sequences": 4}
    memory = None if slots is None else fake_memory(slots, 4)
    here = World(
        SchedulerSettings(vocab_size=VOCAB, **numbers),
        memory=memory,
        disk=FakeDisk(Random(1)) if disk else None,
    )
    here.open(0, PROMPT)
    here.reply(0, 6)
    return here


def moved(here: World, verb: Stage | Settle) -> Moved:
    assert here.engine.apply(verb) is None
    for _ in range(1000):
        here.time += 0.01
        here.engine.step()
        for reply in here.engine.answers():
            assert reply.request == verb.request and reply.moved is not None
            return reply.moved
    raise AssertionError("no answer")


def places(moved: Moved) -> tuple[int, int, int, int]:
    return moved.device, moved.host, moved.disk, moved.recomputed


def test_down_to_the_host_and_up_again() -> None:
    here = one()
    assert places(moved(here, Settle(1, 0))) == (0, 18, 0, 0)
    assert here.scheduler.pool.statistics()["free"] == 16, "nothing of it is left on the device"
    assert places(moved(here, Stage(2, 0))) == (0, 18, 0, 0)
    assert here.state(0).computed == 18
    assert places(moved(here, Stage(3, 0))) == (18, 0, 0, 0)
    here.reply(0, 2)
    assert here.ended[0].work.prefilled == 1  # type: ignore[union-attr]


def test_down_to_the_disk_and_up_again() -> None:
    here = one(disk=True)
    assert here.disk is not None and here.memory is not None
    here.disk.chance = Random(5)
    here.lease(0, ttl=1e4)
    down = moved(here, Settle(1, 0, disk=True))
    assert places(down) == (0, 0, 18, 0) and down.seconds > 0
    assert here.scheduler.statistics()["host_records"] == 0, "its own lease does not hold it there"
    up = moved(here, Stage(2, 0))
    assert up.disk > 0 and sum(places(up)) == 18
    assert here.state(0).computed == 18


def test_what_another_lease_covers_stays_in_the_host_tier() -> None:
    here = one(disk=True)
    here.fork(0, [1], 16)
    here.lease(1, ttl=1e4)
    assert moved(here, Settle(1, 0, disk=True)).disk == 18
    assert here.scheduler.statistics()["host_records"] == 4


def test_without_tiers_it_stays_cached_on_the_device() -> None:
    here = one(slots=None)
    assert places(moved(here, Settle(1, 0, disk=True))) == (16, 0, 0, 2)
    assert places(moved(here, Stage(2, 0))) == (16, 0, 0, 2)


def test_blocks_that_others_hold_stay() -> None:
    here = one()
    here.fork(0, [1], 16)
    moved(here, Settle(1, 0))
    assert here.state(1).computed == 16
    assert here.scheduler.pool.statistics()["held"] == 4


@pytest.mark.parametrize("verb", [Stage(5, 0), Settle(5, 0, disk=True)])
def test_a_turn_or_a_close_in_between_ends_the_wait(verb: Stage | Settle) -> None:
    for close in (False, True):
        here = one(disk=True)
        assert here.disk is not None
        here.disk.poll = lambda now: []  # type: ignore[method-assign]
        assert here.engine.apply(verb) is None
        if close:
            here.close(0)
        else:
            here.generate(0, 3)
        here.engine.step()
        assert [reply.request for reply in here.engine.answers()] == [5]


def test_a_disk_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    here = one(disk=True)
    assert here.disk is not None
    here.disk.poll = lambda now: []  # type: ignore[method-assign]
    assert here.engine.apply(Settle(1, 0, disk=True)) is None
    here.engine.step()
    assert not here.engine.answers() and here.engine.due() is not None
    here.disk.time += PATIENCE_SECONDS
    here.engine.step()
    (reply,) = here.engine.answers()
    assert reply.moved is not None and reply.moved.disk == 0 and reply.moved.host == 18


def test_a_disk_that_refuses_is_not_asked_again_at_every_look() -> None:
    here = one(disk=True)
    assert here.disk is not None
    looks, asked = 100, Counter[bytes]()

    def refused(record: Record, slot: int, ticket: int, now: float) -> bool:
        asked[record.key] += 1
        return False

    here.disk.store = refused  # type: ignore[method-assign]
    here.disk.tick = 0.0
    assert here.engine.apply(Settle(1, 0, disk=True)) is None
    for _ in range(looks):
        here.disk.time += 2 * AGAIN_SECONDS / looks
        here.engine.step()
    assert not here.engine.answers() and asked and set(asked.values()) <= {2, 3}
