"""The outbox: order kept, bounds in events and bytes, room only when what was taken has left."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.gateway.net.outbox import BURST_BYTES, Outbox
from holdfast.gateway.settings import ClientLimits

SMALL = replace(ClientLimits(), outbox_events=3, outbox_bytes=100)


def waiting_for(coroutine) -> asyncio.Task:
    return asyncio.get_running_loop().create_task(coroutine)


@pytest.mark.anyio
async def test_frames_leave_in_the_order_posted() -> None:
    outbox = Outbox(SMALL)
    outbox.post([b"a", b"b"])
    outbox.post([b"c"])
    assert await outbox.take() == [b"a", b"b", b"c"]
    outbox.left(2)
    assert await outbox.take() == [b"c"]
    outbox.left(1)
    assert outbox.statistics().events == 0


@pytest.mark.anyio
async def test_a_burst_is_bounded_and_has_one_frame_at_least() -> None:
    outbox = Outbox(ClientLimits())
    half = b"x" * (BURST_BYTES // 2)
    outbox.post([half, half, b"y", half * 3, b"z"])
    for expected in ([half, half], [b"y"], [half * 3], [b"z"]):
        assert await outbox.take() == expected
        outbox.left(len(expected))


@pytest.mark.anyio
@pytest.mark.parametrize("frames", [[b"a", b"b", b"c"], [b"x" * 100]], ids=["events", "bytes"])
async def test_a_full_outbox_has_room_only_when_a_frame_has_left(frames: list[bytes]) -> None:
    outbox = Outbox(SMALL)
    outbox.post(frames)
    room = waiting_for(outbox.room())
    await outbox.take()
    await asyncio.wait([room], timeout=0)
    assert not room.done()
    outbox.left(1)
    await room


@pytest.mark.anyio
async def test_patient_frames_leave_with_what_follows_them() -> None:
    outbox = Outbox(SMALL)
    taking, emptied = waiting_for(outbox.take()), waiting_for(outbox.emptied())
    outbox.post([b"a"], patient=True)
    outbox.post([b"b"], patient=True)
    await asyncio.wait([taking, emptied], timeout=0.02)
    assert not taking.done() and not emptied.done()
    outbox.post([b"c"])
    assert await taking == [b"a", b"b", b"c"]
    outbox.post([b"d"], patient=True)
    outbox.left(3)
    assert await outbox.take() == [b"d"], "the reader is there anyway"
    outbox.left(1)
    await emptied


@pytest.mark.anyio
async def test_a_frame_that_is_written_at_once_takes_the_patient_ones_along() -> None:
    written: list[tuple[bytes, ...]] = []
    takes = True

    def send_now(*frames: bytes) -> bool:
        if takes:
            written.append(frames)
        return takes

    outbox = Outbox(SMALL, send_now)
    outbox.post([b"a", b"b"], patient=True)
    emptied = waiting_for(outbox.emptied())
    outbox.post_now(b"c")
    assert written == [(b"a", b"b", b"c")]
    await emptied
    assert outbox.free and (outbox.statistics().events, outbox.statistics().bytes) == (0, 0)
    takes = False
    outbox.post([b"d"], patient=True)
    outbox.post_now(b"e")
    assert await outbox.take() == [b"d", b"e"], "the writing task has them, in order"
    takes = True
    outbox.post_now(b"f")
    assert len(written) == 1, "it stays behind those that are being written"


@pytest.mark.anyio
async def test_patient_frames_leave_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.gateway.net.outbox.PATIENCE", 0.01)
    outbox = Outbox(SMALL)
    for frame in (b"a", b"b"):
        outbox.post([frame], patient=True)
        assert await outbox.take() == [frame]
        outbox.left(1)
    await outbox.emptied()


@pytest.mark.anyio
async def test_a_reader_that_waits_gets_what_is_posted_later() -> None:
    outbox = Outbox(SMALL)
    taking = waiting_for(outbox.take())
    await asyncio.wait([taking], timeout=0)
    outbox.post([b"late"])
    assert await taking == [b"late"]


@given(st.lists(st.one_of(st.lists(st.binary(max_size=40), max_size=4), st.none()), max_size=60))
def test_the_outbox_counts_as_a_plain_list_does(moves: list[list[bytes] | None]) -> None:
    async def play() -> None:
        outbox, shadow = Outbox(SMALL), list[bytes]()
        for move in moves:
            if move is not None:
                outbox.post(move)
                shadow += move
            elif shadow:
                assert await outbox.take() == shadow
                shadow.pop(0)
                outbox.left(1)
            now = outbox.statistics()
            assert (now.events, now.bytes) == (len(shadow), sum(map(len, shadow)))

    asyncio.run(play())
