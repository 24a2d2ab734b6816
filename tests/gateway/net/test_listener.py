"""What the listening socket answers itself: requests that are refused when they come, and all connections when
the process has no descriptor left; then it does not spin, and later it accepts again."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from holdfast.gateway.access.turn_queue import Place, TurnQueue
from holdfast.gateway.net.deadlines import Deadlines
from holdfast.gateway.net.listener import PASS, Door, Listener, Refused, listen
from holdfast.gateway.settings import ClientLimits

from .manual_clock import ManualClock


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener.of(listen("127.0.0.1", 0, ClientLimits())) as sock:
        sock.setblocking(False)
        yield sock


BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"


class Choosing:
    """Decides by a request's first word, as a `Decide`."""

    def __init__(self) -> None:
        self.queue = TurnQueue()
        self.seen: list[bytes] = []

    def __call__(self, data: bytes, peer: tuple[str, int] | None, *, close: bool) -> Place | Refused | None:
        self.seen.append(data)
        match data.partition(b" ")[0]:
            case b"REFUSE":
                return Refused(BUSY, close)
            case b"ADMIT":
                return Place(self.queue, b"")
        return None


@pytest.fixture
def choosing() -> Choosing:
    return Choosing()


@pytest.fixture
def door(choosing: Choosing) -> Door:
    return Door(Deadlines(ClientLimits(), ManualClock()), choosing)


@pytest.fixture
def guarded(door: Door) -> Iterator[Listener]:
    """A listener with a door."""
    with Listener.of(listen("127.0.0.1", 0, ClientLimits()), door) as sock:
        sock.setblocking(False)
        yield sock


def sent(listener: Listener, data: bytes) -> socket.socket:
    """A connection on which this was sent."""
    client = socket.create_connection(listener.getsockname(), timeout=60)
    client.sendall(data)
    return client


def test_what_is_refused_when_it_comes_is_answered_and_closed_and_the_next_one_accepted(
    guarded: Listener, choosing: Choosing
) -> None:
    refused, other, silent = (sent(guarded, data) for data in (b"REFUSE it", b"GET it", b""))
    with refused, other, silent:
        for client in (other, silent):
            accepted, peer = guarded.accept()
            with accepted:
                assert peer == client.getsockname()
                accepted.setblocking(False)
                if client is other:
                    assert accepted.recv(100) == b"GET it", "it was only looked at"
        assert refused.recv(1000) == BUSY and refused.recv(1000) == b""
        assert choosing.seen == [b"REFUSE it", b"GET it"]
        with pytest.raises(BlockingIOError):
            guarded.accept()


def test_other_work_has_its_turn_between_many_refusals(guarded: Listener, choosing: Choosing) -> None:
    clients = [sent(guarded, b"REFUSE it") for _ in range(PASS + 1)]
    with pytest.raises(BlockingIOError):
        guarded.accept()
    assert len(choosing.seen) == PASS
    with pytest.raises(BlockingIOError):
        guarded.accept()
    assert len(choosing.seen) == PASS + 1
    for client in clients:
        with client:
            assert client.recv(1000) == BUSY


def test_an_accepted_request_keeps_its_place_until_its_connection_is_made(
    guarded: Listener, choosing: Choosing, door: Door
) -> None:
    with sent(guarded, b"ADMIT it"), guarded.accept()[0] as accepted:
        assert len(choosing.queue) == 1
        _, place = door.pick_up(accepted)
        assert place is not None and door.pick_up(accepted)[1] is None
        place.abandon()
        assert len(choosing.queue) == 0


def test_the_place_of_a_connection_that_was_never_made_is_given_up(
    guarded: Listener, choosing: Choosing
) -> None:
    for _ in range(3):
        with sent(guarded, b"ADMIT it"), guarded.accept()[0]:  # each has the same descriptor
            assert len(choosing.queue) == 1


def test_another_connection_with_its_descriptor_does_not_get_it(
    guarded: Listener, choosing: Choosing, door: Door
) -> None:
    for data in (b"", b"GET it"):
        with sent(guarded, b"ADMIT it"), guarded.accept()[0] as accepted:
            fd = accepted.fileno()
        with sent(guarded, data), guarded.accept()[0] as other:
            assert other.fileno() == fd and door.pick_up(other)[1] is None
            assert len(choosing.queue) == 0


@pytest.fixture
def full_table() -> Iterator[list[int]]:
    """No descriptor is left, until those given are closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # there may be free ones below it
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    try:
        yield taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_connections_beyond_the_file_table_are_refused_and_later_ones_accepted(
    listener: Listener, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    full = request.getfixturevalue("full_table")
    for client in clients:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(BlockingIOError):
        listener.accept()
    for client in clients:
        with client:
            client.settimeout(60)
            assert client.recv(1000).startswith(b"HTTP/1.1 503 ")
    (line,) = [record.message for record in caplog.records]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert f"RLIMIT_NOFILE is {most} open files (ulimit -n)" in line
    with pytest.raises(BlockingIOError):
        listener.accept()
    for _ in range(3):
        os.close(full.pop())
    with socket.create_connection(listener.getsockname()), listener.accept()[0]:
        pass
    assert [record.message for record in caplog.records][1:] == ["connections are accepted again"]


def test_connections_without_a_request_make_room_for_others(
    guarded: Listener, choosing: Choosing, request: pytest.FixtureRequest
) -> None:
    """The longest waiting goes; its descriptor is free in the next pass of the event loop."""
    waiting = sent(guarded, b"")
    held, _ = guarded.accept()
    with waiting, sent(guarded, b"GET it") as other:
        request.getfixturevalue("full_table")
        with pytest.raises(BlockingIOError):
            guarded.accept()
        assert waiting.recv(1) == b"", "it was shut"
        held.close()
        accepted, peer = guarded.accept()
        with accepted:
            assert peer == other.getsockname() and choosing.seen[-1] == b"GET it"
