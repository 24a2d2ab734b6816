"""An engine on the fake device, beside a model of what it must say: plain lists, one per sequence.

Every verb's answer is foretold (state or refusal), every token, every ending, and by which step a turn must
have ended. Used by the state machine and by tests that tell one story.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from holdfast.kvstore.slots import SlotMemory
from holdfast.runtime.link.messages import (
    AnyVerb,
    Close,
    Extend,
    Finish,
    Fork,
    Generate,
    Limits,
    Open,
    Refusal,
    Reply,
    Row,
    Sampling,
    State,
    Step,
    Stop,
    Truncate,
)
from holdfast.runtime.settings import SchedulerSettings
from holdfast.tests.runtime.fakes import GREEDY, FakeDisk, Shadow, fake_engine, fake_memory

DRAWN = 256
"""Tokens the fake device samples are below this; the three that fail are above."""

POISON, LAUNCH_BOMB, LATE_BOMB = DRAWN, DRAWN + 1, DRAWN + 2
VOCAB = DRAWN + 3


@dataclass
class Turn:
    """What a generation must do. ``deadline``: the step by which it has ended."""

    sampling: Sampling
    limits: Limits
    generated_from: int
    prompt: int
    deadline: int
    sampled: int = 0


@dataclass
class Being:
    """What a sequence must be. ``cut``: it was truncated since its last turn. ``alone``: until it samples."""

    shadow: Shadow
    epoch: int = 0
    turn: Turn | None = None
    cut: bool = False
    alone: bool = False

    @property
    def cursed(self) -> bool:
        return any(token >= DRAWN for token in self.shadow.tokens)


def world(*, late: bool = False, slots: int | None = None, **numbers: int) -> World:
    """A small world in overlapped steps, unless said otherwise; with a host tier of ``slots`` slots."""
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
    return World(settings, late=late, memory=memory)


@dataclass
class World:
    """Engine, device (``chance``, ``late``: as in `FakeRunner`), model. ``ended``: last rows by sequence."""

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
    ledger: dict[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Another engine, which finds of this one nothing but its host tier."""
        self.beings.clear()
        self.turns.clear()
        self.steps = self.isolations = 0
        self.engine, self.device = fake_engine(
            self.settings,
            chance=self.chance,
            memory=self.memory,
            disk=self.disk,
            late=self.late,
            ledger=self.ledger,
            vocab_size=DRAWN,
            poison=frozenset({POISON}),
            launch_bombs=frozenset({LAUNCH_BOMB}),
            late_bombs=frozenset({LATE_BOMB}),
        )
        self.scheduler = self.engine.scheduler
        preempt = self._roster.preempt
        vars(self._roster)["preempt"] = lambda: (self._check_victims(), preempt())[1]

    # --- verbs ------------------------------------------------------------------------------------------

    def open(self, seq: int, tokens: list[int], salt: bytes = b"", alone: bool = False) -> None:
        refusal = None
        if seq in self.beings:
            refusal = "sequence_exists"
        elif len(tokens) > self.settings.max_context:
            refusal = "context_exceeded"
        if self._apply(Open(self._next(), seq, salt, tokens, alone), refusal):
            self.beings[seq] = Being(Shadow(tokens, DRAWN), alone=alone)
            self._check_state(seq)

    def extend(self, seq: int, tokens: list[int]) -> None:
        being = self.beings.get(seq)
        refusal = self._busy(being)
        if being is not None and not refusal:
            total = len(being.shadow.tokens) + len(tokens)
            refusal = "context_exceeded" if total > self.settings.max_context else None
        if self._apply(Extend(self._next(), seq, tokens), refusal) and being is not None:
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
        if self._apply(Truncate(self._next(), seq, length, expected), refusal) and being is not None:
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
    ) -> None:
        being = self.beings.get(seq)
        refusal = self._busy(being)
        if being is not None and not refusal:
            length = len(being.shadow.tokens)
            if not length:
                refusal = "length_invalid"
            elif max_tokens <= generated_from:
                refusal = "sampling_invalid"
            elif length >= self.settings.max_context:
                refusal = "context_exceeded"
        limits = Limits(max_tokens, stop_ids)
        if self._apply(Generate(self._next(), seq, sampling, limits, generated_from), refusal):
            assert being is not None
            being.epoch += 1
            prompt = len(being.shadow.tokens)
            before = [turn.deadline for other in self.turns if (turn := self.beings[other].turn)]
            deadline = max([self.steps, *before]) + self.settings.most_steps(prompt, max_tokens)
            being.turn = Turn(sampling, limits, generated_from, prompt, deadline)
            if seq not in self._roster.fetching:
                self.turns.append(seq)
            if being.alone:  # it goes before those that are older, and nobody beside it
                for other in self.turns:
                    delayed = self.beings[other].turn
                    assert delayed is not None
                    delayed.deadline += self.settings.most_steps(prompt, 1)
            self._check_state(seq)

    def stop(self, seq: int) -> None:
        if self._apply(Stop(self._next(), seq), None if seq in self.beings else "sequence_unknown"):
            self._halt(seq)
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
        if self._apply(Fork(self._next(), seq, children, at), refusal) and being is not None:
            length = len(being.shadow.tokens) if at is None else at
            for child in children:
                self.beings[child] = Being(being.shadow.copy(length), cut=True)
            self._check_state(seq)

    def close(self, seq: int, *, keep_kv: bool = True) -> None:
        refusal = None if seq in self.beings else "sequence_unknown"
        if self._apply(Close(self._next(), seq, keep_kv), refusal):
            if seq in self.turns:
                self.turns.remove(seq)
            del self.beings[seq]

    def evict(self, seq: int) -> None:
        """Forced preemption: who must compute again, and who waits for it, may take longer."""
        self.scheduler.evict(seq)
        being = self.beings[seq]
        if being.turn is not None and seq in self.turns:
            again = self.settings.most_steps(len(being.shadow.tokens), 0)
            for other in self.turns[self.turns.index(seq) :]:
                turn = self.beings[other].turn
                assert turn is not None
                turn.deadline += again

    def state(self, seq: int) -> State:
        """What the engine holds of a sequence."""
        return self._roster[seq].state

    # --- steps ------------------------------------------------------------------------------------------

    def step(self) -> Step | None:
        """One step, everything about it checked."""
        oldest = self.turns[0] if self.turns else None
        before = self._progress(oldest)
        waited = [
            seq for seq, being in self.beings.items() if being.turn is not None and seq not in self.turns
        ]
        step = self.engine.step()
        self._let_in(waited)
        if step is None:
            assert not self.turns, "a turn is open and nothing runs"
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
            self._check_row(row)
        if oldest is not None and oldest in self.turns and not isolated:
            assert self._progress(oldest) >= before, "the oldest turn lost ground"
        for seq in self.turns:
            turn = self.beings[seq].turn
            assert turn is not None and self.steps < turn.deadline, "a turn runs beyond its bound"
        assert [sequence.id for sequence in self._roster.turns()] == self.turns, "turns out of order"
        return step

    def run(self, steps: int = 1_000_000) -> None:
        """Steps until idle, at most ``steps``."""
        for _ in range(steps):
            if self.step() is None and not self._roster.fetching:
                return

    def _check_victims(self) -> None:
        """A running turn gives way only when nothing that does not run holds a block."""
        assert not self._roster.holders, "an idle sequence holds blocks while a running turn gives way"
        assert not any(len(waiting.table) for waiting in self._roster.waiting), "and a turn that waits"

    def _let_in(self, waited: list[int]) -> None:
        """Turns whose KV has come from disk, or will not, are as old as that."""
        order = self._order()
        arrived = [seq for seq in waited if seq not in self._roster.fetching]
        arrived.sort(key=lambda seq: order.index(seq) if seq in order else -1)  # else it is over already
        for seq in arrived:
            turn = self.beings[seq].turn
            assert turn is not None
            before = [other.deadline for name in self.turns if (other := self.beings[name].turn)]
            left = self.settings.most_steps(len(self.beings[seq].shadow.tokens), turn.limits.max_tokens)
            turn.deadline = max([self.steps, *before]) + left
            self.turns.append(seq)

    def _order(self) -> list[int]:
        return [sequence.id for sequence in self._roster.turns()]

    def reply(self, seq: int, max_tokens: int, **turn: object) -> list[int]:
        """A turn from beginning to end: what it sampled."""
        before = len(self.beings[seq].shadow.tokens)
        self.generate(seq, max_tokens, **turn)  # type: ignore[arg-type]
        while self.beings[seq].turn is not None:
            self.step()
        return self.beings[seq].shadow.tokens[before:]

    @property
    def _roster(self):
        return self.scheduler._roster

    def _progress(self, seq: int | None) -> tuple[bool, int]:
        """Whether a turn runs, and how many full blocks of it are computed."""
        if seq is None:
            return False, 0
        sequence = self._roster[seq]
        return seq in self._roster.running, sequence.computed // self.settings.block_tokens

    def _check_row(self, row: Row) -> None:
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

    def _next(self) -> int:
        self.request += 1
        return self.request

    def _busy(self, being: Being | None) -> str | None:
        if being is None:
            return "sequence_unknown"
        return "sequence_busy" if being.turn is not None else None

    def _apply(self, verb: AnyVerb, refusal: str | None) -> bool:
        answer = self.engine.apply(verb)
        assert answer.request == verb.request
        if refusal is not None:
            assert isinstance(answer, Refusal) and answer.code == refusal, answer
            return False
        assert isinstance(answer, Reply), answer
        self._state = answer.state
        return True

    def _check_state(self, seq: int) -> None:
        being = self.beings[seq]
        state = self._state
        assert isinstance(state, State)
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
