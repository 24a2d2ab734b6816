"""Run by `.venv-clients`: runs of the openai-agents package that are left, on a model without a server.

Prints the sessions that are kept after each, and what the chat was asked about tools.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from agents import ModelSettings

from holdfast.sdk.adapters.openai_agents import SessionModel
from holdfast.sdk.frames.server import TextDelta


class Endless:
    """A chat that says a word, and then nothing for ever."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.began = asyncio.Event()

    async def add(self, item: Any) -> None: ...

    async def respond(self, **fields: Any) -> AsyncIterator[Any]:
        self.asked = fields
        self.began.set()
        yield TextDelta(
            event_id="e", response_id="r", output_index=0, item_id="i", content_index=0, delta="Once"
        )
        await asyncio.sleep(3600)


async def main() -> dict[str, Any]:
    chats, kept, first = list[Endless](), list[int](), Endless()

    @asynccontextmanager
    async def session() -> AsyncIterator[Endless]:
        chats.append(Endless() if chats else first)
        yield chats[-1]

    model = SessionModel(SimpleNamespace(session=session))  # type: ignore[arg-type]
    settings = ModelSettings(tool_choice="get_weather", parallel_tool_calls=False)
    asked = (None, "Go", settings, [], None, [], None)
    waiting = asyncio.ensure_future(model.get_response(*asked))
    await first.began.wait()
    waiting.cancel()
    await asyncio.wait([waiting])
    kept.append(len(model._kept))
    stream = model.stream_response(*asked)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.aclose()  # type: ignore[attr-defined]
    kept.append(len(model._kept))
    asked_of = {name: first.asked[name] for name in ("tool_choice", "parallel_tool_calls")}
    return {"kept": kept, "asked": asked_of, "sessions": len(chats)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
