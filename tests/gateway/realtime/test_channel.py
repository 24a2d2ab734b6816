"""Both kinds of channel end alike: what was sent before a close arrives, then everybody learns of it."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.gateway.net.channel import ChannelClosed, memory_pair

pytestmark = pytest.mark.anyio


async def test_frames_arrive_in_order_both_ways() -> None:
    here, there = memory_pair()
    for frame in (b"1", b"2"):
        await here.send(frame)
        await there.send(frame)
    assert [await there.receive(), await there.receive()] == [b"1", b"2"]
    assert [await here.receive(), await here.receive()] == [b"1", b"2"]
    await here.close(1000, "")
    await there.close(1000, "")


async def test_what_was_sent_before_a_close_arrives_and_then_its_reason() -> None:
    here, there = memory_pair()
    await here.send(b"last words")
    await here.close(1012, "going away")
    assert await there.receive() == b"last words"
    for act in (there.receive(), there.send(b"too late")):
        with pytest.raises(ChannelClosed) as closed:
            await act
        assert (closed.value.code, closed.value.reason) == (1012, "going away")
    await there.close(1000, "")
    with pytest.raises(ChannelClosed, match="1012"):
        await here.send(b"after my own close")


async def test_a_sender_waits_for_its_reader() -> None:
    here, there = memory_pair(depth=1)
    await here.send(b"1")
    waiting = asyncio.create_task(here.send(b"2"))
    await asyncio.wait([waiting], timeout=0)
    assert not waiting.done()
    assert await there.receive() == b"1"
    await waiting
    assert await there.receive() == b"2"
    await here.close(1000, "")
    await there.close(1000, "")


async def test_of_a_burst_no_more_is_handed_on_than_there_is_room_for() -> None:
    here, there = memory_pair(depth=2)
    frames = [b"1", b"2", b"3"]
    assert await here.send_some(frames) == 2, "each of the others has its own time to be taken in"
    assert [await there.receive(), await there.receive()] == frames[:2]
    assert await here.send_some(frames[2:]) == 1
    there.drop()
    with pytest.raises(ChannelClosed, match="1006"):
        await here.send_some(frames)
    here.drop()


async def test_a_drop_ends_both_ways_at_once() -> None:
    here, there = memory_pair(depth=1)
    await here.send(b"1")
    waiting = asyncio.create_task(there.receive())
    await waiting
    here.drop()
    with pytest.raises(ChannelClosed, match="1006"):
        await there.receive()
    await there.close(1000, "")
