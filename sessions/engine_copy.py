"""The engine's copy of a branch (a conversation, or a response beside it): one sequence, which is driven over
the link, and the tokens that it is known to hold.

It brings the sequence to the wanted tokens with the cheapest verbs. It opens a new one when the engine was
restarted or a verb was cut off. It knows nothing of text, turns or items.

Its state says what is known of the sequence:

       ┌─────────────────────────── close ───────────────────────────┐
       ▼             verb sent                    reply              │
     EMPTY ─────────────────────────▶ UNSURE ─────────────────────▶ HELD
       ▲                              │ ▲  ▲       verb sent, or     │ ▲
       │                    generation│ │  └──── extend refused ─────┘ │
       │                      begins  │ │                            │
       ├──────────── close ───────────┤ │ stop refused               │ reply to stop
       │                              ▼ └──────────────┐              │
       └──────────── close ────── GENERATING ── stop ──▶ STOPPING ────┤
                                      └───────── its last row ────────┘

Not drawn: a copy that its parent forks goes from EMPTY to HELD, and a reply without a generation is stopped
in UNSURE or HELD. After a verb that was cut off or refused the state stays UNSURE: the next turn closes the
sequence and opens another. An engine's death changes no state: `EngineCopy.lost` tells that the sequence is
gone with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TypeAlias

from ..runtime.errors import (
    AdapterUnknown,
    EngineDied,
    EngineGone,
    EpochStale,
    SequenceBusy,
    SequenceUnknown,
    VerbRefused,
)
from ..runtime.link.client import EngineLink
from ..runtime.link.crash_report import EngineDeath
from ..runtime.link.generation import Generation
from ..runtime.verbs import BlockMap, Moved, Opening, Receipt, Sampling, SequenceState, TokenLimits, VerbReply
from .adapters import SessionAdapter, digest_of
from .errors import SequencePoisoned
from .token_ids import NONE, Ids, common_prefix

_NO_EXTENDS: frozenset[asyncio.Future[VerbReply]] = frozenset()

ISOLATE_AFTER = 2
"""After this many crashes a branch runs isolated: its sequence shares no step with others."""

MAX_KILLS = 16
"""A branch fails after so many engines were killed from outside (by the out-of-memory killer, for one)
without a token in between."""


class CrashCount:
    """The poison rule: finds out whether one branch makes engines crash.

    When an engine dies in a step, each sequence of that step is a suspect, unless the engine was killed from
    outside. After `ISOLATE_AFTER` such crashes a branch runs isolated: its sequence shares no step until it has
    sampled a token. If an engine dies in an isolated step, the branch is poisoned and its turn fails. A sampled
    token resets the count.

    The count belongs to the branch, because sequence ids are new in every engine. It outlives turns, so trying
    a poisoned prompt again costs one engine and not three.
    """

    def __init__(self) -> None:
        self._crashes = 0
        self._kills = 0

    @property
    def isolated(self) -> bool:
        """Whether the branch's sequence must share no step with others."""
        return self._crashes >= ISOLATE_AFTER

    def add(self, death: EngineDeath, seq: int, isolated: bool) -> None:
        """Count the death of an engine that held the branch as the sequence with the id ``seq``. ``isolated``:
        whether that sequence was opened to share no step. Does nothing if it was not in the step in which the
        engine died.

        Raises:
            SequencePoisoned: the engine died in an isolated step, or too many engines were killed.
        """
        if seq not in death.step:
            return
        if death.outside:
            self._kills += 1
        elif isolated and len(death.step) == 1:
            raise SequencePoisoned(f"The model's engine dies of this conversation: {death.cause}")
        else:
            self._crashes += 1
        if self._kills >= MAX_KILLS:
            self._kills = 0
            raise SequencePoisoned(f"{MAX_KILLS} engines were killed over this reply: {death.cause}")

    def reset(self) -> None:
        """Set the count to zero: the branch sampled a token."""
        self._crashes = self._kills = 0


