"""Too few blocks: which turn waits or yields, and that every turn ends within the stated number of steps."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.runtime.errors import PoolTooSmall, SettingsInvalid
from holdfast.runtime.settings import SchedulerSettings
from holdfast.tests.runtime.worlds import VOCAB, World, world

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def story(seq: int, length: int) -> list[int]:
    return [(seq * 37 + position * 11) % 250 for position in range(length)]


def test_turns_are_admitted_in_the_order_they_came() -> None:
    here = world(depth=1, blocks=12)
    for seq, length in enumerate((40, 41, 3)):
        here.open(seq, story(seq, length))
    for seq in range(3):
        here.generate(seq, 3)
    here.run(2)
    assert here.engine.statistics()["running"] == 1, "the small one does not slip past the one that waits"
    here.run()
    assert list(here.ended) == [0, 1, 2]


def test_the_oldest_is_never_preempted() -> None:
    """All start small and grow until they no longer fit: the youngest give way, and each ends in turn."""
    here = world(blocks=13, max_context=48, max_sequences=4)
    for seq in range(4):
        here.open(seq, story(seq, 3))
    for seq in range(4):
        here.generate(seq, 45)
    here.run()
    assert list(here.ended) == [0, 1, 2, 3]
    assert here.scheduler.counters.preempted > 0
    assert [here.ended[seq].work.recomputed > 0 for seq in (0, 3)] == [False, True]  # type: ignore[union-attr]


@DEPTHS
def test_idle_sequences_give_way_the_longest_unused_first(depth: int) -> None:
    here = world(depth=depth, blocks=12)
    for seq in range(3):
        here.open(seq, story(seq, 15))
        here.reply(seq, 1)
    here.extend(0, [])  # used again
    here.open(3, story(3, 6))
    here.reply(3, 1)
    assert [here.state(seq).computed for seq in range(4)] == [15, 8, 15, 6], "and keep a beginning"
    assert here.scheduler.counters.preempted == 0
    here.reply(1, 1)
    assert here.ended[1].work.resident >= 8, "its sealed blocks were still in the cache"  # type: ignore[union-attr]


def test_idle_prefill_takes_nothing_from_turns_nor_from_those_used_after() -> None:
    here = world(depth=1, blocks=12, max_step_tokens=64)
    here.open(0, story(0, 8))
    here.generate(0, 4)
    here.step()
    here.open(1, story(1, 40))
    here.open(2, story(2, 40))
    here.run()
    assert here.scheduler.counters.preempted == 0
    assert here.ended[0].work.recomputed == 0  # type: ignore[union-attr]
    assert [here.state(seq).computed for seq in range(3)] == [11, 0, 36]


def test_a_waiting_turn_gives_its_kv_to_an_older_one() -> None:
    here = world(depth=1, blocks=12, max_sequences=1)
    here.open(1, story(1, 40))
    here.run()
    here.open(0, story(0, 30))
    here.generate(0, 18)
    here.step()
    here.generate(1, 3)
    here.run()
    assert list(here.ended) == [0, 1]
    assert here.scheduler.counters.preempted == 0


@DEPTHS
def test_sixty_four_sessions_in_a_pool_for_one(depth: int) -> None:
    """faults.md: 1.05x of one session's need, always progress. Every bound is checked by the world."""
    here = World(
        SchedulerSettings(
            blocks=21,
            vocab_size=VOCAB,
            max_context=80,
            block_tokens=4,
            max_step_tokens=24,
            max_sequences=16,
            depth=depth,
        ),
        Random(depth),
    )
    random = Random(64)
    for seq in range(64):
        here.open(seq, story(seq, random.randint(1, 30)))
    for _ in range(200):
        for _ in range(random.randint(0, 3)):
            seq = random.randrange(64)
            if here.beings[seq].turn is None:
                length = len(here.beings[seq].shadow.tokens)
                if length > 50:
                    here.truncate(seq, random.randint(1, length))
                here.generate(seq, random.randint(1, 25))
        here.run(random.randint(1, 9))
    here.run()
    assert here.scheduler.counters.preempted > 0


