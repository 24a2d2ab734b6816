"""Responses, by the events read so far: which run, what text has come, what a finished one holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

from ..frames.client import ClientEvent, ResponseCancel, ResponseCreate, ResponseSteer
from ..frames.items import FunctionCallItem, MessageItem
from ..frames.response import KVReceipt, Response, Usage
from ..frames.sampling import TokenLogprob
from ..frames.server import ErrorEvent, OutputFrame, ResponseCreated, ResponseDone, ServerEvent, TextDelta

ASIDE = "holdfast.response"
"""The metadata key of the label by which a response out of band is known when it begins."""
MAX_METADATA = 16


@dataclass(frozen=True, slots=True)
class Finished:
    """A response after its end. `ttft_ms`: milliseconds from asking for it to its first text or call; None if
    it had neither. `total_ms`: milliseconds to its end. Both are measured by this client. `logprobs`: of the
    tokens of its messages; empty unless `top_logprobs` asked for them."""

    response: Response
    ttft_ms: float | None
    total_ms: float
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The text of all its messages, joined."""
        return "".join(self.messages.values())

    @property
    def messages(self) -> dict[str, str]:
        """The text of each of its messages, by item id."""
        output = self.response.output
        return {item.id or "": item.text for item in output if isinstance(item, MessageItem)}

    @property
    def calls(self) -> list[FunctionCallItem]:
        """Its complete tool calls, in order; one that was cut off is left out."""
        return [
            item
            for item in self.response.output
            if isinstance(item, FunctionCallItem) and item.status == "completed"
        ]

    @property
    def status(self) -> str:
        """How it ended: completed, cancelled, incomplete or failed."""
        return self.response.status

    @property
    def usage(self) -> Usage | None:
        """Its tokens, as the server counts them; None if the server does not tell."""
        return self.response.usage

    @property
    def kv(self) -> KVReceipt | None:
        """How much KV it computed, and where the rest was found; None if the server does not tell."""
        return self.response.kv if isinstance(self.response.kv, KVReceipt) else None


