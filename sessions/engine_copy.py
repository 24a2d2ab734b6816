"""The engine's copy of a branch: one sequence over the link, and the tokens it is known to hold.

It brings the sequence to any wanted tokens with the cheapest verbs, and opens a new one when the engine was
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

A verb that is cut off leaves UNSURE, and so does a refused one: the next turn closes the sequence and opens
another. An engine that dies changes no state: `EngineCopy.lost` tells that the sequence went with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial

from ..runtime.errors import EngineDied, EngineGone, EpochStale, SequenceBusy, SequenceUnknown, VerbRefused
from ..runtime.link.client import EngineLink
from ..runtime.link.crash_report import EngineDeath
from ..runtime.link.generation import Generation
from ..runtime.link.messages import Moved, Opening, Receipt, Sampling, SequenceState, TokenLimits, VerbReply
from .poison import CrashCount
from .token_ids import NONE, Ids, common_prefix


class CopyState(Enum):
    """What is known of the engine's sequence."""

    EMPTY = "empty"
    """There is none."""
    UNSURE = "unsure"
    """A verb is on its way, or was cut off or refused: the sequence may hold other tokens, or be gone."""
    HELD = "held"
    """It is idle and holds exactly the known tokens."""
    GENERATING = "generating"
    """It holds the known tokens, a turn's prompt, and samples more."""
    STOPPING = "stopping"
    """It was told to stop and to keep the known tokens. Later verbs wait for its reply."""


MOVES = {
    CopyState.EMPTY: {CopyState.EMPTY, CopyState.UNSURE, CopyState.HELD},  # HELD: its parent forked it
    CopyState.UNSURE: set(CopyState),
    CopyState.HELD: {CopyState.EMPTY, CopyState.UNSURE, CopyState.HELD, CopyState.STOPPING},
    CopyState.GENERATING: {CopyState.EMPTY, CopyState.HELD, CopyState.STOPPING},
    CopyState.STOPPING: {CopyState.UNSURE, CopyState.HELD},
}
"""Where each state may go."""


class IllegalMove(AssertionError):
    """The copy was to go where its state does not lead."""

    def __init__(self, state: CopyState, wanted: CopyState) -> None:
        super().__init__(f"the engine's copy cannot go from {state.name} to {wanted.name}")


@dataclass(frozen=True, slots=True)
class _GrantedLease:
    """A lease that the engine granted, until ``until``; and when the session is expected back, at ``returns``.

    Times are of ``time.monotonic()``, in seconds.
    """

    priority: int
    until: float
    returns: float


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The tokens of a turn, and how to sample what follows; the last ``generated_from`` are of the reply."""

    ids: Ids
    sampling: Sampling
    limits: TokenLimits
    generated_from: int

    def parameters(self) -> tuple[Sampling, TokenLimits, int]:
        """As the link's verbs take them."""
        return self.sampling, self.limits, self.generated_from


