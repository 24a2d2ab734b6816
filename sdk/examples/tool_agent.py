"""An agent with tools: each task is a run, and its events are printed as they come.

python -m holdfast.sdk.examples.tool_agent [--url URL]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio

from ..agent.events import CallFinished, CallStarted, RunDone, RunEvent, TextPiece
from ..agent.run import RunLimits
from ..client import Client, connect
from ..tools.tool import tool
from . import asked_url

TASKS = ("What is the weather in Oslo?", "What is 17 plus 25?", "Set a timer for 5 minutes.")
SKIES = {"Oslo": (7, "cloudy"), "Lima": (19, "foggy"), "Cairo": (31, "sunny")}


@tool(timeout=5.0)
async def get_weather(city: str) -> dict[str, Any]:
    """Get the weather in a city."""
    temperature, sky = SKIES[city]
    return {"temperature": temperature, "sky": sky}


@tool
def add(a: float, b: float) -> dict[str, int]:
    """Add two numbers."""
    return {"sum": round(a + b)}


@tool
def set_timer(minutes: int) -> dict[str, bool]:
    """Set a timer."""
    return {"ok": True}


async def work(
    client: Client, tasks: Sequence[str], show: Callable[[RunEvent], object] = lambda event: None
) -> list[RunDone]:
    """Do all tasks in one session, each as a run, and return how each ended. `show` gets every event."""
    async with client.session(tools=[get_weather, add, set_timer], temperature=0) as chat:
        limits = RunLimits(steps=4, calls=4, seconds=60)
        return [await chat.run(task, limits=limits, trace=[show]).done() for task in tasks]


def show(event: RunEvent) -> None:
    match event:
        case TextPiece(text=text):
            print(text, end="", flush=True)
        case CallStarted(name=name, arguments=arguments):
            print(f"[{name} {arguments}", end="", flush=True)
        case CallFinished(output=output, seconds=seconds):
            print(f" -> {output}, {1000 * seconds:.0f} ms] ", end="", flush=True)
        case RunDone(stop=stop, usage=usage):
            print(f" ({stop}, {usage.new_tokens} new and {usage.output_tokens} sampled tokens)")


async def main(url: str | None) -> None:
    async with connect(url) as client:
        await work(client, TASKS, show)


if __name__ == "__main__":
    anyio.run(main, asked_url(__doc__))
