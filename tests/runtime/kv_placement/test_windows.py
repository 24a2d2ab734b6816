"""KV groups with windows: what is given back, what is found again, and what has to be computed again.

Each token that the fake device draws is another one if a group with a window has not what the token sees.
"""

from __future__ import annotations

from random import Random

import pytest

from holdfast.kvstore.groups import Windows
from holdfast.runtime.verbs import Work
from holdfast.tests.kvstore.host.records import held
from holdfast.tests.runtime.worlds import World, world


def small(blocks: int = 400, **more: object) -> World:
    """Blocks of 4 tokens; three groups, two of which see 12 tokens."""
    numbers = {
        "blocks": blocks,
        "max_context": 200,
        "windows": (12, None, 12),
        "max_step_tokens": 16,
        "depth": 1,
    }
    return world(**{**numbers, **more})  # type: ignore[arg-type]


def some(count: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(250) for _ in range(count)]


def work_of(here: World, seq: int) -> Work:
    work = here.ended[seq].work
    assert work is not None
    return work


def flood(here: World, blocks: int) -> None:
    """Other sequences hold nearly so many blocks at once, all within their windows; then they are gone."""
    seqs = range(100, 100 + blocks // 9)
    for seq in seqs:
        here.open(seq, some(12, seed=seq), salt=b"other")
    here.run()
    for seq in seqs:
        here.close(seq, keep_kv=False)


def test_a_prompt_keeps_no_more_than_its_windows() -> None:
    here, windows = small(), Windows((12, None, 12), 4)
    here.open(0, some(160))
    here.generate(0, 4)
    while (computed := here.state(0).computed) < 160:
        assert here.sequence(0).table.blocks <= windows.blocks(computed) + 3 * 4, "and a chunk"
        here.step()
    here.run()
    held = here.sequence(0).table.blocks
    assert held <= windows.blocks(164) + 2
    assert here.scheduler.statistics()["pool_held"] == held


@pytest.mark.parametrize("kept", [60, 62, 75, 88])
def test_an_interrupt_computes_nothing_again(kept: int) -> None:
    """The sequence holds all that it needs then: a turn that takes every other block changes nothing."""
    here = small(150)
    here.open(0, some(60))
    here.generate(0, 40)
    here.run(32)
    assert len(here.beings[0].shadow.tokens) > 88
    here.stop(0, keep=kept)
    flood(here, here.scheduler.pool.available)
    here.extend(0, some(3, seed=kept))
    here.reply(0, 2)
    assert not work_of(here, 0).recomputed


@pytest.mark.parametrize("at", [64, 67])
@pytest.mark.parametrize("fork", [False, True])
def test_from_a_turn_s_end_nothing_is_computed_again(at: int, fork: bool) -> None:
    """On the device other blocks are given up before, below it they are saved."""
    for slots, more in ((None, 0), (400, 0), (400, 150)):
        here = small(150, slots=slots)
        here.open(0, some(at - 2))
        here.reply(0, 3)
        here.extend(0, some(60, seed=1))
        here.reply(0, 3)
        if more:
            here.settle(0)
            flood(here, more)
        if fork:
            here.fork(0, [1], at=at)
        else:
            here.truncate(0, at)
        here.extend(fork, some(3, seed=2))
        here.reply(fork, 3)
        work = work_of(here, fork)
        assert work.prefilled <= 4 and not work.recomputed, (slots, more, work)


def test_what_a_turn_s_end_needs_goes_after_all_else_that_is_behind_a_window() -> None:
    here = small(150)
    here.open(0, some(62))
    here.reply(0, 3)
    here.extend(0, some(60, seed=1))
    here.reply(0, 3)
    flood(here, here.scheduler.pool.available - 12)
    here.truncate(0, 64)
    here.extend(0, some(3, seed=2))
    here.reply(0, 3)
    assert not work_of(here, 0).recomputed


def test_what_is_gone_behind_a_window_is_computed_again() -> None:
    here = small(150)
    here.open(0, some(100))
    here.reply(0, 3)
    flood(here, here.scheduler.pool.available)
    here.truncate(0, 50)
    here.extend(0, some(3, seed=2))
    here.reply(0, 3)
    assert work_of(here, 0).recomputed > 40


def test_a_shared_beginning_is_computed_twice_at_most() -> None:
    here, prefix = small(150), some(80)
    prefilled = []
    for seq in range(4):
        here.open(seq, prefix + some(20, seed=1 + seq))
        here.reply(seq, 2)
        flood(here, here.scheduler.pool.available)
        work = work_of(here, seq)
        prefilled.append(work.prefilled + work.recomputed)
        here.close(seq)
    assert prefilled[0] == 100 and prefilled[1] > 90 and max(prefilled[2:]) <= 24, prefilled


@pytest.mark.parametrize("slots", [None, 400])
@pytest.mark.parametrize("windows", [(12, None, 12), (12,), (12, 12)])
def test_a_beginning_that_was_found_once_is_kept(windows: tuple[int | None, ...], slots: int | None) -> None:
    """Also if no group without a window tells what two sequences share, and if it comes from the host tier."""
    here, prefix = small(150, windows=windows, slots=slots), some(80)
    for seq in range(4):
        here.open(seq, prefix + some(40, seed=1 + seq))
        here.reply(seq, 2)
        if seq:
            assert work_of(here, seq).prefilled <= 44, seq
            flood(here, here.scheduler.pool.available - (0 if slots else 12))


@pytest.mark.parametrize("windows", [(12, None, 12), (12,), (12, 12)])
def test_a_shared_beginning_is_marked_also_if_it_comes_from_the_host_tier(
    windows: tuple[int | None, ...],
) -> None:
    here, prefix = small(150, windows=windows, slots=400), some(80)
    here.open(0, prefix)
    here.reply(0, 2)
    here.settle(0)
    here.run()
    here.close(0)
    here.open(1, prefix + some(40, seed=1))
    here.reply(1, 2)
    assert work_of(here, 1).host >= 12 and 80 in here.sequence(1).marks


@pytest.mark.parametrize("windows", [(12, None), (12,)])
def test_what_is_computed_is_on_the_device_though_more_is_to_come(windows: tuple[int | None, ...]) -> None:
    here = small(windows=windows)
    here.open(0, some(160))
    here.generate(0, 1)
    here.run(4)
    assert 60 <= here.state(0).computed < 100
    here.locate(0)


def test_blocks_behind_a_window_go_before_those_that_others_want() -> None:
    here = small(150)
    here.open(0, some(40, seed=3))
    here.reply(0, 2)
    here.close(0)
    here.open(1, some(120))
    here.reply(1, 2)
    here.open(2, some(40, seed=3) + some(5))
    here.reply(2, 2)
    assert work_of(here, 2).resident >= 36


def with_tails_of_another() -> World:
    """Sequence 1 has the tokens of a closed one that had several turns. The host tier has their ends."""
    here = small(150, slots=400)
    here.open(0, some(61))
    for seed in range(1, 4):
        here.reply(0, 3)
        here.extend(0, some(30, seed=seed))
    here.reply(0, 3)
    tokens = here.beings[0].shadow.tokens
    here.settle(0)
    here.run()
    here.close(0)
    here.open(1, tokens)
    here.run()
    assert len(here.scheduler.tiers.host)
    return here


def test_a_sequence_that_is_erased_leaves_no_record_of_its_turns_ends() -> None:
    """Those of a sequence before it with the same tokens, which is closed, are its own, too."""
    here = with_tails_of_another()
    here.close(1, keep_kv=False)
    while (here.scheduler.due(here.time) or 1) < 1:  # a few at a time: steps go on meanwhile
        here.step()
    assert not len(here.scheduler.tiers.host)


def test_an_engine_that_ends_erases_what_is_left_to_erase() -> None:
    here = with_tails_of_another()
    here.close(1, keep_kv=False)
    assert len(here.scheduler.tiers.host)
    here.engine.leave()
    assert not len(here.scheduler.tiers.host)


def test_blocks_of_all_groups_count_for_the_tenant_that_computed_them() -> None:
    here = small(150, slots=400)
    for seq, salt in enumerate((b"one", b"two", b"one")):
        here.open(seq, some(61, seed=seq), salt=salt)
        here.reply(seq, 3)
        here.close(seq)
        flood(here, here.scheduler.pool.available)
    host = here.scheduler.tiers.host
    here.open(9, some(9), salt=b"two")
    tenants = {here.sequence(9).tenant}
    here.open(8, some(9), salt=b"one")
    tenants.add(here.sequence(8).tenant)
    here.open(7, some(9), salt=b"other")
    assert held(host).keys() <= {*tenants, here.sequence(7).tenant} and tenants <= held(host).keys()


def test_a_lease_covers_all_or_nothing() -> None:
    here = small(150, lease_share=0.3)
    here.open(0, some(100))
    here.reply(0, 2)
    assert here.lease(0).tokens == 102
    here.open(1, some(100, seed=1))
    here.reply(1, 2)
    assert here.lease(1).tokens == 0
