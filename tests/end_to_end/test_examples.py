"""The SDK's examples, each run as a program and held over many conversations with the pocket model."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys

import pytest

from holdfast.benchmarks.pocket.words import WorldWords
from holdfast.gateway.server import Serving
from holdfast.sdk import Client
from holdfast.sdk.examples import attempts, supervisor, tool_agent

pytestmark = pytest.mark.anyio

SHORT, LONG = 2, 50
COUNTS = [SHORT, pytest.param(LONG, marks=pytest.mark.slow)]

TOLD = {
    "tool_agent": ("7 degrees and cloudy in Oslo", "17 plus 25 is 42", "timer is set for 5 minutes"),
    "attempts": ("3, 4, 5, 6, 7, 8, 9, 10, 11, 12", "4821", "20, 21, 22"),
    "supervisor": (
        "first, turn 1: Your name is Marisol",
        "4821",
        "second, turn 2: Your name is Bella",
        "1357",
    ),
}
"""For each example, what it prints when it is run as it stands."""


@pytest.mark.parametrize("example", TOLD)
async def test_an_example_runs_as_a_program(example: str, server: Serving) -> None:
    command = (sys.executable, "-m", f"holdfast.sdk.examples.{example}", "--url", server.url)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = (text.decode() for text in await process.communicate())
    assert process.returncode == 0, err
    assert all(told in out for told in TOLD[example]), out


@pytest.mark.parametrize("example", TOLD)
def test_an_example_says_what_it_is(example: str) -> None:
    command = (sys.executable, "-m", f"holdfast.sdk.examples.{example}", "--help")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--url" in done.stdout and f"holdfast.sdk.examples.{example}" in done.stdout


def drawn(seed: int) -> tuple[random.Random, WorldWords]:
    rng = random.Random(seed)
    return rng, WorldWords(rng)


@pytest.mark.parametrize("count", COUNTS)
async def test_the_tool_agent_ends_right(client: Client, count: int) -> None:
    for seed in range(count):
        rng, _ = drawn(seed)
        city, (degrees, sky) = rng.choice(list(tool_agent.SKIES.items()))
        a, b, minutes = rng.randint(1, 99), rng.randint(1, 99), rng.randint(2, 90)
        errands = [
            f"What is the weather in {city}?",
            f"What is {a} plus {b}?",
            f"Set a timer for {minutes} minutes.",
        ]
        done = await tool_agent.work(client, errands)
        assert [(one.stop, one.calls, len(one.rounds)) for one in done] == [("completed", 1, 2)] * 3, seed
        later = [finished.kv for one in done[1:] for finished in one.rounds]
        assert all(kv is not None and kv.prefilled <= kv.new and kv.miss_reason is None for kv in later), seed
        assert [one.text for one in done] == [
            f"It is {degrees} degrees and {sky} in {city}.",
            f"{a} plus {b} is {a + b}.",
            f"Your timer is set for {minutes} minutes.",
        ], seed


@pytest.mark.parametrize("count", COUNTS)
async def test_the_tree_of_attempts_ends_right(client: Client, count: int) -> None:
    for seed in range(count):
        rng, words = drawn(seed)
        low, name, code = rng.randint(1, 40), words.name(), words.code()
        steps = [
            attempts.counts(low, low + rng.randint(3, 12)),
            attempts.recalls("What is my locker code?", code),
            attempts.recalls("What is my name?", name),
        ]
        told = [f"My locker code is {code}.", f"My name is {name}."]
        path = await attempts.climb(client, told, steps)
        assert [attempt.score for attempt in path] == [1.0] * 3, (seed, [one.text for one in path])


@pytest.mark.parametrize("count", COUNTS)
async def test_the_supervisor_ends_right(client: Client, count: int) -> None:
    for seed in range(count):
        _, words = drawn(seed)
        facts = {name: (words.name(), words.code()) for name in ("one", "two")}
        lines = {
            n: [f"My name is {name}.", f"My locker code is {code}."] for n, (name, code) in facts.items()
        }
        summaries = await supervisor.supervise(client, lines, supervisor.QUESTIONS)
        for worker, (name, code) in facts.items():
            first, second = summaries[worker]
            assert name in first["name"] and name in second["name"], (seed, summaries)
            assert "not told" in first["code"] and code in second["code"], (seed, summaries)


async def test_what_is_asked_aside_leaves_no_trace(client: Client) -> None:
    async with client.session(temperature=0) as chat, client.session(temperature=0) as other:
        watched = supervisor.Worker(chat)
        for line in ("My name is Marisol.", "My locker code is 4821.", "What is my locker code?"):
            said = await watched.hears(line)
            kv = chat.last.kv
            await watched.aside("What is my name?")
            assert said == await other.say(line).text()
            assert kv is not None and other.last.kv is not None and kv.new == other.last.kv.new
            assert kv.prefilled <= kv.new, "what was asked aside may have left blocks that begin alike"
