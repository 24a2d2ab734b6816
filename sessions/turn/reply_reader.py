"""Reads one reply while it is generated: token ids in, events out, and its items at the end. Pure.

ids → text (whole characters) → stop strings → reasoning → words and tool calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from ...runtime.link.messages import TokenLogprob
from ..items import FunctionCall, Item, Message, new_id
from ..text.detokenizer import Detokenizer
from ..text.stop_strings import StopMatcher
from ..text.tokenizer import ChatTokenizer
from ..tools.formats import HERMES, Forms
from ..tools.scanner import CallArguments, CallClosed, CallOpened, Piece, PlainText
from .events import (
    ReplyArgumentsDelta,
    ReplyCallDone,
    ReplyCallStarted,
    ReplyEvent,
    ReplyReasoningDelta,
    ReplyTextDelta,
    TokenScore,
)


class ReplyReader:
    """Reads one reply.

    ``end_ids``: the model's end tokens. ``stops``: stop strings, which count after ``min_tokens`` ids.
    ``stop_ids``: ids that end the reply and have no text. ``new_id`` makes the ids of items and calls.
    ``forms``: how the model writes calls and reasoning. ``whole_calls``: a call's arguments come with its end
    only. ``together``: decode all ids of one `feed` at once, which is faster. It cannot find the id that
    completes a stop string, so it is for replies that are only calls.

    ``ids``: the reply so far, with the end token (then ``ended``) or stop id (then ``halted``) that ends it.
    If a stop string ``matched``, the last id completes it and later ids are dropped. ``logprobs``: one for
    each id, if they were requested.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        end_ids: frozenset[int],
        stops: Sequence[str] = (),
        parse_calls: bool = True,
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        new_id: Callable[[str], str] = new_id,
        forms: Forms = HERMES,
        whole_calls: bool = False,
        together: bool = False,
    ) -> None:
        assert not (together and stops), "the id that completes a stop string must be known"
        self._new_id = new_id
        self._whole_calls = whole_calls
        self._together = together
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.ended = False
        self.halted = False
        self._end_ids = end_ids
        self._stop_ids = frozenset(stop_ids)
        self._min_tokens = min_tokens
        self._tokenizer = tokenizer
        self._scores: list[TokenScore] = []  # of tokens without delivered text
        self._detokenizer = Detokenizer(tokenizer.backend)
        self._stops = StopMatcher(stops)
        self._calls = forms.call_parser() if parse_calls else None
        self._marks = forms.marks(tokenizer.special_ids) if parse_calls else {}
        self._reasoning = forms.splitter()
        self._items: list[Item] = []
        self._text: tuple[str, list[str]] | None = None  # the open message: id, deltas
        self._call: tuple[ReplyCallStarted, list[str]] | None = None  # the open call

    @property
    def matched(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.matched

    def feed(self, ids: Iterable[int], logprobs: Iterable[TokenLogprob] | None = None) -> list[ReplyEvent]:
        """The events that are certain with these ids. Ids after an end token, stop id or match are dropped."""
        if self._together and not logprobs:
            return self._deliver(self._decode_together(list(ids)))
        events: list[ReplyEvent] = []
        for token, logprob in zip_longest(ids, logprobs or ()):
            if self.ended or self.halted or self.matched:
                break
            self.ids.append(token)
            if logprob is not None:
                self.logprobs.append(logprob)
            if token in self._end_ids:
                self.ended = True
            elif token in self._stop_ids:
                self.halted = True
            else:
                if logprob is not None:
                    self._scores.append(self._score(token, logprob))
                text = self._marks.get(token, "") + self._detokenizer.step(token)
                if len(self.ids) >= self._min_tokens:
                    text = self._stops.feed(text)
                events += self._deliver(text)
        return events

    def _decode_together(self, ids: list[int]) -> str:
        """Take in the ids up to one that ends the reply, and return their text."""
        if self.ended or self.halted:
            return ""
        ends = (at for at, token in enumerate(ids) if token in self._end_ids or token in self._stop_ids)
        end = next(ends, None)
        if end is not None:
            self.ended = ids[end] in self._end_ids
            self.halted = not self.ended
        self.ids += ids if end is None else ids[: end + 1]
        text, begin = "", 0
        for at, token in enumerate(ids[:end]):
            if token in self._marks:
                text += "".join(map(self._detokenizer.step, ids[begin:at])) + self._marks[token]
                begin = at
        return text + self._detokenizer.steps(ids[begin:end])

    def finish(self, *, cut: bool) -> list[ReplyEvent]:
        """The remaining events. ``cut``: the reply was ended from outside."""
        events = [] if self.matched else self._deliver(self._stops.feed(self._detokenizer.flush()))
        events += self._deliver(self._stops.flush())
        if self._reasoning is not None:
            events += self._split(*self._reasoning.finish())
        if self._calls is not None:
            events += self._events(self._calls.finish(cut=cut))
        self._end_message(complete=not cut)
        return events

    def said_of(self, item_id: str) -> str | None:
        """The text so far of the message ``item_id``; None if it has not begun."""
        if self._text is not None and self._text[0] == item_id:
            return "".join(self._text[1])
        found = (item for item in self._items if isinstance(item, Message) and item.id == item_id)
        return next((item.text for item in found), None)

    def items(self) -> tuple[Item, ...]:
        """The items that began, in order. Call it after ``finish``."""
        return tuple(self._items)

    def _score(self, token: int, logprob: TokenLogprob) -> TokenScore:
        text = self._tokenizer.text_of
        top = tuple(TokenScore(one, text(one), value) for one, value in logprob.top)
        return TokenScore(token, text(token), logprob.logprob, top)

    def _deliver(self, text: str) -> list[ReplyEvent]:
        if not text:
            return []
        return list(self._split(*(("", text) if self._reasoning is None else self._reasoning.feed(text))))

    def _split(self, reasoning: str, answer: str) -> Iterator[ReplyEvent]:
        if reasoning:
            self._scores.clear()
            yield ReplyReasoningDelta(reasoning)
        if answer:
            pieces: Iterable[Piece] = [PlainText(answer)] if self._calls is None else self._calls.feed(answer)
            yield from self._events(pieces)

    def _events(self, pieces: Iterable[Piece]) -> Iterator[ReplyEvent]:
        for piece in pieces:
            match piece:
                case PlainText():
                    if self._text is None:
                        self._text = (self._new_id("item"), [])
                    self._text[1].append(piece.text)
                    scores = tuple(self._scores)
                    self._scores.clear()
                    yield ReplyTextDelta(self._text[0], piece.text, scores)
                case CallOpened():
                    self._end_message(complete=True)
                    self._scores.clear()  # these tokens are the call's
                    started = ReplyCallStarted(self._new_id("item"), self._new_id("call"), piece.name)
                    self._call = (started, [])
                    yield started
                case CallArguments():
                    started, deltas = self._open_call()
                    deltas.append(piece.delta)
                    if not self._whole_calls:
                        yield ReplyArgumentsDelta(started.item_id, started.call_id, piece.delta)
                case CallClosed():
                    self._scores.clear()
                    yield self._end_call(piece.complete)

    def _end_message(self, *, complete: bool) -> None:
        if self._text is not None:
            item_id, deltas = self._text
            text = "".join(deltas)
            self._items.append(Message(id=item_id, role="assistant", text=text, complete=complete))
            self._text = None

    def _open_call(self) -> tuple[ReplyCallStarted, list[str]]:
        assert self._call is not None, "a call opens with its name"
        return self._call

    def _end_call(self, complete: bool) -> ReplyCallDone:
        started, deltas = self._open_call()
        self._call = None
        done = ReplyCallDone(started.item_id, started.call_id, started.name, "".join(deltas), complete)
        self._items.append(
            FunctionCall(
                id=done.item_id,
                call_id=done.call_id,
                name=done.name,
                arguments=done.arguments,
                complete=complete,
            )
        )
        return done
