"""Responses, by the events read so far: which run, what text has come, what a finished one holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from .frames.client import ClientEvent, ResponseCancel, ResponseCreate, ResponseSteer
from .frames.items import FunctionCallItem, MessageItem
from .frames.response import KVReceipt, Response, Usage
from .frames.sampling import TokenLogprob
from .frames.server import ErrorEvent, OutputFrame, ResponseCreated, ResponseDone, ServerEvent, TextDelta


@dataclass(frozen=True, slots=True)
class Finished:
    """A response after its end. `ttft_ms`: from sending to the first text or call; `total_ms`: to the end.

    Both are measured by this client. `logprobs`: of the tokens of its messages, where `top_logprobs` asked for
    them.
    """

    response: Response
    ttft_ms: float | None
    total_ms: float
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The text of all messages."""
        return "".join(self.messages.values())

    @property
    def messages(self) -> dict[str, str]:
        """The texts of the messages, by item id."""
        output = self.response.output
        return {item.id or "": item.text for item in output if isinstance(item, MessageItem)}

    @property
    def calls(self) -> list[FunctionCallItem]:
        """The complete tool calls."""
        return [
            item
            for item in self.response.output
            if isinstance(item, FunctionCallItem) and item.status == "completed"
        ]

    @property
    def status(self) -> str:
        """completed, cancelled or incomplete."""
        return self.response.status

    @property
    def usage(self) -> Usage | None:
        """Tokens, in the standard's fields."""
        return self.response.usage

    @property
    def kv(self) -> KVReceipt | None:
        """What the turn cost in KV; None where the server does not report it."""
        return self.response.kv if isinstance(self.response.kv, KVReceipt) else None


@dataclass(slots=True)
class Progress:
    """What has come of one response, also after its reader has left: `texts` of its messages, by item id."""

    response_id: str | None = None
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of all messages so far."""
        return "".join(self.texts.values())

    def take(self, event: ServerEvent) -> bool:
        """Note an event; whether it belongs to this response."""
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

    def shorten(self, item_id: str, end: int) -> None:
        """End the text after `end` characters of this message; later messages are dropped."""
        kept: dict[str, str] = {}
        for known, text in self.texts.items():
            kept[known] = text[:end] if known == item_id else text
            if known == item_id:
                break
        self.texts = kept


class Rounds(list[Finished]):
    """The responses of one turn that have ended. `latest`: the progress of the last one that was asked for."""

    latest: Progress | None = None


class RunningResponses:
    """Which responses of a session run or have been asked for, by the events sent and read so far. `running`:
    ids of the responses that ran before this client came."""

    def __init__(self, running: Iterable[str] = ()) -> None:
        self.asked: list[str] = []
        """Ids of `response.create`s without an answer, in order."""
        self.running = set(running)
        """Ids of responses without their `response.done`."""
        self.ending: set[str] = set()
        """Ids of running responses that a cancel was sent for."""
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
        """Whether a response still runs that ran before this client came: its events come from the first."""
        return bool(self._inherited & self.running)

    def sent(self, event_id: str, event: ClientEvent) -> None:
        if isinstance(event, ResponseCancel):
            self._cancels.add(event_id)
            self.ending.update([event.response_id] if isinstance(event.response_id, str) else [])
        elif isinstance(event, ResponseCreate | ResponseSteer):
            self.asked.append(event_id)

    def read(self, event: ServerEvent) -> bool:
        """Note a server event; whether a reader gets it: errors about a cancel are harmless and skipped."""
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
        """The client event up to which this one shows that the server has all; None: it shows none."""
        if isinstance(event, ErrorEvent):
            return event.error.event_id
        return self._created.pop(event.response.id, None) if isinstance(event, ResponseDone) else None

    def _begin(self) -> None:
        """A response does not name its `response.create`: it is the first without an answer."""
        if self.asked:
            self._begun.append(self.asked.pop(0))


def place_in(texts: Mapping[str, str], end: int) -> tuple[str, int] | None:
    """Where the first `end` characters of all messages end: the item id of a message and characters of it."""
    begins = zip(texts, accumulate(map(len, texts.values()), initial=0), strict=False)
    found = [(item_id, end - begin) for item_id, begin in begins if begin < end or begin == 0]
    return found[-1] if found else None


def characters_heard(text: str, heard: int | str | None) -> int:
    """How many characters of the text were heard; None: all. Raises `ValueError` where it is not so long."""
    if heard is None:
        return len(text)
    if isinstance(heard, str):
        if not text.startswith(heard):
            raise ValueError("The reply does not begin with this text")
        return len(heard)
    if not 0 <= heard <= len(text):
        raise ValueError(f"{len(text)} characters of the reply have come, not {heard}")
    return heard
