"""A server without a free descriptor answers connections with 503 and does not spin; later it accepts again."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from holdfast.gateway.net.listener import Listener, listen
from holdfast.gateway.settings import ClientLimits


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener.of(listen("127.0.0.1", 0, ClientLimits())) as sock:
        sock.setblocking(False)
        yield sock


@pytest.fixture
def full_table() -> Iterator[list[int]]:
    """No descriptor is left, until those given are closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = os.open(os.devnull, os.O_RDONLY)
    taken = [highest]
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
            assert client.recv(100).startswith(b"HTTP/1.1 503 ")
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
