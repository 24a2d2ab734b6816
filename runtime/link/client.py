"""The engine, as sessions see it: one object that stays while engines die and restart behind it.

Every verb is one coroutine. A refusal raises the class of ``runtime.errors`` that its code names. Sequence
ids are made here and never reused, so a sequence of a dead engine is unknown to the next one. ``process``
and ``thread`` put an engine behind this object.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from .. import verbs
from ..errors import EngineDied, EngineGone, FrameInvalid, SequenceUnknown
from ..settings import LoraModule
from . import messages
from .crash_report import EngineDeath
from .gateway_end import GatewayEnd
from .generation import Generation

KEPT_DEATHS = 16
_T = TypeVar("_T")


class EngineLink:
    """The engine for many concurrent callers on one event loop: a coroutine for each verb.

    ``engine_number`` counts the engines that have loaded; ``deaths`` holds the latest deaths of loaded
    engines, oldest first. ``adapters``: those that are loaded, by name, in the order in which they were. While
    no engine is loaded every verb raises ``EngineDied`` at once; ``wait_ready`` waits for the next one.
    ``expected``: the names of the adapters that the first engine loads.
    """

    def __init__(self, expected: Iterable[str] = ()) -> None:
        self.expected = frozenset(expected)
        self.engine_number = 0
        self.deaths: deque[EngineDeath] = deque(maxlen=KEPT_DEATHS)
        self._on_recovery: list[Callable[[float], None]] = []
        self._end: GatewayEnd | None = None
        self._hello: messages.Hello | None = None
        self._fault: EngineGone | None = None  # why no engine will be started again
        self._changed = asyncio.Event()  # an engine is ready, or none will be started again
        self._loaded = False
        self.adapters: dict[str, verbs.LoadedAdapter] = {}
        self._next_id = 1
        self._gone_below = 1  # sequence ids below this one belong to dead engines

    # --- the engine's state ---------------------------------------------------------------------------------

    @property
    def hello(self) -> messages.Hello:
        """What the latest engine serves. Raises ``EngineDied`` before the first is loaded."""
        if self._hello is None:
            raise EngineDied("no engine has been ready yet")
        return self._hello

    @property
    def heartbeat(self) -> messages.Heartbeat | None:
        """The latest heartbeat of the engine that runs or loads; None before its first."""
        return self._end.heartbeat if self._end else None

    @property
    def phase(self) -> messages.Phase:
        """The phase of the latest heartbeat; loading before the first."""
        return self.heartbeat.phase if self.heartbeat else messages.Phase.LOADING

    @property
    def overdue(self) -> float:
        """Seconds since the next heartbeat should have arrived; 0.0 if it is in time, or while the engine
        restarts.

        Infinite once no engine will be started again.
        """
        if self._fault is not None:
            return math.inf
        return self._end.overdue if self._end is not None else 0.0

    @property
    def ready(self) -> bool:
        """Whether an engine is loaded and in time with its heartbeats, so that it takes verbs."""
        return self._ready_end is not None and self.overdue == 0.0

    async def wait_ready(self) -> messages.Hello:
        """Wait until an engine is loaded; returns what it serves. Raises ``EngineGone`` once none will be
        started again."""
        while self._ready_end is None:
            if self._fault is not None:
                raise self._fault.copy()
            self._changed.clear()
            await self._changed.wait()
        return self.hello

    def death_of(self, engine_number: int) -> EngineDeath | None:
        """How the engine with this number died; None if it runs, or its death is no longer kept."""
        return next((death for death in self.deaths if death.engine_number == engine_number), None)

    def on_recovery(self, callback: Callable[[float], None]) -> None:
        """Call ``callback`` with the seconds without an engine each time a new one replaces a dead one."""
        self._on_recovery.append(callback)

    # --- verbs ----------------------------------------------------------------------------------------------

    async def open(
        self, tokens: Sequence[int], salt: bytes = b"", isolated: bool = False, adapter: bytes = b""
    ) -> verbs.SequenceState:
        """Begin a sequence with ``tokens``; returns its state, which has its id. ``salt`` separates the
        tenants' cached blocks.

        ``isolated``: no other sequence shares its steps until it has sampled a token. ``adapter``: the digest
        of the one that computes it; empty: none.
        """
        end = self._end_for()
        seq = self._new_id()
        verb = verbs.Open(end.next_request(), seq, salt, list(tokens), isolated, adapter)
        return _told((await end.call(verb)).state, "state")

    def extend(
        self, seq: int, tokens: Sequence[int], turn_expected: bool = False, expect_length: int | None = None
    ) -> asyncio.Future[verbs.VerbReply]:
        """Append tokens to a sequence; refused while it generates. ``turn_expected``: a turn on them begins
        soon, so compute them like a turn's.

        The verb is sent when this returns, so later verbs need not wait for the reply, which has the state.
        It is refused if the sequence has not ``expect_length`` tokens (None: any number): then a verb that
        builds on a refused one is refused, too. Raises at once if the verb cannot be sent.
        """
        end = self._end_for(seq)
        return end.ask(verbs.Extend(end.next_request(), seq, list(tokens), turn_expected, expect_length))

    async def truncate(self, seq: int, length: int, expect_epoch: int) -> verbs.SequenceState:
        """End a running generation and keep the sequence's first ``length`` tokens; refused if its epoch is
        not ``expect_epoch``. Returns the new state."""
        end = self._end_for(seq)
        reply = await end.call(verbs.Truncate(end.next_request(), seq, length, expect_epoch))
        return _told(reply.state, "state")

    async def generate(
        self,
        on: int | verbs.Opening,
        sampling: verbs.Sampling,
        limits: verbs.TokenLimits,
        generated_from: int = 0,
        tokens: Sequence[int] = (),
        expect_length: int | None = None,
    ) -> Generation:
        """Append ``tokens`` to the sequence ``on`` and sample what follows. Returns once the engine has
        accepted the verb; the rows come by the generation.

        With an opening, the same verb begins the sequence, new or as a fork, so that the prompt is scheduled as
        a turn's; the id of the sequence is in the generation's state. ``generated_from``: how many of the last
        tokens were generated before this call. ``expect_length``: refused if an existing sequence has not so
        many tokens before; None: any number.
        """
        opening: verbs.Opening | None = None
        if isinstance(on, verbs.Opening):
            opening, end, seq = on, self._end_for(on.parent), self._new_id()
        else:
            end, seq = self._end_for(on), on
        asked = sampling, limits, generated_from, list(tokens), opening, expect_length
        verb = verbs.Generate(end.next_request(), seq, *asked)
        generation = Generation(self.stop)
        await end.call(verb, generation)
        return generation

    async def stop(self, seq: int, keep: int | None = None) -> verbs.SequenceState:
        """End the generation of the sequence, if one runs; its iterator ends without an error. Returns the
        state, with the true length.

        ``keep``: also cut the sequence to this many tokens, if it has more; None: keep all.
        """
        end = self._end_for(seq)
        return _told((await end.call(verbs.Stop(end.next_request(), seq, keep))).state, "state")

    async def fork(self, seq: int, children: int, at: int | None = None) -> list[int]:
        """Make ``children`` new sequences that share the first ``at`` tokens of sequence ``seq`` (None: all
        committed ones); returns their ids."""
        end = self._end_for(seq)
        ids = [self._new_id() for _ in range(children)]
        await end.call(verbs.Fork(end.next_request(), seq, ids, at))
        return ids

    async def lease(
        self,
        seq: int,
        priority: int | None = None,
        ttl: float | None = None,
        returns_in: float | None = None,
    ) -> verbs.Receipt:
        """Ask for a lease of the KV of sequence ``seq``: it is evicted last and restored first, within the
        budget. The receipt says what is promised.

        ``priority``: of its turns while the lease lasts, higher goes first. ``ttl``: seconds that it lasts; 0
        ends it. ``returns_in``: seconds until the next turn is expected. None: the engine's default.
        """
        end = self._end_for(seq)
        reply = await end.call(verbs.Lease(end.next_request(), seq, priority, ttl, returns_in))
        return _told(reply.receipt, "receipt")

    async def stage(self, seq: int) -> verbs.Moved:
        """Restore an idle sequence's KV to the device and wait until that is done; returns where it came
        from."""
        end = self._end_for(seq)
        return _told((await end.call(verbs.Stage(end.next_request(), seq))).moved, "move")

    async def settle(self, seq: int, disk: bool = False) -> verbs.Moved:
        """Offload an idle sequence's KV from the device to the host tier, or to ``disk``, and wait until that
        is done; returns where it is now."""
        end = self._end_for(seq)
        return _told((await end.call(verbs.Settle(end.next_request(), seq, disk))).moved, "move")

    async def locate(
        self, seq: int | None, tokens: Sequence[int] = (), salt: bytes = b"", adapter: bytes = b""
    ) -> verbs.BlockMap:
        """Which tier each block of the sequence ``seq`` lies in; with None, those of ``tokens`` under
        ``salt``, computed by ``adapter``. Moves nothing."""
        end = self._end_for(seq)
        reply = await end.call(verbs.Locate(end.next_request(), seq, salt, list(tokens), adapter))
        return _told(reply.blocks, "blocks")

    async def close(self, seq: int, keep_kv: bool = True) -> None:
        """Remove a sequence; with ``keep_kv`` its sealed blocks stay cached until they are evicted."""
        end = self._end_for(seq)
        await end.call(verbs.Close(end.next_request(), seq, keep_kv))

    # --- adapters -------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str) -> verbs.LoadedAdapter:
        """Load the adapter in the folder ``path``, which the engine's process reads, under ``name``; returns
        once turns may use it. An engine that follows this one loads it again."""
        # To its end, also if the caller is cancelled: what the engine has done is then known here.
        return await asyncio.shield(self._load_adapter(self._end_for(), name, path))

    async def _load_adapter(self, end: GatewayEnd, name: str, path: str) -> verbs.LoadedAdapter:
        reply = await end.call(verbs.LoadAdapter(end.next_request(), name, path))
        adapter = _told(reply.adapter, "adapter")
        if end is self._end:
            self.adapters[name] = adapter
        return adapter

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter: turns that run with it go on, and no other one begins."""
        await asyncio.shield(self._unload_adapter(self._end_for(), name))

    async def _unload_adapter(self, end: GatewayEnd, name: str) -> None:
        await end.call(verbs.UnloadAdapter(end.next_request(), name))
        if end is self._end:
            self.adapters.pop(name, None)

    def again(self) -> tuple[LoraModule, ...] | None:
        """The adapters that an engine which follows this one has to load; None: there was none before it."""
        if self._hello is None:
            return None
        return tuple(LoraModule(one.name, one.path, one.digest) for one in self.adapters.values())

    async def statistics(self) -> dict[str, float]:
        """The engine's counters, the lengths of both ends' queues (``link_*``), and the number of the
        engine."""
        end = self._end_for()
        reply = await end.call(verbs.Statistics(end.next_request()))
        return {**(reply.statistics or {}), **end.lengths(), "link_incarnation": self.engine_number}

    # --- for the two forms ----------------------------------------------------------------------------------

    def attach(self, end: GatewayEnd) -> None:
        """Use ``end`` from now on: an engine has been started behind it and is loading. For the object that
        starts engines."""
        self._end = end
        self._loaded = False

    def welcome(self, hello: messages.Hello) -> None:
        """Note that the engine is loaded: it gets the verbs from now on, and sequences of earlier engines
        become unknown."""
        self.engine_number += 1
        self._hello = hello
        self.adapters = {one.name: one for one in hello.adapters}
        self._loaded = True
        self._gone_below = self._next_id
        self._changed.set()
        death = self.death_of(self.engine_number - 1)
        if death is not None:
            for callback in self._on_recovery:
                callback(time.monotonic() - death.lost_at)

    def fail(self, fault: EngineGone) -> None:
        """Note that no engine will be started again: from now on verbs raise ``fault``, that of the first
        call."""
        self._fault = self._fault or fault
        if self._end is not None:
            self._end.close(fault)
        self._changed.set()

    @property
    def _ready_end(self) -> GatewayEnd | None:
        """The gateway's end of the link; None while no engine is loaded or the engine is gone."""
        return self._end if self._end and self._loaded and self._end.gone is None else None

    def _end_for(self, seq: int | None = None) -> GatewayEnd:
        """The gateway's end for a verb on the sequence ``seq``. Raises ``SequenceUnknown`` if an earlier
        engine had the sequence, ``EngineGone`` if no engine is loaded."""
        if seq is not None and 0 < seq < self._gone_below:
            raise SequenceUnknown(f"sequence {seq} was of an engine that is gone")
        end = self._ready_end
        if end is None:
            fault = self._fault or (self._end.gone if self._end else None)
            raise fault.copy() if fault else EngineDied("the engine is loading")
        return end

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def _told(found: _T | None, what: str) -> _T:
    """What a reply has to tell, or else ``FrameInvalid``."""
    if found is None:
        raise FrameInvalid(f"the reply to a verb has no {what}")
    return found
