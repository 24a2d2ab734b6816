"""Where the blocks of a sequence lie: the answer to a locate, in every tier, and that asking moves nothing."""

from __future__ import annotations

from random import Random

from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import BlockMap, KVTier, Locate, Settle, Stage, TierRun, VerbReply
from holdfast.tests.runtime.fakes import FakeDisk, fake_memory
from holdfast.tests.runtime.worlds import VOCAB, World, world

PROMPT = list(range(30, 43))
DEVICE, HOST, DISK, NONE = KVTier.DEVICE, KVTier.HOST, KVTier.DISK, KVTier.NONE


def one(*, disk: bool = False) -> World:
    """A sequence of 19 tokens, 18 of which have KV: four full blocks of four and a tail of two."""
    numbers = {"blocks": 16, "max_context": 48, "block_tokens": 4, "max_step_tokens": 8, "max_sequences": 4}
    here = World(
        SchedulerSettings(vocab_size=VOCAB, **numbers),
        memory=fake_memory(40, 4),
        disk=FakeDisk(Random(1)) if disk else None,
    )
    here.open(0, PROMPT)
    here.reply(0, 6)
    return here


def located(here: World, seq: int | None, tokens: list[int] | None = None, salt: bytes = b"") -> BlockMap:
    answer = here.engine.apply(Locate(7, seq, salt, tokens or []))
    assert isinstance(answer, VerbReply) and answer.request == 7 and answer.blocks is not None
    return answer.blocks


def runs(blocks: BlockMap) -> list[tuple[KVTier, bool, int]]:
    return [(run.tier, run.shared, run.count) for run in blocks.runs]


def move(here: World, verb: Settle | Stage) -> None:
    assert here.engine.apply(verb) is None
    for _ in range(1000):
        here.time += 0.01
        here.engine.step()
        if here.engine.answers():
            return
    raise AssertionError("no answer")


def test_down_through_the_tiers_and_up_again() -> None:
    here = one(disk=True)
    assert here.disk is not None
    here.disk.chance = Random(5)
    assert located(here, 0) == BlockMap(19, 4, [TierRun(DEVICE, False, 5)])
    move(here, Settle(1, 0))
    assert runs(located(here, 0)) == [(HOST, False, 5)]
    move(here, Settle(2, 0, disk=True))
    assert runs(located(here, 0)) == [(DISK, False, 5)]
    move(here, Stage(3, 0))
    assert runs(located(here, 0)) == [(DEVICE, False, 5)]


def test_an_empty_sequence_has_no_blocks_and_one_token_has_none_computed() -> None:
    here = world()
    here.open(0, [])
    here.open(1, [5])
    assert located(here, 0) == BlockMap(0, 4, [])
    assert runs(located(here, 1)) == [(NONE, False, 1)]


def test_tokens_without_kv_stand_behind_those_with_it() -> None:
    here = one()
    here.extend(0, list(range(60, 72)))
    assert runs(located(here, 0)) == [(DEVICE, False, 5), (NONE, False, 3)]


def test_asking_changes_nothing_and_may_come_while_a_turn_runs() -> None:
    here = one(disk=True)
    here.generate(0, 8)
    before = here.engine.statistics()
    states = []
    while here.beings[0].turn is not None:
        states.append(runs(located(here, 0)))
        assert here.engine.statistics() == before
        here.step()
        before = here.engine.statistics()
    assert len(states) > 4 and all(found[0][0] is DEVICE for found in states)


def test_forks_share_the_blocks_of_their_common_beginning_while_another_holds_them() -> None:
    here = one()
    here.fork(0, [1], 14)
    here.fork(0, [2])
    assert runs(located(here, 1)) == [(DEVICE, True, 4)], (
        "the partial last block is copied when it is written"
    )
    assert runs(located(here, 2)) == [(DEVICE, True, 5)]
    here.extend(1, [99])  # else the fork says what its parent said, and has its blocks
    here.reply(1, 4)
    assert runs(located(here, 1)) == [(DEVICE, True, 3), (DEVICE, False, 2)]
    here.close(2)
    move(here, Settle(1, 0))
    assert runs(located(here, 0)) == [(DEVICE, True, 3), (HOST, False, 2)], (
        "the fork holds three on the device"
    )
    move(here, Settle(2, 1))
    assert runs(located(here, 0)) == [(HOST, False, 5)]
    here.close(1)
    assert runs(located(here, 0)) == [(HOST, False, 5)]


def test_another_tenant_shares_nothing() -> None:
    here = world()
    here.open(0, PROMPT, b"one")
    here.open(1, PROMPT, b"two")
    here.run()
    assert runs(located(here, 0)) == [(DEVICE, False, 3), (NONE, False, 1)]


def test_tokens_of_no_sequence_are_found_where_an_engine_before_left_them() -> None:
    here = one()
    tokens = here.beings[0].shadow.tokens[:]
    move(here, Settle(1, 0))
    here.restart()
    assert runs(located(here, None, tokens)) == [(HOST, False, 5)], "the tail among them"
    assert runs(located(here, None, tokens, b"another tenant")) == [(NONE, False, 5)]
    assert not here.scheduler.statistics()["sequences"]
    here.open(0, tokens)
    here.run()
    assert runs(located(here, None, tokens))[0][1], "an open sequence has them, too"
