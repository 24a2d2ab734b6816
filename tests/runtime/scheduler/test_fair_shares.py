"""Tenants share places, blocks, prefill and the first place; counted in steps, on the fake device."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from holdfast.runtime.order.fair_shares import QUANTUM, FairShares
from holdfast.runtime.sequence import Sequence, Turn, TurnAge
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.tokens import TokenList
from holdfast.runtime.verbs import Finish, Opening, Sampling, TokenLimits
from holdfast.tests.runtime.worlds import VOCAB, World

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
ATTACKER, VICTIM = b"attacker", b"victim"


def story(seq: int, length: int) -> list[int]:
    return [(seq * 37 + position * 11) % 250 for position in range(length)]


def turn(number: int, tenant: int, tokens: int = 10) -> Sequence:
    """A turn, the ``number``-th that began, of a sequence of so many tokens."""
    return Sequence(
        number,
        b"",
        TokenList([1] * tokens),
        tenant=tenant,
        turn=Turn(Sampling(), TokenLimits(4), prompt=tokens, allowed=4, exhausted=Finish.LENGTH),
        age=TurnAge(number, number, 0),
    )


def crowd(depth: int, blocks: int = 400, **numbers: int) -> World:
    """A world with room for eight turns at once."""
    usual = {"max_step_tokens": 72, "max_sequences": 8, "max_context": 400}
    settings = SchedulerSettings(
        vocab_size=VOCAB, block_tokens=4, depth=depth, blocks=blocks, **{**usual, **numbers}
    )
    return World(settings, Random(depth))


def steps_to_first_token(here: World, seq: int) -> int:
    """Steps until the turn of ``seq`` has told a token."""
    before, began = len(here.beings[seq].shadow.tokens), here.steps
    while len(here.beings[seq].shadow.tokens) == before:
        here.step()
    return here.steps - began


@DEPTHS
def test_a_tenant_without_room_keeps_its_place_in_the_rotation(depth: int) -> None:
    """It came before a tenant that found room, so it has the first place before that one."""
    here = crowd(depth, blocks=16, max_context=60)
    for seq, tokens, salt in ((0, 40, ATTACKER), (1, 40, VICTIM), (2, 4, b"third"), (3, 40, b"third")):
        here.open(seq, story(seq, tokens), salt)
        here.generate(seq, 4 if seq == 0 else 20)
    here.run(2)
    assert here.order()[:2] == [0, 2]
    while here.beings[0].turn is not None:
        here.step()
    here.step()
    assert here.leader() == 1


@DEPTHS
def test_a_newcomer_has_its_first_token_at_once_beside_more_talkers_than_places(depth: int) -> None:
    here = crowd(depth)
    for seq in range(20):
        here.open(seq, story(seq, 12), ATTACKER)
        here.generate(seq, 300)
    here.run(30)
    here.open(100, story(100, 20), VICTIM)
    here.generate(100, 5)
    assert steps_to_first_token(here, 100) <= 1 + depth
    assert here.scheduler.counters.displaced == 1
    assert here.scheduler.counters.preempted == here.scheduler.counters.recomputed == 0


@DEPTHS
def test_a_newcomer_has_its_first_token_at_once_beside_long_prompts(depth: int) -> None:
    here = crowd(depth)
    for seq in range(16):
        here.generate(seq, 2, tokens=story(seq, 390), opening=Opening(ATTACKER))
    here.run(1)
    here.generate(100, 5, tokens=story(100, 30), opening=Opening(VICTIM))
    assert steps_to_first_token(here, 100) <= 1 + depth


@DEPTHS
def test_a_newcomer_has_its_first_token_at_once_where_another_tenant_holds_all_blocks(depth: int) -> None:
    here = crowd(depth, blocks=110)
    for seq in range(7):
        here.open(seq, story(seq, 40), ATTACKER)
        here.generate(seq, 300)
    while here.scheduler.pool.available > 3:
        here.step()
    here.open(100, story(100, 40), VICTIM)
    here.generate(100, 5)
    assert steps_to_first_token(here, 100) <= 2 + depth, "blocks of the newest one may lie behind the fence"
    assert here.scheduler.counters.displaced == 1


@DEPTHS
def test_what_a_tenant_waits_for_does_not_grow_with_anothers_queue(depth: int) -> None:
    """One place and a pool for one: the first place alone goes round."""
    waits = []
    for queued in (4, 40):
        here = crowd(depth, blocks=25, max_context=100, max_sequences=1, max_step_tokens=16)
        for seq in range(queued):
            here.generate(seq, 20, tokens=story(seq, 12), opening=Opening(ATTACKER))
        here.run(3)
        here.generate(100, 5, tokens=story(100, 30), opening=Opening(VICTIM))
        waits.append(steps_to_first_token(here, 100))
    assert waits[0] == waits[1] <= 25 + depth


@DEPTHS
def test_two_tenants_that_want_everything_have_half_of_the_places_each(depth: int) -> None:
    here = crowd(depth, blocks=1000)
    for seq in range(16):
        here.generate(seq, 350, tokens=story(seq, 9), opening=Opening(ATTACKER))
    here.run(10)
    for seq in range(100, 116):
        here.generate(seq, 350, tokens=story(seq, 9), opening=Opening(VICTIM))
    here.run(10)
    before = {seq: len(being.shadow.tokens) for seq, being in here.beings.items()}
    displaced = here.scheduler.counters.displaced
    here.run(200)
    gained = {seq: len(being.shadow.tokens) - before[seq] for seq, being in here.beings.items()}
    assert sum(gained[seq] for seq in range(100, 116)) == sum(gained[seq] for seq in range(16))
    assert here.scheduler.counters.displaced == displaced, "they do not take places from each other in turns"


def test_a_tenant_alone_runs_as_under_first_come_first_served() -> None:
    """Work-conserving: as many steps, and the same endings in each of them."""
    ends = []
    for policy in ("fair_shares", "first_come_first_served"):
        here = crowd(2, blocks=110)
        here = World(replace(here.settings, policy=policy), Random(2))
        for seq in range(20):
            here.generate(seq, 60 + seq, tokens=story(seq, 50), opening=Opening(ATTACKER))
        steps: list[tuple[int, int]] = []
        while here.turns:
            step = here.step()
            assert step is not None
            steps += [(here.steps, row.seq) for row in step.rows if row.finish]
        ends.append((steps, here.scheduler.counters.computed))
    assert ends[0] == ends[1]


def test_a_tenant_with_more_than_its_share_gives_its_newest_turns() -> None:
    policy = FairShares()
    running = [turn(1, 1, 40), turn(2, 2, 90), turn(3, 1, 30), turn(4, 1, 30), turn(5, 1, 30)]
    head = turn(6, 3, 20)
    assert [one.id for one in policy.displaced(head, running, by_tokens=False)] == [5, 4, 3]
    assert [one.id for one in policy.displaced(head, running, by_tokens=True)] == [5, 4, 2, 3]
    assert not list(policy.displaced(turn(6, 1), running, by_tokens=False)), "not for itself"
    assert not list(policy.displaced(head, running[:2], by_tokens=False)), "nor for as much as it has"


def test_the_last_row_is_of_the_tenant_that_holds_most() -> None:
    rows = FairShares().rows([turn(1, 1, 10), turn(2, 1, 10), turn(3, 2, 25), turn(4, 1, 10)], 0)
    assert [one.id for one in rows] == [1, 2, 3, 4]


def test_prompts_share_a_step_equally_and_what_is_left_goes_on() -> None:
    policy = FairShares()
    assert policy.limits({1: 6000, 2: 50}, 450) == {1: 400, 2: 50}
    assert policy.limits({1: 6000, 2: 6000}, 450) == {1: 225, 2: 225}
    policy.charge(2, 10)
    assert policy.limits({1: 900, 2: 900, 3: 900}, 2 * QUANTUM) == {1: QUANTUM, 3: QUANTUM, 2: 0}, "in turns"


def test_the_tenant_with_the_fewest_running_turns_is_admitted_first() -> None:
    policy = FairShares()
    heads = [turn(4, 1), turn(5, 2), turn(6, 3)]
    assert [head.id for head in policy.admit(heads, [turn(1, 1), turn(2, 1), turn(3, 2)])] == [6, 5, 4]


def test_the_first_place_goes_round() -> None:
    policy = FairShares()
    turns = [turn(number, tenant) for number, tenant in enumerate((1, 1, 1, 2, 3, 1))]
    led = []
    for late in range(6):
        first = policy.lead(turns[:3], turns[3:])
        assert first is not None
        led.append(first.tenant)
        turns.remove(first)
        turns.append(turn(20 + late, 4 if late == 0 else first.tenant))
    assert led == [1, 2, 3, 4, 1, 2]
