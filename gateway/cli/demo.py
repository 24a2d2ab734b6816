"""``holdfast demo``: a server with its engine in a child process, and a conversation over a real WebSocket.

Prints what is said, each turn's TTFT, and how many tokens were prefilled and how many were new. It fails if
these two differ, if the model does not recall what it was told, or if a reply changes because the engine or the
server was killed or the KV went to disk.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from ...kvstore.log_lines import LogSettings
from ...runtime.errors import RuntimeFault
from ...runtime.model.folder import POCKET
from ...runtime.settings import EngineSettings
from ...sdk.chat import Chat
from ...sdk.client import connect
from ...sdk.connection.responses import Finished
from ...sdk.errors import SDKError
from ...sessions.errors import SessionError
from ..server import serving
from ..settings import GatewaySettings
from .chat import cost
from .options import refused

SKIES = {"Oslo": (7, "cloudy"), "Lima": (19, "foggy"), "Cairo": (31, "sunny")}
COUNTED = "Every turn prefilled exactly its new tokens"
RIGHT = (
    "Engine and server were killed in mid-reply: it said what an undisturbed session says.",
    "The KV that was sent to disk came back from there: only new tokens were computed.",
)


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """One turn of the demo. ``say``: what the user says. ``expect``: texts that the reply must contain.
    ``tool``: the name of the tool that the model must call; None: no call is required."""

    say: str
    expect: tuple[str, ...] = ()
    tool: str | None = None


SCRIPT = (
    ScriptLine("Hello! My name is Marisol.", ("Marisol",)),
    ScriptLine("My locker code is 4821."),
    ScriptLine("What is the weather in Oslo?", ("7", "cloudy", "Oslo"), tool="get_weather"),
    ScriptLine("My favourite colour is teal."),
    ScriptLine("What is 17 plus 25?", ("42",), tool="add"),
    ScriptLine("What is my locker code?", ("4821",)),
    ScriptLine("Tell me the story of the fox."),
    ScriptLine("What is my name?", ("Marisol",)),
    ScriptLine("What is my dog called?", ("not told",)),
)


TALK = (
    ScriptLine("Hello! My name is Marisol, and I live in Oslo."),
    ScriptLine("What is the capital of France?"),
    ScriptLine("Name three colours of the rainbow."),
    ScriptLine("Say that in German, please."),
    ScriptLine("What is my name?"),
)
"""The lines for a model other than the pocket model. Only the token counts are checked, not what the replies
say."""
LONGEST = 96
"""The most tokens of a reply in `TALK`."""


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    degrees, sky = SKIES.get(city, (20, "clear"))
    return json.dumps({"temperature": degrees, "sky": sky})


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return json.dumps({"sum": round(a + b)})


def run(model: str = POCKET) -> int:
    """Run the whole demo with this model. Returns the exit code: 0 if everything was right, 1 if not, 2 if it
    could not start or broke off."""
    return played(partial(_demo, model))


def played(play: Callable[[Console], Coroutine[Any, Any, int]]) -> int:
    """Run a demo: ``play`` gets a console to print on, and returns the exit code. Returns that code, or 2 with
    the cause on stderr if the demo could not start or broke off."""
    try:
        return asyncio.run(play(Console(highlight=False)))
    except (RuntimeFault, SessionError, SDKError) as error:
        return refused(error.message)


def verdict(wrong: list[str], console: Console, right: Iterable[str] = ()) -> int:
    """Print what went ``wrong`` and return 1. If nothing did, print the lines ``right`` and return 0."""
    for fault in wrong:
        console.print(f"[red]{fault}[/red]", soft_wrap=True)
    if not wrong:
        for line in right:
            console.print(line)
    return 1 if wrong else 0


def figures(title: str, headings: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Make a table of numbers, to be printed on a console. Each of ``rows`` has a cell for each heading."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*map(str, row))
    return table


def engine_of(model: str) -> EngineSettings:
    """Settings of a demo's engine: it logs what is wrong alone, as its lines stand among those of the demo."""
    return EngineSettings(model=model, logs=LogSettings(level="warning"))


async def _demo(model: str, console: Console) -> int:
    from ...benchmarks.crash_demo import play_crashes

    known = model == POCKET
    console.print(f"[dim]Starting a server, and an engine with the {model} model in its own process…[/dim]")
    async with serving(GatewaySettings(port=0), engine_of(model)) as running:
        console.print(f"[dim]Engine {running.engine.pid} loaded; talking over {running.url}[/dim]\n")
        name = running.service.model
        limits: dict[str, Any] = {"tools": [get_weather, add]} if known else {"max_output_tokens": LONGEST}
        async with connect(running.url) as client, client.session(**limits) as chat:
            rows: list[list[object]] = []
            wrong: list[str] = []
            for turn, line in enumerate(SCRIPT if known else TALK, start=1):
                wrong += await _turn(chat, line, turn, name, console)
                rows += [_row(turn, finished) for finished in chat.rounds]
    headings = ("turn", "TTFT ms", "prefilled", "new", "resident", "said")
    console.print(figures("What each response cost", headings, rows))
    console.print("\n[bold]Second act[/bold]: a server on a store; its engine is killed, then the server.\n")
    wrong += await play_crashes(model, console, None if known else LONGEST)
    counted = f"{COUNTED}, and what was told was recalled." if known else f"{COUNTED}."
    return verdict(wrong, console, (counted, *RIGHT))


async def _turn(chat: Chat, line: ScriptLine, turn: int, name: str, console: Console) -> list[str]:
    """Say one line to the model and print the reply and its cost. ``turn``: its number, from 1. ``name``: the
    model's, as the speaker of the reply. Returns what went wrong, one text for each fault."""
    console.print(f"[bold]you[/bold]     {line.say}")
    console.print(f"[bold cyan]{name}[/bold cyan]  ", end="")
    said = ""
    async for piece in chat.say(line.say):
        said += piece
        console.print(piece, end="", markup=False, soft_wrap=True)
    console.print()
    called = [call for finished in chat.rounds for call in finished.calls]
    for finished in chat.rounds:
        for call in finished.calls:
            console.print(f"[dim]        called {call.name}({call.arguments})[/dim]", soft_wrap=True)
        console.print(f"[dim]        {cost(finished)}[/dim]", soft_wrap=True)
    console.print()
    wrong = [f"turn {turn}: {fault}" for finished in chat.rounds if (fault := _miscounted(finished))]
    wrong += [f"turn {turn}: the reply lacks {text!r}" for text in line.expect if text not in said]
    if line.tool is not None and line.tool not in [call.name for call in called]:
        wrong.append(f"turn {turn}: {line.tool} was not called")
    return wrong


def _miscounted(finished: Finished) -> str | None:
    kv = finished.kv
    if kv is None:
        return "the server sent no receipt"
    if kv.miss_reason == "unreported":
        return "the engine has not reported what it computed"
    computed = kv.prefilled + kv.recomputed
    return None if computed == kv.new else f"{computed} tokens prefilled, {kv.new} are new ({kv.miss_reason})"


def _row(turn: int, finished: Finished) -> list[object]:
    kv, said = finished.kv, finished.usage.output_tokens if finished.usage else 0
    counts = (kv.prefilled, kv.new, kv.resident) if kv else (0, 0, 0)
    return [turn, f"{finished.ttft_ms or 0.0:.0f}", *counts, said]
