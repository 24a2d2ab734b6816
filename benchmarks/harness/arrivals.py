"""Sends streamed Chat Completions requests, as a process; ``python -m``, one line of JSON at the end.

They arrive at a rate, at random times (Poisson), whether the earlier ones were answered or not; or each of
``clients`` clients sends one after another. Each is a new conversation on a connection of its own, as of so
many users.
"""

from __future__ import annotations

import argparse
import json
import random
import select
import socket
import time
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

TOKENS = 16
"""The tokens of each reply."""
WAIT_SECONDS = 60.0
"""An answer that has not ended so long after the last request began is lost."""
BODY = json.dumps(
    {
        "model": "pocket",
        "messages": [{"role": "user", "content": "TEXT"}],
        "max_tokens": TOKENS,
        "min_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
)


@dataclass(slots=True)
class Answers:
    """``ttft``, ``taken``: seconds to the first token and to the end of each complete reply. ``at``: from the
    begin of the load to that token. ``refused``: to each refusal (429 or 503). ``silent``: refusals without
    ``Retry-After``. ``failed``: other answers.
    ``late``: seconds by which each request was sent after it was due; all times count from when it was due."""

    ttft: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    silent: int = 0
    failed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Request:
    """One request on its connection. ``began``: when it was due. ``unsent``: until the connection takes it.
    ``told``: the start of the answer, at least its head, and ``last`` its end. ``first``: when its first token
    came."""

    sock: socket.socket
    began: float
    unsent: bytes
    told: bytes = b""
    last: bytes = b""
    first: float = 0.0


class Users:
    """Users of the server at ``url``. They share its machine, so they cost little: one thread, bare sockets,
    and an answer is searched, not parsed."""

    def __init__(self, url: str, key: str, seed: int) -> None:
        address = urlsplit(url)
        assert address.hostname and address.port
        self._address = (address.hostname, address.port)
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        )
        self._rng = random.Random(seed)
        self._number = 0
        self._asking: dict[int, _Request] = {}  # by descriptor
        self._poll = select.epoll()
        self._began = 0.0
        self.answers = Answers()

    def arrive(self, rate: float, seconds: float) -> None:
        """Send ``rate`` requests per second at random times, for so many seconds, and wait for their
        answers."""
        began = now = self._began = time.perf_counter()
        due = began + self._rng.expovariate(rate)
        while due < began + seconds:
            while due <= now and due < began + seconds:
                self._ask(due)
                due += self._rng.expovariate(rate)
            now = self._read(max(0.0, due - time.perf_counter()))
        self._rest()

    def crowd(self, clients: int, seconds: float) -> None:
        """For so many seconds, keep ``clients`` requests running: each client sends the next when the last was
        answered."""
        now = self._began = time.perf_counter()
        end = now + seconds
        while now < end:
            for _ in range(clients - len(self._asking)):
                self._ask(now)
            now = self._read(1.0)
        self._rest()

    def _rest(self) -> None:
        """Read what is still answered."""
        end = time.perf_counter() + WAIT_SECONDS
        while self._asking and (left := end - time.perf_counter()) > 0.0:
            self._read(left)
        for request in list(self._asking.values()):
            self._fail(request, f"no end within {WAIT_SECONDS:g} s")

    def _ask(self, began: float) -> None:
        """Begin one request. ``began``: when it was due."""
        self._number += 1
        text = f"My name is number {self._number} of {self._rng.randrange(10**6)}. What is my name?"
        body = BODY.replace("TEXT", text)
        sock = socket.socket()
        request = _Request(sock, began, f"{self._head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        sock.setblocking(False)
        sock.connect_ex(self._address)
        self._asking[sock.fileno()] = request
        self._poll.register(sock, select.EPOLLOUT)
        self.answers.late.append(time.perf_counter() - began)

    def _read(self, seconds: float) -> float:
        """Wait at most so long for something to come, and read it. Returns the time."""
        for fd, _ in self._poll.poll(seconds):
            request = self._asking[fd]
            try:
                if request.unsent:
                    sent = request.sock.send(request.unsent)
                    request.unsent = request.unsent[sent:]
                    if not request.unsent:
                        self._poll.modify(fd, select.EPOLLIN)
                elif data := request.sock.recv(1 << 16):
                    self._take(request, data)
                else:
                    self._end(request)
            except BlockingIOError:
                continue
            except OSError as fault:
                self._fail(request, f"{type(fault).__name__}: {fault}")
        return time.perf_counter()

    def _take(self, request: _Request, data: bytes) -> None:
        if b"\r\n\r\n" not in request.told:
            request.told += data
        if not request.first and b'"content":"' in data.replace(b'"content":""', b""):
            request.first = time.perf_counter()
        request.last = (request.last + data)[-64:]

    def _end(self, request: _Request) -> None:
        """The connection was closed by the server, behind the answer."""
        now = time.perf_counter()
        answers, told = self.answers, request.told.lower()
        status = told[9:12]
        if b"\r\n\r\n" not in told:
            self._fail(request, "closed without an answer")
            return
        if status in (b"429", b"503"):
            answers.refused.append(now - request.began)
            answers.silent += b"\r\nretry-after:" not in told
        elif status == b"200" and request.first and b"[DONE]" in request.last:
            answers.ttft.append(request.first - request.began)
            answers.taken.append(now - request.began)
            answers.at.append(request.first - self._began)
        else:
            answers.failed.append(f"{status!r}: {request.last!r}")
        self._close(request)

    def _fail(self, request: _Request, why: str) -> None:
        self.answers.failed.append(why)
        self._close(request)

    def _close(self, request: _Request) -> None:
        del self._asking[request.sock.fileno()]
        request.sock.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--clients", type=int, default=32, help="without a rate")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()

    users = Users(chosen.url, chosen.key, chosen.seed)
    if chosen.rate:
        users.arrive(chosen.rate, chosen.seconds)
    else:
        users.crowd(chosen.clients, chosen.seconds)
    print(json.dumps({**asdict(users.answers), "cpu_seconds": time.process_time()}))


if __name__ == "__main__":
    main()
