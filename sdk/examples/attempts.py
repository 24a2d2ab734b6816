"""A tree of attempts: at each step the session forks, all children try, the best one goes on, the others end.

A fork shares the KV of all that was said, so an attempt costs its own tokens alone.

    python -m holdfast.sdk.examples.attempts [URL]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from ..chat import Chat
from ..client import Client, connect


@dataclass(frozen=True, slots=True)
class Step:
    """What is asked, and how good an answer is: the more the better."""

    ask: str
    score: Callable[[str], float]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One child's answer."""

    chat: Chat
    text: str
    score: float


async def best_of(chat: Chat, step: Step, width: int) -> Attempt:
    """Fork, let all children try, keep the best. The first is greedy, the others draw, each with its seed."""
    attempts: list[Attempt] = []

    async def attempt(child: Chat, seed: int) -> None:
        drawn: dict[str, float] = {"temperature": 1.2, "seed": seed} if seed else {"temperature": 0}
        text = await child.say(step.ask, **drawn).text()
        attempts.append(Attempt(child, text, step.score(text)))

    async with anyio.create_task_group() as group:
        for seed, child in enumerate(await chat.fork(width)):
            group.start_soon(attempt, child, seed)
    best = max(attempts, key=lambda attempt: attempt.score)
    for other in attempts:
        if other is not best:
            await other.chat.aclose()
    return best


async def climb(client: Client, told: Sequence[str], steps: Sequence[Step], width: int = 3) -> list[Attempt]:
    """Tell a session what there is to know, then take each step with the best of `width` attempts."""
    async with client.session() as root:
        for line in told:
            await root.say(line, temperature=0).text()
        path: list[Attempt] = []
        for step in steps:
            path.append(await best_of(path[-1].chat if path else root, step, width))
        return path


def counts(low: int, high: int) -> Step:
    """Counting: the score is the share of numbers that are right."""
    wanted = [str(number) for number in range(low, high + 1)]

    def score(text: str) -> float:
        found = re.findall(r"\d+", text)
        right: int = sum(one == other for one, other in zip(found, wanted, strict=False))
        return right / max(len(found), len(wanted))

    return Step(f"Count from {low} to {high}.", score)


def recalls(ask: str, wanted: str) -> Step:
    """Remembering: right or wrong."""
    return Step(ask, lambda text: float(wanted in text))


async def main(url: str) -> None:
    """Climb at the server."""
    steps = [counts(3, 12), recalls("What is my locker code?", "4821"), counts(20, 31)]
    async with connect(url) as client:
        for attempt in await climb(client, ["My locker code is 4821."], steps):
            print(f"{attempt.score:.2f}  {attempt.text}")


if __name__ == "__main__":
    anyio.run(main, (sys.argv[1:] or ["ws://127.0.0.1:8040"])[0])
