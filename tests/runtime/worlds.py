"""An engine on the fake device, beside a model of what it must say: plain lists, one per sequence.

Every verb's answer is foretold (state or refusal), every token, every ending, and by which step a turn must
have ended. Used by the state machine and by tests that tell one story.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from holdfast.kvstore.groups import Windows
from holdfast.kvstore.host.slots import SlotMemory
from holdfast.kvstore.keys import BlockHasher
from holdfast.kvstore.quotas import tenant_of
from holdfast.runtime.adapters import AdapterTable
from holdfast.runtime.engine import Engine
from holdfast.runtime.kv_placement.costs import Costs
from holdfast.runtime.kv_placement.leases import MOST_PRIORITY, MOST_SECONDS
from holdfast.runtime.order.policy import policy_named
from holdfast.runtime.order.queues import HEAD_START
from holdfast.runtime.sequence import TurnAge
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import (
    AnyVerb,
    Close,
    Extend,
    Finish,
    Fork,
    Generate,
    Grant,
    KVTier,
    Lease,
    LoadAdapter,
    Locate,
    Open,
    Opening,
    Receipt,
    Refusal,
    Row,
    Sampling,
    SequenceState,
    Settle,
    Stage,
    Step,
    Stop,
    TokenLimits,
    Truncate,
    UnloadAdapter,
    VerbReply,
)
from holdfast.tests.runtime.fakes import (
    GREEDY,
    NO_FOLDER,
    SECRET,
    SPACE,
    FakeAdapters,
    FakeDisk,
    Shadow,
    fake_adapter,
    fake_engine,
    fake_memory,
    widest,
)

DRAWN = 256
"""Tokens the fake device samples are below this; the three that fail are above."""

POISON, LAUNCH_BOMB, LATE_BOMB = DRAWN, DRAWN + 1, DRAWN + 2
VOCAB = DRAWN + 3


@dataclass
class Turn:
    """What a generation must do. ``deadline``: the step by which it has ended. ``age``: in the order."""

    sampling: Sampling
    limits: TokenLimits
    generated_from: int
    prompt: int
    deadline: int
    sampled: int = 0
    age: TurnAge = TurnAge()


@dataclass
class Being:
    """What a sequence must be. ``adapter``: the digest of its own. ``cut``: it was truncated since its last
    turn. ``alone``: until it samples."""

    shadow: Shadow
    adapter: bytes = b""
    epoch: int = 0
    turn: Turn | None = None
    cut: bool = False
    alone: bool = False
    priority: int = 0
    leased_until: float = 0.0

    @property
    def cursed(self) -> bool:
        return any(token >= DRAWN for token in self.shadow.tokens)


def world(
    *,
    late: bool = False,
    slots: int | None = None,
    make: Callable[..., tuple[Engine, Any]] = fake_engine,
    adapters: tuple[int, int] = (0, 0),
    **numbers: Any,
) -> World:
    """A small world in overlapped steps, unless said otherwise; with a host tier of ``slots`` slots.

    ``make``, ``adapters``: as in `World`.
    """
    usual = {
        "blocks": 16,
        "max_context": 48,
        "block_tokens": 4,
        "max_step_tokens": 8,
        "max_sequences": 4,
        "depth": 2,
    }
    settings = SchedulerSettings(vocab_size=VOCAB, **{**usual, **numbers})
    memory = None if slots is None else fake_memory(slots, settings.block_tokens)
    return World(settings, late=late, memory=memory, make=make, adapters=adapters)


@dataclass
class World:
    """Engine, device (``chance``, ``late``: as in `FakeRunner`), model. ``ended``: last rows by sequence.

    ``make``: `fakes.fake_engine`, or another that takes the same. ``tenants``: so many salts its verbs name at
    most, for the bound of a policy that shares between tenants. ``adapters``: slots for them, and how many can
    be loaded.
    """

    settings: SchedulerSettings
    chance: Random | None = None
    late: bool = False
    memory: SlotMemory | None = None
    disk: FakeDisk | None = None
    beings: dict[int, Being] = field(default_factory=dict)
    turns: list[int] = field(default_factory=list)
    ended: dict[int, Row] = field(default_factory=dict)
    steps: int = 0
    isolations: int = 0
    request: int = 0
    time: float = 0.0
    ledger: dict[bytes, int] = field(default_factory=dict)
    make: Callable[..., tuple[Engine, Any]] = fake_engine
    tenants: int = 3
    adapters: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Another engine, which finds of this one nothing but its host tier."""
        if hasattr(self, "device"):
            self.device.die()
        self.beings.clear()
        self.turns.clear()
        self._first: int | None = None
        self.policy = policy_named(self.settings.policy, self.settings.patience)  # asked for its bound alone
        # By tenant with turns: tenures of the first place that each other tenant began since it had one itself.
        self._passed: dict[int, Counter[int]] = {}
        self._others = self._most_of_others()
        self._leaders: list[int] = []  # tenants that were given the first place in this step
        self._planned = 0  # steps planned when the order of turns was looked at last
        self.numbers: set[int] = set()
        self.gave: set[int] = set()  # sequences that gave blocks in this step, and may have found them again
        self.following: dict[int, int] = {}  # requests that are answered later: the most tokens
        self.loading: dict[int, tuple[str, str]] = {}  # and those that load: name and path
        self.loaded: dict[str, bytes] = {}  # digests by name
        self.steps = self.isolations = 0
        self.engine, self.device = self.make(
            self.settings,
            chance=self.chance,
            memory=self.memory,
            disk=self.disk,
            clock=lambda: self.time,
            late=self.late,
            ledger=self.ledger,
            vocab_size=DRAWN,
            poison=frozenset({POISON}),
            launch_bombs=frozenset({LAUNCH_BOMB}),
            late_bombs=frozenset({LATE_BOMB}),
            table=AdapterTable(*self.adapters),
            adapters=FakeAdapters(self.adapters[0], self.chance),
        )
        self.scheduler = self.engine.scheduler
        self._now = 0.0
        tick, apply = self.scheduler.tick, self.scheduler.apply
        vars(self.scheduler)["tick"] = lambda now: (self._look_at_the_clock(now), tick(now))[1]
        vars(self.scheduler)["apply"] = lambda verb, now: (self._look_at_the_clock(now), apply(verb, now))[1]
        preemption = self.scheduler._planner._preemption
        self._preempt = preemption.preempt
        vars(preemption)["preempt"] = self._preempts
        self._lead = self._queues.lead
        vars(self._queues)["lead"] = self._leads
        block_manager = self.scheduler._block_manager
        self._surrender = block_manager.surrender
        vars(block_manager)["surrender"] = self._gives

    # --- verbs ------------------------------------------------------------------------------------------

    def load(self, name: str, path: str) -> None:
        """Load an adapter; the answer comes with a later step."""
        verb = LoadAdapter(self.next_request(), name, path)
        refusal = self._no_room(name)
        answer = self.engine.apply(verb)
        if refusal is None:
            assert answer is None
            self.loading[verb.request] = name, path
        else:
            assert isinstance(answer, Refusal) and answer.code == refusal, answer

    def _no_room(self, name: str) -> str | None:
        slots, most = self.adapters
        if slots and name in self.loaded:
            return "adapter_exists"
        return None if slots and len(self.loaded) < most else "adapter_limit"

    def unload(self, name: str) -> None:
        refusal = None if name in self.loaded else "adapter_unknown"
        if self._apply(UnloadAdapter(self.next_request(), name), refusal):
            del self.loaded[name]

    def _gone(self, adapter: bytes) -> str | None:
        """Why no turn begins with an adapter."""
        return "adapter_unknown" if adapter and adapter not in self.loaded.values() else None

    def _shadow(self, tokens: Iterable[int], adds: int) -> Shadow:
        return Shadow(tokens, DRAWN, adds, widest(self.settings.windows)[1])

    def open(
        self, seq: int, tokens: list[int], salt: bytes = b"", alone: bool = False, path: str = ""
    ) -> None:
        adapter, adds = fake_adapter(path) if path else (b"", 0)
        refusal = self._gone(adapter)
        if seq in self.beings:
            refusal = "sequence_exists"
        elif len(tokens) > self.settings.max_context:
            refusal = "context_exceeded"
        if self._apply(Open(self.next_request(), seq, salt, tokens, alone, adapter), refusal):
            self.beings[seq] = Being(self._shadow(tokens, adds), adapter, alone=alone)
            self._check_state(seq)

    def extend(self, seq: int, tokens: list[int], *, due: bool = False) -> None:
        being = self.beings.get(seq)
        refusal = self._busy(being)
        if being is not None and not refusal:
            total = len(being.shadow.tokens) + len(tokens)
            refusal = "context_exceeded" if total > self.settings.max_context else None
        if self._apply(Extend(self.next_request(), seq, tokens, due), refusal) and being is not None:
            being.shadow.extend(tokens)
            self._check_state(seq)

    def truncate(self, seq: int, length: int, expect_epoch: int | None = None) -> None:
        being = self.beings.get(seq)
        expected = expect_epoch if expect_epoch is not None else being.epoch if being else 0
        refusal = None
        if being is None:
            refusal = "sequence_unknown"
        elif expected != being.epoch:
            refusal = "epoch_stale"
        elif not 0 <= length <= len(being.shadow.tokens):
            refusal = "length_invalid"
        if self._apply(Truncate(self.next_request(), seq, length, expected), refusal) and being is not None:
            self._halt(seq)
            being.shadow.truncate(length)
            being.cut = True
            self._check_state(seq)

    def generate(
        self,
        seq: int,
        max_tokens: int,
        *,
        stop_ids: tuple[int, ...] = (),
        sampling: Sampling = GREEDY,
        generated_from: int = 0,
        tokens: Sequence[int] = (),
        opening: Opening | None = None,
    ) -> None:
        being, refusal = self._opened(seq, opening)
        if being is not None and not refusal:
            length = len(being.shadow.tokens) + len(tokens)
            if not length:
                refusal = "length_invalid"
            elif max_tokens <= generated_from:
                refusal = "sampling_invalid"
            elif length >= self.settings.max_context:
                refusal = "context_exceeded"
        limits = TokenLimits(max_tokens, stop_ids)
        verb = Generate(self.next_request(), seq, sampling, limits, generated_from, list(tokens), opening)
        if self._apply(verb, refusal):
            assert being is not None
            self.beings[seq] = being
            being.shadow.extend(tokens)
            being.epoch += 1
            prompt = len(being.shadow.tokens)
            deadline = self._deadline(seq, prompt, max_tokens)
            being.turn = Turn(sampling, limits, generated_from, prompt, deadline)
            if seq not in self._queues.restoring:
                self._begin(seq)
            self._check_state(seq)

    def _opened(self, seq: int, opening: Opening | None) -> tuple[Being | None, str | None]:
        """What a turn begins on, and why it does not."""
        being = self.beings.get(seq)
        if opening is None:
            return being, self._busy(being) or self._gone(being.adapter if being else b"")
        adds = fake_adapter(opening.adapter.decode())[1] if opening.adapter else 0
        begun = Being(self._shadow((), adds), opening.adapter, alone=opening.isolated)
        if opening.parent is not None:
            parent = self.beings.get(opening.parent)
            if parent is None:
                return None, "sequence_unknown"
            if not 0 <= opening.at <= len(parent.shadow.tokens):
                return None, "length_invalid"
            begun = Being(parent.shadow.copy(opening.at), parent.adapter, cut=True)
        if refusal := self._gone(begun.adapter):
            return None, refusal
        return (begun, None) if being is None else (None, "sequence_exists")

    def lease(
        self,
        seq: int,
        priority: int | None = None,
        ttl: float | None = None,
        returns_in: float | None = None,
    ) -> Receipt | None:
        """The receipt, checked against the wish and the budget."""
        being = self.beings.get(seq)
        verb = Lease(self.next_request(), seq, priority, ttl, returns_in)
        if not self._apply(verb, None if being else "sequence_unknown") or being is None:
            return None
        self._check_state(seq)
        receipt = self._receipt
        assert receipt is not None and -MOST_PRIORITY <= receipt.priority <= MOST_PRIORITY
        assert 0 <= receipt.ttl <= MOST_SECONDS and 0 <= receipt.returns_in <= (receipt.ttl or MOST_SECONDS)
        assert 0 <= receipt.tokens <= len(being.shadow.tokens)
        if receipt.grant is Grant.GRANTED:
            assert receipt.priority == (priority or 0) or not receipt.ttl
            assert ttl in (None, receipt.ttl) and returns_in in (None, receipt.returns_in)
            assert receipt.tokens == len(being.shadow.tokens) or not receipt.ttl
        being.priority, being.leased_until = receipt.priority, self._now + receipt.ttl
        self._check_budget()
        return receipt

    def stage(self, seq: int) -> None:
        """The answer comes with a later step."""
        self._apply(Stage(self.next_request(), seq), self._busy(self.beings.get(seq)), wait=True)

    def settle(self, seq: int, *, disk: bool = False) -> None:
        """The answer comes with a later step."""
        self._apply(Settle(self.next_request(), seq, disk), self._busy(self.beings.get(seq)), wait=True)

    def locate(self, seq: int) -> None:
        """Every block is in one run; those with computed tokens are on the device; asking changes nothing."""
        being = self.beings.get(seq)
        before = self.engine.statistics()
        answer = self.engine.apply(Locate(self.next_request(), seq))
        assert self.engine.statistics() == before
        if being is None:
            assert isinstance(answer, Refusal) and answer.code == "sequence_unknown"
            return
        assert isinstance(answer, VerbReply) and answer.blocks is not None
        size, computed = self.settings.block_tokens, self.state(seq).computed
        blocks = [(run.tier, run.shared) for run in answer.blocks.runs for _ in range(run.count)]
        assert len(blocks) == -(-len(being.shadow.tokens) // size)
        if computed == self._lasting(seq):
            assert all(tier is KVTier.DEVICE for tier, _ in blocks[: -(-computed // size)])
        others = [
            other.shadow.tokens
            for number, other in self.beings.items()
            if number != seq and other.adapter == being.adapter
        ]
        for at, (_, shared) in enumerate(blocks):
            beginning = being.shadow.tokens[: (at + 1) * size]
            if shared and len(beginning) == (at + 1) * size and at + 1 < len(blocks):
                begun = at * size + 1  # a fork from inside the block holds it until it writes there
                assert any(tokens[:begun] == beginning[:begun] for tokens in others)

    def stop(self, seq: int, keep: int | None = None) -> None:
        being = self.beings.get(seq)
        refusal = "sequence_unknown" if being is None else "length_invalid" if (keep or 0) < 0 else None
        if self._apply(Stop(self.next_request(), seq, keep), refusal) and being is not None:
            self._halt(seq)
            if keep is not None and keep < len(being.shadow.tokens):
                being.shadow.truncate(keep)
                being.cut = True
            self._check_state(seq)

    def fork(self, seq: int, children: list[int], at: int | None = None) -> None:
        being = self.beings.get(seq)
        refusal = None
        if being is None:
            refusal = "sequence_unknown"
        elif at is not None and not 0 <= at <= len(being.shadow.tokens):
            refusal = "length_invalid"
        elif len(set(children)) < len(children) or any(child in self.beings for child in children):
            refusal = "sequence_exists"
        if self._apply(Fork(self.next_request(), seq, children, at), refusal) and being is not None:
            length = len(being.shadow.tokens) if at is None else at
            for child in children:
                self.beings[child] = Being(being.shadow.copy(length), being.adapter, cut=True)
            self._check_state(seq)

    def close(self, seq: int, *, keep_kv: bool = True) -> None:
        refusal = None if seq in self.beings else "sequence_unknown"
        if self._apply(Close(self.next_request(), seq, keep_kv), refusal):
            if seq in self.turns:
                self.turns.remove(seq)
            del self.beings[seq]

    def evict(self, seq: int) -> None:
        """Forced preemption: what must be computed again, and what waits for it, may take longer."""
        self.scheduler.evict(seq)
        being = self.beings[seq]
        if being.turn is not None and seq in self.turns:
            again = self._own(len(being.shadow.tokens), 0)
            for other in self.turns if self.policy.by_tenant else self.turns[self.turns.index(seq) :]:
                turn = self.beings[other].turn
                assert turn is not None
                turn.deadline += again

    def state(self, seq: int) -> SequenceState:
        """What the engine holds of a sequence."""
        return self.scheduler.state(seq)

    # --- steps ------------------------------------------------------------------------------------------

    def step(self) -> Step | None:
        """One step, everything about it checked."""
        oldest = self.leader() if self.policy.by_tenant else self.turns[0] if self.turns else None
        before = self._progress(oldest)
        waiting_tenants = {self._queues[seq].tenant for seq in self.turns}
        waited = [
            seq for seq, being in self.beings.items() if being.turn is not None and seq not in self.turns
        ]
        idle = self._idle_holders()
        self._first = next(iter(self._queues.running), None)
        self.time += 0.05
        self.gave.clear()
        step = self.engine.step()
        for being in self.beings.values():  # leases end before a turn is given its age
            if being.leased_until <= self._now:
                being.priority = 0
        self._let_in(waited)
        self._check_rotation(waiting_tenants)
        self._reorder()
        self._hear_answers()
        if self.moving:  # turns may wait for their own KV
            for seq in self.turns:
                turn = self.beings[seq].turn
                assert turn is not None
                turn.deadline += 1
        if step is None:
            assert not self.turns or self.moving, "a turn is open and nothing runs"
            if self.moving:
                self.device.advance()
            return None
        self.steps += 1
        isolated = self.scheduler.counters.isolations - self.isolations
        self.isolations += isolated
        for seq in self.turns if isolated else ():
            turn = self.beings[seq].turn
            assert turn is not None
            turn.deadline += (
                2 * isolated
            )  # its rows of steps in flight were taken back, one of them ran again
        if not isolated and any(self.beings[row.seq].alone for row in step.rows):
            assert len(step.rows) == 1, "a suspect shares its step"
        for row in step.rows:
            self.check_row(row)
        admitted = before[0] or not waited  # else one of higher priority may have come from disk, and gone
        admitted = admitted and (before[0] or self.policy.bound(0, 0) == 0)  # else others may have gone first
        stays = self.leader() == oldest if self.policy.by_tenant else oldest in self.turns[:1]
        if oldest is not None and stays and admitted and not isolated:
            assert self._progress(oldest) >= before, "the turn that is first lost ground"
        if not isolated:
            self._check_leases(idle)
        self._check_budget()
        for seq in self.turns:
            turn = self.beings[seq].turn
            assert turn is not None and self.steps < turn.deadline, "a turn runs beyond its bound"
        self._reorder()
        return step

    def due(self) -> float | None:
        """Seconds until something has to be done; preparing for what may come does not count."""
        return self.scheduler.due(self.time if self.disk is None else self.disk.time)

    def run(self, steps: int = 1_000_000) -> None:
        """Steps until idle, at most ``steps``."""
        for _ in range(steps):
            if self.step() is None and not (self._queues.restoring or self.moving or self.loading):
                return

    def _leads(self, sequence: Any) -> None:
        self._leaders.append(sequence.tenant)
        self._lead(sequence)

    def _preempts(self, blocks: int, sequence: Any) -> None:
        """A running turn gives way only when nothing that does not run holds a block."""
        before = self.scheduler.counters.preempted
        self._preempt(blocks, sequence)
        if self.scheduler.counters.preempted == before:
            return
        assert not self._queues.idle.unleased, "an idle sequence holds blocks while a running turn gives way"
        assert not any(len(waiting.table) for waiting in self._queues.waiting), "and a turn that waits"
        assert not any(len(other.table) for other in self._queues.restoring.values()), "and one that comes up"

    def _let_in(self, waited: list[int]) -> None:
        """Turns with KV that has come from disk, or will not, are as old as that."""
        order = self.order()
        arrived = [seq for seq in waited if seq not in self._queues.restoring]
        arrived.sort(key=lambda seq: order.index(seq) if seq in order else -1)  # else it is over already
        for seq in arrived:
            turn = self.beings[seq].turn
            assert turn is not None
            turn.deadline = self._deadline(seq, len(self.beings[seq].shadow.tokens), turn.limits.max_tokens)
            self._begin(seq)

    def _deadline(self, seq: int, prompt: int, max_tokens: int) -> int:
        """The step by which a turn that begins now has ended, as the policy promises."""
        older, own = self._ahead(seq) - self.steps, self._own(prompt, max_tokens)
        bound = self.policy.bound(older, own, self._others)
        assert bound is not None
        return self.steps + bound

    def _own(self, prompt: int, max_tokens: int) -> int:
        """Steps that a turn needs once it runs first."""
        return self.settings.most_steps(prompt, max_tokens, self.tenants if self.policy.by_tenant else 1)

    def _most_of_others(self) -> int:
        """Steps that one turn of each other tenant needs at most; however many turns those have."""
        if not self.policy.by_tenant:
            return 0
        most = self.settings.max_context
        return (self.tenants - 1) * max(self._own(prompt, most) for prompt in range(1, most))

    def leader(self) -> int | None:
        """The sequence of the turn that runs first, until it ends."""
        leader = self._queues.leader
        return None if leader is None else leader.id

    def _check_rotation(self, tenants: set[int]) -> None:
        """The first place goes round: no tenant has it twice while another that has turns waits for it.

        ``tenants``: those with turns before the step.
        """
        for gone in self._passed.keys() - tenants:
            del self._passed[gone]
        leaders, self._leaders = self._leaders, []
        if not self.policy.by_tenant or not leaders:
            return
        leader = leaders[-1]
        for tenant in tenants - {leader}:
            passed = self._passed.setdefault(tenant, Counter())
            passed[leader] += 1
            assert passed[leader] == 1, "a tenant had the first place twice while another waited for it"
        self._passed.pop(leader, None)

    def _ahead(self, seq: int) -> int:
        """The step by which all turns before this one have ended."""
        order = self.order()
        before = order[: order.index(seq)] if seq in order else order
        if self.policy.by_tenant:
            own = self._queues[seq].tenant
            before = [other for other in before if self._queues[other].tenant == own]
        ends = [turn.deadline for other in before if (turn := self.beings[other].turn)]
        return max([self.steps, *ends])

    def _begin(self, seq: int) -> None:
        """A turn has its age: its number, less the head start of its priority."""
        being, age = self.beings[seq], self._queues[seq].age
        assert being.turn is not None
        number = age[0] + HEAD_START * being.priority
        assert number == age[1] and number not in self.numbers
        self.numbers.add(number)
        being.turn.age = age
        for other in self.turns:  # a suspect goes before those that are older, and none beside it
            theirs = self.beings[other].turn
            assert theirs is not None
            if being.alone:
                theirs.deadline += self._own(being.turn.prompt, 1)
            elif self.beings[other].alone:
                being.turn.deadline += self._own(theirs.prompt, 1)
        self.turns.append(seq)
        if seq in self.order():
            self._first = next(iter(self._queues.running), None)
            self._reorder()

    def _reorder(self) -> None:
        """A turn is overtaken by an older one, and else only while the policy's bound allows it.

        The first that runs is never overtaken. Under a policy by tenant a turn is overtaken by turns of its own
        tenant only, and the others count in its bound.
        """
        since = self._planned - (self.policy.bound(0, 0) or 0)
        self._planned = self.scheduler.counters.steps
        order = [seq for seq in self.order() if seq in self.turns]
        assert sorted(order) == sorted(seq for seq in self.turns if seq in order)
        leader = self.leader() if self.policy.by_tenant else None
        assert leader in (None, *order[:1]), "the first that runs was overtaken"
        if order == self.turns:
            return
        where = {seq: at for at, seq in enumerate(self.turns)}
        for at, seq in enumerate(order):
            turn = self.beings[seq].turn
            assert turn is not None
            for other in order[:at]:
                theirs = self.beings[other].turn
                assert theirs is not None
                if where[other] > where[seq] and self._behind(seq, other):
                    young = turn.age.step > since
                    assert theirs.age < turn.age or young, "overtaken by a younger turn"
                    assert seq != (leader if self.policy.by_tenant else self._first), (
                        "the first that runs was overtaken"
                    )
                    turn.deadline += self._own(theirs.prompt, theirs.limits.max_tokens) + self._others
        self.turns = [*order, *(seq for seq in self.turns if seq not in order)]

    def _behind(self, seq: int, other: int) -> bool:
        """Whether one turn may have to wait for the end of another."""
        return not self.policy.by_tenant or self._queues[seq].tenant == self._queues[other].tenant

    def _hear_answers(self) -> None:
        for reply in self.engine.answers():
            if reply.request in self.loading:
                self._hear_loaded(reply, *self.loading.pop(reply.request))
                continue
            length = self.following.pop(reply.request)
            moved, state = reply.moved, reply.state
            assert isinstance(state, SequenceState) and 0 <= state.computed <= state.length <= length
            assert moved is not None and min(moved.device, moved.host, moved.disk, moved.recomputed) >= 0
            assert moved.device + moved.host + moved.disk <= length

    def _hear_loaded(self, reply: VerbReply | Refusal, name: str, path: str) -> None:
        refusal = "adapter_invalid" if path == NO_FOLDER else self._no_room(name)
        if refusal is not None:
            assert isinstance(reply, Refusal) and reply.code == refusal, reply
            return
        digest = fake_adapter(path)[0]
        assert isinstance(reply, VerbReply) and reply.adapter is not None, reply
        assert (reply.adapter.name, reply.adapter.digest) == (name, digest)
        self.loaded[name] = digest

    def _idle_holders(self) -> tuple[dict[int, int], dict[int, tuple[int, float]]]:
        """Blocks of idle holders without a lease; of others those that it covers, and when they return."""
        idle = list(self._queues.idle)
        free = {held.id: len(held.table) for held in idle if held.lease is None}
        leased = {
            held.id: (min(len(held.table), held.lease.blocks), held.lease.returns)
            for held in idle
            if held.lease is not None
        }
        return free, leased

    def _gives(self, sequence: Any, kept: int = 0, *, keep: bool = True) -> int:
        self.gave.add(sequence.id)
        return self._surrender(sequence, kept, keep=keep)

    def _check_leases(self, before: tuple[dict[int, int], dict[int, tuple[int, float]]]) -> None:
        """A leased idle sequence lost its KV: then no unleased one kept its own, nor one that returns later.

        One that gave its own first may have found it again since, where nothing was written to the blocks yet.
        """
        free, leased = self._idle_holders()
        robbed = [seq for seq in before[1] if seq in self.beings and not len(self._queues[seq].table)]
        for seq in robbed:
            (held, returns), sequence = before[1][seq], self._queues[seq]
            if not held or sequence.turn or sequence.lease is None:  # over just now
                continue
            if self.beings[seq].cursed:  # its row failed
                continue
            if self.scheduler.placement.awaits(sequence):
                continue
            if seq not in self.gave:  # it cannot go on with what it had: blocks behind a window are gone
                continue
            stayed = [other for other, size in free.items() if size and other not in self.gave]
            assert not [other for other in stayed if free[other] == before[0].get(other)]
            held_on = [other for other, now in leased.items() if now[0] and other not in self.gave]
            kept = [other for other in held_on if before[1].get(other) == leased[other]]
            assert not [other for other in kept if leased[other][1] > returns]

    def _check_budget(self) -> None:
        promises = [held.lease for held in self._queues.sequences.values() if held.lease]
        share = self.settings.lease_share
        assert sum(promise.blocks for promise in promises) <= share * self.settings.blocks
        if self.memory is not None:
            assert sum(promise.records for promise in promises) <= share * self.memory.slots
        hasher = BlockHasher(SECRET, self.settings.block_tokens)
        for salt, most in self.settings.lease_caps.items():
            tenant = tenant_of(hasher.root(SPACE, salt))
            theirs = [held.lease for held in self._queues.sequences.values() if held.tenant == tenant]
            assert sum(promise.blocks for promise in theirs if promise) <= most, (
                "a tenant has more than its cap"
            )
            assert sum(promise.records for promise in theirs if promise) <= most

    def order(self) -> list[int]:
        """The sequences with turns, in the order in which they run."""
        return [sequence.id for sequence in (*self._queues.running.values(), *self._queues.waiting)]

    def reply(self, seq: int, max_tokens: int, **turn: object) -> list[int]:
        """A turn from beginning to end: what it sampled."""
        before = len(self.beings[seq].shadow.tokens)
        self.generate(seq, max_tokens, **turn)  # type: ignore[arg-type]
        while self.beings[seq].turn is not None:
            self.step()
        return self.beings[seq].shadow.tokens[before:]

    def _look_at_the_clock(self, now: float) -> None:
        """The engine takes the time: it is told of it with each tick and each verb."""
        self._now = now

    @property
    def _queues(self):
        return self.scheduler._queues

    def sequence(self, seq: int) -> Any:
        """What the scheduler knows of it."""
        return self._queues[seq]

    def restoring(self) -> list[int]:
        """Sequences with turns that wait for the disk."""
        return list(self._queues.restoring)

    def staged(self) -> list[int]:
        """Idle sequences that wait for the disk."""
        return list(self._queues.staged)

    @property
    def moving(self) -> bool:
        """Whether saves or loads of a step that is over are under way."""
        return self.engine.statistics()["moving"] > 0

    def flying(self) -> set[int]:
        """Sequences with a row in a step that is launched."""
        return {one.id for one in self._queues.sequences.values() if one.in_flight}

    def to_disk(self, seq: int) -> None:
        """Ask again that its records go to disk."""
        self.scheduler.placement.leave(self._queues[seq])

    def measured(self, costs: Costs) -> None:
        """What restoring costs, as if measured."""
        self.scheduler.placement.costs.measured = copy(costs)

    def _progress(self, seq: int | None) -> tuple[bool, int]:
        """Whether a turn runs, and how many full blocks of it are computed; while some that it needs may not
        come, those without which it can go on."""
        if seq is None:
            return False, 0
        return seq in self._queues.running, self._lasting(seq) // self.settings.block_tokens

    def _lasting(self, seq: int) -> int:
        """After how many of its computed tokens a sequence holds all that the next one sees."""
        sequence, size = self._queues[seq], self.settings.block_tokens
        windows, table = Windows(self.settings.windows, size), sequence.table.view
        ends = [sequence.computed, *range(sequence.computed // size * size, -1, -size)]
        return next(
            end
            for end in ends
            if all(
                (table[windows.first(group, end) : -(-end // size), group] >= 0).all()
                for group in range(len(windows))
            )
        )

    def check_row(self, row: Row) -> None:
        being = self.beings[row.seq]
        turn = being.turn
        assert turn is not None, "a row for a sequence that does not generate"
        assert row.epoch == being.epoch, "a row of an older epoch"
        for token in row.tokens:
            assert token == being.shadow.next(turn.sampling), "a wrong token"
            being.shadow.extend([token])
            being.alone = False
            turn.sampled += 1
        assert row.length == len(being.shadow.tokens)
        assert row.finish == self._finish(being, turn, row)
        if row.finish is not None:
            self._check_work(being, turn, row)
            self._end(row.seq)
            self.ended[row.seq] = row

    def _finish(self, being: Being, turn: Turn, row: Row) -> Finish | None:
        if being.cursed:
            assert not row.tokens and row.error
            return Finish.ERROR
        if row.tokens[-1] in turn.limits.stop_ids:
            return Finish.STOP
        if turn.generated_from + turn.sampled == turn.limits.max_tokens:
            return Finish.LENGTH
        return Finish.CONTEXT if row.length == self.settings.max_context else None

    def _check_work(self, being: Being, turn: Turn, row: Row) -> None:
        work = row.work
        assert work is not None and work.decoded == turn.sampled
        if not (work.recomputed or being.cut or being.cursed):
            assert work.prefilled + work.resident + work.host + work.disk == turn.prompt

    # --- the model --------------------------------------------------------------------------------------

    def next_request(self) -> int:
        """The number of a verb that a test sends itself."""
        self.request += 1
        return self.request

    def _busy(self, being: Being | None) -> str | None:
        if being is None:
            return "sequence_unknown"
        return "sequence_busy" if being.turn is not None else None

    def _apply(self, verb: AnyVerb, refusal: str | None, *, wait: bool = False) -> bool:
        answer = self.engine.apply(verb)
        if wait and refusal is None:
            assert answer is None
            self.following[verb.request] = self.settings.max_context
            return True
        assert answer is not None
        assert answer.request == verb.request
        if refusal is not None:
            assert isinstance(answer, Refusal) and answer.code == refusal, answer
            return False
        assert isinstance(answer, VerbReply), answer
        self._state, self._receipt = answer.state, answer.receipt
        return True

    def _check_state(self, seq: int) -> None:
        being = self.beings[seq]
        state = self._state
        assert isinstance(state, SequenceState)
        assert (state.seq, state.length, state.epoch) == (seq, len(being.shadow.tokens), being.epoch)
        assert 0 <= state.computed <= state.length

    def _halt(self, seq: int) -> None:
        if self.beings[seq].turn is not None:
            self._end(seq)
        self.beings[seq].epoch += 1

    def _end(self, seq: int) -> None:
        self.beings[seq].turn = None
        self.beings[seq].cut = False
        if seq in self.turns:  # else it waited for the disk
            self.turns.remove(seq)
