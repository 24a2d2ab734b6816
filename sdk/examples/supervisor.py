"""A supervisor of several conversations: it asks each one questions out of band.

Such a question is answered from the whole conversation and leaves no trace in it: the next turn and its KV are
the same as without the question.

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
    """One supervised conversation, with the ids of its items."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._items: list[ItemReference] = []

    async def hears(self, line: str) -> str:
        self._note(await self._chat.add(MessageItem.of("user", line)))
        async for _ in self._chat.respond():
            pass
        for item in self._chat.last.response.output:
            self._note(item)
        return self._chat.last.text

    async def aside(self, question: str) -> str:
        """The model's answer to a question out of band."""
        context = [*self._items, MessageItem.of("user", question)]
        async for _ in self._chat.respond(conversation="none", input=context, max_output_tokens=48):
            pass
        return self._chat.last.text

    def _note(self, item: object) -> None:
        self._items.append(ItemReference(id=getattr(item, "id", None) or ""))


async def supervise(
    client: Client, lines: Mapping[str, Sequence[str]], questions: Mapping[str, str]
) -> dict[str, list[dict[str, str]]]:
    """Run all conversations concurrently; for each turn the answers to `questions`."""
    summaries: dict[str, list[dict[str, str]]] = {name: [] for name in lines}

    async def converse(name: str) -> None:
        async with client.session(temperature=0) as chat:
            worker = Worker(chat)
            for line in lines[name]:
                await worker.hears(line)
                answers = {about: await worker.aside(question) for about, question in questions.items()}
                summaries[name].append(answers)

    async with anyio.create_task_group() as group:
        for name in lines:
            group.start_soon(converse, name)
    return summaries


async def main(url: str) -> None:
    lines = {
        "first": ["My name is Marisol.", "My locker code is 4821."],
        "second": ["My name is Bella.", "My locker code is 1357."],
    }
    async with connect(url) as client:
        for name, found in (await supervise(client, lines, QUESTIONS)).items():
            for turn, summary in enumerate(found, start=1):
                print(f"{name}, turn {turn}: " + " ".join(summary.values()))


if __name__ == "__main__":
    anyio.run(main, (sys.argv[1:] or ["ws://127.0.0.1:8040"])[0])
