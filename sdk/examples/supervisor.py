"""A supervisor of several conversations: it asks each one questions out of band.

Such a question is answered from the whole conversation and leaves no trace in it: the next turn and its KV are
the same as without the question.

    python -m holdfast.sdk.examples.supervisor [--url URL]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio

from ..chat import Chat
from ..client import Client, connect
from ..frames.items import InputItem, ItemReference, MessageItem
from . import asked_url

QUESTIONS = {"name": "What is my name?", "code": "What is my locker code?"}


class Worker:
    """One supervised conversation. It remembers the ids of its items, to refer to them in questions."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._items: list[ItemReference] = []

    async def hears(self, line: str) -> str:
        """Say `line` in the conversation; returns the reply."""
        self._note(await self._chat.add(MessageItem.of("user", line)))
        reply = await self._chat.respond()
        for item in reply.response.output:
            self._note(item)
        return reply.text

    async def aside(self, question: str) -> str:
        """Ask the model `question` out of band, with the conversation's items before it; returns the answer."""
        context: list[InputItem] = [*self._items, MessageItem.of("user", question)]
        return (await self._chat.respond(conversation="none", input=context, max_output_tokens=48)).text

    def _note(self, item: object) -> None:
        self._items.append(ItemReference(id=getattr(item, "id", None) or ""))


async def supervise(
    client: Client, lines: Mapping[str, Sequence[str]], questions: Mapping[str, str]
) -> dict[str, list[dict[str, str]]]:
    """Hold all conversations concurrently. `lines`: by the conversation's name, what its user says, line by
    line. After each line, all `questions` are asked out of band. Returns, by the conversation's name, the
    answers after each line, each by the key of its question."""
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


async def main(url: str | None) -> None:
    lines = {
        "first": ["My name is Marisol.", "My locker code is 4821."],
        "second": ["My name is Bella.", "My locker code is 1357."],
    }
    async with connect(url) as client:
        for name, found in (await supervise(client, lines, QUESTIONS)).items():
            for turn, summary in enumerate(found, start=1):
                print(f"{name}, turn {turn}: " + " ".join(summary.values()))


if __name__ == "__main__":
    anyio.run(main, asked_url(__doc__))
