"""Any verbs in any order, with steps in flight, in a pool too small for them: what the scheduler must never
do.

The model (`worlds`) foretells every answer, token and ending, and by which step a turn has ended at the
latest, as the policy's bound says; the engine audits its blocks whenever it is idle. It is run for each policy
in `NAMED`, or for the one that ``HOLDFAST_POLICY`` names, as `SchedulerSettings.policy` does.
"""

from __future__ import annotations

import os
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.kvstore.host.slots import SlotState
from holdfast.runtime.order.policy import NAMED
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import Opening, Sampling
from holdfast.tests.runtime.fake_device import device_engine
from holdfast.tests.runtime.fakes import NO_FOLDER, FakeDisk, drafting_engine, fake_engine, fake_memory
from holdfast.tests.runtime.worlds import LATE_BOMB, LAUNCH_BOMB, POISON, World

POLICIES = [os.environ["HOLDFAST_POLICY"]] if "HOLDFAST_POLICY" in os.environ else [*NAMED]
"""The policies that all machines run, as `SchedulerSettings.policy` names them."""

FACTOR = max(1, int(os.environ.get("HOLDFAST_EXAMPLES", "1")))

SALTS = (b"", b"tenant", b"other")
NAMES = ("a", "b", "c", "d")
"""Of adapters; each is also the path of one."""

WINDOWS = ((None,), (None,), (None, 6), (5, None), (None, 3, 9), (6,), (4, 9))
"""Of KV groups, in tokens; None: all are seen."""

SEQS = st.integers(0, 5)
NUMBERS = st.integers(0, 1 << 16)