@dataclass(slots=True)
class Progress:
    """What has come of one response so far; it stays after the reader has left. `texts`: the text of each
    message, by item id."""

    response_id: str | None = None
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of all messages so far, joined."""
        return "".join(self.texts.values())

    def take(self, event: ServerEvent) -> bool:
        """Take in a server event: add text of this response to `texts`. Returns whether the event is about this
        response; the first `response.created` says which that is."""
        match event:
            case ResponseCreated() if self.response_id is None:
                self.response_id = event.response.id
            case ResponseDone():
                return event.response.id == self.response_id
            case TextDelta() if event.response_id == self.response_id:
                self.texts[event.item_id] = self.texts.get(event.item_id, "") + event.delta
            case OutputFrame():
                return event.response_id == self.response_id
            case _:
                return False
        return True

    def has(self, heard: int | str) -> bool:
        """Whether so much has come as was `heard`, a number of characters or the text itself, or the text
        begins in another way."""
        if isinstance(heard, int):
            return len(self.text) >= heard
        return len(self.text) >= len(heard) or not heard.startswith(self.text)

    def shorten(self, item_id: str, end: int) -> None:
        """Cut `texts` as the server has cut the reply: the message `item_id` keeps its first `end` characters,
        and later messages are dropped."""
        kept: dict[str, str] = {}
        for known, text in self.texts.items():
            kept[known] = text[:end] if known == item_id else text
            if known == item_id:
                break
        self.texts = kept


class Rounds(list[Finished]):
    """The responses of one turn that have ended, in order. `latest`: the progress of the one that was asked for
    last, which may still run; None if that was refused, or none was asked for."""

    latest: Progress | None = None


class RunningResponses:
    """Which responses of a session run or have been asked for, as the events sent and read so far tell.
    `running`: ids of the responses that ran before this client came."""

    def __init__(self, running: Iterable[str] = ()) -> None:
        self.asked: list[str] = []
        """Event ids of the `response.create`s and `response.steer`s that have no answer yet, in order."""
        self.running = set(running)
        """Ids of the responses that have no `response.done` yet."""
        self.ending: set[str] = set()
        """Ids of the running responses that a cancel was sent for."""
        self._inherited = frozenset(self.running)
        self._cancels: set[str] = set()
        self._begun: deque[str] = deque(
            maxlen=64
        )  # `response.create`s of responses that have begun, in that order
        self._created: dict[str, str] = {}  # running responses, and the `response.create` of each

    @property
    def busy(self) -> bool:
        """Whether a response runs or has been asked for."""
        return bool(self.asked or self.running)

    @property
    def inherited(self) -> bool:
        """Whether a response still runs that ran before this client came. Its events may come again, from the
        first."""
        return bool(self._inherited & self.running)

    def sent(self, event_id: str, event: ClientEvent) -> None:
        """Take in a client event that is being sent: whether it asks for a response or cancels one.
        ``event_id``: its id."""
        if isinstance(event, ResponseCancel):
            self._cancels.add(event_id)
            self.ending.update([event.response_id] if isinstance(event.response_id, str) else [])
        elif isinstance(event, ResponseCreate | ResponseSteer):
            self.asked.append(event_id)

    def read(self, event: ServerEvent) -> bool:
        """Take in a server event that is read now: whether a response began, ended or was refused. Returns
        whether the event is for the reader: an error about a cancel is not, as it only says that the response
        had ended before."""
        match event:
            case ErrorEvent(error=error) if error.event_id in self._cancels:
                self._cancels.discard(error.event_id or "")
                return False
            case ErrorEvent(error=error) if error.event_id in self.asked:
                self.asked.remove(error.event_id or "")
            case ErrorEvent(error=error) if error.event_id in self._begun:
                self._begun.remove(error.event_id or "")  # the response that began was that of a later one
                self._begin()
            case ResponseCreated(response=response):
                if self.asked:
                    self._created[response.id] = self.asked[0]
                self._begin()
                self.running.add(response.id)
            case ResponseDone(response=response):
                self.running.discard(response.id)
                self.ending.discard(response.id)
                self._created.pop(response.id, None)
        return True

    def acknowledged(self, event: ServerEvent) -> str | None:
        """The id of a client event that the server must have, with all before it, since it sent `event`: the
        one that an error or the end of a response answers. None for any other event."""
        if isinstance(event, ErrorEvent):
            return event.error.event_id
        return self._created.pop(event.response.id, None) if isinstance(event, ResponseDone) else None

    def _begin(self) -> None:
        """Called when a response has begun: takes its `response.create` from `asked`. The server does not name
        it, but it is the first."""
        if self.asked:
            self._begun.append(self.asked.pop(0))


def is_aside(create: ResponseCreate) -> bool:
    """Whether the event asks for a response out of band, which changes no history and runs beside others."""
    return create.response is not None and create.response.conversation == "none"


def labelled(create: ResponseCreate, label: str) -> ResponseCreate:
    """The same event with `label` in the response's metadata, under the key `ASIDE`; unchanged if the metadata
    is full."""
    assert create.response is not None
    known = create.response.metadata if isinstance(create.response.metadata, dict) else {}
    if len(known) >= MAX_METADATA:
        return create
    params = msgspec.structs.replace(create.response, metadata={**known, ASIDE: label})
    return msgspec.structs.replace(create, response=params)


def end_in(texts: Mapping[str, str], end: int) -> tuple[str, int] | None:
    """Where the first `end` characters of all messages end: the id of the message that they end in, and how
    many of its characters belong to them. None if there is no message. `texts`: the messages, by item id, in
    order."""
    begins = zip(texts, accumulate(map(len, texts.values()), initial=0), strict=False)
    found = [(item_id, end - begin) for item_id, begin in begins if begin < end or begin == 0]
    return found[-1] if found else None


def characters_heard(text: str, heard: int | str | None) -> int:
    """How many characters of `text` were heard. `heard`: that number, or the beginning of the text itself;
    None: all. Raises `ValueError` if the text is shorter or begins in another way."""
    if heard is None:
        return len(text)
    if isinstance(heard, str):
        if not text.startswith(heard):
            raise ValueError("The reply does not begin with the text that was heard")
        return len(heard)
    if not 0 <= heard <= len(text):
        raise ValueError(f"{len(text)} characters of the reply have come, so {heard} cannot have been heard")
    return heard
