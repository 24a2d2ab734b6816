"""``holdfast chat``: a conversation in a terminal with a running server.

The event loop has a thread of its own, so that pings are answered while the prompt waits. Ctrl-C reaches the
main thread and cuts a reply short.
"""

from __future__ import annotations

import queue
import sys

from anyio.from_thread import BlockingPortal, start_blocking_portal
from rich.console import Console

from ...sdk.chat import Chat
from ...sdk.client import connect
from ...sdk.errors import SDKError
from ...sdk.responses import Finished

PROMPT = "you> "


def run(url: str, instructions: str, api_key: str | None) -> int:
    """Talk until Ctrl-D, or Ctrl-C at the prompt. Returns the exit code."""
    with start_blocking_portal() as portal:
        try:
            with (
                portal.wrap_async_context_manager(connect(url, api_key=api_key)) as client,
                portal.wrap_async_context_manager(client.session(instructions=instructions or None)) as chat,
            ):
                return _talk(portal, chat)
        except SDKError as error:
            print(f"holdfast: {error.message}", file=sys.stderr)
            return 2


def _talk(portal: BlockingPortal, chat: Chat) -> int:
    console = Console(highlight=False)
    console.print(f"[dim]{chat.session.model} · Ctrl-C cuts a reply short, Ctrl-D leaves[/dim]")
    while True:
        try:
            said = input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if said.strip():
            _turn(portal, chat, said, console)


def _turn(portal: BlockingPortal, chat: Chat, said: str, console: Console) -> None:
    pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    async def listen() -> None:
        try:
            async for piece in chat.say(said):
                pieces.put(piece)
        finally:
            pieces.put(None)

    reply = portal.start_task_soon(listen)
    while (piece := _next(pieces, portal, chat)) is not None:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    try:
        reply.result()
    except SDKError as error:
        console.print(f"[red]{error.code}: {error.message}[/red]")
        return
    console.print(f"[dim]{cost(chat.last)}[/dim]")


def _next(pieces: queue.SimpleQueue[str | None], portal: BlockingPortal, chat: Chat) -> str | None:
    """The next piece. Ctrl-C cancels the reply and waits for the pieces that were sent before."""
    while True:
        try:
            return pieces.get()
        except KeyboardInterrupt:
            portal.call(chat.cancel)


def cost(finished: Finished) -> str:
    """One line: the time to the first text, and tokens prefilled against new ones."""
    parts = [finished.status] if finished.status != "completed" else []
    if finished.ttft_ms is not None:
        parts.append(f"TTFT {finished.ttft_ms:.0f} ms")
    if finished.kv is not None:
        computed, new = finished.kv.prefilled + finished.kv.recomputed, finished.kv.new
        parts.append(f"prefilled {computed} {'=' if computed == new else '≠'} new {new}")
    if finished.usage is not None:
        parts.append(f"{finished.usage.output_tokens} tokens in {finished.total_ms:.0f} ms")
    return " · ".join(parts)
