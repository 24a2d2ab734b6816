"""Generates the reply of one turn: the prompt's ids go to the engine, events come back.

If the engine dies, the run waits for the next one, opens a sequence there with the prompt and the ids sampled
so far, and goes on. Sampling depends only on seed and position, so no token is repeated or missing.

The caller drives the run with ``advance``. It may stop between any two calls, if it then calls ``cancel`` and
``advance`` until the run has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np

from ...runtime import errors as runtime
from ...runtime.link.generation import Generation, Take
from ...runtime.verbs import Finish, Row, Sampling, SequenceState, TokenLimits, TokenLogprob, Work
from .. import errors
from ..engine_copy import EngineCopy
from ..errors import TurnFailed
from ..token_ids import NONE, Ids, frozen, ids_of
from .events import EndReason, ReplyEvent, ReplyStatus, ReplyTextDelta
from .reply_reader import ReplyReader

TellNow: TypeAlias = Callable[[ReplyTextDelta], bool]
"""A function that hands more text of a reply to its reader within the call, if that needs no wait. Returns
whether it did."""


@dataclass(frozen=True, slots=True)
class ReplyEnd:
    """How a run ended. ``work``: what it cost; None: not known, see `ReplyRun`. ``error``: why it failed; None
    if it did not."""

    reason: EndReason
    work: Work | None
    error: TurnFailed | None = None

    @property
    def status(self) -> ReplyStatus:
        """The status of the reply."""
        return self.reason.status


class ReplyRun:
    """Generates one reply on ``sequence``, the engine's copy of a branch: call `advance` until ``ending`` is
    set.

    ``reader``: makes events of the ids. ``prompt``: the ids of the whole prompt; ``new``: how many of them no
    turn had computed before.

    An engine that dies or that is stopped reports no work. Then the tokens that had no KV on the device count
    as computed, if tokens were sampled and there are no more than ``new`` ones. Otherwise the work is not
    known: a lower tier may have had the KV, or the engine was stopped at an unknown token.

    ``said``, ``logprobs``: ids that the reply has already, from an earlier server process, and their log
    probabilities. The events of these ids come first, and the generation continues behind them.
    ``recovery_seconds``: how long to wait for another engine if this one dies.
    """

    def __init__(
        self,
        sequence: EngineCopy,
        reader: ReplyReader,
        prompt: Ids,
        sampling: Sampling,
        limits: TokenLimits,
        new: int,
        recovery_seconds: float = 0.0,
        said: Ids = NONE,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        self.reader = reader
        self.ending: ReplyEnd | None = None
        self._sequence = sequence
        self._prompt = prompt
        self._sampling, self._limits, self._new = sampling, limits, new
        self._said, self._logprobs = said, logprobs
        self._prompt_scores: list[TokenLogprob] = []
        self._scored = False  # whether those of the prompt were told
        self._retold = not len(said)
        self._generation: Generation | None = None
        self._held_by = 0  # the number of the engine that generates the reply
        self._stopping: asyncio.Future[SequenceState] | None = None
        self._resident = 0
        self._recovery_seconds = recovery_seconds
        self._lost: Work | None = None  # the work that engines did for the reply before they died
        self._lost_is_known = True
        self._sampled = False  # whether the generation has given a token
        self._untold: list[ReplyEvent] | None = None  # of a row that was read as it arrived
        self._cancelled = asyncio.Event()
        self._reason = EndReason.CLIENT_CANCELLED

    @property
    def recovered(self) -> bool:
        """Whether an engine died during the reply, or the reply comes from an earlier process."""
        return self._lost is not None

    async def advance(self, tell_now: TellNow | None = None) -> list[ReplyEvent]:
        """Go on with the reply, and return the next events, possibly none. The first calls repeat the ids
        that it has already and begin the generation; later ones wait for the engine's next row. Do not call
        it once ``ending`` is set.

        ``tell_now``: called with the text of each row that comes while this waits and is nothing but more text,
        as the row arrives. It returns whether it has handed the text on, so that this goes on waiting; if not,
        the text is returned here.
        """
        try:
            if not self._retold:
                return self._retell()
            if self._generation is None and not self._cancelled.is_set():
                await self._start()
                return []
            return await self._read(tell_now)
        except runtime.RuntimeFault as fault:
            if not isinstance(fault, runtime.EngineGone) and not self._sequence.lost:
                return await self._fail(_failure(fault))
            return await self._outlive(fault)

    async def cancel(self, reason: EndReason = EndReason.CLIENT_CANCELLED) -> None:
        """End the reply as soon as possible. What was read stays; the next ``advance`` sets ``ending``."""
        if not self._cancelled.is_set():
            self._reason = reason
        self._cancelled.set()
        if self._generation is not None and self.ending is None and self._stopping is None:
            # nothing more is read, so one verb both stops and tells the engine what to keep
            self._stopping = self._generation.leave(len(self._prompt) + len(self.reader.ids))

    async def give_up(self, error: TurnFailed, fault: BaseException) -> None:
        """End the reply with ``error``, after `advance` raised ``fault``. The sequence is closed, because its
        tokens are unknown."""
        error.__cause__ = fault
        self._end(EndReason.ERROR, None, error)
        with suppress(runtime.RuntimeFault):
            await self._sequence.close(keep_kv=False)

    def _retell(self) -> list[ReplyEvent]:
        """The events of the ids that the reply has already, from an earlier server process. If they are the
        whole reply, ``ending`` is set, too."""
        self._retold = True
        self._lost = Work(0, 0, 0, len(self._said))
        events = self.reader.feed(self._said.tolist(), self._logprobs)
        over = self.reader.ended or self.reader.matched or self.reader.halted or self.reader.called
        if over:
            self._end(EndReason.STOP)
        elif self.reader.cycles:
            self._end(EndReason.REPETITION)
        elif len(self._said) >= self._limits.max_tokens:
            self._end(EndReason.MAX_OUTPUT_TOKENS)
        return events if self.ending is None else events + self.reader.finish(cut=not over)

    async def _start(self) -> None:
        said, self._stopping, self._sampled = len(self.reader.ids), None, False
        self._prompt_scores = []  # another engine begins with the prompt again
        try:
            self._generation = await self._sequence.begin(self._all(), self._sampling, self._limits, said)
        finally:
            self._held_by = self._sequence.engine_number
        self._resident = self._sequence.cached

    async def _outlive(self, fault: runtime.RuntimeFault) -> list[ReplyEvent]:
        """Called when the engine is gone, which raised ``fault``: waits for the next one, until the time to
        wait is over or the reply is cancelled. Returns no events, so that the next `advance` goes on; or those
        that end the reply, if it failed."""
        self._generation = None
        lost = self._work() if self._fresh else self._lost or Work(0, 0, 0, 0)
        self._lost_is_known &= lost is not None
        self._lost = lost or Work(0, 0, 0, len(self.reader.ids))
        waiting = asyncio.ensure_future(self._sequence.recover(self._held_by))
        leaving = asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait(
                {waiting, leaving}, timeout=self._recovery_seconds, return_when="FIRST_COMPLETED"
            )
            if waiting.done():
                waiting.result()
            elif not self._cancelled.is_set():
                return await self._fail(_failure(fault))
        except runtime.EngineGone as final:
            return await self._fail(_failure(final))
        except errors.SequencePoisoned as poisoned:
            return await self._fail(poisoned)
        finally:
            waiting.cancel()
            leaving.cancel()
        return []

    def _taking(self, tell_now: TellNow) -> Take:
        """A function for `Generation.next_row` that reads a row as it arrives, if it is one token of plain
        text, and hands the text to ``tell_now``. It returns False for other rows, and for the first row of a
        generation: these are read in the usual way."""

        def take(row: Row) -> bool:
            if not self._sampled or len(row.tokens) != 1 or row.logprobs or self._cancelled.is_set():
                return False
            delta = self.reader.plain(row.tokens[0])
            if delta is None:
                return False
            if not self.reader.cycles and tell_now(delta):
                return True
            self._untold = [delta]
            return False

        return take

    async def _read(self, tell_now: TellNow | None) -> list[ReplyEvent]:
        row = None
        if self._generation is not None and not self._cancelled.is_set():
            row = await self._generation.next_row(None if tell_now is None else self._taking(tell_now))
        events, self._untold = self._untold, None
        if row is None or self._cancelled.is_set():
            return (events or []) + await self._cut(self._reason)
        if row.finish is Finish.ERROR:
            why = row.error or "the engine gave up this sequence"
            return await self._fail(
                _failure(runtime.fault_of(row.code, why)) if row.code else TurnFailed(why)
            )
        if row.tokens:
            self._sampled = True
            self._sequence.crashes.reset()
        self._prompt_scores += row.prompt_logprobs or ()
        if events is None:
            events = self.reader.feed(row.tokens, row.logprobs)
        if row.tokens and not self._scored and self._sampling.prompt_logprobs is not None:
            events = [self.reader.prompt_scores(self._prompt.tolist(), self._prompt_scores), *events]
            self._scored = True
        if self.reader.matched or self.reader.called:
            return events + await self._cut(EndReason.STOP, row.work)
        if self.reader.cycles:
            return events + await self._cut(EndReason.REPETITION, row.work)
        if row.finish is not None:
            stopped = row.finish is Finish.STOP
            self._sequence.finish(self._all(), 1 if row.work is None else row.work.pending)
            self._end(EndReason.STOP if stopped else EndReason.MAX_OUTPUT_TOKENS, row.work)
            events += self.reader.finish(cut=not stopped)
        return events

    async def _cut(self, reason: EndReason, work: Work | None = None) -> list[ReplyEvent]:
        """Stop the generation: the engine keeps the ids that were read and drops later ones. Sets ``ending``
        and returns the last events. ``work``: the engine's report of its work; None if there is none."""
        if self._generation is not None:
            await self._sequence.stop(self._all(), self._stopping)
        self._end(reason, work)
        return self.reader.finish(cut=reason is not EndReason.STOP)

    async def _fail(self, error: TurnFailed) -> list[ReplyEvent]:
        """End the reply as failed: set ``ending``, and return the last events. If only the request was at
        fault, the sequence is kept, with the ids so far; otherwise it is closed and its KV dropped, because
        its tokens are unknown."""
        if isinstance(error, _REQUESTED):
            await self._sequence.stop(self._all())
        else:
            await self._sequence.close(keep_kv=False)
        self._end(EndReason.ERROR, None, error)
        return self.reader.finish(cut=True)

    def _end(self, reason: EndReason, work: Work | None = None, error: TurnFailed | None = None) -> None:
        self.ending = ReplyEnd(reason, self._work(work), error)

    def _work(self, work: Work | None = None) -> Work | None:
        """What the reply cost on all engines together; None: not known. ``work``: the last engine's report;
        None if there is none.

        Tokens that a later engine prefilled count as recomputed, except the last one, which had no KV before.
        What a killed server did is not known: then the KV that this one found counts.
        """
        said, lost, fresh = len(self.reader.ids), self._lost, self._fresh
        if work is None:
            computed = len(self._prompt) + said - fresh - self._resident
            if not fresh or computed > self._new:
                return None
            work = Work(computed, 0, self._resident, fresh)
        if not self._lost_is_known:
            return None
        if lost is None or not lost.decoded:
            return work
        again = work.recomputed + max(0, work.prefilled - 1)
        first = lost if lost != Work(0, 0, 0, lost.decoded) else self._found(work)
        return msgspec.structs.replace(
            work,
            prefilled=lost.prefilled,
            recomputed=lost.recomputed + again,
            resident=first.resident,
            decoded=said,
            host=first.host,
            disk=first.disk,
            restore_seconds=lost.restore_seconds + work.restore_seconds,
        )

    @property
    def _fresh(self) -> int:
        """How many of the reply's tokens the last engine sampled."""
        return len(self.reader.ids) - (self._lost.decoded if self._lost else 0)

    def _found(self, work: Work) -> Work:
        """``work`` with the KV that was found for the prompt alone. What was found for the reply's ids so far,
        which come behind it, does not count."""
        left = len(self._prompt)
        resident = min(work.resident, left)
        host = min(work.host, left - resident)
        return msgspec.structs.replace(
            work, resident=resident, host=host, disk=min(work.disk, left - resident - host)
        )

    def _all(self) -> Ids:
        """The ids of the prompt and of the reply so far."""
        return frozen(np.concatenate([self._prompt, ids_of(self.reader.ids)]))


_REQUESTED = (errors.GrammarRefused, errors.GrammarStuck, errors.GrammarUnavailable)
"""Errors of the reply's grammar: the engine did not begin, so its sequence stays usable."""

_FAILURES: tuple[tuple[type[runtime.RuntimeFault], type[TurnFailed]], ...] = (
    (runtime.EngineOverloaded, errors.EngineFull),
    (runtime.EngineGone, errors.EngineUnavailable),
    (runtime.AdapterUnknown, errors.AdapterUnavailable),
    (runtime.GrammarUnavailable, errors.GrammarUnavailable),
    (runtime.GrammarStuck, errors.GrammarStuck),
    (runtime.GrammarFault, errors.GrammarRefused),
    (runtime.RuntimeFault, TurnFailed),
)
"""For each error of the runtime, the error of the turn. The first row that fits is used."""


def _failure(fault: runtime.RuntimeFault) -> TurnFailed:
    error = next(ours for theirs, ours in _FAILURES if isinstance(fault, theirs))(fault.message)
    error.__cause__ = fault
    return error
