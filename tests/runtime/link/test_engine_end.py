"""The engine's end: reports wait in order for the socket; a gateway that reads nothing ends the link."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from holdfast.runtime.errors import FrameInvalid, LinkClosed
from holdfast.runtime.link import engine_end
from holdfast.runtime.link.engine_end import EngineEnd
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.link.messages import AnyReport, Fatal, Heartbeat, Phase, frame, report_reader
from holdfast.runtime.verbs import Row, Step, Stop

BIG = Step(1, [Row(1, 1, list(range(70_000, 90_000)), 20_000)])  # 100 kB


@dataclass
class Ends:
    near: socket.socket
    end: EngineEnd
    orphaned: threading.Event
    came: list[AnyReport] = field(default_factory=list)

    def read(self, until: type | None = None) -> list[AnyReport]:
        """Read, all of it or until a report of a kind has come."""
        reader = report_reader()
        while data := self.near.recv(1 << 16):
            self.came += reader.feed(data)
            if until is not None and any(isinstance(report, until) for report in self.came):
                break
        return self.came


@pytest.fixture
def ends() -> Iterator[Ends]:
    near, far = socket.socketpair()
    orphaned = threading.Event()
    end = EngineEnd(far, Liveness(), orphaned.set)
    with near:
        yield Ends(near, end, orphaned)
        end.close()


def test_take_returns_verbs_in_order_and_can_wait(ends: Ends) -> None:
    assert ends.end.take(wait=False) == []
    sender = threading.Timer(0.0, ends.near.sendall, [b"".join(frame(Stop(n, n)) for n in range(100))])
    sender.start()
    verbs: list = []
    while len(verbs) < 100:
        verbs += ends.end.take(wait=True)
    assert [verb.request for verb in verbs] == list(range(100))
    sender.join()


def test_a_verb_that_arrives_in_two_parts_is_joined(ends: Ends) -> None:
    data = frame(Stop(1, 2))
    ends.near.sendall(data[:3])
    ends.near.sendall(data[3:])
    assert ends.end.take(wait=True) == [Stop(1, 2)]


def test_reports_beyond_the_socket_buffer_follow_in_order(ends: Ends) -> None:
    sent = [Step(number, BIG.others) for number in range(30)]
    for report in sent:
        ends.end.send(report)
    assert ends.end.statistics()["link_outbox_bytes"] > 0
    reading = threading.Thread(target=ends.read)
    reading.start()
    while ends.end.statistics()["link_outbox_bytes"]:
        ends.end.check()
    ends.end.close()
    reading.join()
    assert [report for report in ends.came if isinstance(report, Step)] == sent


def test_a_slow_gateway_blocks_the_device_thread_only_when_the_outbox_is_full(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_end, "OUTBOX_BYTES", 1_000_000)
    sent = 0
    done = threading.Event()

    def device() -> None:
        nonlocal sent
        for _ in range(60):  # 6 MB: more than outbox and kernel buffer hold together
            ends.end.send(BIG)
            sent += 1
        done.set()
        while ends.end.statistics()["link_outbox_bytes"]:
            ends.end.check()
        ends.end.close()

    thread = threading.Thread(target=device)
    thread.start()
    while ends.end.statistics()["link_outbox_bytes"] <= 1_000_000:
        assert not done.is_set()
    ends.read()
    thread.join()
    assert sent == 60 == sum(isinstance(report, Step) for report in ends.came)


def test_a_gateway_that_reads_nothing_ends_the_link(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_end, "OUTBOX_BYTES", 1_000_000)
    monkeypatch.setattr(engine_end, "STALL_SECONDS", 0.05)

    def device() -> None:
        while True:
            ends.end.send(BIG)

    with pytest.raises(LinkClosed, match="read nothing"):
        device()
    with pytest.raises(LinkClosed, match="read nothing"):
        ends.end.take(wait=True)


def test_a_closed_gateway_wakes_a_blocked_take(ends: Ends) -> None:
    closer = threading.Timer(0.0, ends.near.close)
    closer.start()
    with pytest.raises(LinkClosed):
        ends.end.take(wait=True)
    assert ends.orphaned.wait(60)
    with pytest.raises(LinkClosed):
        ends.end.send(BIG)
    closer.join()


def test_closing_this_end_does_not_call_on_gateway_gone(ends: Ends) -> None:
    ends.end.close()
    ends.end.close()
    assert ends.read() in ([], [ends.came[0]] if ends.came else [])
    assert not ends.orphaned.is_set()


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1"], ids=repr)
def test_garbage_is_reported_and_ends_the_link(ends: Ends, garbage: bytes) -> None:
    ends.near.sendall(garbage)
    with pytest.raises(LinkClosed):
        ends.end.take(wait=True)
    ends.end.close()
    fatal = ends.read()[-1]
    assert isinstance(fatal, Fatal) and fatal.code == FrameInvalid.code


def test_heartbeats_are_sent_while_nothing_else_is(ends: Ends) -> None:
    beat = next(report for report in ends.read(until=Heartbeat) if isinstance(report, Heartbeat))
    assert beat.phase is Phase.LOADING and beat.deadline > 0
