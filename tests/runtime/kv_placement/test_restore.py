"""Records in the page cache are read directly to the device, at once; on a fake disk and device."""

from __future__ import annotations

from random import Random

from holdfast.runtime.settings import SchedulerSettings
from holdfast.tests.runtime.fakes import FakeDisk, Willing, fake_memory
from holdfast.tests.runtime.worlds import VOCAB, World

PROMPT = list(range(30, 43))


def near(blocks: int = 16) -> World:
    settings = SchedulerSettings(
        blocks=blocks,
        vocab_size=VOCAB,
        max_context=48,
        block_tokens=4,
        max_step_tokens=8,
        max_sequences=4,
        depth=1,
    )
    return World(settings, memory=fake_memory(40, 4), disk=FakeDisk(Random(1), near=True))


def kept(here: World, seq: int) -> list[int]:
    """A conversation with KV on disk alone, all of it in the page cache; its tokens."""
    here.open(seq, PROMPT)
    said = here.reply(seq, 6)
    here.run()
    here.settle(seq, disk=True)
    for _ in range(10):  # what the disk refuses is asked again
        here.run()
        while here.scheduler.tiers.busy:
            here.step()
        here.to_disk(seq)
    here.memory = fake_memory(40, 4)
    here.restart()
    assert here.disk is not None
    here.disk.near = here.disk.readable  # type: ignore[method-assign]
    return [*PROMPT, *said]


def test_a_turn_finds_its_kv_at_the_first_sign_and_does_not_wait() -> None:
    here = near()
    tokens = kept(here, 0)
    here.open(0, tokens)
    assert here.state(0).computed == 18 and not here.staged(), "a tail of two, and before any step"
    here.reply(0, 4)
    work = here.ended[0].work
    assert here.disk is not None and work is not None
    assert (here.disk.came, here.disk.fetched) == (5, 0)
    assert (work.disk, work.prefilled, work.recomputed) == (18, 1, 0)


def test_what_cannot_be_read_comes_through_the_disk_process() -> None:
    here = near()
    tokens = kept(here, 0)
    assert here.disk is not None
    read, most = here.disk.read, iter([2])
    here.disk.read = lambda keys, blocks: read(keys[: next(most, 0)], blocks)  # type: ignore[method-assign]
    here.open(0, tokens)
    assert here.state(0).computed == 8 and 0 in here.staged()
    here.reply(0, 4)
    work = here.ended[0].work
    assert work is not None and here.disk.fetched > 0
    assert work.disk + work.prefilled + work.recomputed == 19


def test_what_says_it_is_of_another_length_is_computed_again() -> None:
    here = near()
    tokens = kept(here, 0)
    disk = here.disk
    assert disk is not None
    read = disk.read
    disk.read = lambda keys, blocks: [  # type: ignore[method-assign]
        4 + (at == 2) for at, _ in enumerate(read(keys, blocks))
    ]
    here.open(0, tokens)
    assert here.state(0).computed == 8
    here.reply(0, 4)
    work = here.ended[0].work
    assert work is not None and (work.disk, work.prefilled + work.recomputed) == (8, 11)


def test_what_is_not_in_memory_is_brought_there_and_goes_past_the_host_tier() -> None:
    here = near()
    tokens = kept(here, 0)
    assert here.disk is not None
    brought, here.disk.chance = here.disk.brought, Willing()
    here.disk.near = brought.__contains__  # type: ignore[method-assign]
    here.open(0, tokens)
    assert here.state(0).computed == 0 and 0 in here.staged()
    here.reply(0, 4)
    work = here.ended[0].work
    assert (here.disk.came, here.disk.fetched) == (5, 0)
    assert work is not None and (work.disk, work.prefilled, work.recomputed) == (18, 1, 0)


def test_a_block_that_is_still_to_be_saved_is_not_read_into() -> None:
    here = near(blocks=13)
    tokens = kept(here, 0)
    here.open(1, [200, 201, 202, 203, 204])
    here.reply(1, 2)
    here.settle(1)
    here.open(0, tokens)  # before any step, so that the tail's save has not gone out
    here.run()
    here.reply(1, 5)
    here.reply(0, 5)
