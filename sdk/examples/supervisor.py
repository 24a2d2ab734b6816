"""A supervisor of several conversations: it asks each about itself, out of band, and leaves no trace there.

What is asked aside is answered from all that was said, and is no part of it: the next turn is the same as if
nobody had asked, and its KV is where it was.

    python -m holdfast.sdk.examples.supervisor [URL]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import anyio

from ..chat import Chat
from ..client import Client, connect
from ..frames.items import ItemReference, MessageItem

QUESTIONS = {"name": "What is my name?", "code": "What is my locker code?"}


class Worker:
    """One conversation that is watched: it knows the ids of its items."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._items: list[ItemReference] = []

    async def hears(self, line: str) -> str:
        """A turn; what the model says."""
        self._note(await self._chat.add(MessageItem.of("user", line)))
        async for _ in self._chat.respond():
            pass
        for item in self._chat.last.response.output:
            self._note(item)
        return self._chat.last.text

    async def aside(self, question: str) -> str:
        """What the model says to a question that the conversation never hears."""
        asked = [*self._items, MessageItem.of("user", question)]
        async for _ in self._chat.respond(conversation="none", input=asked, max_output_tokens=48):
            pass
        return self._chat.last.text

    def _note(self, item: object) -> None:
        self._items.append(ItemReference(id=getattr(item, "id", None) or ""))


async def supervise(
    client: Client, lines: Mapping[str, Sequence[str]], questions: Mapping[str, str]
) -> dict[str, list[dict[str, str]]]:
    """All conversations side by side; after each turn a summary of it: the answers to `questions`."""
    summaries: dict[str, list[dict[str, str]]] = {name: [] for name in lines}

    async def converse(name: str) -> None:
        async with client.session(temperature=0) as chat:
            worker = Worker(chat)
            for line in lines[name]:
                await worker.hears(line)
                told = {about: await worker.aside(question) for about, question in questions.items()}
                summaries[name].append(told)

    async with anyio.create_task_group() as group:
        for name in lines:
            group.start_soon(converse, name)
    return summaries


async def main(url: str) -> None:
    """Supervise at the server."""
    lines = {
        "first": ["My name is Marisol.", "My locker code is 4821."],
        "second": ["My name is Bella.", "My locker code is 1357."],
    }
    async with connect(url) as client:
        for name, told in (await supervise(client, lines, QUESTIONS)).items():
            for turn, summary in enumerate(told, start=1):
                print(f"{name}, turn {turn}: " + " ".join(summary.values()))


if __name__ == "__main__":
    anyio.run(main, (sys.argv[1:] or ["ws://127.0.0.1:8040"])[0])
