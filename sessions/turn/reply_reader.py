"""One reply as it comes: ids in, events out; at the end its items. Pure.

ids → text (whole characters) → stop strings → words and tool calls. Knows nothing of links, loops or the
history.
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
from ..tools.scanner import CallArguments, CallClosed, CallOpened, Piece, TextPiece
from .events import ArgumentsDelta, CallDone, CallStarted, ReasoningDelta, ReplyEvent, TextDelta, TokenScore


class ReplyReader:
    """Reads a reply's ids.

    ``ids``: those that belong to the reply so far, the end token included when the model sampled it
    (``ended``); ``logprobs``: where they were asked for, one for each of them. ``matched``: a stop string was
    found; the last of ``ids`` completes it, and later ones were not taken. ``halted``: the last of ``ids`` is
    one of ``stop_ids``, which has no text. Stop strings are looked for from ``min_tokens`` ids on. ``new_id``
    names what is begun; ``forms``: how calls and reasoning are written. ``whole_calls``: a call's arguments are
    told when it is over, and not while they come. ``together``: the text of ids that come at once is looked
    at once, as nothing but calls is expected; stop strings need it piece by piece.
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
        assert not (together and stops), "the id that completes a stop string is to be known"
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
        self._scores: list[TokenScore] = []  # of tokens whose text was not delivered
        self._detokenizer = Detokenizer(tokenizer.backend)
        self._stops = StopMatcher(stops)
        self._calls = forms.call_parser() if parse_calls else None
        self._marks = forms.marks(tokenizer.special_ids) if parse_calls else {}
        self._thoughts = forms.splitter()
        self._items: list[Item] = []
        self._text: tuple[str, list[str]] | None = None  # the message that is being said: id, deltas
        self._call: tuple[CallStarted, list[str]] | None = None

    @property
    def matched(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.matched

    def feed(self, ids: Iterable[int], logprobs: Iterable[TokenLogprob] | None = None) -> list[ReplyEvent]:
        """The events these ids make certain. Ids after an end token, a stop id or a match are left out."""
        if self._together and not logprobs:
            return self._deliver(self._taken_together(list(ids)))
        events: list[ReplyEvent] = []
        held = ""
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
                held += self._marks.get(token, "") + self._detokenizer.step(token)
                if held and not self._together:
                    events += self._deliver(self._unstopped(held))
                    held = ""
        return events + self._deliver(held)

    def _taken_together(self, ids: list[int]) -> str:
        """The text of ids of which nobody is told before the last of them."""
        if self.ended or self.halted:
            return ""
        ends = (at for at, token in enumerate(ids) if token in self._end_ids or token in self._stop_ids)
        end = next(ends, None)
        if end is not None:
            self.ended = ids[end] in self._end_ids
            self.halted = not self.ended
        self.ids += ids if end is None else ids[: end + 1]
        said, begun = "", 0
        for at, token in enumerate(ids[:end]):
            if token in self._marks:
                said += "".join(map(self._detokenizer.step, ids[begun:at])) + self._marks[token]
                begun = at
        return said + self._detokenizer.steps(ids[begun:end])

    def finish(self, *, cut: bool) -> list[ReplyEvent]:
        """The rest of the events. ``cut``: the reply did not end by itself."""
        events = [] if self.matched else self._deliver(self._stops.feed(self._detokenizer.flush()))
        events += self._deliver(self._stops.flush())
        if self._thoughts is not None:
            events += self._split(*self._thoughts.finish())
        if self._calls is not None:
            events += self._events(self._calls.finish(cut=cut))
        self._end_message(complete=not cut)
        return events

    def said_of(self, item_id: str) -> str | None:
        """The text so far of a message that has begun; None for one that has not."""
        if self._text is not None and self._text[0] == item_id:
            return "".join(self._text[1])
        found = (item for item in self._items if isinstance(item, Message) and item.id == item_id)
        return next((item.text for item in found), None)

    def items(self) -> tuple[Item, ...]:
        """The items that began, in order; after ``finish``."""
        return tuple(self._items)

    def _unstopped(self, text: str) -> str:
        return text if len(self.ids) < self._min_tokens else self._stops.feed(text)

    def _score(self, token: int, logprob: TokenLogprob) -> TokenScore:
        text = self._tokenizer.text_of
        top = tuple(TokenScore(one, text(one), value) for one, value in logprob.top)
        return TokenScore(token, text(token), logprob.logprob, top)

    def _deliver(self, text: str) -> list[ReplyEvent]:
        if not text:
            return []
        return list(
            self._split("", text) if self._thoughts is None else self._split(*self._thoughts.feed(text))
        )

    def _split(self, thought: str, said: str) -> Iterator[ReplyEvent]:
        """What was thought, and then what was said."""
        if thought:
            self._scores.clear()
            yield ReasoningDelta(thought)
        if said:
            pieces: Iterable[Piece] = [TextPiece(said)] if self._calls is None else self._calls.feed(said)
            yield from self._events(pieces)

    def _events(self, pieces: Iterable[Piece]) -> Iterator[ReplyEvent]:
        for piece in pieces:
            match piece:
                case TextPiece():
                    yield self._say(piece.text)
                case CallOpened():
                    self._end_message(complete=True)
                    self._scores.clear()  # these tokens are the call's
                    started = CallStarted(self._new_id("item"), self._new_id("call"), piece.name)
                    self._call = (started, [])
                    yield started
                case CallArguments():
                    started, deltas = self._begun_call()
                    deltas.append(piece.delta)
                    if not self._whole_calls:
                        yield ArgumentsDelta(started.item_id, started.call_id, piece.delta)
                case CallClosed():
                    self._scores.clear()
                    yield self._end_call(piece.complete)

    def _say(self, text: str) -> TextDelta:
        if self._text is None:
            self._text = (self._new_id("item"), [])
        item_id, deltas = self._text
        deltas.append(text)
        scores = tuple(self._scores)
        self._scores.clear()
        return TextDelta(item_id, text, scores)

    def _end_message(self, *, complete: bool) -> None:
        if self._text is not None:
            item_id, deltas = self._text
            text = "".join(deltas)
            self._items.append(Message(id=item_id, role="assistant", text=text, complete=complete))
            self._text = None

    def _begun_call(self) -> tuple[CallStarted, list[str]]:
        assert self._call is not None, "arguments follow a call's name"
        return self._call

    def _end_call(self, complete: bool) -> CallDone:
        started, deltas = self._begun_call()
        self._call = None
        arguments = "".join(deltas)
        self._items.append(
            FunctionCall(
                id=started.item_id,
                call_id=started.call_id,
                name=started.name,
                arguments=arguments,
                complete=complete,
            )
        )
        return CallDone(started.item_id, started.call_id, started.name, arguments, complete)
