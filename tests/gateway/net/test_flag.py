"""A flag does what `asyncio.Event` does, and holds nothing while nothing waits for it."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from holdfast.gateway.net.flag import Flag

pytestmark = pytest.mark.anyio


async def waiting(flag: Flag, count: int) -> list[asyncio.Task[bool]]:
    tasks = [asyncio.create_task(flag.wait()) for _ in range(count)]
    await anyio.wait_all_tasks_blocked()
    return tasks


async def test_setting_it_lets_all_go_on_even_if_it_is_cleared_at_once() -> None:
    flag = Flag()
    assert not flag.is_set()
    tasks = await waiting(flag, 3)
    assert not any(task.done() for task in tasks)
    flag.set()
    flag.clear()
    assert await asyncio.gather(*tasks) == [True] * 3
    (later,) = await waiting(flag, 1)
    assert not later.done()
    flag.set()
    assert await later and await flag.wait()


async def test_a_cancelled_wait_is_forgotten_and_the_others_go_on() -> None:
    flag = Flag()
    first, second = await waiting(flag, 2)
    first.cancel()
    await asyncio.wait([first])
    flag.set()
    assert await second


async def test_a_wait_that_is_cancelled_as_it_goes_on_harms_nothing() -> None:
    flag = Flag()
    first, second = await waiting(flag, 2)
    flag.set()
    first.cancel()
    await asyncio.wait([first, second])
    assert first.cancelled() and second.result()


async def test_it_is_small() -> None:
    assert Flag.__slots__ and not hasattr(Flag(), "__dict__")
    flag = Flag(on=True)
    assert flag.is_set() and await flag.wait()