class EngineCopy:
    """At most one sequence of the engine, and the tokens it is known to hold.

    With an ``origin`` it begins as a fork of that copy, where the two share at least a block. ``reopened``: the
    branch comes from the journal, and an earlier engine held it.
    """

    def __init__(
        self,
        link: EngineLink,
        salt: bytes = b"",
        origin: EngineCopy | None = None,
        *,
        reopened: bool = False,
    ) -> None:
        self._link = link
        self._salt = salt
        self._origin = origin
        self.state = CopyState.EMPTY
        self._sequence: SequenceState | None = None  # the engine's last word on it
        self._tokens = NONE
        self._engine_number = 0 if reopened else link.engine_number  # the first engine is number 1
        self._isolated = False  # the sequence was opened so that it shares no step
        self._verbs = asyncio.Lock()
        self._stop_reply: asyncio.Task[None] | None = None
        self._extends: set[asyncio.Future[VerbReply]] = set()  # replies that no verb waits for: see `_extend`
        self._without_kv = 1  # sampled tokens at the end that had no KV when the last generation ended
        self._before_prefill: int | None = None  # tokens with KV before `prefill` ran; None: it did not
        self._retracted = False
        self.cached = 0
        """Tokens that had KV before the last turn's prompt was computed, be it by `prefill` or by the turn."""
        self._lease: _GrantedLease | None = None
        self._lease_verbs = 0  # sent and not answered
        self._turns = 0
        self.crashes = CrashCount()

    @property
    def lost(self) -> bool:
        """Whether the engine that last held the branch is gone."""
        return self._engine_number != self._link.engine_number

    @property
    def held(self) -> Ids:
        """The tokens that the engine holds for certain, ``[tokens]``; none while it generates."""
        return self._tokens if self.state is CopyState.HELD and not self.lost else NONE

    @property
    def sent(self) -> Ids:
        """The tokens that were sent to the engine, ``[tokens]``, but for a turn that is on its way."""
        return NONE if self.lost else self._tokens

    @property
    def pending_extends(self) -> int:
        """Extensions that the engine has not answered yet."""
        return len(self._extends)

    async def wait_extended(self) -> None:
        """Wait until the extensions that are on their way now are answered."""
        if self._extends:
            await asyncio.wait(self._extends)

    async def wait_stopped(self) -> None:
        """Wait until a generation that was stopped has ended."""
        if self._stop_reply is not None:
            await asyncio.wait([self._stop_reply])

    def without_kv(self, keep: int) -> int:
        """How many of the branch's first ``keep`` tokens were sampled last and have no KV yet."""
        if self._sequence is None or self.lost or len(self._tokens) < keep:
            return 1
        computed = self._sequence.computed if self._before_prefill is None else self._before_prefill
        return min(self._without_kv, max(0, keep - computed))

    def take_retracted(self) -> bool:
        """Whether, since the last call, tokens were prefilled that no turn kept."""
        retracted, self._retracted = self._retracted, False
        return retracted

    # --- forks --------------------------------------------------------------------------------------------

    def child(self) -> EngineCopy:
        """Another copy, which begins as a fork of this one."""
        return EngineCopy(self._link, self._salt, self)

    async def fork(self, children: Sequence[EngineCopy], ids: Ids) -> None:
        """Fork the part of ``ids`` that this copy holds to all children, with one verb.

        While this one generates, ``ids`` may reach as far as its rows were read. Children that share no block
        stay empty, and so they do where the engine refuses: they are opened when they are first used.
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
                    child._origin, child._engine_number = None, self._engine_number
                    child._move(CopyState.HELD, SequenceState(seq, at, computed, 0), ids[:at])

    # --- turns --------------------------------------------------------------------------------------------

    async def begin(
        self, ids: Ids, sampling: Sampling, limits: TokenLimits, generated_from: int = 0
    ) -> Generation:
        """Make the engine hold exactly ``ids`` and sample what follows; the last ``generated_from`` are of the
        reply already.

        New tokens travel with the verb that generates, so no step lies between. Call `stop` or `finish` when
        the generation is over. Raises the runtime's ``VerbRefused`` and ``EngineGone``.
        """
        async with self._exclusive():
            self._end_return_hint()
            held, before, self._before_prefill = self.held, self._before_prefill, None
            prompt = _Prompt(ids, sampling, limits, generated_from)
            sequence = await self._reusable(ids, whole=False)
            self._retracted |= before is not None and common_prefix(held, ids) < len(held)
            generation = await (
                self._begin_anew(prompt) if sequence is None else self._go_on(prompt, sequence.seq)
            )
            found = generation.state.computed
            self.cached = min(len(ids) if before is None else before, found)
            return generation

    async def stop(self, ids: Ids, reply: asyncio.Future[SequenceState] | None = None) -> None:
        """End the generation and keep exactly ``ids``, a beginning of what it made.

        Returns before the engine answers, which it does when the step in flight is over; later verbs wait for
        that. ``reply``: the engine's answer, where it was told to stop already.
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
        """The generation ended by itself. The sequence holds ``ids``, the last ``without_kv`` without KV."""
        self._without_kv = without_kv
        sequence = self._known
        state = SequenceState(sequence.seq, len(ids), len(ids) - without_kv, sequence.epoch)
        self._move(CopyState.HELD, state, ids)

    async def prefill(self, ids: Ids, *, unless: Callable[[], bool], turn_expected: bool = False) -> None:
        """Make the engine hold and compute the tokens of a turn that has not begun.

        Does nothing where ``unless`` is true once this has its place among the verbs: the turn began meanwhile.
        Nor does it where an engine died in a step of this branch: only a turn, under the poison rule, tries
        that again. ``turn_expected``: compute them with a turn's priority.
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
        """Lease the KV of the sequence, which is opened with ``ids`` where there is none.

        ``ttl`` and ``returns_in`` are seconds. A granted lease is asked for again after the engine's death.
        """
        turns = self._turns
        self._lease_verbs += 1
        try:
            seq = await self._present(ids)
            receipt = await self._link.lease(seq, priority, ttl, returns_in)
        finally:
            self._lease_verbs -= 1
        self._lease = None
        now = time.monotonic()
        if receipt.ttl > 0 or (receipt.returns_in > 0 and turns == self._turns):
            self._lease = _GrantedLease(receipt.priority, now + receipt.ttl, now + receipt.returns_in)
        return receipt

    async def hint_return(self, returns_in: float) -> None:
        """Tell the engine in how many seconds a turn is likely.

        Does nothing where a lease is granted or asked for: the hint would take it back.
        """
        leased = self._live_lease is not None or self._lease_verbs > 0
        if self._sequence is not None and not self.lost and not leased:
            await self._link.lease(self._sequence.seq, None, 0.0, returns_in)

    async def stage(self, ids: Ids) -> Moved:
        """Bring the KV of the sequence, or of ``ids`` where there is none, up to the device."""
        return await self._link.stage(await self._present(ids))

    async def settle(self, ids: Ids, *, disk: bool) -> Moved:
        """Send the KV of the sequence down, to the host tier or to ``disk``."""
        return await self._link.settle(await self._present(ids), disk)

    # --- deaths and ends ----------------------------------------------------------------------------------

    async def recover(self) -> None:
        """The engine that held the sequence is gone: wait for the next one, and count how it died.

        Raises:
            EngineGone: no engine will come.
            SequencePoisoned: the engine died of this branch.
        """
        sequence, held_by = self._sequence, self._engine_number
        await self._link.wait_ready()
        if not self.lost:
            raise EngineDied("the engine answers what its link does not know")
        death = self._link.death_of(held_by)
        if sequence is not None and death is not None:
            await self.close()
            self.crashes.add(death, sequence.seq, self._isolated)

    async def close(self, *, keep_kv: bool = True) -> None:
        """Close the engine's sequence, if there is one.

        Where the engine dies over it the sequence stays known until the next engine is there, so that
        `recover` can tell whether it was in the fatal step.
        """
        async with self._exclusive():
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
        """Go to ``state``; all changes of the state are made here. Raises ``IllegalMove``."""
        if state not in MOVES[self.state]:
            raise IllegalMove(self.state, state)
        self.state, self._sequence, self._tokens = state, sequence, tokens

    def _doubt(self) -> None:
        """A verb goes out, or was refused: until its reply comes what the engine holds is not certain."""
        self._move(CopyState.UNSURE, self._sequence, self._tokens)

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """One verb at a time, each after the reply to a stop."""
        async with self._verbs:
            await self.wait_stopped()
            yield

    @property
    def _known(self) -> SequenceState:
        """The engine's sequence. Raises ``SequenceUnknown`` where there is none."""
        if self._sequence is None:
            raise SequenceUnknown("the session has no sequence in the engine")
        return self._sequence

    @property
    def _live_lease(self) -> _GrantedLease | None:
        """The lease, or the expected return, that is not over yet."""
        lease = self._lease
        return lease if lease is not None and max(lease.until, lease.returns) > time.monotonic() else None

    def _end_return_hint(self) -> None:
        """A turn begins: the session is back. A lease stays until its time is over."""
        self._turns += 1
        if self._lease is not None and self._lease.until <= time.monotonic():
            self._lease = None

    @property
    def _suspect(self) -> bool:
        """Whether only a turn may open the sequence, because engines died in steps of this branch."""
        if self._sequence is None or not self.lost:
            return self.crashes.isolated
        return self._fatal is not None

    @property
    def _fatal(self) -> EngineDeath | None:
        """The death of the engine that held the sequence, if it died in a step of it.

        None where the link does not remember that death.
        """
        if self._sequence is None or not self.lost:
            return None
        death = self._link.death_of(self._engine_number)
        return death if death is not None and self._sequence.seq in death.step else None

    # --- verbs --------------------------------------------------------------------------------------------

    async def _present(self, ids: Ids) -> int:
        """The engine's sequence, opened with ``ids`` where there is none.

        Raises:
            EngineDied: an engine crashed in a step of this branch: only a turn tries that again.
            SequencePoisoned: too many engines were killed in steps of this branch.
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
                    raise EngineDied("an engine died over this session: its next turn begins it again")
                if len(ids):
                    await self._bring(ids)
                else:
                    await self._close()
                    await self._open(NONE, isolated=False)
            return self._known.seq

    async def _bring(self, ids: Ids, *, turn_expected: bool = False) -> SequenceState:
        """Make the engine hold exactly ``ids``; ``turn_expected`` as in `prefill`.

        Raises the runtime's ``VerbRefused`` and ``EngineGone``.
        """
        sequence = await self._reusable(ids, turn_expected=turn_expected)
        if sequence is not None:
            return sequence
        isolated = self.crashes.isolated
        sequence = None if isolated else await self._fork_origin(ids)
        if sequence is not None:
            try:
                return await self._mend(sequence, ids, whole=True, turn_expected=turn_expected)
            except VerbRefused:  # the fork is not what was expected
                await self._close()
        return await self._open(ids, isolated=isolated)

    async def _reusable(
        self, ids: Ids, *, whole: bool = True, turn_expected: bool = False
    ) -> SequenceState | None:
        """The sequence, brought to ``ids``, or where not ``whole`` to a beginning of them.

        None: it could not be used and is closed.
        """
        assert len(ids) > 0, "a prompt has at least one token"
        if self.state is CopyState.HELD and not self.lost and not self.crashes.isolated:
            try:
                return await self._mend(self._known, ids, whole=whole, turn_expected=turn_expected)
            except VerbRefused:  # the sequence is not what was expected
                pass
        await self._close()
        return None

    async def _mend(
        self, sequence: SequenceState, ids: Ids, *, whole: bool, turn_expected: bool
    ) -> SequenceState:
        """Truncate the sequence to what it shares with ``ids``; where ``whole``, extend it to all of them."""
        shared = common_prefix(self._tokens, ids)
        if shared < len(self._tokens):
            self._doubt()
            sequence = await self._link.truncate(sequence.seq, shared, sequence.epoch)
            self._move(CopyState.HELD, sequence, ids[:shared])
        if whole and shared < len(ids):
            self._extend(sequence.seq, ids, turn_expected)
        return sequence

    def _extend(self, seq: int, ids: Ids, turn_expected: bool) -> None:
        """Append the new tokens without waiting for the reply, which comes when the step in flight is over.

        Every verb names the length that it expects, so where this one is refused the later ones are too.
        """
        there = len(self._tokens)
        reply = self._link.extend(seq, ids[there:].tolist(), turn_expected, there)
        self._tokens = ids
        self._extends.add(reply)
        reply.add_done_callback(partial(self._extended, seq))

    def _extended(self, seq: int, reply: asyncio.Future[VerbReply]) -> None:
        self._extends.discard(reply)
        refused = reply.cancelled() or reply.exception() is not None
        if self._sequence is None or self._sequence.seq != seq:
            return
        if refused and self.state is CopyState.HELD:
            self._doubt()
        elif not refused and self.state in (CopyState.HELD, CopyState.UNSURE):
            self._sequence = reply.result().state or self._sequence

    async def _open(self, ids: Ids, *, isolated: bool) -> SequenceState:
        """Open a sequence that holds ``ids``, and ask again for the lease that it had."""
        self._send_opening(isolated)
        sequence = await self._link.open(ids.tolist(), self._salt, isolated)
        self._move(CopyState.HELD, sequence, ids)
        lease = self._live_lease
        if lease is not None:
            now = time.monotonic()
            with suppress(VerbRefused):
                ttl, returns_in = max(0.0, lease.until - now), max(0.0, lease.returns - now)
                await self._link.lease(sequence.seq, lease.priority, ttl, returns_in)
        return sequence

    def _send_opening(self, isolated: bool) -> None:
        """A verb goes out that makes the sequence, in the engine that runs now."""
        self._doubt()
        self._isolated, self._engine_number = isolated, self._link.engine_number

    def _forkable(self, ids: Ids) -> tuple[int, int] | None:
        """The origin's sequence and how many of its tokens begin ``ids``; None: too few for a fork."""
        origin = self._origin
        if origin is None or origin._sequence is None or origin.lost:
            return None
        at = min(common_prefix(origin._tokens, ids), len(ids) - 1)
        return None if at < self._link.hello.block_tokens else (origin._sequence.seq, at)

    async def _fork_origin(self, ids: Ids) -> SequenceState | None:
        """Fork what the origin shares with ``ids``; None where that cannot be."""
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

    async def _go_on(self, prompt: _Prompt, seq: int) -> Generation:
        """Generate on a sequence that holds the beginning of the prompt."""
        try:
            return await self._generate(prompt, seq)
        except (EpochStale, SequenceBusy, SequenceUnknown):  # the sequence is not what was expected
            if self.lost:
                raise
            await self._close()
            return await self._begin_anew(prompt)

    async def _begin_anew(self, prompt: _Prompt) -> Generation:
        """Generate on a new sequence, which comes with the same verb where no lease is to be asked for."""
        isolated = self.crashes.isolated
        if self._live_lease is not None:
            return await self._generate(prompt, (await self._open(prompt.ids, isolated=isolated)).seq)
        parent = None if isolated else self._forkable(prompt.ids)
        if parent is not None:
            with suppress(VerbRefused):  # the parent is not what was expected
                return await self._begin_with(prompt, Opening(parent=parent[0], at=parent[1]))
        return await self._begin_with(prompt, Opening(self._salt, isolated))

    async def _begin_with(self, prompt: _Prompt, opening: Opening) -> Generation:
        self._send_opening(opening.isolated)
        new = prompt.ids[opening.at :].tolist()
        return self._generating(prompt, await self._link.begin(opening, *prompt.parameters(), new))

    async def _generate(self, prompt: _Prompt, seq: int) -> Generation:
        self._doubt()
        there = len(self._tokens)
        new = prompt.ids[there:].tolist()
        return self._generating(prompt, await self._link.generate(seq, *prompt.parameters(), new, there))

    def _generating(self, prompt: _Prompt, generation: Generation) -> Generation:
        self._without_kv = 1
        self._move(CopyState.GENERATING, generation.state, prompt.ids)
        return generation
