"""Sends streamed Chat Completions requests, as a process; ``python -m``, one line of JSON at the end.

They arrive at a rate, at random times (Poisson), whether the earlier ones were answered or not; or each of
``clients`` clients sends one after another. Each is a new conversation on a connection of its own, as of so
many users.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

TOKENS = 16
"""The tokens of each reply."""
WAIT_SECONDS = 60.0
"""A request with an answer that takes longer counts as failed."""


@dataclass(slots=True)
class Answers:
    """What came of the requests. ``ttft``, ``taken``: for each complete reply, seconds to its first token and
    to its end. ``refused``: for each refusal (429 or 503), seconds until it came. ``silent``: the number of
    refusals without ``Retry-After``. ``failed``: a text for each other answer."""

    ttft: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    silent: int = 0
    failed: list[str] = field(default_factory=list)


class Users:
    """The users that send requests to the server at ``url``. ``answers``: what came of them so far."""

    def __init__(self, url: str, key: str, seed: int) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname, address.port
        self._key = key
        self._rng = random.Random(seed)
        self._number = 0
        self.answers = Answers()

    async def arrive(self, rate: float, seconds: float) -> None:
        """Send ``rate`` requests per second at random times, for so many seconds, and wait for their
        answers."""
        asking = set()
        began = due = time.perf_counter()
        while (due := due + self._rng.expovariate(rate)) < began + seconds:
            await asyncio.sleep(due - time.perf_counter())
            task = asyncio.ensure_future(self._ask(due))
            asking.add(task)
            task.add_done_callback(asking.discard)
        await asyncio.gather(*asking)

    async def crowd(self, clients: int, seconds: float) -> None:
        """For so many seconds, keep ``clients`` requests running: each client sends the next when the last was
        answered."""
        end = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end:
                await self._ask(time.perf_counter())

        await asyncio.gather(*(client() for _ in range(clients)))

    async def _ask(self, began: float) -> None:
        """Send one request, read its answer and record what came of it. ``began``: when the request was due."""
        answers = self.answers
        self._number += 1
        text = f"My name is number {self._number} of {self._rng.randrange(10**6)}. What is my name?"
        body = json.dumps(
            {
                "model": "pocket",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": TOKENS,
                "min_tokens": TOKENS,
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Authorization: Bearer {self._key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    writer.write(head.encode() + body)
                    told = (await reader.readuntil(b"\r\n\r\n")).lower()
                    status = int(told.split(b" ", 2)[1])
                    first, last = 0.0, b""
                    while data := await reader.read(1 << 16):
                        if not first and b'"content":"' in data.replace(b'"content":""', b""):
                            first = time.perf_counter()
                        last = (last + data)[-64:]
                finally:
                    writer.transport.abort()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as fault:
            answers.failed.append(f"{type(fault).__name__}: {fault}")
            return
        now = time.perf_counter()
        if status in (429, 503):
            answers.refused.append(now - began)
            answers.silent += b"\r\nretry-after:" not in told
        elif status == 200 and first and b"[DONE]" in last:
            answers.ttft.append(first - began)
            answers.taken.append(now - began)
        else:
            answers.failed.append(f"{status}: {last!r}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--clients", type=int, default=32, help="without a rate")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()

    async def ask() -> Answers:
        users = Users(chosen.url, chosen.key, chosen.seed)
        if chosen.rate:
            await users.arrive(chosen.rate, chosen.seconds)
        else:
            await users.crowd(chosen.clients, chosen.seconds)
        return users.answers

    print(json.dumps(asdict(asyncio.run(ask()))))


if __name__ == "__main__":
    main()
