"""The memory for bodies: each tenant has its own, and its requests get it in order, whatever becomes of
them."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import anyio
import pytest

from holdfast.gateway.errors import TooManyBodies
from holdfast.gateway.net.bodies import BodyMemory

pytestmark = pytest.mark.anyio
ACME, OTHER = b"acme", b"other"


class Requests:
    """Requests that hold memory until they are let go. ``order``: the numbers of those that got it."""

    def __init__(self, memory: BodyMemory) -> None:
        self.memory = memory
        self.order: list[int] = []
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._ends: dict[int, asyncio.Event] = {}

    async def begin(self, number: int, size: int, salt: bytes = ACME, seconds: float = 60.0) -> None:
        self._ends[number] = asyncio.Event()
        self.tasks[number] = asyncio.create_task(self._hold(number, size, salt, seconds))
        await anyio.wait_all_tasks_blocked()

    async def end(self, number: int) -> None:
        self._ends[number].set()
        await self.tasks[number]
        await anyio.wait_all_tasks_blocked()

    async def _hold(self, number: int, size: int, salt: bytes, seconds: float) -> None:
        async with self.memory.held(salt, size, seconds):
            self.order.append(number)
            await self._ends[number].wait()


async def test_a_tenant_waits_for_its_own_bodies_in_turn_and_others_do_not() -> None:
    on = Requests(BodyMemory(100))
    await on.begin(1, 60)
    await on.begin(2, 60)
    await on.begin(3, 10)
    await on.begin(4, 100, OTHER)
    assert on.order == [1, 4], "a small one does not pass a large one by"
    await on.end(1)
    assert on.order == [1, 4, 2, 3]
    await on.begin(5, 1000)
    for number in (2, 3):
        await on.end(number)
    assert on.order[-1] == 5, "what is larger than all memory has it alone"
    await on.end(5)
    await on.end(4)


async def test_one_that_waits_too_long_or_leaves_lets_those_behind_it_go_on() -> None:
    on = Requests(BodyMemory(100))
    await on.begin(1, 60)
    await on.begin(2, 60, seconds=0.01)
    await on.begin(3, 60)
    await on.begin(4, 40)
    with pytest.raises(TooManyBodies, match="send fewer at once"):
        await on.tasks[2]
    on.tasks[3].cancel()
    await anyio.wait_all_tasks_blocked()
    assert on.order == [1, 4]
    for number in (1, 4):
        await on.end(number)
    await on.begin(5, 100)
    assert on.order[-1] == 5, "nothing is left taken"
    await on.end(5)


@pytest.mark.parametrize("seed", range(20))
async def test_in_any_order_of_ends_and_cancels_no_more_is_taken_and_all_comes_back(seed: int) -> None:
    rng, memory = random.Random(seed), BodyMemory(100)
    held = dict.fromkeys((ACME, OTHER), 0)

    async def request(salt: bytes, size: int) -> None:
        async with memory.held(salt, size, 60.0):
            held[salt] += size
            assert held[salt] <= 100
            try:
                for _ in range(rng.randrange(5)):
                    await asyncio.sleep(0)
            finally:
                held[salt] -= size

    tasks: list[asyncio.Task[None]] = []
    for _ in range(200):
        tasks.append(asyncio.create_task(request(rng.choice((ACME, OTHER)), rng.choice((0, 1, 30, 70, 100)))))
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    await asyncio.wait(tasks)
    for task in tasks:
        with suppress(asyncio.CancelledError):
            task.result()
    for salt in held:
        async with memory.held(salt, 100, 0.0):
            pass