@DEPTHS
@pytest.mark.parametrize(("prompt", "sampled"), [(1, 1), (5, 1), (23, 9), (24, 24)])
def test_a_lone_turn_ends_within_its_bound(depth: int, prompt: int, sampled: int) -> None:
    """The bound is not generous: without stalls a turn comes close to it."""
    here = world(depth=depth, blocks=12, max_step_tokens=5, max_sequences=2)
    here.open(0, story(0, prompt))
    here.reply(0, sampled)
    bound = here.settings.most_steps(prompt, sampled)
    stalls = (depth - 1) * (here.settings.blocks_for(prompt + sampled) + 2) + depth
    assert bound - stalls - prompt <= here.steps <= bound - stalls


def test_the_longest_sequence_must_fit_the_pool() -> None:
    with pytest.raises(PoolTooSmall, match="takes 5 blocks of 4 tokens; the pool has 4"):
        world(blocks=4, max_context=17)
    assert len(_longest_reply(blocks=5, max_context=17)) == 17 - 3


def _longest_reply(**numbers: int) -> list[int]:
    here = world(**numbers)
    here.open(0, story(0, 3))
    return here.reply(0, 99)


@pytest.mark.parametrize(
    "numbers",
    [
        {"depth": 3},
        {"depth": 0},
        {"max_step_tokens": 3, "max_sequences": 4},
        {"blocks": 0},
        {"max_context": 1},
        {"block_tokens": 0},
        {"watermark_blocks": -1},
    ],
)
def test_numbers_that_cannot_work_together(numbers: dict[str, int]) -> None:
    with pytest.raises(SettingsInvalid):
        world(**numbers)


def test_a_new_turn_leaves_the_watermark_free() -> None:
    running = []
    for watermark in (0, 6):
        here = world(depth=1, blocks=12, watermark_blocks=watermark)
        for seq in range(2):
            here.open(seq, story(seq, 15))
            here.generate(seq, 1 + 9 * (seq == 0))
        here.step()
        running.append(here.engine.statistics()["running"])
        here.run()
    assert running == [2, 1]


@pytest.mark.parametrize("seed", [25, 26, 30, 38])
def test_a_turn_that_is_brought_up_is_not_kept_waiting_by_prefill_of_idle_sequences(seed: int) -> None:
    """The blocks that it waits for behind the fence are its own: sequences with no claim took them one by one,
    step by step. The world asserts each turn's bound."""
    chance = Random(seed)
    here = world(blocks=40, slots=60, policy="first_come_first_served")  # it has the tightest bound
    for _ in range(400):
        seq = chance.randrange(24)
        what = chance.choice(("extend", "extend", "generate", "generate", "stop", "settle", "stage", "close"))
        if seq not in here.beings:
            here.open(seq, [chance.randrange(200) for _ in range(chance.randrange(1, 40))])
        elif what == "extend":
            here.extend(seq, [1, 2, 3])
        elif what == "generate":
            here.generate(seq, chance.randrange(1, 6))
        else:
            getattr(here, what)(seq)
        for _ in range(chance.randrange(3)):
            here.step()
    here.run()
    assert here.scheduler.statistics()["restored"] > 0


@pytest.mark.parametrize(
    ("blocks", "step", "steps", "prompt", "tokens", "own"),
    [(20, 8, 17, 32, 9, 4), (16, 11, 12, 28, 6, 3), (18, 17, 12, 38, 9, 4), (15, 4, 7, 28, 3, 1)],
)
def test_a_turn_whose_blocks_an_earlier_one_takes_has_no_row(
    blocks: int, step: int, steps: int, prompt: int, tokens: int, own: int
) -> None:
    """A prompt of higher rank grows, a chunk a step, into the blocks of a turn that decodes in the same step;
    rows run in any order."""
    numbers = {"blocks": blocks, "max_context": 48, "max_step_tokens": step, "max_sequences": 3}
    here = World(SchedulerSettings(vocab_size=VOCAB, block_tokens=4, **numbers), Random(2))
    for seq in (0, 1):
        here.open(seq, story(seq, own))
        here.generate(seq, 40)
    here.run(steps)
    here.open(2, story(2, prompt))
    here.lease(2, 8, None, None)
    here.generate(2, tokens)
    here.run()
    assert set(here.ended) == {0, 1, 2} and here.scheduler.counters.preempted
