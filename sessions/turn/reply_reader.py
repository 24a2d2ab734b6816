"""Reads one reply while it is generated: token ids in, events out, and its items at the end. Pure.

ids → text (whole characters) → stop strings → reasoning → words and tool calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, zip_longest
from typing import TYPE_CHECKING

from ...runtime.verbs import TokenLogprob
from ..conversation.items import FunctionCall, Item, Message, Tool, derived_id
from ..text.detokenizer import Detokenizer
from ..text.stop_strings import StopMatcher
from ..tools.scanner import CallArguments, CallClosed, CallOpened, Piece, PlainText, ReasoningText
from .cycles import CycleFinder
from .events import (
    ReplyArgumentsDelta,
    ReplyCallDone,
    ReplyCallStarted,
    ReplyEvent,
    ReplyPromptScores,
    ReplyReasoningDelta,
    ReplyTextDelta,
    TokenScore,
)
from .request import TurnRequest

if TYPE_CHECKING:
    from ..text.language import Language


class ReplyReader:
    """Reads one reply: makes events and items (text, tool calls) of its token ids as they come.

    ``request``: what was asked for; its stop strings and cycles count only after ``min_output_tokens``, and its
    stop ids have no text. ``end_ids``: the model's end tokens. ``response``: the id of which those of items and
    calls are made, so that they are the same each time. ``tools``: those of the prompt. ``whole_calls``:
    deliver a call's arguments only at its end.

    ``ids``: the reply so far. If an end token ended it, that is the last id and ``ended`` is true; if a stop id
    did, ``halted`` is true. If a stop string ``matched``, the last id completes it. If its only call ended it,
    ``called`` is true, and the last id completes the call. If the reply ``cycles``, the last id is the one at
    which that was found. ``logprobs``: one for each id, if they were requested.
    """

    def __init__(
        self,
        language: Language,
        request: TurnRequest,
        end_ids: frozenset[int],
        response: str,
        tools: Sequence[Tool] = (),
        *,
        whole_calls: bool = False,
    ) -> None:
        tokenizer = language.tokenizer
        forms = language.forms.without_reasoning() if request.plain else language.forms
        leads = request.prompt is None and request.format is None  # no grammar counts its spaces
        only_calls = request.tool_choice == "required" and request.parallel_calls
        self.request = request
        self.called = False
        self._response = response
        self._begun = count(1)  # numbers the items and calls
        self._whole_calls = whole_calls
        self._together = whole_calls and only_calls and not request.stop
        """Whether all ids of a `feed` are decoded at once, which is faster. That cannot find the id that
        completes a stop string, or the only call."""
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.ended = False
        self.halted = False
        self.cycles = False
        self._cycles = CycleFinder(request.cycle_tokens)
        self._end_ids = end_ids
        self._stop_ids = frozenset(request.stop_ids)
        self._tokenizer = tokenizer
        self._scores: list[TokenScore] = []  # scores of tokens; their text is not delivered yet
        self._detokenizer = Detokenizer(tokenizer.backend, tokenizer.texts, leads=leads)
        self._stops = StopMatcher(request.stop)
        self._parser = forms.parser(tools, parse_calls=request.parse_calls)
        self._marks = forms.marks(tokenizer.special_ids, parse_calls=request.parse_calls)
        self._ruled = end_ids.union(self._stop_ids, self._marks)
        """Ids that are more than text: end tokens, stop ids, and special tokens of calls and reasoning."""
        self._watched = self._together or bool(request.stop)
        """Whether text cannot be delivered as soon as its token comes: there are stop strings, or all ids of a
        `feed` are decoded at once."""
        self._items: list[Item] = []
        self._text: tuple[str, list[str]] | None = None  # the open message: its id and its deltas
        self._call: tuple[ReplyCallStarted, list[str]] | None = (
            None  # the open call: its first event and its deltas
        )

    @property
    def matched(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.matched

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found; None if none was."""
        return self._stops.found

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> list[ReplyEvent]:
        """Read more ids. Returns the events that are now certain. Ids behind the one that ends the reply are
        dropped. ``logprobs``: one for each id, if requested."""
        if self._together and not logprobs:
            return self._deliver(self._decode_together(list(ids)))
        if not logprobs and len(ids) == 1 and not self._over and (delta := self.plain(ids[0])) is not None:
            return [delta]
        events: list[ReplyEvent] = []
        for token, logprob in zip_longest(ids, logprobs or ()):
            if self._over:
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
                    self._scores.append(self.score(token, logprob))
                text = self._marks.get(token, "") + self._detokenizer.step(token)
                if len(self.ids) >= self.request.min_output_tokens:
                    text = self._stops.feed(text)
                events += self._deliver(text)
                self._check_cycle()
        return events

    def plain(self, token: int) -> ReplyTextDelta | None:
        """Read an id that is nothing but more text of the open message, as most are. None if it may be more;
        then nothing has changed and `feed` reads it. The reply must not have ended."""
        if self._text is None or self._watched or token in self._ruled or self._scores:
            return None
        text = self._detokenizer.alone(token)
        if text is None or not self._parser.passes(text):
            return None
        self.ids.append(token)
        if self.request.cycle_tokens:
            self._check_cycle()
        item_id, deltas = self._text
        deltas.append(text)
        return ReplyTextDelta(item_id, text)

    @property
    def _over(self) -> bool:
        return self.ended or self.halted or self.cycles or self._stops.matched or self.called

    def _check_cycle(self) -> None:
        """Set ``cycles`` if the reply repeats itself up to its last id."""
        self.cycles = self._cycles.ends(self.ids) and len(self.ids) >= self.request.min_output_tokens

    def _decode_together(self, ids: list[int]) -> str:
        """Append ``ids`` to the reply's ids, up to one that ends the reply, and return their text, decoded at
        once."""
        text, begin, end = "", 0, 0
        for token in ids:
            if self.ended or self.halted or self.cycles:
                break
            self.ids.append(token)
            if token in self._end_ids:
                self.ended = True
            elif token in self._stop_ids:
                self.halted = True
            else:
                end += 1
                self._check_cycle()
        for at, token in enumerate(ids[:end]):
            if token in self._marks:
                text += "".join(map(self._detokenizer.step, ids[begin:at])) + self._marks[token]
                begin = at
        return text + self._detokenizer.steps(ids[begin:end])

    def finish(self, *, cut: bool) -> list[ReplyEvent]:
        """Called once, when the reply is over: takes out what was held back, and closes the open item. Returns
        the remaining events. ``cut``: the reply was ended from outside, so the open message is not complete."""
        events = [] if self.matched else self._deliver(self._stops.feed(self._detokenizer.flush()))
        events += self._deliver(self._stops.flush())
        events += self._events(self._parser.finish(cut=cut))
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

    def prompt_scores(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> ReplyPromptScores:
        """The scores of a prompt. ``logprobs``: one for each of its ``ids`` but the first."""
        scores = (self.score(token, logprob) for token, logprob in zip(ids[1:], logprobs, strict=True))
        return ReplyPromptScores(self._tokenizer.text_of(ids[0]), tuple(scores))

    def score(self, token: int, logprob: TokenLogprob) -> TokenScore:
        """The score of ``token``, with the texts of all its tokens."""
        top = tuple(self._score(one, value) for one, value in logprob.top)
        return self._score(token, logprob.logprob, top)

    def _score(self, token: int, logprob: float, top: tuple[TokenScore, ...] = ()) -> TokenScore:
        text, texts = self._tokenizer.text_of(token), self._tokenizer.texts
        split = texts.bytes_of(token) if "\ufffd" in text and texts.independent else b""
        return TokenScore(token, text, logprob, top, split)

    def _deliver(self, text: str) -> list[ReplyEvent]:
        return list(self._events(self._parser.feed(text))) if text else []

    def _events(self, pieces: Iterable[Piece]) -> Iterator[ReplyEvent]:
        for piece in pieces:
            if self.called:
                return
            match piece:
                case PlainText():
                    if self._text is None:
                        self._text = (self._new_id("item"), [])
                    self._text[1].append(piece.text)
                    scores = tuple(self._scores)
                    self._scores.clear()
                    yield ReplyTextDelta(self._text[0], piece.text, scores)
                case ReasoningText():
                    self._scores.clear()
                    yield ReplyReasoningDelta(piece.text)
                case CallOpened():
                    self._end_message(complete=True)
                    self._scores.clear()  # these tokens belong to the call, not to a message
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
                    self.called = piece.complete and not self.request.parallel_calls
                    yield self._end_call(piece.complete)

    def _new_id(self, prefix: str) -> str:
        return derived_id(prefix, self._response, str(next(self._begun)))

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
