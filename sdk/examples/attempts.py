"""A tree of attempts: at each step the session forks, all forks try, and the best goes on.

A fork shares the session's KV, so an attempt costs only its own tokens.

    python -m holdfast.sdk.examples.attempts [--url URL]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from ..chat import Chat
from ..client import Client, connect
from ..params import SamplingOptions
from . import asked_url


@dataclass(frozen=True, slots=True)
class Step:
    """A question, and what scores an answer to it: higher is better."""

    ask: str
    score: Callable[[str], float]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The answer of one fork to a step: its chat, its text and its score."""

    chat: Chat
    text: str
    score: float


async def best_of(chat: Chat, step: Step, width: int) -> Attempt:
    """Make `width` forks of the chat, let each answer the step's question, and return the best answer; the
    other forks are closed. The first is greedy, the others sample with a seed each."""
    attempts: list[Attempt] = []

    async def attempt(child: Chat, seed: int) -> None:
        sampling: SamplingOptions = {"temperature": 1.2, "seed": seed} if seed else {"temperature": 0}
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
    """Say the facts in a new session, then take each step with `width` attempts, from the best one of the step
    before. Returns the best attempt of each step; its chat is closed by then."""
    async with client.session() as root:
        for fact in facts:
            await root.say(fact, temperature=0).text()
        path: list[Attempt] = []
        for step in steps:
            path.append(await best_of(path[-1].chat if path else root, step, width))
        return path


def counts(low: int, high: int) -> Step:
    """A step of counting from `low` to `high`; the score is the share of right numbers."""
    wanted = [str(number) for number in range(low, high + 1)]

    def score(text: str) -> float:
        found = re.findall(r"\d+", text)
        right: int = sum(one == other for one, other in zip(found, wanted, strict=False))
        return right / max(len(found), len(wanted))

    return Step(f"Count from {low} to {high}.", score)


def recalls(ask: str, wanted: str) -> Step:
    """A step of remembering: the score is 1 if the answer to `ask` holds `wanted`, else 0."""
    return Step(ask, lambda text: float(wanted in text))


async def main(url: str | None) -> None:
    steps = [counts(3, 12), recalls("What is my locker code?", "4821"), counts(20, 31)]
    async with connect(url) as client:
        for attempt in await climb(client, ["My locker code is 4821."], steps):
            print(f"{attempt.score:.2f}  {attempt.text}")


if __name__ == "__main__":
    anyio.run(main, asked_url(__doc__))
