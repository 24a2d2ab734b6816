"""Turns through the scheduler: chunks beside decodes, overlap, ends, work accounts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from holdfast.runtime.plan import Plan
from holdfast.runtime.verbs import Finish, Opening, Sampling, Work
from holdfast.tests.runtime.fake_device import device_engine
from holdfast.tests.runtime.fakes import fake_engine
from holdfast.tests.runtime.worlds import LATE_BOMB, LAUNCH_BOMB, World, world

STORY = list(range(30, 78))
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def stop_at(here: World, seq: int, count: int) -> tuple[int, ...]:
    """The id that greedy sampling comes to after ``count`` tokens, so that it can be made a stop id."""
    shadow = here.beings[seq].shadow.copy(len(here.beings[seq].shadow.tokens))
    for _ in range(count):
        shadow.extend([shadow.next()])
    assert shadow.tokens[-1] not in shadow.tokens[-count:-1], "this story repeats itself too early"
    return (shadow.tokens[-1],)


@DEPTHS
@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 64])
def test_a_turn_samples_what_the_whole_context_says(depth: int, chunk: int) -> None:
    here = world(depth=depth, max_step_tokens=chunk, max_sequences=1)
    here.open(0, STORY[:21])
    assert len(here.reply(0, 9)) == 9
    assert here.ended[0].finish is Finish.LENGTH


@DEPTHS
def test_prompts_are_cut_into_chunks_beside_decodes(depth: int) -> None:
    here = world(depth=depth, max_step_tokens=6)
    here.device.keep_plans = True
    here.open(0, STORY[:3])
    here.generate(0, 12)
    here.step()
    here.open(1, STORY[20:40])
    here.generate(1, 3)
    here.run()
    mixed = [plan for plan in here.device.plans if len(plan) == 2]
    assert mixed[0].counts.tolist() == [1, 5], "the decode keeps its token, the prompt gets the rest"
    assert all(plan.size <= 6 for plan in here.device.plans)
    assert here.steps <= 12 + depth, "the decode never waited for the prompt"


@DEPTHS
@pytest.mark.parametrize("parent", [None, 0])
def test_a_turn_that_begins_its_sequence_takes_no_step_more(depth: int, parent: int | None) -> None:
    """Its prompt is computed in the step that samples its first token, whenever the engine looks for work."""
    here = world(depth=depth, max_step_tokens=32)
    here.device.keep_plans = True
    here.open(0, STORY[:12])
    here.run()
    del here.device.plans[:], here.device.rows[:]
    at = 0 if parent is None else 10
    here.generate(1, 3, tokens=STORY[at:21], opening=Opening(parent=parent, at=at))
    here.run()
    told = [(row.count, row.sampling is not None) for rows in here.device.rows for row in rows]
    found = 8 if parent is None else 10  # of a sequence of its own whole blocks, of its parent what it has
    assert told == [(21 - found, True), (1, True), (1, True)]
    assert here.ended[1].work == Work(21 - found, 0, found, 3)


def test_overlapped_steps_are_fed_by_the_one_before() -> None:
    here = world(depth=2)
    here.device.keep_plans = True
    here.open(0, STORY[:4])
    here.open(1, STORY[8:12])
    here.generate(0, 6)
    here.generate(1, 6)
    here.run()
    fed = [plan.fed.tolist() for plan in here.device.plans[1:]]
    assert fed == [[True, True]] * 5
    assert here.scheduler.counters.discarded == 0


@DEPTHS
def test_an_end_token_is_kept_and_what_ran_past_it_is_not(depth: int) -> None:
    here = world(depth=depth)
    here.open(0, STORY[:6])
    stop_ids = stop_at(here, 0, 5)
    assert here.reply(0, 20, stop_ids=stop_ids)[-1:] == list(stop_ids)
    here.run()
    assert here.ended[0].finish is Finish.STOP
    assert here.scheduler.counters.discarded == depth - 1
    assert here.state(0).computed == here.state(0).length - 1, "the end token is the pending one"
    here.extend(0, STORY[:3])
    here.reply(0, 4)


@DEPTHS
def test_the_context_ends_a_turn(depth: int) -> None:
    here = world(depth=depth, max_context=12)
    here.open(0, STORY[:9])
    assert len(here.reply(0, 40)) == 3
    assert here.ended[0].finish is Finish.CONTEXT
    here.generate(0, 1)  # refused, as the model says


def test_generated_from_counts_towards_the_limit() -> None:
    here = world()
    here.open(0, STORY[:5])
    assert len(here.reply(0, 7, generated_from=4)) == 3


@DEPTHS
def test_every_turn_prefills_what_is_new_and_no_more(depth: int) -> None:
    here = world(depth=depth, blocks=40, max_context=140)
    here.open(0, STORY[:10])
    length = 0
    for turn in range(6):
        new = len(here.beings[0].shadow.tokens) - length
        length = len(here.beings[0].shadow.tokens)
        sampled = here.reply(0, 5 + turn)
        pending = 1 if turn else 0
        expected = Work(
            prefilled=new + pending, recomputed=0, resident=length - new - pending, decoded=5 + turn
        )
        assert here.ended[0].work == expected
        length += len(sampled)
        here.extend(0, STORY[turn : turn + 7])
        if turn % 2:
            here.run()  # prefilled before the turn, counted in it all the same


@DEPTHS
def test_what_was_computed_and_removed_takes_nothing_from_what_was_there(depth: int) -> None:
    here = world(depth=depth, blocks=40)
    here.open(0, STORY[:10])
    here.reply(0, 4)
    here.extend(0, STORY[10:30])
    here.run()
    here.truncate(0, 14)
    here.extend(0, STORY[:3])
    here.reply(0, 2)
    assert here.ended[0].work == Work(prefilled=20 + 3, recomputed=0, resident=13, decoded=2)


def test_what_was_evicted_counts_as_computed_again() -> None:
    here = world(max_sequences=1)
    here.open(0, STORY[:10])
    here.reply(0, 4)
    here.evict(0)
    here.open(1, [99] * 47)  # takes the blocks that the eviction left in the prefix cache
    here.reply(1, 1)
    here.extend(0, [5, 6])
    here.reply(0, 2)
    work = here.ended[0].work
    assert work is not None and work.recomputed + work.resident == 13 and work.recomputed > 0
    assert work.prefilled == 3


def test_idle_sequences_are_prefilled_but_for_the_last_token() -> None:
    here = world()
    here.open(0, STORY[:20])
    here.run()
    assert here.state(0).computed == 19
    steps = here.steps
    here.reply(0, 1)
    assert here.steps - steps == 1, "the first token is one step away"


def test_turns_go_before_idle_prefill() -> None:
    here = world(depth=1, max_step_tokens=6)
    here.open(0, STORY[:30])
    here.open(1, STORY[30:40])
    here.generate(1, 3)
    here.step()
    assert (here.state(0).computed, here.state(1).computed) == (0, 6)
    here.step()
    assert (here.state(0).computed, here.state(1).computed) == (2, 10)
    here.run()


@DEPTHS
def test_a_seed_decides_by_position_alone(depth: int) -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    replies = []
    for chunk in (2, 8):
        here = world(depth=depth, max_step_tokens=chunk, max_sequences=2)
        here.open(0, STORY[:11])
        here.generate(0, 12, sampling=sampling)
        for round_ in range(6):
            here.step()
            if chunk == 8 and round_ % 2:
                here.evict(0)
        here.run()
        replies.append(here.beings[0].shadow.tokens)
    assert replies[0] == replies[1]
    here = world(depth=depth)
    here.open(0, STORY[:11])
    assert here.reply(0, 12, sampling=Sampling(temperature=1.0, seed=8)) != replies[0][11:]


def test_forced_preemption_changes_no_token() -> None:
    plain = world()
    plain.open(0, STORY[:9])
    expected = plain.reply(0, 25)
    for every in range(1, 5):
        here = world()
        here.open(0, STORY[:9])
        here.generate(0, 25)
        while here.beings[0].turn is not None:
            here.step()
            if here.steps % (every + 3) == 0:
                here.evict(0)
        assert here.beings[0].shadow.tokens[9:] == expected


def test_sequences_do_not_disturb_each_other() -> None:
    here = world(max_sequences=4, blocks=48, depth=2)
    for seq in range(4):
        here.open(seq, STORY[seq : 9 + 2 * seq])
    alone = []
    for seq in range(4):
        there = world()
        there.open(0, STORY[seq : 9 + 2 * seq])
        alone.append(there.reply(0, 10))
    for seq in range(4):
        here.generate(seq, 10)
    here.run()
    assert [here.beings[seq].shadow.tokens[9 + seq :] for seq in range(4)] == alone


def test_statistics_tell_every_queue() -> None:
    here = world(max_sequences=1, max_step_tokens=4, depth=1)
    for seq in range(4):
        here.open(seq, STORY[seq * 10 : seq * 10 + 9])
    for seq in range(3):
        here.generate(seq, 2)
    here.step()
    gauges = here.engine.statistics()
    expected = {
        "sequences": 4,
        "running": 1,
        "waiting": 2,
        "idle_holding": 1,
        "idle_expected": 0,
        "idle_prefill": 1,
        "in_flight": 0,
    }
    assert {name: gauges[name] for name in expected} == expected
    assert gauges["pool_held"] == 1 and gauges["computed"] == 4
    here.run()
    gauges = here.engine.statistics()
    assert gauges["running"] == gauges["waiting"] == gauges["idle_prefill"] == 0
    assert (gauges["turns"], gauges["sampled"]) == (3, 6)


def test_plans_are_numbered_in_order() -> None:
    here = world()
    here.device.keep_plans = True
    here.open(0, STORY[:9])
    here.reply(0, 5)
    assert all(late.step == early.step + 1 for early, late in pairwise(here.device.plans))


@DEPTHS
def test_a_suspect_is_computed_alone_until_it_has_sampled(depth: int) -> None:
    here = world(depth=depth, blocks=24)
    here.device.keep_plans = True
    here.open(0, STORY[:3])
    here.generate(0, 12)
    here.step()
    here.open(1, STORY[20:36], alone=True)
    here.step()  # not before its turn, though there is room for it
    assert all((plan.seqs == 0).all() for plan in here.device.plans)
    here.generate(1, 6)
    here.open(2, STORY[5:9])
    here.generate(2, 4)
    here.run()
    members = [set(plan.seqs.tolist()) for plan in here.device.plans]
    lone = [place for place, seqs in enumerate(members) if seqs == {1}]
    assert len(lone) >= 2 and lone == list(range(lone[0], lone[0] + len(lone))), "chunk by chunk, in a row"
    first = next(place for place, seqs in enumerate(members) if 1 in seqs)
    assert first == lone[0] and {0, 1, 2} in members[lone[-1] :], "then it runs with the others"
    assert {seq: row.finish for seq, row in here.ended.items()} == dict.fromkeys((0, 1, 2), Finish.LENGTH)


def test_a_suspect_without_room_does_not_hold_up_the_others() -> None:
    here = world(depth=1, blocks=12, max_context=48)
    here.open(0, STORY[:40])
    here.generate(0, 8)
    here.step()
    here.open(1, STORY[:20], salt=b"other", alone=True)
    here.generate(1, 3)
    here.run()
    assert {seq: row.finish for seq, row in here.ended.items()} == {0: Finish.LENGTH, 1: Finish.LENGTH}


def test_a_suspect_shares_no_flight() -> None:
    here = world(depth=2, blocks=24)
    plan, flights = here.scheduler.plan, []

    def looked(now: float) -> Plan | None:
        made = plan(now)
        flying = here.flying()
        if 1 in flying and here.sequence(1).isolated:
            flights.append(flying)
        return made

    vars(here.scheduler)["plan"] = looked
    here.open(0, STORY[:3])
    here.generate(0, 12)
    here.step()
    here.open(1, STORY[20:36], alone=True)
    here.generate(1, 6)
    here.run()
    assert flights and all(flying == {1} for flying in flights)


def test_a_row_in_flight_does_not_count_for_a_new_sequence_of_the_same_number() -> None:
    here = world(depth=2)
    here.open(0, STORY[:8])
    here.generate(0, 20)
    here.step()
    here.close(0, keep_kv=False)
    here.open(0, STORY[20:28])
    here.generate(0, 5)
    here.run()
    assert here.scheduler.counters.discarded > 0 and len(here.beings[0].shadow.tokens) == 13


@pytest.mark.parametrize("bomb", [LAUNCH_BOMB, LATE_BOMB], ids=["launched", "in flight"])
@pytest.mark.parametrize("make", [fake_engine, device_engine])
def test_adapters_are_copied_again_after_a_step_that_failed(make: Callable[..., Any], bomb: int) -> None:
    """Two in one step beside a row without one; then their slots may hold anything."""
    here = world(make=make, adapters=(2, 2), max_step_tokens=12)
    for name in ("a", "b"):
        here.load(name, name)
    here.run()
    for seq, path in enumerate(("a", "b", "")):
        here.open(seq, STORY[:5], path=path)
        here.generate(seq, 4)
    here.run()
    here.open(3, [bomb, 7])
    here.generate(3, 2)
    here.run()
    for seq in range(3):
        here.generate(seq, 6)
    here.run()
    assert all(here.ended[seq].finish is Finish.LENGTH for seq in range(3))


def test_an_idle_sequence_that_finds_no_blocks_keeps_no_slot() -> None:
    """Leases hold all blocks. It was lent the one slot and got no row; a turn with another adapter has it."""
    here = world(adapters=(1, 2), blocks=24, max_context=64, max_step_tokens=32, lease_share=1.0)
    for name in ("a", "b"):
        here.load(name, name)
    here.run()
    for seq in (1, 2, 3):
        here.open(seq, [7 * at + seq for at in range(30)])
        here.run()
        here.lease(seq, 8, 1000.0, 1000.0)
    here.open(4, [3 * at for at in range(38)], path="a")
    assert here.step() is None and here.state(4).computed == 0
    here.open(5, STORY[:3], path="b")
    assert len(here.reply(5, 4)) == 4
