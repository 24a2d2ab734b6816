"""A tree of attempts: at each step the session forks, all forks try, and the best goes on.

A fork shares the session's KV, so an attempt costs only its own tokens.

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
    """A question, and the score of an answer: higher is better."""

    ask: str
    score: Callable[[str], float]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The answer of one fork."""

    chat: Chat
    text: str
    score: float


async def best_of(chat: Chat, step: Step, width: int) -> Attempt:
    """Fork, let all forks try, keep the best. The first is greedy, the others sample with a seed each."""
    attempts: list[Attempt] = []

    async def attempt(child: Chat, seed: int) -> None:
        sampling: dict[str, float] = {"temperature": 1.2, "seed": seed} if seed else {"temperature": 0}
        text = await child.say(step.ask, **sampling).text()
        attempts.append(Attempt(child, text, step.score(text)))

    async with anyio.create_task_group() as group:
        for seed, child in enumerate(await chat.fork(width)):
            group.start_soon(attempt, child, seed)
    best = max(attempts, key=lambda attempt: attempt.score)
    for other in attempts:
        if other is not best:
            await other.chat.aclose()
    return best


async def climb(client: Client, facts: Sequence[str], steps: Sequence[Step], width: int = 3) -> list[Attempt]:
    """Say the facts in a session, then take each step with the best of `width` attempts."""
    async with client.session() as root:
        for fact in facts:
            await root.say(fact, temperature=0).text()
        path: list[Attempt] = []
        for step in steps:
            path.append(await best_of(path[-1].chat if path else root, step, width))
        return path


def counts(low: int, high: int) -> Step:
    """A step of counting; the score is the share of right numbers."""
    wanted = [str(number) for number in range(low, high + 1)]

    def score(text: str) -> float:
        found = re.findall(r"\d+", text)
        right: int = sum(one == other for one, other in zip(found, wanted, strict=False))
        return right / max(len(found), len(wanted))

    return Step(f"Count from {low} to {high}.", score)


def recalls(ask: str, wanted: str) -> Step:
    """A step of remembering; the score is 1 or 0."""
    return Step(ask, lambda text: float(wanted in text))


async def main(url: str) -> None:
    steps = [counts(3, 12), recalls("What is my locker code?", "4821"), counts(20, 31)]
    async with connect(url) as client:
        for attempt in await climb(client, ["My locker code is 4821."], steps):
            print(f"{attempt.score:.2f}  {attempt.text}")


if __name__ == "__main__":
    anyio.run(main, (sys.argv[1:] or ["ws://127.0.0.1:8040"])[0])