class CopyState(Enum):
    """What is known of the engine's sequence."""

    EMPTY = "empty"
    """There is no sequence in the engine."""
    UNSURE = "unsure"
    """A verb is in flight, or was cut off or refused: the sequence may hold other tokens, or be gone."""
    HELD = "held"
    """The sequence is idle and holds exactly the known tokens."""
    GENERATING = "generating"
    """The sequence holds the known tokens, which are a turn's prompt, and samples more."""
    STOPPING = "stopping"
    """The engine was told to end the generation and to keep the known tokens. Later verbs wait for its
    reply."""


MOVES = {
    CopyState.EMPTY: {CopyState.EMPTY, CopyState.UNSURE, CopyState.HELD},  # HELD: its parent forked it
    CopyState.UNSURE: set(CopyState),
    CopyState.HELD: {CopyState.EMPTY, CopyState.UNSURE, CopyState.STOPPING},
    CopyState.GENERATING: {CopyState.EMPTY, CopyState.HELD, CopyState.STOPPING},
    CopyState.STOPPING: {CopyState.UNSURE, CopyState.HELD},
}
"""The states that each state may go to."""


class IllegalMove(AssertionError):
    """The copy was asked to go to a state that `MOVES` does not allow."""

    def __init__(self, state: CopyState, wanted: CopyState) -> None:
        super().__init__(f"the engine's copy cannot go from {state.name} to {wanted.name}")


@dataclass(frozen=True, slots=True)
class _GrantedLease:
    """A lease that the engine granted. It ends at ``until``; the session is expected back at ``returns``, both
    in seconds of the copy's clock. ``priority``: of the session's turns while it lasts; higher goes
    first."""

    priority: int
    until: float
    returns: float


_Parameters: TypeAlias = tuple[Sampling, TokenLimits, int]
"""How to sample, the limits, and how many of the prompt's last tokens this reply had sampled before its turn
was begun again."""


