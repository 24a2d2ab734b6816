"""An engine in memory: behaves on the link as the contract says, and its model is a function of token ids.

Rows are made when a reader asks for them, ``ahead`` tokens at a time, so nothing runs on its own: the
engine may be ahead of its reader, as a real one is. ``log`` holds every verb; tokens in it are what
really crossed the link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from holdfast.runtime.errors import (
    EngineDied,
    EngineOverloaded,
    EpochStale,
    LengthInvalid,
    SequenceBusy,
    SequenceUnknown,
    VerbRefused,
)
from holdfast.runtime.link.crash_report import EngineDeath
from holdfast.runtime.link.generation import Generation, Take
from holdfast.runtime.link.messages import Hello
from holdfast.runtime.verbs import (
    BlockMap,
    Finish,
    Grant,
    KVTier,
    LoadedAdapter,
    Moved,
    Opening,
    Receipt,
    Row,
    Sampling,
    SequenceState,
    TierRun,
    TokenLimits,
    TokenLogprob,
    VerbReply,
    Work,
)

Model = Callable[[list[int]], int]
"""The next token; raising makes the row an error."""


@dataclass
class Held:
    """One sequence of the engine."""

    tokens: list[int]
    epoch: int = 0
    computed: int = 0
    generation: Generation | None = None
    limits: TokenLimits = TokenLimits(0)
    sampled: int = 0
    before: int = 0
    work: Work = Work(0, 0, 0, 0)


class Pulled(Generation):
    """Asks its engine for rows when it has none."""

    def __init__(self, link: ScriptedLink, seq: int) -> None:
        super().__init__(link.stop)
        self._link = link
        self._seq = seq

    async def next_row(self, take: Take | None = None) -> Row | None:
        await asyncio.sleep(0)
        for _ in range(self._link.ahead):
            if self.running and not self.queued:
                self._link.step(self._seq)
        for _ in range(self._link.ahead - 1):
            if self.running:
                self._link.step(self._seq)
        if self.running and not self.queued:
            self._link.stuck.set()
        return await super().next_row(take)


@dataclass
class ScriptedLink:
    """Stands in for ``EngineLink``.

    ``logprobs``: rows have them, a number made of the token. ``slow``: extensions are answered after some time,
    those in ``unanswered`` by any test. ``cut_off`` verbs do not answer before ``freed``, and no rows come
    unless ``flowing``; ``adapters`` are loaded; ``stuck`` is set when a verb waits. ``chosen``: tokens that
    each turn computes though they are kept. ``on_disk``: tokens that a sequence without KV finds on disk, at
    most.
    """

    model: Model
    end: int
    max_context: int = 4096
    ahead: int = 1
    tokens_per_row: int = 1
    engine_number: int = 1
    alive: bool = True
    full: bool = False
    logprobs: bool = False
    chosen: int = 0
    on_disk: int = 0
    held: dict[int, Held] = field(default_factory=dict)
    log: list[tuple] = field(default_factory=list)
    cut_off: set[str] = field(default_factory=set)
    unanswered: list[asyncio.Future[VerbReply]] = field(default_factory=list)
    slow: bool = False
    flowing: bool = True
    stuck: asyncio.Event = field(default_factory=asyncio.Event)
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    deaths: list[EngineDeath] = field(default_factory=list)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    adapters: dict[str, LoadedAdapter] = field(default_factory=dict)
    expected: frozenset[str] = frozenset()
    _last: int = 0
    _back: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def hello(self) -> Hello:
        return Hello("fake", "cpu", "float32", 1000, (self.end,), self.max_context, 4, 100, 1, 1)

    def die(self, outside: bool = False) -> None:
        """All sequences are gone; readers and callers learn it. Those that generate were in the step."""
        self.alive = False
        self._back.clear()
        step = frozenset(seq for seq, held in self.held.items() if held.generation is not None)
        self.deaths.append(EngineDeath(self.engine_number, "killed", outside, step, 0.0))
        for held in self.held.values():
            if held.generation is not None:
                held.generation.end(EngineDied("killed"))
        self.held.clear()
        for reply in self.unanswered:
            reply.set_exception(EngineDied("killed"))
        self.unanswered.clear()

    def restart(self) -> None:
        self.alive = True
        self.engine_number += 1
        self._back.set()

    async def wait_ready(self) -> Hello:
        self.waiting.set()
        if not self.alive:
            await self._back.wait()
        return self.hello

    def death_of(self, engine_number: int) -> EngineDeath | None:
        return next((death for death in self.deaths if death.engine_number == engine_number), None)

    def sent(self) -> int:
        """Tokens that crossed the link downwards since the last call."""
        total = sum(len(entry[2]) for entry in self.log if entry[0] in ("open", "begin", "extend"))
        self.log.clear()
        return total

    # --- verbs ---

    async def open(
        self, tokens: Sequence[int], salt: bytes = b"", alone: bool = False, adapter: bytes = b""
    ) -> SequenceState:
        await self._verb("open", salt, list(tokens), *(["alone"] * alone))
        return self._state(self._new(Held(list(tokens))))

    def extend(
        self, seq: int, tokens: Sequence[int], due: bool = False, expect_length: int | None = None
    ) -> asyncio.Future[VerbReply]:
        if not self.alive:
            raise EngineDied("the engine is gone")
        self.log.append(("extend", seq, list(tokens), *(["due"] * due)))
        assert tokens, "an extension has tokens"
        reply: asyncio.Future[VerbReply] = asyncio.get_running_loop().create_future()
        if "extend" in self.cut_off:
            self.stuck.set()
            self.unanswered.append(reply)
            return reply
        refusal: VerbRefused | None = None
        try:
            self._idle(seq, expect_length).tokens.extend(tokens)
        except VerbRefused as error:
            refusal = error
        state = self._state(seq) if refusal is None else None
        answer = lambda: reply.set_exception(refusal) if refusal else reply.set_result(VerbReply(0, state))
        if self.slow:
            asyncio.get_running_loop().call_later(0.01, answer)
        else:
            answer()
        return reply

    async def truncate(self, seq: int, length: int, expect_epoch: int) -> SequenceState:
        await self._verb("truncate", seq, length)
        held = self._known(seq)
        if held.epoch != expect_epoch:
            raise EpochStale(f"epoch is {held.epoch}")
        if not 0 <= length <= len(held.tokens):
            raise LengthInvalid(f"{length} of {len(held.tokens)}")
        self._end(seq)
        del held.tokens[length:]
        held.computed = min(held.computed, length)
        held.epoch += 1
        return self._state(seq)

    async def generate(
        self,
        on: int | Opening,
        sampling: Sampling,
        limits: TokenLimits,
        generated_from: int = 0,
        tokens: Sequence[int] = (),
        expect_length: int | None = None,
    ) -> Generation:
        if isinstance(on, Opening):
            return await self.begin(on, sampling, limits, generated_from, tokens)
        seq = on
        if self.alive:
            self._idle(seq, expect_length)
        if tokens:  # logged as an extension, for what crosses the link
            await self.extend(seq, list(tokens))
        await self._verb("generate", seq, limits, *([generated_from] if generated_from else []))
        return self._generated(seq, limits, generated_from)

    async def begin(
        self,
        opening: Opening,
        sampling: Sampling,
        limits: TokenLimits,
        generated_from: int = 0,
        tokens: Sequence[int] = (),
    ) -> Generation:
        """What `generate` does with an opening; patched by tests."""
        origin = opening.salt if opening.parent is None else (opening.parent, opening.at)
        await self._verb("begin", origin, list(tokens), limits, generated_from, opening.isolated)
        begun = Held([])
        if opening.parent is not None:
            parent = self._known(opening.parent)
            begun = Held(parent.tokens[: opening.at], computed=min(opening.at, parent.computed))
            assert len(begun.tokens) == opening.at
        begun.tokens += tokens
        return self._generated(self._new(begun), limits, generated_from)

    def _new(self, held: Held) -> int:
        if self.full:
            raise EngineOverloaded("too many sequences")
        assert all(type(token) is int for token in held.tokens), "only plain ints cross the link"
        self._last += 1
        self.held[self._last] = held
        return self._last

    def _generated(self, seq: int, limits: TokenLimits, generated_from: int) -> Generation:
        held = self._idle(seq)
        held.epoch += 1
        held.limits, held.sampled, held.before = limits, generated_from, generated_from
        resident = min(held.computed, len(held.tokens) - 1)
        disk = 0 if resident else min(self.on_disk, len(held.tokens) - 1)
        held.work = Work(len(held.tokens) - resident - disk, 0, resident, 0, disk=disk)
        held.generation = Pulled(self, seq)
        held.generation.state = self._state(seq)
        return held.generation

    async def stop(self, seq: int, keep: int | None = None) -> SequenceState:
        await self._verb("stop", seq)
        held = self._known(seq)
        held.epoch += 1
        if keep is not None and keep < len(held.tokens):
            del held.tokens[keep:]
            held.computed = min(held.computed, keep)
        self._end(seq)
        return self._state(seq)

    async def fork(self, seq: int, children: int, at: int | None = None) -> list[int]:
        await self._verb("fork", seq, at)
        held = self._known(seq)
        at = len(held.tokens) if at is None else at
        assert 0 < at <= len(held.tokens)
        made = []
        for _ in range(children):
            self._last += 1
            self.held[self._last] = Held(held.tokens[:at], computed=min(at, held.computed))
            made.append(self._last)
        return made

    async def close(self, seq: int, keep_kv: bool = True) -> None:
        await self._verb("close", seq, keep_kv)
        self._known(seq)
        self._end(seq)
        del self.held[seq]

    async def lease(
        self, seq: int, priority: int | None = None, ttl: float | None = None, returns_in: float | None = None
    ) -> Receipt:
        await self._verb("lease", seq, priority, ttl, returns_in)
        held = self._known(seq)
        return Receipt(Grant.GRANTED, priority or 0, ttl or 0.0, returns_in or 0.0, len(held.tokens), 0)

    async def stage(self, seq: int) -> Moved:
        await self._verb("stage", seq)
        return Moved(self._idle(seq).computed, 0, 0, 0, 0.0)

    async def settle(self, seq: int, disk: bool = False) -> Moved:
        await self._verb("settle", seq, disk)
        return Moved(0, 0, self._idle(seq).computed, 0, 0.0)

    async def locate(
        self, seq: int | None, tokens: Sequence[int] = (), salt: bytes = b"", adapter: bytes = b""
    ) -> BlockMap:
        """Of a sequence on the device, of other tokens nowhere; each in a block of its own."""
        await self._verb("locate", seq, list(tokens), salt)
        length = len(tokens) if seq is None else len(self._known(seq).tokens)
        tier = KVTier.NONE if seq is None else KVTier.DEVICE
        return BlockMap(length, 1, [TierRun(tier, False, length)] if length else [])

    # --- the step ---

    def step(self, seq: int) -> None:
        """Sample up to ``tokens_per_row`` tokens of one sequence and put them up as a row."""
        held = self.held[seq]
        generation = held.generation
        if generation is None or not self.flowing:
            return
        tokens: list[int] = []
        finish: Finish | None = None
        error = None
        while finish is None and len(tokens) < self.tokens_per_row:
            held.computed = len(held.tokens)
            try:
                token = self.model(held.tokens)
            except RuntimeError as fault:
                finish, error = Finish.ERROR, str(fault)
                break
            held.tokens.append(token)
            held.sampled += 1
            tokens.append(token)
            if token in held.limits.stop_ids:
                finish = Finish.STOP
            elif held.sampled >= held.limits.max_tokens:
                finish = Finish.LENGTH
        work = None
        if finish is not None:
            prefilled = held.work.prefilled + self.chosen
            decoded = held.sampled - held.before
            work = replace(held.work, prefilled=prefilled, decoded=decoded, chosen=self.chosen)
            held.generation = None
        logprobs = (
            [TokenLogprob(-token / 7, [(token, -token / 7)]) for token in tokens] if self.logprobs else None
        )
        generation.put(Row(seq, held.epoch, tokens, len(held.tokens), finish, work, error, logprobs))

    def flow(self) -> None:
        """Rows come again, to readers that wait too."""
        self.flowing = True
        for seq, held in list(self.held.items()):
            if held.generation is not None:
                self.step(seq)

    async def _verb(self, *entry: object) -> None:
        await asyncio.sleep(0)
        if not self.alive:
            raise EngineDied("the engine is gone")
        self.log.append(entry)
        if entry[0] in self.cut_off:
            self.stuck.set()
            await self.freed.wait()
            if not self.alive:
                raise EngineDied("killed")

    def _known(self, seq: int) -> Held:
        if seq not in self.held:
            raise SequenceUnknown(f"no sequence {seq}")
        return self.held[seq]

    def _idle(self, seq: int, length: int | None = None) -> Held:
        held = self._known(seq)
        if held.generation is not None:
            raise SequenceBusy(f"sequence {seq} generates")
        if length is not None and length != len(held.tokens):
            raise EpochStale(f"{len(held.tokens)} tokens, not {length}")
        return held

    def _end(self, seq: int) -> None:
        held = self._known(seq)
        generation, held.generation = held.generation, None
        if generation is not None:
            generation.end()

    def _state(self, seq: int) -> SequenceState:
        held = self.held[seq]
        return SequenceState(seq, len(held.tokens), held.computed, held.epoch)


class Recital:
    """A model that recites: after each prompt the next of its texts, then the end token."""

    def __init__(self, *texts: list[int], end: int) -> None:
        self._texts = list(texts)
        self._end = end
        self._told: list[int] = []
        self._saying: list[int] = []
        self.prompts: list[list[int]] = []

    def __call__(self, tokens: list[int]) -> int:
        if not self._continues(tokens):
            self.prompts.append(list(tokens))
            self._saying, self._told = [*self._texts.pop(0), self._end], []
        token = self._saying[len(self._told)]
        self._told.append(token)
        if token < 0:
            raise RuntimeError("not a number")
        return token

    def _continues(self, tokens: list[int]) -> bool:
        return bool(self.prompts) and tokens == self.prompts[-1] + self._told
