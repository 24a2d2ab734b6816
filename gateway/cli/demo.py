"""``holdfast demo``: a server with its engine in a child process, and a conversation over a real WebSocket.

Prints what is said, each turn's TTFT, and tokens prefilled against new ones. It fails where these differ, where
the model does not recall what it was told, or where a killed engine or server, or KV on disk, changes a reply
(`crash_demo`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ...runtime.errors import RuntimeFault
from ...runtime.settings import EngineSettings
from ...sdk.chat import Chat
from ...sdk.client import connect
from ...sdk.errors import SDKError
from ...sdk.responses import Finished
from ...sessions.errors import SessionError
from ..server import serving
from ..settings import GatewaySettings
from .chat import cost
from .crash_demo import play_crashes

MODEL = "pocket"
SKIES = {"Oslo": (7, "cloudy"), "Lima": (19, "foggy"), "Cairo": (31, "sunny")}


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """What is said, what the reply must contain, and the tool that it has to call."""

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


@dataclass(frozen=True, slots=True)
class ResponseRow:
    """One response, for the table at the end."""

    turn: int
    finished: Finished


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    degrees, sky = SKIES.get(city, (20, "clear"))
    return json.dumps({"temperature": degrees, "sky": sky})


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return json.dumps({"sum": round(a + b)})


def run() -> int:
    """The whole demo; 0 if all was as it should be, 1 if not, 2 if it could not start."""
    console = Console(highlight=False)
    try:
        return asyncio.run(_demo(console))
    except (RuntimeFault, SessionError, SDKError) as error:
        print(f"holdfast: {error.message}", file=sys.stderr)
        return 2


async def _demo(console: Console) -> int:
    console.print(f"[dim]Starting a server, and an engine with the {MODEL} model in its own process…[/dim]")
    async with serving(GatewaySettings(port=0), EngineSettings(model=MODEL)) as running:
        console.print(f"[dim]Engine {running.engine.pid} loaded; talking over {running.url}[/dim]\n")
        async with connect(running.url) as client, client.session(tools=[get_weather, add]) as chat:
            rows: list[ResponseRow] = []
            wrong: list[str] = []
            for turn, line in enumerate(SCRIPT, start=1):
                wrong += await _turn(chat, line, turn, rows, console)
    console.print(_table(rows))
    console.print("\n[bold]Second act[/bold]: a server on a store; its engine is killed, then the server.\n")
    wrong += await play_crashes(MODEL, console)
    return _verdict(wrong, console)


async def _turn(
    chat: Chat, line: ScriptLine, turn: int, rows: list[ResponseRow], console: Console
) -> list[str]:
    """Say one line. Returns what went wrong with it."""
    console.print(f"[bold]you[/bold]     {line.say}")
    console.print("[bold cyan]pocket[/bold cyan]  ", end="")
    said = ""
    async for piece in chat.say(line.say):
        said += piece
        console.print(piece, end="", markup=False, soft_wrap=True)
    console.print()
    called = [call for finished in chat.rounds for call in finished.calls]
    for finished in chat.rounds:
        rows.append(ResponseRow(turn, finished))
        for call in finished.calls:
            console.print(f"[dim]        called {call.name}({call.arguments})[/dim]", soft_wrap=True)
        console.print(f"[dim]        {cost(finished)}[/dim]", soft_wrap=True)
    console.print()
    wrong = [f"turn {turn}: {_miscounted(finished)}" for finished in chat.rounds if _miscounted(finished)]
    wrong += [f"turn {turn}: the reply lacks {text!r}" for text in line.expect if text not in said]
    if line.tool is not None and line.tool not in [call.name for call in called]:
        wrong.append(f"turn {turn}: {line.tool} was not called")
    return wrong


def _miscounted(finished: Finished) -> str | None:
    kv = finished.kv
    if kv is None:
        return "the server sent no receipt"
    computed = kv.prefilled + kv.recomputed
    return None if computed == kv.new else f"{computed} tokens prefilled, {kv.new} are new ({kv.miss_reason})"


def _table(rows: list[ResponseRow]) -> Table:
    table = Table(title="What each response cost")
    for heading in ("turn", "TTFT ms", "prefilled", "new", "resident", "said", "tok/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        finished, kv, usage = row.finished, row.finished.kv, row.finished.usage
        said = usage.output_tokens if usage else 0
        first = finished.ttft_ms or 0.0
        speed = (said - 1) / (finished.total_ms - first) * 1000 if said > 1 else 0.0
        counts = (kv.prefilled, kv.new, kv.resident) if kv else (0, 0, 0)
        table.add_row(str(row.turn), f"{first:.0f}", *map(str, counts), str(said), f"{speed:.0f}")
    return table


def _verdict(wrong: list[str], console: Console) -> int:
    if not wrong:
        console.print("Every turn prefilled exactly its new tokens, and what was told was recalled.")
        console.print("Engine and server were killed in mid-reply: it said what an undisturbed session says.")
        console.print("The KV that was sent to disk came back from there: only new tokens were computed.")
        return 0
    for fault in wrong:
        console.print(f"[red]{fault}[/red]")
    return 1
