"""Blocks that stay on the device go to the host tier a few at a time, those that leave it at once."""

from __future__ import annotations

import os

import pytest

from holdfast.kvstore.host.slots import SlotMemory, make_memory
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.keys import BlockHasher
from holdfast.kvstore.pool import BlockPool
from holdfast.kvstore.tiers import Tiers
from holdfast.runtime.kv_placement.costs import CostBook
from holdfast.runtime.kv_placement.transfers import ALONE, FEW, MANY, PART, Transfers
from holdfast.runtime.plan import Outcomes
from holdfast.runtime.scheduler.scheduler import Scheduler
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import Generate, Open, Sampling, TokenLimits

WAITING = 2 * PART * MANY
KEYS = [number.to_bytes(16, "big") for number in range(1, WAITING + 1)]


class Below:
    """Transfers above an empty tier; ``blocks``: of each key's content, as the pool has it."""

    def __init__(self, *, beside: bool = False) -> None:
        fd = make_memory(1 << 16)
        tier = HostTier(SlotMemory(fd, bytes(16), 64))
        os.close(fd)
        self.blocks = {key: block for block, key in enumerate(KEYS)}
        self.moves = Transfers(Tiers(tier), self.blocks.get, 4, beside)
        for key, block in self.blocks.items():
            self.moves.save(key, block)

    def emitted(self, rows: int = 1, *, draws: bool = True) -> list[int]:
        saves, _ = self.moves.emit(rows=rows, draws=draws)
        return [save.block for save in saves]


def test_beside_a_token_that_is_waited_for_go_a_few_and_all_of_them_in_time() -> None:
    here = Below()
    steps = []
    while here.moves.waiting:
        steps.append(here.emitted())
    assert len(steps[0]) == MANY
    assert all(FEW <= len(step) <= MANY for step in steps[:-1])
    assert [block for step in steps for block in step] == list(range(WAITING)), "the longest waiting first"


def test_beside_a_prompt_all_go() -> None:
    here = Below()
    first = here.emitted()
    assert here.emitted(draws=False) == list(range(len(first), WAITING))
    assert not here.moves.waiting


def test_a_plan_for_them_alone_is_soon_over() -> None:
    here = Below()
    steps = []
    while here.moves.waiting:
        steps.append(here.emitted(0, draws=False))
    assert [len(step) for step in steps] == [ALONE] * (WAITING // ALONE)


def test_copies_beside_the_step_are_not_spread() -> None:
    assert len(Below(beside=True).emitted()) == WAITING


@pytest.mark.parametrize("wanted", [True, False])
def test_a_block_that_leaves_goes_at_once(wanted: bool) -> None:
    here = Below()
    leaving = WAITING - 1
    del here.blocks[KEYS[leaving]]  # the pool forgets its name, and says so
    here.moves.evicted(leaving, KEYS[leaving], wanted)
    assert leaving in here.emitted()
    while here.moves.waiting:
        assert leaving not in here.emitted()


def test_a_tail_goes_at_once() -> None:
    here = Below()
    here.moves.save(b"t" * 16, 99, 3)
    assert 99 in here.emitted()


def test_a_block_that_holds_something_else_by_now_is_not_saved() -> None:
    """As blocks with unknown content do: they lose their keys, and this is not told."""
    here = Below()
    del here.blocks[KEYS[-1]]
    here.blocks[KEYS[-2]] = 98
    saved = []
    while here.moves.waiting:
        saved += here.emitted()
    assert saved == list(range(WAITING - 2))
    assert not here.moves.pending()


@pytest.mark.parametrize("beside", [False, True])
def test_a_token_of_the_step_behind_a_prompt_waits_for_few_of_its_blocks(*, beside: bool) -> None:
    fd = make_memory(1 << 20)
    tier = HostTier(SlotMemory(fd, bytes(16), 64))
    os.close(fd)
    settings = SchedulerSettings(blocks=WAITING, vocab_size=64, max_context=512, max_step_tokens=256)
    costs = CostBook(None, beside=beside)
    scheduler = Scheduler(
        settings, BlockPool(WAITING), BlockHasher(bytes(32), 16), tiers=Tiers(tier), costs=costs
    )
    scheduler.apply(Open(0, 1, b"", [1] * 161), 0.0)
    scheduler.apply(Generate(0, 1, Sampling(), TokenLimits(100)), 0.0)
    saves = []
    for _ in range(12):
        plan = scheduler.plan(0.0)
        assert plan is not None
        saves.append(len(plan.saves))
        scheduler.commit(plan, Outcomes.of([[2]] * len(plan)), 0.0)
    assert saves[:6] == ([0, 10, 0, 0, 0, 0] if beside else [0, *[FEW] * 5])
