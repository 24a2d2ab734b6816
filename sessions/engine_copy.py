"""The engine's copy of a branch: one sequence over the link, and the tokens it is known to hold.

Brings it to any wanted tokens by the cheapest verbs, and opens it anew when the engine was restarted or a
verb was cut off in the middle. Knows nothing of text, turns or items.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ..runtime.errors import EngineDied, EngineGone, EpochStale, SequenceBusy, SequenceUnknown, VerbRefused
from ..runtime.link.client import EngineLink
from ..runtime.link.crash_report import EngineDeath
from ..runtime.link.generation import Generation
from ..runtime.link.messages import (
    Moved,
    Opening,
    Receipt,
    Sampling,
    SequenceState,
    TokenLimits,
    VerbReply,
)
from .poison import PoisonRule
from .token_ids import NONE, Ids, common_prefix


@dataclass(frozen=True, slots=True)
class _Wish:
    """A lease that was promised, or, until no later than now, only when it comes back. Times by
    ``time.monotonic()``."""

    priority: int
    until: float
    returns: float


@dataclass(frozen=True, slots=True)
class _Turn:
    """What is to be generated on which tokens."""

    ids: Ids
    sampling: Sampling
    limits: TokenLimits
    generated_from: int

    def asked(self) -> tuple[Sampling, TokenLimits, int]:
        """As the link takes it."""
        return self.sampling, self.limits, self.generated_from


class EngineCopy:
    """At most one sequence of the engine, with the tokens it is known to hold.

    With an ``origin`` it begins as a fork of that one, where the two share at least a block. ``reopened``: an
    engine that is gone held the branch.
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
        self._state: SequenceState | None = None
        self._held = NONE
        self._engine_number = 0 if reopened else link.engine_number  # the first engine is number 1
        self._verbs = asyncio.Lock()
        self.retracted = False  # since the last turn, tokens were computed ahead that did not stay
        self._ahead = False  # what is held was anticipated
        self._computed_before = 0  # KV there was before anything was
        self.found = 0
        """Tokens that had KV before any of the last generation's prompt was computed, in it or ahead of it."""
        self._certain = True  # False while a verb is on its way: cut off, it leaves us guessing
        self._replies: set[asyncio.Future[VerbReply]] = set()  # that no verb waits for: see `_hand`
        self._generating = False
        self._stopping: asyncio.Task[None] | None = None  # holds the place of a verb until the engine answers
        self._unread = 1
        self._alone = False  # opened so that it shares no step
        self._lease: _Wish | None = None
        self._asking = 0  # leases that the engine has not answered yet
        self._turns = 0
        self.suspicion = PoisonRule()

    @property
    def lost(self) -> bool:
        """Whether the engine that last held the branch is gone."""
        return self._engine_number != self._link.engine_number

    @property
    def held(self) -> Ids:
        """The tokens that the engine holds for it, as far as is known."""
        return NONE if self.lost or not self._certain else self._held

    @property
    def handed(self) -> Ids:
        """What the engine was given; a turn that is on its way to it does not count."""
        return NONE if self.lost else self._held

    @property
    def unanswered(self) -> int:
        """Verbs with tokens of no turn that are on their way to the engine, or wait there for a step to end."""
        return len(self._replies)

    async def answered(self) -> None:
        """Wait until those are answered that are on their way now."""
        if self._replies:
            await asyncio.wait(self._replies)

    def child(self) -> EngineCopy:
        """Another sequence that begins as a fork of this one."""
        return EngineCopy(self._link, self._salt, self)

    async def fork(self, children: Sequence[EngineCopy], ids: Ids) -> None:
        """Make children that share the beginning of ``ids`` this one holds, all in one verb.

        Where that cannot be they begin when they are first brought to something. While this one generates,
        ``ids`` may reach as far as that was read.
        """
        async with self._verbs:
            state = self._state
            if state is None or self.lost or not (self._certain or self._generating):
                return
            at = common_prefix(self._held, ids)
            if self._generating and at == len(self._held):
                at = len(ids)
            if at < self._link.hello.block_tokens:
                return
            computed = min(at, state.computed) if self._certain else at - 1
            with suppress(VerbRefused, EngineGone):
                for child, seq in zip(
                    children, await self._link.fork(state.seq, len(children), at), strict=True
                ):
                    child._origin = None
                    child._settle(SequenceState(seq, at, computed, 0), ids[:at])

    def pending(self, keep: int) -> int:
        """Of a branch's first ``keep`` tokens: the last ones that were said, but have no KV yet."""
        if self._state is None or self.lost or len(self._held) < keep:
            return 1
        computed = self._computed_before if self._ahead else self._state.computed
        return min(self._unread, max(0, keep - computed))

    async def begin(
        self, ids: Ids, sampling: Sampling, limits: TokenLimits, generated_from: int = 0
    ) -> Generation:
        """Have the engine hold exactly these tokens and sample what follows, the last ``generated_from`` of
        them being of the reply already.

        What only follows on what is held comes with that verb, and the whole sequence where nothing is, so no
        step lies between. `stop` or `finished` tells how it ended. Raises the runtime's ``VerbRefused`` and
        ``EngineGone``.
        """
        async with self._verbs:
            self._is_back()
            before = self._computed_before if self._ahead else len(ids)
            held, ahead, self._ahead = self.held, self._ahead, False
            turn = _Turn(ids, sampling, limits, generated_from)
            state = await self._kept(ids, whole=False)
            self.retracted |= ahead and common_prefix(held, ids) < len(held)
            generation = await (self._opened(turn) if state is None else self._resumed(turn, state.seq))
            self.found = min(before, generation.state.computed)
            return generation

    async def anticipate(self, ids: Ids, *, unless: Callable[[], bool], due: bool = False) -> None:
        """Have the engine hold the tokens of a turn that has not begun; not if one did while this waited for
        its place. ``due``: it is about to.

        Nor where an engine died in a step of this branch, or was killed in it. Whether that was its doing is
        for a turn to find out, which pays for it with the poison rule, and not for every piece of text that
        comes.
        """
        async with self._verbs:
            if not unless() and not self._doubtful:
                before = self.held
                if not self._ahead:
                    self._computed_before = self._state.computed if self._state else 0
                await self._bring(ids, due=due)
                self.retracted |= self._ahead and common_prefix(before, ids) < len(before)
                self._ahead = True

    async def lease(
        self, ids: Ids, priority: int | None, ttl: float | None, returns_in: float | None
    ) -> Receipt:
        """Have what is held kept first, or ``ids`` where nothing is; wished again of the next engine."""
        turns = self._turns
        self._asking += 1
        try:
            seq = await self._present(ids)
            receipt = await self._link.lease(seq, priority, ttl, returns_in)
        finally:
            self._asking -= 1
        self._lease = None
        now = time.monotonic()
        if receipt.ttl > 0 or (receipt.returns_in > 0 and turns == self._turns):
            self._lease = _Wish(receipt.priority, now + receipt.ttl, now + receipt.returns_in)
        return receipt

    async def foresee(self, returns_in: float) -> None:
        """Tell the engine when this is likely to be wanted, in seconds, where nobody has said so, or does now:
        it would take back the lease that is on its way."""
        if self._state is not None and not self.lost and self._wished is None and not self._asking:
            await self._link.lease(self._state.seq, None, 0.0, returns_in)

    async def stage(self, ids: Ids) -> Moved:
        """Have the KV of what is held, or of ``ids`` where nothing is, brought up."""
        return await self._link.stage(await self._present(ids))

    async def settle(self, ids: Ids, *, disk: bool) -> Moved:
        """Have it sent down."""
        return await self._link.settle(await self._present(ids), disk)

    async def _present(self, ids: Ids) -> int:
        """The engine's sequence, opened with ``ids`` where it has none.

        Raises ``EngineDied`` where an engine died by itself in a step of this branch: a turn is to find out
        whether that happens again. An engine that was killed from outside is no such case, but engines that are
        killed over it again and again are: ``SequencePoisoned``.
        """
        if self._state is not None and not self.lost:
            return self._state.seq
        async with self._verbs:
            if self._state is None or self.lost:
                state, fatal = self._state, self._fatal
                if state is not None and fatal is not None and fatal.outside:
                    await self.close()
                    self.suspicion.weigh(fatal, state.seq, self._alone)
                elif self._doubtful:
                    raise EngineDied("an engine died over this session: its next turn begins it again")
                await (self._bring(ids) if len(ids) else self._begin(NONE, alone=False))
            return self._open.seq

    @property
    def _doubtful(self) -> bool:
        if self._state is None or not self.lost:
            return self.suspicion.alone
        return self._fatal is not None

    @property
    def _fatal(self) -> EngineDeath | None:
        """How the engine that held it died, if it died in a step of this branch.

        A death that the link has forgotten is no evidence.
        """
        state = self._state
        if state is None or not self.lost:
            return None
        death = self._link.death_of(self._engine_number)
        return death if death is not None and state.seq in death.step else None

    async def _bring(self, ids: Ids, *, due: bool = False) -> SequenceState:
        """Have the engine hold exactly these tokens; ``due`` as in `anticipate`.

        Raises the runtime's ``VerbRefused`` and ``EngineGone``.
        """
        state = await self._kept(ids, due=due)
        if state is not None:
            return state
        alone = self.suspicion.alone
        state = None if alone else await self._forked(ids)
        if state is not None:
            try:
                return await self._mend(state, ids, whole=True, due=due)
            except VerbRefused:  # its parent was not as we thought
                await self.close()
        return await self._begin(ids, alone=alone)

    async def _kept(self, ids: Ids, *, whole: bool = True, due: bool = False) -> SequenceState | None:
        """What the engine holds, made ``ids``, or not ``whole``: a beginning of them; None: nothing of use."""
        assert len(ids) > 0, "a prompt has at least one token"
        state = self._state if self._certain and not self.lost and not self.suspicion.alone else None
        if state is not None:
            try:
                return await self._mend(state, ids, whole=whole, due=due)
            except VerbRefused:  # it is not as we thought: begin again
                pass
        await self.close()
        return None

    async def _begin(self, ids: Ids, *, alone: bool) -> SequenceState:
        self._certain, self._alone, self._engine_number = False, alone, self._link.engine_number
        state = self._settle(await self._link.open(ids.tolist(), self._salt, alone), ids)
        wish = self._wished
        if wish is not None:
            now = time.monotonic()
            with suppress(VerbRefused):
                ttl, returns_in = max(0.0, wish.until - now), max(0.0, wish.returns - now)
                await self._link.lease(state.seq, wish.priority, ttl, returns_in)
        return state

    @property
    def _wished(self) -> _Wish | None:
        """The lease that it still has to have."""
        wish = self._lease
        return wish if wish is not None and max(wish.until, wish.returns) > time.monotonic() else None

    def _is_back(self) -> None:
        """What was said of its return is over; a lease is not."""
        self._turns += 1
        if self._lease is not None and self._lease.until <= time.monotonic():
            self._lease = None

    async def stop(self, ids: Ids, stopping: asyncio.Future[SequenceState] | None = None) -> None:
        """End the generation and keep exactly ``ids``, a beginning of what it made.

        The engine answers when the step in flight is over, and nobody waits for it here: verbs that come later
        do. ``stopping``: its answer, where it was told to already.
        """
        await self._verbs.acquire()
        prompt, self._held = len(self._held), ids
        self._stopping = asyncio.create_task(self._stopped(ids, prompt, stopping))

    async def at_rest(self) -> None:
        """Wait until a generation that was stopped has ended."""
        if self._stopping is not None:
            await asyncio.wait([self._stopping])

    async def _stopped(self, ids: Ids, prompt: int, stopping: asyncio.Future[SequenceState] | None) -> None:
        try:
            state = await (stopping or self._link.stop(self._open.seq, len(ids)))
            if state.length > len(ids):
                state = await self._link.truncate(state.seq, len(ids), state.epoch)
        except (VerbRefused, EngineGone):  # the next turn finds the sequence lost, or begins it again
            self._generating = False
        else:
            said = state.length - prompt  # of these a grammar may have had several follow without a step
            self._unread = max(1, min(said, state.length - state.computed))
            self._settle(state, ids[: state.length])
        finally:
            self._verbs.release()

    def finished(self, ids: Ids, pending: int) -> None:
        """The generation ended by itself; ``ids`` is all the sequence holds, ``pending`` of them without KV."""
        self._unread = pending
        self._settle(SequenceState(self._open.seq, len(ids), len(ids) - pending, self._open.epoch), ids)

    async def recover(self) -> None:
        """The engine that held it is gone: wait for the next one, and weigh how that one died.

        Raises ``EngineGone`` where none will come, ``SequencePoisoned`` where it died of this sequence.
        """
        state, held_by = self._state, self._engine_number
        await self._link.wait_ready()
        if not self.lost:
            raise EngineDied("the engine answers what its link does not know")
        death = self._link.death_of(held_by)
        if state is not None and death is not None:
            await self.close()
            self.suspicion.weigh(death, state.seq, self._alone)

    async def close(self, *, keep_kv: bool = True) -> None:
        """Let go of the engine's sequence, if there is one; it may be gone already.

        Of an engine that is gone it stays known, until another is there: did that one die of it?
        """
        await self.at_rest()
        state, lost = self._state, self.lost
        self._state, self._held, self._certain, self._generating = None, NONE, True, False
        if state is not None and not lost:
            try:
                with suppress(VerbRefused):
                    await self._link.close(state.seq, keep_kv)
            except EngineGone:
                self._state, self._certain = self._state or state, False

    @property
    def _open(self) -> SequenceState:
        if self._state is None:
            raise SequenceUnknown("the session let its sequence go")
        return self._state

    async def _mend(self, state: SequenceState, ids: Ids, *, whole: bool, due: bool) -> SequenceState:
        shared = common_prefix(self._held, ids)
        if shared < len(self._held):
            self._certain = False
            state = self._settle(await self._link.truncate(state.seq, shared, state.epoch), ids[:shared])
        if whole and shared < len(ids):
            self._hand(state.seq, ids, due)
        return state

    def _hand(self, seq: int, ids: Ids, due: bool) -> None:
        """Append what is new, and wait for no reply: it comes when the step in flight is over, and a verb that
        waited for it would be a step late. Every verb says what it takes for granted: should this one be
        refused, that one is, too.
        """
        there = len(self._held)
        reply = self._link.extend(seq, ids[there:].tolist(), due, there)
        self._held = ids
        self._replies.add(reply)
        reply.add_done_callback(partial(self._answered, seq))

    def _answered(self, seq: int, reply: asyncio.Future[VerbReply]) -> None:
        self._replies.discard(reply)
        refused = reply.cancelled() or reply.exception() is not None
        if self._state is None or self._state.seq != seq:
            return
        if refused:
            self._certain = False
        elif not self._generating:
            self._state = reply.result().state or self._state

    async def _resumed(self, turn: _Turn, seq: int) -> Generation:
        """The turn, on a sequence that holds the beginning of it."""
        try:
            return await self._generated(turn, seq)
        except (EpochStale, SequenceBusy, SequenceUnknown):  # it is not as we thought: begin again
            if self.lost:
                raise
            await self.close()
            return await self._opened(turn)

    async def _opened(self, turn: _Turn) -> Generation:
        """The turn, and its sequence with it."""
        alone = self.suspicion.alone
        if self._wished is not None:  # the turn is to have what was promised
            return await self._generated(turn, (await self._begin(turn.ids, alone=alone)).seq)
        parent = None if alone else self._parent(turn.ids)
        if parent is not None:
            with suppress(VerbRefused):  # it was not as we thought
                return await self._opened_as(turn, Opening(parent=parent[0], at=parent[1]))
        return await self._opened_as(turn, Opening(self._salt, alone))

    async def _opened_as(self, turn: _Turn, opening: Opening) -> Generation:
        self._certain, self._alone, self._engine_number = False, opening.isolated, self._link.engine_number
        new = turn.ids[opening.at :].tolist()
        return self._runs(turn, await self._link.begin(opening, *turn.asked(), new))

    async def _generated(self, turn: _Turn, seq: int) -> Generation:
        self._certain = False
        there = len(self._held)
        return self._runs(
            turn, await self._link.generate(seq, *turn.asked(), turn.ids[there:].tolist(), there)
        )

    def _runs(self, turn: _Turn, generation: Generation) -> Generation:
        self._certain, self._generating, self._unread = False, True, 1
        self._state, self._held = generation.state, turn.ids  # of the epoch that the rows have
        return generation

    def _parent(self, ids: Ids) -> tuple[int, int] | None:
        """A sequence, and so many of its tokens that these begin with, if enough for a fork."""
        origin = self._origin
        if origin is None or origin._state is None or origin.lost:
            return None
        at = min(common_prefix(origin._held, ids), len(ids) - 1)
        return None if at < self._link.hello.block_tokens else (origin._state.seq, at)

    async def _forked(self, ids: Ids) -> SequenceState | None:
        parent = self._parent(ids)
        if parent is None:
            return None
        at = parent[1]
        try:
            (seq,) = await self._link.fork(parent[0], 1, at)
        except VerbRefused:
            return None
        return self._settle(SequenceState(seq, at, at, 0), ids[:at])

    def _settle(self, state: SequenceState, ids: Ids) -> SequenceState:
        self._state, self._held, self._certain, self._generating = state, ids, True, False
        self._engine_number = self._link.engine_number
        return state