class EngineCopy:
    """At most one sequence of the engine, and the tokens it is known to hold.

    ``salt``: separates the tenants' cached blocks. ``origin``: the copy of which the first verb forks the
    sequence, if the two share at least a block of tokens. ``adapter``: the one that computes it; None: none.
    ``reopened``: the branch comes from the journal, so
    the sequence of an earlier server held it. ``clock``: seconds, for leases.
    """

    def __init__(
        self,
        link: EngineLink,
        salt: bytes = b"",
        origin: EngineCopy | None = None,
        *,
        adapter: SessionAdapter | None = None,
        reopened: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._clock = clock
        self._salt = salt
        self._adapter = adapter
        self._origin = origin
        self.state = CopyState.EMPTY
        self._sequence: SequenceState | None = None  # as the engine last reported it
        self._tokens = NONE
        self.engine_number = 0 if reopened else link.engine_number
        """The number of the engine process in which the sequence was opened: 1 for the server's first engine, 0
        for one of an earlier server."""
        self._isolated = False  # whether the sequence shares no step with others
        self._verbs = asyncio.Lock()
        self._stop_reply: asyncio.Task[None] | None = None
        self._extends = _NO_EXTENDS  # in flight; see `_extend`
        self._without_kv = 1  # sampled tokens at the end that had no KV when generation ended
        self._before_prefill: int | None = None  # tokens with KV before the first `prefill` since a turn
        self._retracted = False
        self.cached = 0
        """How many tokens of the last turn's prompt had KV already, before `prefill` and the turn computed the
        others."""
        self.prefilled = NONE
        """The prompt that the last turn computed, if that wrote nothing: no turn of the tree has it, and it is
        not new to the next one."""
        self._lease: _GrantedLease | None = None
        self._lease_verbs = 0  # in flight
        self._turns = 0
        self.crashes = CrashCount()

    @property
    def lost(self) -> bool:
        """Whether the engine that the sequence was opened in is gone; the current engine has another number."""
        return self.engine_number != self._link.engine_number

    @property
    def held(self) -> Ids:
        """The tokens that the engine is known to hold, ``[tokens]``; empty while it generates, in any other
        state but HELD, or if its engine is gone."""
        return self._tokens if self.state is CopyState.HELD and not self.lost else NONE

    @property
    def sent(self) -> Ids:
        """The tokens that were sent to the engine, ``[tokens]``, whether it has answered or not; without
        those of a turn that is beginning. Empty if its engine is gone."""
        return NONE if self.lost else self._tokens

    @property
    def pending_extends(self) -> int:
        """How many `extend` verbs the engine has not answered yet."""
        return len(self._extends)

    async def wait_extended(self) -> None:
        """Wait until the engine has answered the `extend` verbs that are in flight now."""
        if self._extends:
            await asyncio.wait(self._extends)

    async def wait_stopped(self) -> None:
        """Wait until a generation that was stopped has ended."""
        if self._stop_reply is not None:
            await asyncio.wait([self._stop_reply])

    def without_kv(self, keep: int) -> int:
        """Of the branch's first ``keep`` tokens, how many at the end were sampled in the last turn and have no
        KV yet, so that the next turn computes them. 1 if the engine's sequence is gone or shorter."""
        if self._sequence is None or self.lost or len(self._tokens) < keep:
            return 1
        computed = self._sequence.computed if self._before_prefill is None else self._before_prefill
        return min(self._without_kv, max(0, keep - computed))

    def take_retracted(self) -> bool:
        """Whether tokens that `prefill` had sent were removed again since this was last called, because a later
        prefill or turn had other tokens there. Resets the answer to false."""
        retracted, self._retracted = self._retracted, False
        return retracted

    # --- forks --------------------------------------------------------------------------------------------

    def child(self) -> EngineCopy:
        """A new, empty copy with this one as its origin: its first verb forks this one's sequence, if they
        share a block."""
        child = EngineCopy(self._link, self._salt, self, adapter=self._adapter, clock=self._clock)
        child.prefilled = self.prefilled
        return child

    async def fork(self, children: Sequence[EngineCopy], ids: Ids) -> None:
        """Fork this copy's sequence into those of all ``children`` (made by `child`), with one verb. They then
        hold the first tokens of ``ids`` that this copy holds too.

        While this copy generates, ``ids`` may include the sampled ids that were read. If the engine refuses,
        or less than a block is shared, the children stay empty and are opened when they are first used.
        """
        async with self._exclusive():
            sequence = self._sequence
            if sequence is None or self.lost or self.state is CopyState.UNSURE:
                return
            generating = self.state is CopyState.GENERATING
            at = common_prefix(self._tokens, ids)
            if generating and at == len(self._tokens):
                at = len(ids)
            if at < self._link.hello.block_tokens:
                return
            computed = at - 1 if generating else min(at, sequence.computed)
            with suppress(VerbRefused, EngineGone):
                forked = await self._link.fork(sequence.seq, len(children), at)
                for child, seq in zip(children, forked, strict=True):
                    child._origin, child.engine_number = None, self.engine_number
                    child._move(CopyState.HELD, SequenceState(seq, at, computed, 0), ids[:at])

    # --- turns --------------------------------------------------------------------------------------------

    async def begin(
        self, ids: Ids, sampling: Sampling, limits: TokenLimits, generated_from: int = 0
    ) -> Generation:
        """Make the engine hold exactly ``ids`` and sample what follows.

        The last ``generated_from`` ids are the reply's already: it was interrupted and goes on. Ids that the
        engine lacks go with the verb that generates, so they cost no step of their own. Call `stop` or `finish`
        when the generation is over. Raises the runtime's ``VerbRefused`` and ``EngineGone``.
        """
        async with self._exclusive():
            self._end_return_hint()
            held, before, self._before_prefill = self.held, self._before_prefill, None
            sequence = await self._reusable(ids)
            self._retracted |= before is not None and common_prefix(held, ids) < len(held)
            try:
                generation = await self._start(ids, (sampling, limits, generated_from), sequence)
            except AdapterUnknown as fault:
                name = "" if self._adapter is None else self._adapter.name
                raise AdapterUnknown(f"The session's adapter {name!r} is not loaded") from fault
            found = generation.state.computed
            self.cached = min(len(ids) if before is None else before, found)
            return generation

    async def stop(self, ids: Ids, reply: asyncio.Future[SequenceState] | None = None) -> None:
        """End the generation and keep exactly ``ids``, the prompt and a beginning of the reply.

        Returns before the engine answers, which it does after the step in flight; later verbs wait for the
        answer. ``reply``: the engine's answer, if it was told to stop already.
        """
        async with self._exclusive():
            if self._sequence is None:  # it was closed meanwhile
                if reply is not None:
                    await asyncio.wait([reply])
                return
            prompt, seq = len(self._tokens), self._sequence.seq
            self._move(CopyState.STOPPING, self._sequence, ids)
            self._stop_reply = asyncio.create_task(self._stop(seq, ids, prompt, reply))

    async def _stop(
        self, seq: int, ids: Ids, prompt: int, reply: asyncio.Future[SequenceState] | None
    ) -> None:
        try:
            sequence = await (reply or self._link.stop(seq, len(ids)))
            if sequence.length > len(ids):
                sequence = await self._link.truncate(seq, len(ids), sequence.epoch)
            sampled = sequence.length - prompt  # a grammar may have appended several without a step
            self._without_kv = max(1, min(sampled, sequence.length - sequence.computed))
            self._move(CopyState.HELD, sequence, ids[: sequence.length])
        except (VerbRefused, EngineGone):  # the next turn opens another sequence
            pass
        finally:
            if self.state is CopyState.STOPPING:
                self._doubt()

    def finish(self, ids: Ids, without_kv: int) -> None:
        """Note that the generation ended by itself. The sequence now holds ``ids``, the prompt and the reply;
        the last ``without_kv`` of them have no KV."""
        self._without_kv = without_kv
        sequence = self._known
        state = SequenceState(sequence.seq, len(ids), len(ids) - without_kv, sequence.epoch)
        self._move(CopyState.HELD, state, ids)

    async def prefill(self, ids: Ids, *, unless: Callable[[], bool], turn_expected: bool = False) -> None:
        """Make the engine hold and compute ``ids``, before a turn begins.

        ``unless``: called when the earlier verbs are done; if it returns true, nothing is done, because the
        turn has begun meanwhile. ``turn_expected``: compute with a turn's priority. Nothing is done either if
        an engine died in a step of this branch: only a turn tries that again, under the poison rule.
        """
        async with self._exclusive():
            if unless() or self._suspect:
                return
            held, again = self.held, self._before_prefill is not None
            if not again:
                self._before_prefill = self._sequence.computed if self._sequence else 0
            await self._bring(ids, turn_expected=turn_expected)
            self._retracted |= again and common_prefix(held, ids) < len(held)

    # --- where the KV is ----------------------------------------------------------------------------------

    async def lease(
        self, ids: Ids, priority: int | None, ttl: float | None, returns_in: float | None
    ) -> Receipt:
        """Request a lease for the KV of the sequence (kept longest, restored first); if there is no sequence,
        open it with ``ids``. Returns what the engine grants.

        ``priority``: of its turns meanwhile; higher goes first. ``ttl``: how many seconds the lease lasts; 0
        ends it. ``returns_in``: seconds until the next turn is expected. None: the engine's default. A granted
        lease is requested again when the sequence is opened in a new engine.
        """
        turns = self._turns
        self._lease_verbs += 1
        try:
            seq = await self._present(ids)
            receipt = await self._link.lease(seq, priority, ttl, returns_in)
        finally:
            self._lease_verbs -= 1
        self._lease = None
        now = self._clock()
        if receipt.ttl > 0 or (receipt.returns_in > 0 and turns == self._turns):
            self._lease = _GrantedLease(receipt.priority, now + receipt.ttl, now + receipt.returns_in)
        return receipt

    async def hint_return(self, returns_in: float) -> None:
        """Tell the engine in how many seconds (``returns_in``) a turn is likely, which orders the eviction of
        KV.

        Does nothing if there is no sequence, or if a lease is granted or requested: the hint would end it.
        """
        leased = self._live_lease is not None or self._lease_verbs > 0
        if self._sequence is not None and not self.lost and not leased:
            await self._link.lease(self._sequence.seq, None, 0.0, returns_in)

    async def stage(self, ids: Ids) -> Moved:
        """Bring the KV of the sequence up to the device; if there is no sequence, open it with ``ids``.
        Returns, when the KV is there, how many tokens came from each tier."""
        return await self._link.stage(await self._present(ids))

    async def settle(self, ids: Ids, *, disk: bool) -> Moved:
        """Send the KV of the sequence down to the host tier or, if ``disk``, to the disk tier; if there is no
        sequence, open it with ``ids``. Returns, when the KV is there, how many tokens were in each tier."""
        return await self._link.settle(await self._present(ids), disk)

    async def locate(self, ids: Ids) -> BlockMap:
        """In which tier each block of the sequence lies; if there is no sequence, where one that holds ``ids``
        would find its blocks. Opens and moves nothing."""
        if self._sequence is not None and not self.lost:
            with suppress(SequenceUnknown):  # it is closed meanwhile
                return await self._link.locate(self._sequence.seq)
        return await self._link.locate(None, ids.tolist(), self._salt, digest_of(self._adapter))

    # --- deaths and ends ----------------------------------------------------------------------------------

    async def recover(self, held_by: int) -> None:
        """An engine died while a turn ran in it: wait until a new one runs. ``held_by``: the number of the
        dead engine.

        If the sequence was lost with it, forget the sequence and count the death in `crashes`. Another verb
        may have opened the sequence in the new engine meanwhile; then it has counted the death.

        Raises:
            EngineGone: no engine will come.
            EngineDied: engine ``held_by`` did not die.
            SequencePoisoned: this branch makes engines crash.
        """
        sequence, lost_with = self._sequence, self.engine_number
        await self._link.wait_ready()
        if held_by == self._link.engine_number:
            raise EngineDied("the engine and its link disagree about a sequence")
        death = self._link.death_of(lost_with)
        if self.lost and sequence is not None and death is not None:
            await self.close()
            self.crashes.add(death, sequence.seq, self._isolated)

    async def close(self, *, keep_kv: bool = True) -> None:
        """Close the engine's sequence, if there is one; its KV stays cached if ``keep_kv``. It waits for a
        generation that is being stopped, but not for other verbs in flight, such as a fork.

        If the engine dies meanwhile, the sequence stays known, so that `recover` can tell whether it was in
        the fatal step.
        """
        await self.wait_stopped()
        await self._close(keep_kv=keep_kv)

    async def _close(self, *, keep_kv: bool = True) -> None:
        sequence, lost = self._sequence, self.lost
        self._move(CopyState.EMPTY, None, NONE)
        if sequence is not None and not lost:
            try:
                with suppress(VerbRefused):
                    await self._link.close(sequence.seq, keep_kv)
            except EngineGone:
                self._move(CopyState.UNSURE, sequence, NONE)

    # --- the state ----------------------------------------------------------------------------------------

    def _move(self, state: CopyState, sequence: SequenceState | None, tokens: Ids) -> None:
        """Go to ``state``, and set the engine's sequence (None: none) and the tokens that it is known to hold.
        The state changes nowhere else. Raises ``IllegalMove``."""
        if state not in MOVES[self.state]:
            raise IllegalMove(self.state, state)
        self.state, self._sequence, self._tokens = state, sequence, tokens

    def _doubt(self) -> None:
        """Go to UNSURE, because a verb is about to be sent or was refused. The sequence and the tokens that it
        was known to hold stay recorded."""
        self._move(CopyState.UNSURE, self._sequence, self._tokens)

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """Hold the copy's lock while the block runs, so that one verb runs at a time. The block begins after
        the engine has answered a stop in flight."""
        async with self._verbs:
            await self.wait_stopped()
            yield

    @property
    def _known(self) -> SequenceState:
        """The engine's sequence. Raises ``SequenceUnknown`` if there is none."""
        if self._sequence is None:
            raise SequenceUnknown("the session has no sequence in the engine")
        return self._sequence

    @property
    def _live_lease(self) -> _GrantedLease | None:
        """The granted lease; None if there is none, or if both its end and the expected return are past."""
        lease = self._lease
        return lease if lease is not None and max(lease.until, lease.returns) > self._clock() else None

    def _end_return_hint(self) -> None:
        """Call this when a turn begins: forget what was said of the session's return, unless it belongs to a
        lease that still lasts."""
        self._turns += 1
        if self._lease is not None and self._lease.until <= self._clock():
            self._lease = None

    @property
    def _suspect(self) -> bool:
        """Whether only a turn may open the sequence, because engines died in steps of this branch."""
        if self._sequence is None or not self.lost:
            return self.crashes.isolated
        return self._fatal is not None

    @property
    def _fatal(self) -> EngineDeath | None:
        """The death of the engine that held the sequence, if the sequence was in that engine's last step.

        None if the engine lives, if the sequence was not in that step, or if the link does not know that
        death.
        """
        if self._sequence is None or not self.lost:
            return None
        death = self._link.death_of(self.engine_number)
        return death if death is not None and self._sequence.seq in death.step else None

    # --- verbs --------------------------------------------------------------------------------------------

    async def _present(self, ids: Ids) -> int:
        """The id of the engine's sequence; if there is none, or its engine died, open one with ``ids``.

        Raises:
            EngineDied: an engine crashed in a step of this branch. The next turn opens the sequence again;
                until then other verbs are refused.
            SequencePoisoned: too many engines were killed from outside in steps of this branch.
        """
        if self._sequence is not None and not self.lost:
            return self._sequence.seq
        async with self._exclusive():
            if self._sequence is None or self.lost:
                sequence, fatal = self._sequence, self._fatal
                if sequence is not None and fatal is not None and fatal.outside:
                    await self._close()
                    self.crashes.add(fatal, sequence.seq, self._isolated)
                elif self._suspect:
                    raise EngineDied("an engine died over this session: its next turn opens it again")
                if len(ids):
                    await self._bring(ids)
                else:
                    await self._close()
                    await self._open(NONE, isolated=False)
            return self._known.seq

    async def _bring(self, ids: Ids, *, turn_expected: bool = False) -> None:
        """Make the engine hold exactly ``ids``: truncate and extend the sequence, or fork the origin's, or open
        one.

        ``turn_expected``: new tokens are computed with a turn's priority. Raises the runtime's ``VerbRefused``
        and ``EngineGone``.
        """
        sequence = await self._reusable(ids)
        isolated = self.crashes.isolated
        if sequence is None and not isolated:
            sequence = await self._fork_origin(ids)
        if sequence is None:
            await self._open(ids, isolated=isolated)
        elif len(self._tokens) < len(ids):
            self._extend(sequence.seq, ids, turn_expected)

    async def _reusable(self, ids: Ids) -> SequenceState | None:
        """The engine's sequence, after truncating it to the tokens that it shares with ``ids``.

        None if it cannot be used: then it was closed, and a new one must be opened.
        """
        assert len(ids) > 0, "a prompt has at least one token"
        if self.state is CopyState.HELD and not self.lost and not self.crashes.isolated:
            sequence, shared = self._known, common_prefix(self._tokens, ids)
            if shared == len(self._tokens):
                return sequence
            self._doubt()
            with suppress(VerbRefused):  # the sequence is not what was expected
                sequence = await self._link.truncate(sequence.seq, shared, sequence.epoch)
                self._move(CopyState.HELD, sequence, ids[:shared])
                return sequence
        await self._close()
        return None

    def _extend(self, seq: int, ids: Ids, turn_expected: bool) -> None:
        """Send an `extend` with the tokens of ``ids`` behind those that the engine holds, without waiting for
        the reply, which comes after the step in flight.

        Every verb names the length it expects, so if this one is refused, later ones are too.
        """
        there = len(self._tokens)
        reply = self._link.extend(seq, ids[there:].tolist(), turn_expected, there)
        self._tokens = ids
        self._extends |= {reply}
        reply.add_done_callback(partial(self._extended, seq))

    def _extended(self, seq: int, reply: asyncio.Future[VerbReply]) -> None:
        self._extends -= {reply}
        refused = reply.cancelled() or reply.exception() is not None
        if self._sequence is None or self._sequence.seq != seq:
            return
        if refused and self.state is CopyState.HELD:
            self._doubt()
        elif not refused and self.state in (CopyState.HELD, CopyState.UNSURE):
            self._sequence = reply.result().state or self._sequence

    async def _open(self, ids: Ids, *, isolated: bool) -> SequenceState:
        """Open a sequence that holds ``ids``, and request the branch's lease again if it is still live; a
        refusal of the lease is ignored. Returns the sequence."""
        self._send_opening(isolated)
        sequence = await self._link.open(ids.tolist(), self._salt, isolated, digest_of(self._adapter))
        self._move(CopyState.HELD, sequence, ids)
        lease = self._live_lease
        if lease is not None:
            now = self._clock()
            with suppress(VerbRefused):
                ttl, returns_in = max(0.0, lease.until - now), max(0.0, lease.returns - now)
                await self._link.lease(sequence.seq, lease.priority, ttl, returns_in)
        return sequence

    def _send_opening(self, isolated: bool) -> None:
        """Call this before a verb that opens the sequence: go to UNSURE, and record the current engine as the
        one that holds the sequence, and whether the sequence shares no step (``isolated``)."""
        self._doubt()
        self._isolated, self.engine_number = isolated, self._link.engine_number

    def _forkable(self, ids: Ids) -> tuple[int, int] | None:
        """The id of the origin's sequence, and how many of its first tokens a fork that is to hold ``ids``
        would share: at most all of ``ids`` but the last. None if there is no origin with a sequence, or if less
        than a block would be shared."""
        origin = self._origin
        if origin is None or origin._sequence is None or origin.lost:
            return None
        at = min(common_prefix(origin._tokens, ids), len(ids) - 1)
        return None if at < self._link.hello.block_tokens else (origin._sequence.seq, at)

    async def _fork_origin(self, ids: Ids) -> SequenceState | None:
        """Make this copy's sequence a fork of the origin's, with the tokens that the origin shares with
        ``ids``.

        Returns the new sequence, or None if there is no origin with a sequence, if it shares less than a block,
        or if the engine refuses.
        """
        parent = self._forkable(ids)
        if parent is None:
            return None
        at = parent[1]
        self._send_opening(isolated=False)
        try:
            (seq,) = await self._link.fork(parent[0], 1, at)
        except VerbRefused:
            self._move(CopyState.EMPTY, None, NONE)
            return None
        sequence = SequenceState(seq, at, at, 0)
        self._move(CopyState.HELD, sequence, ids[:at])
        return sequence

    async def _start(self, ids: Ids, parameters: _Parameters, sequence: SequenceState | None) -> Generation:
        """Generate behind ``ids`` on ``sequence``, which holds a beginning of them; if it is None or the engine
        refuses it, on a new one.

        The verb that generates also opens the new one, unless a lease must be requested in between.
        """
        if sequence is not None:
            try:
                return await self._generate(ids, parameters, sequence.seq)
            except (EpochStale, SequenceBusy, SequenceUnknown):  # it is not what was expected
                if self.lost:
                    raise
                await self._close()
        isolated = self.crashes.isolated
        if self._live_lease is not None:
            sequence = await self._open(ids, isolated=isolated)
            return await self._generate(ids, parameters, sequence.seq)
        parent = None if isolated else self._forkable(ids)
        if parent is not None:
            with suppress(VerbRefused):  # the parent is not what was expected
                return await self._generate(ids, parameters, Opening(parent=parent[0], at=parent[1]))
        opening = Opening(self._salt, isolated, adapter=digest_of(self._adapter))
        return await self._generate(ids, parameters, opening)

    async def _generate(self, ids: Ids, parameters: _Parameters, on: int | Opening) -> Generation:
        """Send the verb that generates behind ``ids``: on the sequence with the id ``on``, or on a new one,
        which the same verb opens as the `Opening` ``on`` says."""
        if isinstance(on, Opening):
            self._send_opening(on.isolated)
            there, expected = on.at, None
        else:
            self._doubt()
            there = expected = len(self._tokens)
        generation = await self._link.generate(on, *parameters, ids[there:].tolist(), expected)
        self._without_kv = 1
        self._move(CopyState.GENERATING, generation.state, ids)
        return generation