class SchedulerMachine(RuleBasedStateMachine):
    """A tiny pool: at least one sequence of the longest length, at most two."""

    DEPTH: int
    LATE = False
    MAKE = staticmethod(fake_engine)

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.policy = policy
        self.world: World

    @initialize(
        seed=NUMBERS,
        block_tokens=st.sampled_from((1, 2, 4, 4, 7)),
        longest=st.integers(8, 60),
        slack=st.sampled_from((1.0, 1.05, 1.05, 1.3, 2.0)),
        max_sequences=st.integers(1, 5),
        spare=st.sampled_from((0, 1, 5, 40)),
        cursed=st.booleans(),
        slots=st.sampled_from((None, 0.0, 0.1, 0.5, 1.0, 4.0, 4.0)),
        tenants=st.integers(1, 3),
        adapters=st.sampled_from((0, 0, 1, 1, 2, 3)),
        below=st.sampled_from(("", "disk", "near", "liar", "liar")),
        windows=st.sampled_from(WINDOWS),
    )
    def begin(
        self,
        seed,
        block_tokens,
        longest,
        slack,
        max_sequences,
        spare,
        cursed,
        slots,
        tenants,
        adapters,
        below,
        windows,
    ) -> None:
        blocks = int(-(-longest // block_tokens) * slack) * len(windows)
        self.damaged = False
        liar = Random(seed + 2) if below == "liar" else None
        self.world = World(
            SchedulerSettings(
                blocks=blocks,
                vocab_size=259,
                max_context=longest,
                block_tokens=block_tokens,
                max_step_tokens=max_sequences + spare,
                max_sequences=max_sequences,
                depth=self.DEPTH,
                watermark_blocks=seed % 3,
                lease_caps={b"tenant": seed % 4},
                policy=self.policy,
                patience=seed % 50,
                windows=windows,
            ),
            Random(seed),
            memory=None if slots is None else fake_memory(int(slots * blocks), block_tokens),
            disk=FakeDisk(Random(seed + 1), near=below == "near", liar=liar) if slots and below else None,
            late=self.LATE and seed % 3 == 0,
            make=self.MAKE,
            tenants=tenants,
            adapters=(adapters, adapters and adapters + seed % 3),
        )
        for name in NAMES[: self.world.adapters[1]]:
            self.world.load(name, name)
        self.tenants = tenants
        self.random = Random(seed)
        self.longest = longest
        self.cursed = cursed

    def _tokens(self, most: int, number: int) -> list[int]:
        """The beginning of one of three stories, so that prefixes are shared; sometimes more behind it."""
        random = Random(number)
        story = Random(number % 3)
        tokens = [story.randrange(200) for _ in range(random.randint(0, most))]
        if random.random() < 0.4:
            tokens += [random.randrange(200) for _ in range(random.randint(0, 4))]
        if self.cursed and random.random() < 0.08:
            tokens.append(random.choice((POISON, LAUNCH_BOMB, LATE_BOMB)))
        return tokens

    def _salt(self, number: int) -> bytes:
        """One of the tenants of this example."""
        return SALTS[number // 8 % self.tenants]

    def _path(self, number: int) -> str:
        """Of an adapter that may be loaded; often of none."""
        return ("", "", *NAMES)[number // 24 % (len(NAMES) + 2)] if self.world.adapters[0] else ""

    @rule(seq=SEQS, number=NUMBERS)
    def open(self, seq, number) -> None:
        tokens, path = self._tokens(self.longest, number), self._path(number)
        self.world.open(seq, tokens, self._salt(number), alone=number % 11 == 0, path=path)

    @precondition(lambda self: self.world.adapters[0])
    @rule(name=st.sampled_from(NAMES), path=st.sampled_from((*NAMES, NO_FOLDER)))
    def load(self, name, path) -> None:
        self.world.load(name, path)

    @precondition(lambda self: self.world.adapters[0])
    @rule(name=st.sampled_from(NAMES))
    def unload(self, name) -> None:
        self.world.unload(name)

    @rule(seq=SEQS, number=NUMBERS)
    def extend(self, seq, number) -> None:
        self.world.extend(seq, self._tokens(9, number), due=number % 3 == 0)

    @rule(seq=SEQS, number=NUMBERS)
    def truncate(self, seq, number) -> None:
        being = self.world.beings.get(seq)
        length = len(being.shadow.tokens) if being else 0
        late = being.epoch - 1 if being and number % 5 == 0 else None
        self.world.truncate(seq, max(0, length - number % (length + 2)), late)

    @rule(seq=SEQS, most=st.integers(1, 40), number=NUMBERS)
    def generate(self, seq, most, number) -> None:
        random = Random(number)
        self.world.generate(
            seq,
            most,
            stop_ids=tuple(random.sample(range(256), random.choice((0, 0, 8, 30)))),
            sampling=Sampling(temperature=number % 2, seed=number % 4),
            generated_from=random.choice((0, 0, 0, 3)),
            tokens=random.choice(([], self._tokens(9, number))),
        )

    @rule(seq=SEQS, most=st.integers(1, 40), parent=st.none() | SEQS, number=NUMBERS)
    def begin_turn(self, seq, most, parent, number) -> None:
        being = self.world.beings.get(parent)
        at = 0 if parent is None else number % (len(being.shadow.tokens) + 2 if being else 1)
        if parent is not None:
            opening = Opening(b"", False, parent, at, being.adapter if being else b"")
        else:
            adapter = self._path(number).encode()
            opening = Opening(self._salt(number), number % 11 == 0, adapter=adapter)
        self.world.generate(
            seq,
            most,
            sampling=Sampling(temperature=number % 2, seed=number % 4),
            tokens=self._tokens(self.longest, number),
            opening=opening,
        )

    @rule(seq=SEQS, number=NUMBERS)
    def stop(self, seq, number) -> None:
        being = self.world.beings.get(seq)
        length = len(being.shadow.tokens) if being else 0
        self.world.stop(seq, None if number % 2 else number % (length + 4) - 1)

    @rule(seq=SEQS, children=st.lists(SEQS, min_size=1, max_size=2), number=NUMBERS)
    def fork(self, seq, children, number) -> None:
        being = self.world.beings.get(seq)
        length = len(being.shadow.tokens) if being else 0
        self.world.fork(seq, children, None if number % 2 else number % (length + 2))

    @rule(seq=SEQS, number=NUMBERS)
    def lease(self, seq, number) -> None:
        random = Random(number)
        ttl = random.choice((None, 0, 0.5, 5.0, 60.0, 1e9, -1.0))
        returns_in = random.choice((None, 0.0, 0.2, 3.0, 30.0, 1e9, float("nan")))
        self.world.lease(seq, random.choice((None, 0, 1, 1, 8, -3, 99)), ttl, returns_in)

    @rule(seq=SEQS)
    def stage(self, seq) -> None:
        self.world.stage(seq)

    @rule(seq=SEQS, disk=st.booleans())
    def settle(self, seq, disk) -> None:
        self.world.settle(seq, disk=disk)

    @rule(seq=SEQS)
    def locate(self, seq) -> None:
        self.world.locate(seq)

    @rule(seq=SEQS, keep=st.booleans())
    def close(self, seq, keep) -> None:
        self.world.close(seq, keep_kv=keep)

    @precondition(lambda self: self.world.beings)
    @rule(number=NUMBERS)
    def evict(self, number) -> None:
        self.world.evict(sorted(self.world.beings)[number % len(self.world.beings)])

    @rule(steps=st.sampled_from((1, 1, 1, 2, 3, 5)))
    def step(self, steps) -> None:
        self.world.run(steps)

    @rule(number=NUMBERS, rounds=st.integers(1, 30))
    def crowd(self, number, rounds) -> None:
        """Turns on all sequences, new ones whenever one is over, for a while: where most steps are made."""
        random = Random(number)
        for seq in range(4):
            if seq not in self.world.beings:
                self.open(seq, random.randrange(1 << 16))
        for _ in range(rounds):
            for seq, being in list(self.world.beings.items()):
                if random.random() < 0.1:
                    self.lease(seq, random.randrange(1 << 16))
                if being.turn is None and random.random() < 0.3:
                    self.truncate(seq, random.randrange(1 << 16))
                    self.generate(seq, random.randint(1, 40), random.randrange(1 << 16))
            self.world.run(random.randint(1, 6))

    @rule()
    def rest(self) -> None:
        self.world.run()

    @precondition(lambda self: self.world.memory is not None)
    @rule()
    def die(self) -> None:
        """In the middle of whatever moves are in flight: the next engine has the slots, and nothing else."""
        self.world.restart()

    @precondition(lambda self: self.world.memory is not None and self.world.memory.slots)
    @rule(number=NUMBERS)
    def flip(self, number) -> None:
        """A bit of a record that is not being filled or read."""
        memory = self.world.memory
        slot = number % memory.slots
        if memory.state(slot) is SlotState.READY:
            self.damaged = True
            memory.payload(slot)[number % memory.block_bytes] ^= 1 << number % 8

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run()
        for seq in list(self.world.beings):
            self.world.close(seq)
        self.world.run()
        pool = self.world.scheduler.pool.statistics()
        assert pool["free"] + pool["cached"] == pool["blocks"], "blocks leak"
        figures = self.world.scheduler.statistics()
        assert not (figures["leases"] or figures["leased_blocks"] or figures["leased_records"])
        while self.world.following or self.world.loading or self.world.moving:
            self.world.step()
        memory, disk = self.world.memory, self.world.disk
        if memory is not None:
            filling = sum(memory.state(slot) is SlotState.FILLING for slot in range(memory.slots))
            assert filling == (0 if disk is None else disk.lent), "slots leak"
        if not self.damaged:
            assert not self.world.scheduler.statistics().get("host_damaged"), "a slot changed under its hash"


class LockStepMachine(SchedulerMachine):
    """One step at a time."""

    DEPTH = 1


class OverlapMachine(SchedulerMachine):
    """A step is planned while the one before it is in flight."""

    DEPTH = 2


class DraftingMachine(SchedulerMachine):
    """Tokens are guessed, rightly and wrongly: nothing else comes out."""

    DEPTH = 2
    MAKE = staticmethod(drafting_engine)


class DeviceMachine(OverlapMachine):
    """The same, by the real runner and mover on streams that run in any order that their events allow."""

    LATE = True
    MAKE = staticmethod(device_engine)

    @rule(call=st.integers(0, 200))
    def refuse(self, call) -> None:
        """One call of the next launch, if it makes so many: the step fails half way, and can be made again."""
        self.world.device.doomed = call


def _run(machine: type[SchedulerMachine], policy: str, examples: int) -> None:
    """About 150 steps an example: 11,000 for a policy by the three machines, three times as
    many in `make more`, 700,000 in `make slow`."""
    run_state_machine_as_test(
        lambda: machine(policy),
        settings=settings(
            max_examples=examples * FACTOR * (1 if FACTOR < 10 else 7),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(300 * FACTOR)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("machine", "examples"),
    [(LockStepMachine, 20), (OverlapMachine, 20), (DraftingMachine, 20), (DeviceMachine, 20)],
)
def test_any_verbs_in_any_order(machine, examples, policy) -> None:
    _run(machine, policy, examples)


@pytest.mark.timeout(300 * FACTOR)
def test_the_worst_of_policies() -> None:
    """Another order in each step: it keeps the bound that ageing gives it."""
    _run(OverlapMachine, "holdfast.tests.runtime.scheduler.shuffled:Shuffled", 15)
