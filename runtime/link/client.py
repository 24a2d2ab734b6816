"""The engine, as sessions see it: one object that stays while engines come and go behind it.

Every verb is one coroutine; a refusal raises the class of ``runtime.errors`` whose code it carries. Sequence
ids are given out here and never twice, so a sequence of an engine that died is unknown to the next. Knows no
processes and no threads: ``process`` and ``thread`` put an engine behind it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from ..errors import EngineDied, EngineGone, FrameInvalid, SequenceUnknown
from .crash_report import EngineDeath
from .gateway_end import GatewayEnd
from .generation import Generation
from .messages import (
    Close,
    Extend,
    Fork,
    Generate,
    Heartbeat,
    Hello,
    Lease,
    Moved,
    Open,
    Opening,
    Phase,
    Receipt,
    Sampling,
    SequenceState,
    Settle,
    Stage,
    Statistics,
    Stop,
    TokenLimits,
    Truncate,
    VerbReply,
)

KEPT_DEATHS = 16


class EngineLink:
    """Verbs for many concurrent callers on one event loop.

    While no engine is there every verb raises ``EngineDied`` at once; ``wait_ready`` waits for the next one.
    """

    def __init__(self) -> None:
        self.engine_number = 0
        self.deaths: deque[EngineDeath] = deque(
            maxlen=KEPT_DEATHS
        )  # of engines that were ready, the latest last
        self._recovered: list[Callable[[float], None]] = []
        self._wire: GatewayEnd | None = None
        self._hello: Hello | None = None
        self._ended: EngineGone | None = None
        self._settled = asyncio.Event()  # an engine is there, or none will ever be
        self._loaded = False
        self._next_id = 1
        self._gone_below = 1  # ids below were given out for engines that are gone

    # --- how the engine is ----------------------------------------------------------------------------------

    @property
    def hello(self) -> Hello:
        """What the latest engine serves."""
        if self._hello is None:
            raise EngineDied("no engine has been ready yet")
        return self._hello

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The latest heartbeat of the engine that runs or loads."""
        return self._wire.heartbeat if self._wire else None

    @property
    def last_heartbeat(self) -> float:
        """When it came, by ``time.monotonic()``; before the first, when the engine was started."""
        return self._wire.last_heartbeat if self._wire else 0.0

    @property
    def phase(self) -> Phase:
        """What the engine last said it was doing; an engine not heard of yet is loading."""
        return self.heartbeat.phase if self.heartbeat else Phase.LOADING

    @property
    def overdue(self) -> float:
        """Seconds since the engine should have been heard of again; 0.0 while in time, or about to restart.

        Infinite where none will come again.
        """
        if self._ended is not None:
            return math.inf
        return self._wire.overdue if self._wire is not None else 0.0

    @property
    def ready(self) -> bool:
        """Whether verbs can be given now: an engine is loaded, there, and in time with its heartbeats."""
        return self._up is not None and self.overdue == 0.0

    async def wait_ready(self) -> Hello:
        """Wait until an engine is there; raises ``EngineGone`` where none will ever be again."""
        while self._up is None:
            if self._ended is not None:
                raise type(self._ended)(self._ended.message)
            self._settled.clear()
            await self._settled.wait()
        return self.hello

    def death_of(self, engine_number: int) -> EngineDeath | None:
        """How that engine ended, if it did and is remembered."""
        return next((death for death in self.deaths if death.engine_number == engine_number), None)

    def on_recovery(self, told: Callable[[float], None]) -> None:
        """Call ``told`` with the seconds without an engine whenever another one has taken over."""
        self._recovered.append(told)

    # --- verbs ----------------------------------------------------------------------------------------------

    async def open(self, tokens: Sequence[int], salt: bytes = b"", alone: bool = False) -> SequenceState:
        """Begin a sequence; its id is in the state. ``salt`` separates tenants' cached blocks.

        ``alone``: it is computed in steps of its own until it has sampled a token.
        """
        wire = self._there()
        seq = self._new_id()
        return _state(await wire.call(Open(wire.next_request(), seq, salt, list(tokens), alone)))

    def extend(
        self, seq: int, tokens: Sequence[int], due: bool = False, expect_length: int | None = None
    ) -> asyncio.Future[VerbReply]:
        """Append tokens; refused while the sequence generates. ``due``: they are computed like a turn's.

        On its way when this returns: verbs behind it need not wait for the reply, which has the state. Refused
        if the sequence has not ``expect_length`` tokens, so that a verb which takes for granted what was
        refused is refused, too. Raises at once what keeps it from being sent.
        """
        wire = self._there(seq)
        return wire.ask(Extend(wire.next_request(), seq, list(tokens), due, expect_length))

    async def truncate(self, seq: int, length: int, expect_epoch: int) -> SequenceState:
        """Keep the first ``length`` tokens, ending what runs; refused where the epoch is another."""
        wire = self._there(seq)
        return _state(await wire.call(Truncate(wire.next_request(), seq, length, expect_epoch)))

    async def generate(
        self,
        seq: int,
        sampling: Sampling,
        limits: TokenLimits,
        generated_from: int = 0,
        tokens: Sequence[int] = (),
        expect_length: int | None = None,
    ) -> Generation:
        """Append ``tokens`` and sample what follows. ``generated_from``: how many of the last tokens were
        generated before this call. ``expect_length``: as of `extend`.
        """
        wire = self._there(seq)
        verb = Generate(
            wire.next_request(),
            seq,
            sampling,
            limits,
            generated_from,
            list(tokens),
            expect_length=expect_length,
        )
        return await self._generated(wire, verb)

    async def begin(
        self,
        opening: Opening,
        sampling: Sampling,
        limits: TokenLimits,
        generated_from: int = 0,
        tokens: Sequence[int] = (),
    ) -> Generation:
        """`open`, or `fork`, and `generate` in one: the prompt is planned as that of a turn. The id of the
        sequence is in the generation's state.
        """
        wire = self._there(opening.parent)
        request, seq = wire.next_request(), self._new_id()
        verb = Generate(request, seq, sampling, limits, generated_from, list(tokens), opening)
        return await self._generated(wire, verb)

    async def _generated(self, wire: GatewayEnd, verb: Generate) -> Generation:
        generation = Generation(self.stop)
        await wire.call(verb, generation)
        return generation

    async def stop(self, seq: int, keep: int | None = None) -> SequenceState:
        """End the generation, if one runs; the length is the authoritative one. Its iterator ends cleanly.

        ``keep``: cut the sequence to so many tokens, too, if it has more.
        """
        wire = self._there(seq)
        return _state(await wire.call(Stop(wire.next_request(), seq, keep)))

    async def fork(self, seq: int, children: int, at: int | None = None) -> list[int]:
        """Make sequences that share the first ``at`` tokens (by default all committed); gives their ids."""
        wire = self._there(seq)
        ids = [self._new_id() for _ in range(children)]
        await wire.call(Fork(wire.next_request(), seq, ids, at))
        return ids

    async def lease(
        self,
        seq: int,
        priority: int | None = None,
        ttl: float | None = None,
        returns_in: float | None = None,
    ) -> Receipt:
        """Keep its KV first and bring it back first, within the budget; the receipt says what is promised."""
        wire = self._there(seq)
        reply = await wire.call(Lease(wire.next_request(), seq, priority, ttl, returns_in))
        if reply.receipt is None:
            raise FrameInvalid("the reply to a lease has no receipt")
        return reply.receipt

    async def stage(self, seq: int) -> Moved:
        """Bring an idle sequence's KV up, and wait until it is there; tells where it came from."""
        wire = self._there(seq)
        return _moved(await wire.call(Stage(wire.next_request(), seq, wait=True)))

    async def settle(self, seq: int, disk: bool = False) -> Moved:
        """Send an idle sequence's KV down from the device, or to ``disk``, and wait; tells where it is."""
        wire = self._there(seq)
        return _moved(await wire.call(Settle(wire.next_request(), seq, disk, wait=True)))

    async def close(self, seq: int, keep_kv: bool = True) -> None:
        """Forget a sequence; with ``keep_kv`` its sealed blocks stay cached until they are evicted."""
        wire = self._there(seq)
        await wire.call(Close(wire.next_request(), seq, keep_kv))

    async def statistics(self) -> dict[str, float]:
        """The engine's counters and both ends' queue lengths (``link_*``)."""
        wire = self._there()
        reply = await wire.call(Statistics(wire.next_request()))
        return {**(reply.statistics or {}), **wire.lengths(), "link_incarnation": self.engine_number}

    # --- for the two forms ----------------------------------------------------------------------------------

    def attach(self, wire: GatewayEnd) -> None:
        """An engine has been started on ``wire``; it loads."""
        self._wire = wire
        self._loaded = False

    def welcome(self, hello: Hello) -> None:
        """It is loaded: verbs go to it, and the sequences of the one before are gone."""
        self.engine_number += 1
        self._hello = hello
        self._loaded = True
        self._gone_below = self._next_id
        self._settled.set()
        death = self.death_of(self.engine_number - 1)
        if death is not None:
            for told in self._recovered:
                told(time.monotonic() - death.lost_at)

    def bury(self, death: EngineDeath) -> None:
        """An engine that was ready is gone, and this is how; before the next is welcomed."""
        self.deaths.append(death)

    def end(self, fault: EngineGone) -> None:
        """None will ever be there again; the first reason stays."""
        self._ended = self._ended or fault
        if self._wire is not None:
            self._wire.close()
        self._settled.set()

    @property
    def _up(self) -> GatewayEnd | None:
        """The wire to an engine that is loaded and there."""
        return self._wire if self._wire and self._loaded and self._wire.gone is None else None

    def _there(self, seq: int | None = None) -> GatewayEnd:
        if seq is not None and 0 < seq < self._gone_below:
            raise SequenceUnknown(f"sequence {seq} was of an engine that is gone")
        if self._up is None:
            raise self._absence()
        return self._up

    def _absence(self) -> EngineGone:
        fault = self._ended or (self._wire.gone if self._wire else None)
        return type(fault)(fault.message) if fault else EngineDied("the engine is loading")

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def _state(reply: VerbReply) -> SequenceState:
    if reply.state is None:
        raise FrameInvalid("the reply to a verb has no state")
    return reply.state


def _moved(reply: VerbReply) -> Moved:
    if reply.moved is None:
        raise FrameInvalid("the reply to a verb does not say where KV went")
    return reply.moved
