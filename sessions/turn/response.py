"""One turn of a session, from the request to ``ReplyDone``, as an async iterator of events.

The turn advances only when its reader asks for the next event; only the engine runs ahead.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from msgspec.structs import replace

from ...runtime.errors import EngineGone
from ...runtime.verbs import TokenLimits, TokenLogprob
from ..conversation.edits import check_cut, end_with, trimmed
from ..conversation.history import History, Prepared, RunningTurn
from ..conversation.items import new_id
from ..conversation.tree import Draft, TurnNode, TurnReply, matched
from ..errors import EngineUnavailable, ItemUnknown, PromptTooLong, TurnFailed
from ..journal.records import ContextCut, Emitted, Ended, Interrupted
from ..journal.replay import KeptTurn, ended, refused
from ..token_ids import NONE, Ids, common_prefix, ids_of, packed
from ..workers import Stopped
from .branch import Branch
from .events import (
    EndReason,
    LeftOut,
    MissReason,
    ReplyDone,
    ReplyEvent,
    ReplyStarted,
    ReplyStatus,
    ReplyTextDelta,
    TurnUsage,
)
from .fitting import FittedPrompt, PromptFit
from .generation import ReplyEnd, ReplyRun, TellNow
from .reply_reader import ReplyReader
from .request import TurnRequest

log = logging.getLogger(__name__)


GATHERED = 64
"""If the arguments of a call are not streamed, the engine sends this many tokens at a time. If it dies, the
tokens that it has not sent are sampled again by the next engine."""


class TurnResponse:
    """The events of one turn. Read them all, or use it as ``async with``: leaving the block cancels the turn.

    It owns the turn that ``prepared`` began. In every case it commits that turn or takes it back. Reading may
    raise ``PromptTooLong``, ``TemplateFailed`` or ``EngineUnavailable`` before the first event; then nothing
    has changed. After ``ReplyStarted`` every outcome is a ``ReplyDone``. It has one reader.

    ``request``: the request, with its grammar. ``ended`` is called with the response when the turn is over.
    ``whole_calls``: a call's arguments are delivered at its end, not while they are sampled.

    The other parameters are for a response that was interrupted. ``said``, ``logprobs``: the ids that it has
    already, and their log probabilities; their events are repeated with the same ids of items, and the reply
    continues behind them. ``cut``: the message at which the reply ends, and that message's length in
    characters. ``left_out``: what ``prepared`` leaves out of the context already.
    """

    def __init__(
        self,
        branch: Branch,
        request: TurnRequest,
        prepared: Prepared,
        response_id: str | None = None,
        *,
        ended: Callable[[TurnResponse], None] = lambda response: None,
        said: Ids = NONE,
        logprobs: Sequence[TokenLogprob] = (),
        cut: tuple[str, int] | None = None,
        left_out: LeftOut | None = None,
        whole_calls: bool = False,
    ) -> None:
        self._whole_calls = whole_calls
        self.id = response_id or new_id("resp")
        self._branch = branch
        self._ended = ended
        self._prepared = prepared
        self._left_out = left_out
        self.writes = prepared.turn is not None
        """Whether its reply joins the conversation."""
        self._request = request
        self._sequence = branch.sequence.child() if prepared.aside else branch.sequence
        self._said, self._logprobs = said, logprobs
        self._cut = cut
        self._recorded = len(said)
        self._growing = False  # the journal's log takes what the reply has said with its next operations
        self._draft: Draft | None = None
        self._end_ids: frozenset[int] = frozenset()
        self._run: ReplyRun | None = None
        self._prompt_tokens = self._new_tokens = 0
        self._restarted = False
        self._cancelled: EndReason | None = None
        self._events: deque[ReplyEvent] = deque()
        self.over = False
        """Whether the turn was committed or taken back. Some events may still wait to be read."""
        self._reading = False
        self._leaving: asyncio.Task[None] | None = None

    @property
    def request(self) -> TurnRequest:
        """The request that this response answers."""
        return self._request

    @property
    def _turn(self) -> RunningTurn | None:
        return self._prepared.turn

    @property
    def _aside(self) -> bool:
        return self._prepared.aside

    def withdraw(self) -> None:
        """Mark the response as over and do nothing else: the caller takes the turn out of the history."""
        self.over = True

    def refuse(self, fault: BaseException | None = None) -> None:
        """Take the turn out of the history, and record in the journal that it was refused because of
        ``fault`` (None: it was cancelled). Does nothing once the turn is over."""
        if self.over:
            return
        self.over = True
        try:
            if self._turn is not None:
                self._branch.history.abort_turn(self._turn)
            self._branch.history.record(refused(self.id, fault))
        finally:
            self._ended(self)

    async def cancel(self, reason: EndReason = EndReason.CLIENT_CANCELLED) -> None:
        """End the reply as soon as possible. What it said so far stays, with its KV, and the reader gets the
        last events. ``reason``: why; only the first one counts."""
        self._cancelled = self._cancelled or reason
        if self._run is not None:
            await self._run.cancel(reason)

    def says(self, item_id: str) -> bool:
        """Whether the reply joins the conversation and has begun the message with the id ``item_id``."""
        return self.writes and self._run is not None and self._run.reader.said_of(item_id) is not None

    def cut(self, item_id: str, end: int) -> None:
        """Let the reply end after ``end`` characters of its message ``item_id``, and record that in the
        journal. Text behind that is removed when the reply is over.

        The caller must also call `cancel`. Raises ``ItemUnknown`` or ``CutInvalid``.
        """
        said = None if self._run is None else self._run.reader.said_of(item_id)
        if said is None:
            raise ItemUnknown(f"The response has no message {item_id!r}", param="item_id")
        check_cut(said, end)
        self._cut = (item_id, end)
        self._branch.history.record(Interrupted(response=self.id, item=item_id, end=end))

    def so_far(self) -> tuple[History, Ended]:
        """A copy of the history in which the reply ends with the tokens that the journal has so far, and the
        operation that says so in the journal. The response itself goes on."""
        self._branch.log.gather()
        history, turn = self._branch.history.branch(), self._turn
        assert turn is not None, "only a reply that joins the conversation"
        said = NONE if self._run is None else ids_of(self._run.reader.ids)
        if self._recorded > len(said):  # it continues after an interruption, and has not read these again
            said = self._said
        said = said[: self._recorded]
        if self._draft is None or not len(said) or self._request.prefill_only:
            history.abort_turn(turn)
            return history, refused(self.id, None)
        reader = self._reader()
        reader.feed(said.tolist())
        reader.finish(cut=not reader.ended)
        kept = self._kept(reader, cut=not reader.ended)
        done = ReplyDone(ReplyStatus.CANCELLED, EndReason.CLIENT_CANCELLED, reader.items(), TurnUsage())
        self._settle(history, turn, kept)
        return history, ended(self.id, done, reader.ended, kept)

    async def aclose(self) -> None:
        """Cancel the reply and end the turn. Events that were not read are dropped. If the caller is cancelled
        meanwhile, this still finishes."""
        if self._leaving is not None or not self.over:
            await self._leave(drop=True)

    async def leave(self) -> None:
        """Cancel the reply and end the turn. A reader can still read the remaining events."""
        if self._reading:
            await self.cancel()
        elif not self.over and self._leaving is None:
            await self._leave(drop=False)

    async def _leave(self, *, drop: bool) -> None:
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(self._left(drop=drop))
        await asyncio.shield(self._leaving)

    async def _left(self, *, drop: bool) -> None:
        run = self._run
        if not self.over and run is None:
            self.refuse()
        elif not self.over and run is not None:
            await run.cancel()
            while (ending := run.ending) is None:
                await self._advanced(run)
            await self._conclude(run, ending)
            if drop:
                self._events.clear()
        elif self._aside:
            await self._sequence.close()

    def __aiter__(self) -> TurnResponse:
        return self

    async def __anext__(self) -> ReplyEvent:
        event = await self.next_event()
        if event is None:
            raise StopAsyncIteration
        return event

    async def next_event(self, tell_now: TellNow | None = None) -> ReplyEvent | None:
        """Wait for the next event and return it; None behind `ReplyDone`. ``tell_now``: called with text that
        comes while this waits, as the text arrives; it returns whether it has handed the text on. If not, the
        text is returned here."""
        self._reading = True
        try:
            while not self._events:
                if self._leaving is not None:
                    await asyncio.shield(self._leaving)
                if self.over:
                    return None
                await self._proceed(tell_now)
        except asyncio.CancelledError:
            await self._leave(drop=True)
            raise
        finally:
            self._reading = False
        return self._events.popleft()

    async def __aenter__(self) -> TurnResponse:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _proceed(self, tell_now: TellNow | None) -> None:
        if self._run is None:
            try:
                run = await self._begin()
            except BaseException as fault:
                self.refuse(fault)
                raise
            if not self.over:  # the response was not closed meanwhile
                self._run = run
                self._events.append(ReplyStarted(self._prompt_tokens))
        elif self._run.ending is None:
            self._events += await self._advanced(self._run, tell_now)
            said = None if self._cut is None else self._run.reader.said_of(self._cut[0])
            if self._cut is not None and said is not None and len(said) >= self._cut[1]:
                await self.cancel()
        else:  # the reader has all deltas, so the reply may join the history
            await self._conclude(self._run, self._run.ending)

    async def _advanced(self, run: ReplyRun, tell_now: TellNow | None = None) -> list[ReplyEvent]:
        """Advance ``run``, the generation of the reply, and return its next events; the journal gets the new
        ids. If an unexpected error is raised in between, only this turn fails."""

        def told(delta: ReplyTextDelta) -> bool:
            if not self._growing:
                self._record_said(run)
            return self._cut is None and tell_now is not None and tell_now(delta)

        try:
            events = await run.advance(None if tell_now is None else told)
            self._record_said(run)
        except Exception as fault:
            log.exception("response %s failed", self.id)
            await run.give_up(TurnFailed("The reply broke off for an internal reason"), fault)
            return []
        return events

    async def _begin(self) -> ReplyRun:
        """Render the prompt, leave out older turns if it is too long and the request allows that, and prepare
        the run. Nothing is sent to the engine yet. Raises ``PromptTooLong``, ``TemplateFailed``,
        ``EngineUnavailable``."""
        branch = self._branch
        try:
            hello = branch.link.hello
        except EngineGone as fault:
            raise EngineUnavailable(fault.message) from fault
        try:
            fit = await self._fitted(hello.max_context)
            said, prompt = fit.checked(hello.max_context), fit.ids
        except PromptTooLong as fault:
            fault.param = None if self._request.input is None else "input"
            raise
        if fit.indexes:
            self._leave_out(fit)
        kept, shared = said.parent, said.keep
        if self._prepared.script.verbatim:
            kept = self._prepared.script.base
            shared = 0 if kept is None else common_prefix(prompt, kept.tokens())
            self._rewrite(said)
        self._draft = said
        if self._turn is not None and self._aside:  # the history gets the reply without the overrides
            self._draft = await branch.draft(self._turn.script, stopped=self._given_up)
        self._prompt_tokens = len(prompt)
        await branch.sequence.wait_stopped()
        self._new_tokens = len(prompt) - shared + self._pending(kept, shared)
        if said.parent is None:  # nothing is used again, but the instructions are not new
            self._new_tokens -= fit.instructions
        if not self._aside:  # the last token is fed again
            prefilled = min(common_prefix(prompt, branch.sequence.prefilled), len(prompt) - 1)
            self._new_tokens = min(self._new_tokens, len(prompt) - prefilled)
        self._restarted = branch.sequence.lost
        end_ids = self._end_ids = branch.language.end_ids(hello.eos_ids)
        request, room = self._request, hello.max_context - len(prompt)
        most = min(room, request.max_output_tokens or room)
        stop_ids = tuple(sorted(end_ids.union(request.stop_ids)))
        gather = GATHERED if self._whole_calls and request.one_call else 1
        run = ReplyRun(
            self._sequence,
            self._reader(),
            prompt,
            request.sampling,
            TokenLimits(most, stop_ids, min(request.min_output_tokens, most), gather),
            self._new_tokens,
            branch.settings.recovery_seconds,
            self._said,
            self._logprobs,
        )
        if self._cancelled:
            await run.cancel(self._cancelled)
        return run

    def _reader(self) -> ReplyReader:
        language, tools = self._branch.language, self._prepared.script.preamble.tools
        whole = self._whole_calls
        return ReplyReader(language, self._request, self._end_ids, self.id, tools, whole_calls=whole)

    async def _fitted(self, max_context: int) -> FittedPrompt:
        """The prompt, without older turns if it is too long and the request allows that. A reply that continues
        after an interruption gets the prompt with which it began."""
        branch, request, script = self._branch, self._request, self._prepared.script
        if request.prompt is not None:
            ids = ids_of(request.prompt)
            return FittedPrompt(len(ids), Draft(None, (), 0, ids, script.miss), ids)
        begun = self._left_out is not None or len(self._said) > 0
        truncation = None if begun or request.input is not None else request.truncation
        fit = PromptFit(branch.renderer, script, max_context, request.max_output_tokens, truncation)

        def gives_up(gone: Stopped) -> Stopped:
            return lambda: gone() or self._given_up()

        whole = await branch.render(script, lambda gone: fit.whole(gives_up(gone)))
        if self._given_up() or not fit.is_full(whole):
            return whole
        return await branch.slot.run(lambda gone: fit.shortened(whole, gives_up(gone)))

    def _leave_out(self, fit: FittedPrompt) -> None:
        """Leave out of this turn's prompt, and if its reply joins the conversation of later ones, what ``fit``
        left out. The journal gets that first."""
        segments = [self._prepared.script.segments[index] for index in fit.indexes]
        items = [item for one in segments for item in (one.items if isinstance(one, TurnReply) else (one,))]
        self._left_out = LeftOut(tuple(item.id for item in items), fit.gone)
        if self.writes:
            cut = ContextCut(response=self.id, indexes=fit.indexes, told=self._left_out)
            self._branch.history.record(cut)
        self._prepared = self._prepared.without(fit.indexes)

    def _rewrite(self, draft: Draft) -> None:
        """Bring the prompt as items to the turn from which its ``draft`` goes on: the replies behind it are
        written as their items. Later turns do so, too, if this one joins the conversation."""
        _, shared = matched(draft.parent, self._prepared.script.segments)
        if any(isinstance(segment, TurnReply) for segment in self._prepared.script.segments[shared:]):
            self._prepared = self._prepared.rewritten(shared)

    def _given_up(self) -> bool:
        """Whether the reply was cancelled before it said anything. Then its prompt need not be complete."""
        return self._cancelled is not None and not len(self._said)

    def _pending(self, turn: TurnNode | None, keep: int) -> int:
        """How many of the first ``keep`` tokens up to the end of a ``turn``, which the prompt keeps, have no
        KV: at the end of its reply, they were sampled last, or tokenized again by a cut."""
        if turn is None or keep < turn.length:
            return 0
        return turn.reply.respelled or self._branch.sequence.without_kv(keep)

    async def _conclude(self, run: ReplyRun, ending: ReplyEnd) -> None:
        if self._aside:  # first: nothing may come between the end of the turn and the event that tells it
            await self._sequence.close()
        if self.over:
            return
        try:
            done, kept = self._recorded_end(run, ending)
        except BaseException as fault:
            self.refuse(fault)
            raise
        self.over = True
        try:
            if kept and self._cut is not None and any(item.id == self._cut[0] for item in done.items):
                end_with(self._branch.history, *self._cut, self._branch.language.tokenizer)
        finally:
            self._events.append(done)
            self._ended(self)

    def _recorded_end(self, run: ReplyRun, ending: ReplyEnd) -> tuple[ReplyDone, bool]:
        """Commit the turn to the history, or take it back. Returns the last event, and whether the turn was
        committed.

        The journal gets its record first. If it refuses that, nothing has changed.
        """
        self._record_said(run)
        history, turn, draft, reader = self._branch.history, self._turn, self._draft, run.reader
        failed = ending.status is ReplyStatus.FAILED
        kept = None if failed else self._kept(reader, cut=ending.status is not ReplyStatus.COMPLETED)
        self._restarted |= run.recovered
        done = ReplyDone(
            ending.status,
            ending.reason,
            reader.items(),
            self._usage(ending, len(reader.ids)),
            ending.error,
            self._left_out,
            reader.stopped_by if ending.reason is EndReason.STOP else None,
        )
        history.record(ended(self.id, done, reader.ended, kept))
        if turn is not None:
            self._settle(history, turn, kept)
        if draft is not None and not self._aside and not failed:
            self._branch.sequence.prefilled = draft.tokens() if kept is None else NONE
        return done, kept is not None

    def _kept(self, reader: ReplyReader, *, cut: bool) -> KeptTurn | None:
        """The turn with the reply that ``reader`` has read. None if it does not join the history: it has no
        item, or only its prompt was wanted. Tokens that say more than its items, which only a reply has that
        was ``cut`` or that a stop string or a stop id ended, are taken out."""
        turn, draft, items = self._turn, self._draft, reader.items()
        if turn is None or draft is None or not items or self._request.prefill_only:
            return None
        whole = TurnReply(items, ids_of(reader.ids), reader.ended)
        says_more = cut or reader.matched or reader.halted
        reply = trimmed(whole, self._branch.language.tokenizer) if says_more else whole
        return KeptTurn(turn, draft.node(reply or whole), len(reader.ids), loose=reply is None)

    def _settle(self, history: History, turn: RunningTurn, kept: KeptTurn | None) -> None:
        """End the running turn in ``history``: with its reply, or without one if it is not kept."""
        if kept is None or self._draft is None:
            history.abort_turn(turn)
        else:
            history.commit_turn(turn, self._draft, kept.node.reply, kept.node.id, loose=kept.loose)

    def _record_said(self, run: ReplyRun) -> None:
        """Let the journal take the ids that were read since the last time, with the session's next operations
        or with the next group of what may wait."""
        if not self._growing and self._turn is not None and len(run.reader.ids) > self._recorded:
            self._growing = True
            self._branch.log.grow(lambda: self._emitted(run))

    def _emitted(self, run: ReplyRun) -> Emitted:
        reader, first = run.reader, self._recorded
        self._growing, self._recorded = False, len(reader.ids)
        logprobs = reader.logprobs[first:] if len(reader.logprobs) == len(reader.ids) else ()
        return Emitted(response=self.id, ids=packed(reader.ids[first:]), logprobs=tuple(logprobs))

    def _usage(self, ending: ReplyEnd, said: int) -> TurnUsage:
        retracted = self._sequence.take_retracted()
        usage = TurnUsage(
            input_tokens=self._prompt_tokens,
            output_tokens=said,
            new_tokens=self._new_tokens,
            miss_reason=MissReason.UNREPORTED,
        )
        work = ending.work
        if work is None:
            return usage
        missed = work.prefilled + work.recomputed > self._new_tokens
        reason = self._prepared.script.miss or (
            MissReason.ENGINE_RESTARTED if self._restarted else MissReason.EVICTED
        )
        if retracted and reason is MissReason.EVICTED:
            reason = MissReason.INPUT_RETRACTED
        elif reason is MissReason.EVICTED and work.chosen:
            reason = MissReason.CHEAPER_TO_COMPUTE
        return replace(
            usage,
            cached_tokens=work.resident + work.host + work.disk,
            prefilled_tokens=work.prefilled,
            recomputed_tokens=work.recomputed,
            host_tokens=work.host,
            disk_tokens=work.disk,
            restore_ms=round(1e3 * work.restore_seconds, 3),
            miss_reason=reason if missed else None,
        )
