"""The stage of the session tests: a scripted engine, a session on it, and short words to play a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any

from holdfast.sessions.conversation.items import Message, Preamble, new_id
from holdfast.sessions.journal.records import AnyOperation
from holdfast.sessions.journal.session_log import SessionLog
from holdfast.sessions.session import Session
from holdfast.sessions.settings import SessionSettings
from holdfast.sessions.text.language import Language
from holdfast.sessions.text.renderer import Renderer
from holdfast.sessions.turn.events import ReplyDone, ReplyEvent, ReplyStarted, ReplyTextDelta
from holdfast.sessions.turn.request import TurnRequest

from .scripted_link import Recital, ScriptedLink
from .text.chat_languages import end_id, ids, ours, reference

NAME = "chatml"
END = end_id(NAME)
LANGUAGE = Language.of(ours(NAME))
BROKEN = [-1]
"""Said by a recital, it is a fault of the engine."""


class Kept(SessionLog):
    """A journal in memory."""

    def __init__(self, operations: list[AnyOperation]) -> None:
        super().__init__()
        self.operations = list(operations)

    def _take(self, operation: AnyOperation) -> None:
        self.operations.append(operation)


def renderer_of(language: Language, now: datetime) -> Renderer:
    return Renderer(language.tokenizer, now, language.prefix_rule, language.report.rules)


def toks(text: str) -> list[int]:
    return ids(NAME, text)


def reciting(*texts: str | list[int], **more: object) -> ScriptedLink:
    said = [toks(text) if isinstance(text, str) else text for text in texts]
    return ScriptedLink(Recital(*said, end=END), END, **more)


def session_on(
    link: ScriptedLink,
    preamble: Preamble | None = None,
    settings: SessionSettings | None = None,
    **owned: Any,
) -> Session:
    """``owned``: collaborators that the test looks at, as `Session` takes them."""
    session = Session("s", link, LANGUAGE, now=datetime(2025, 3, 1), settings=settings, **owned)
    session.history.preamble = preamble or Preamble()
    return session


def say(session: Session, text: str) -> Message:
    item = Message(id=new_id("item"), role="user", text=text)
    session.history.insert(item)
    return item


async def read(session: Session, request: TurnRequest | None = None) -> tuple[list[ReplyEvent], ReplyDone]:
    events = [event async for event in session.respond(request or TurnRequest.checked())]
    assert isinstance(events[0], ReplyStarted)
    done = events[-1]
    assert isinstance(done, ReplyDone)
    assert sum(isinstance(event, ReplyDone) for event in events) == 1
    return events, done


async def ask(session: Session, text: str, **request: object) -> ReplyDone:
    say(session, text)
    return (await read(session, TurnRequest.checked(**request)))[1]


async def cancel(session: Session) -> bool:
    """Cancel the response that writes the conversation; False if there is none."""
    if (writer := session.writer) is not None:
        await writer.cancel()
    return writer is not None


def text_of(events: list[ReplyEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReplyTextDelta))


def one_shot(*turns: tuple[str, str], system: str | None = None) -> list[int]:
    """The prompt after these turns (role, text) as transformers tokenizes it at once."""
    messages = [{"role": "system", "content": system}] * (system is not None)
    messages += [{"role": role, "content": text} for role, text in turns]
    return reference(NAME).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def prompts(link: ScriptedLink) -> list[list[int]]:
    assert isinstance(link.model, Recital)
    return link.model.prompts


def run(test: Callable) -> Callable:
    @wraps(test)
    def wrapped(*args: object, **kwargs: object) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20))

    return wrapped
