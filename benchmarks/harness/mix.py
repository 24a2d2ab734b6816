"""Ordinary traffic, as a process; ``python -m``: the server's address, and a seed.

Five clients hold conversations of three turns over Chat Completions, each request with all messages; four hold
sessions of four turns over the SDK, and fork every fourth of them for one turn more. For each turn a line of
JSON comes: when it ended (``time.monotonic``) and the seconds to its first text; for each conversation that has
ended one with the time alone; for a failure one with its text. When its input ends, each client goes to the end
of its conversation.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import sys
import time
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import urlsplit

from holdfast.sdk import Chat, SDKError, connect

from .completions import SECONDS, streamed

CHATS, SESSIONS = 5, 4
CHAT_TURNS, SESSION_TURNS, FORKED = 3, 4, 4
TOKENS = 24
PAUSE = 0.1
"""After a failure."""
SWITCH_SECONDS = 0.001
NAMES = ("Marisol", "Tomas", "Ada", "Ivo", "Lena", "Piet", "Noor", "Kai")


class Traffic:
    """The clients of the server at ``url``."""

    def __init__(self, url: str, seed: str) -> None:
        self._url = url
        self._seed = seed
        self._over = Event()
        self._printing = Lock()

    def run(self) -> None:
        """Run all clients until the input ends."""
        clients = [Thread(target=self._chats, args=(number,)) for number in range(CHATS)]
        clients.append(Thread(target=lambda: asyncio.run(self._sessions())))
        for client in clients:
            client.start()
        sys.stdin.read()
        self._over.set()
        for client in clients:
            client.join()

    def _tell(self, *what: object) -> None:
        with self._printing:
            print(json.dumps(what), flush=True)

    def _chats(self, number: int) -> None:
        """Hold one conversation after another over Chat Completions."""
        rng = random.Random(f"{self._seed} chat {number}")
        address = urlsplit(self._url).netloc
        client = http.client.HTTPConnection(address, timeout=SECONDS)
        while not self._over.is_set():
            messages: list[dict[str, Any]] = []
            try:
                for line in _lines(rng)[:CHAT_TURNS]:
                    messages.append({"role": "user", "content": line})
                    body = {"messages": messages, "temperature": 0, "max_tokens": TOKENS}
                    said = streamed(client, body)
                    messages.append({"role": "assistant", "content": said.text})
                    self._tell(time.monotonic(), said.first)
            except (OSError, http.client.HTTPException, RuntimeError) as fault:
                self._fail(fault)
                client.close()
                client = http.client.HTTPConnection(address, timeout=SECONDS)
                time.sleep(PAUSE)
            self._tell(time.monotonic())
        client.close()

    async def _sessions(self) -> None:
        async with asyncio.TaskGroup() as clients:
            for number in range(SESSIONS):
                clients.create_task(self._session_client(number))

    async def _session_client(self, number: int) -> None:
        """Hold one conversation after another in sessions of its own."""
        rng = random.Random(f"{self._seed} session {number}")
        async with connect(self._url) as client:
            count = 0
            while not self._over.is_set():
                count += 1
                try:
                    async with client.session(temperature=0, max_output_tokens=TOKENS) as chat:
                        await self._converse(chat, _lines(rng), forked=count % FORKED == 0)
                except SDKError as fault:
                    self._fail(fault)
                    await asyncio.sleep(PAUSE)
                self._tell(time.monotonic())

    async def _converse(self, chat: Chat, lines: list[str], *, forked: bool) -> None:
        half = len(lines) // 2
        for line in lines[:half]:
            await self._turn(chat, line)
        if forked:
            (fork,) = await chat.fork(1)
            await self._turn(fork, lines[half])
            await fork.aclose()
        for line in lines[half:]:
            await self._turn(chat, line)

    async def _turn(self, chat: Chat, line: str) -> None:
        began, first = time.perf_counter(), 0.0
        async for _ in chat.say(line):
            first = first or time.perf_counter() - began
        self._tell(time.monotonic(), first or time.perf_counter() - began)

    def _fail(self, fault: Exception) -> None:
        self._tell(f"{type(fault).__name__}: {fault}")


def _lines(rng: random.Random) -> list[str]:
    """What a client says in one conversation; no two say the same."""
    name = f"{rng.choice(NAMES)} number {rng.randrange(10**6)}"
    said = f"My name is {name}. My locker code is {rng.randrange(10**4)}."
    return [said, "What is my name?", "Tell me a story about a fox.", "What is my locker code?"][
        :SESSION_TURNS
    ]


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_SECONDS)
    Traffic(*sys.argv[1:]).run()
