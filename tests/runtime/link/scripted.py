"""An engine for the link's own tests: a token is its position, a step gives each running turn one.

It keeps the link's contract (epochs, refusals, one row a step) and nothing else: no blocks, no scheduler.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from holdfast.runtime.errors import EpochStale, SequenceBusy, SequenceUnknown, VerbRefused
from holdfast.runtime.link.engine_end import LoadedEngine
from holdfast.runtime.link.messages import Hello
from holdfast.runtime.verbs import (
    AnyVerb,
    Close,
    Extend,
    Finish,
    Fork,
    Generate,
    Open,
    Refusal,
    Row,
    SequenceState,
    Statistics,
    Step,
    Stop,
    Truncate,
    VerbReply,
    Work,
)

HELLO = Hello("scripted", "none", "none", 1 << 20, (0,), 1 << 20, 16, 64, 16, 0)


@dataclass
class HeldSequence:
    length: int
    epoch: int = 0
    until: int | None = None  # the length at which the turn ends

    def state(self, seq: int) -> SequenceState:
        return SequenceState(seq, self.length, self.length, self.epoch)


@dataclass
class Scripted:
    """``gate``: steps wait for it. ``broken``: the next step raises."""

    gate: threading.Event = field(default_factory=threading.Event)
    held: dict[int, HeldSequence] = field(default_factory=dict)
    steps: int = 0
    broken: Exception | None = None
    verbs: list[AnyVerb] = field(default_factory=list)
    wide: int = 1  # tokens in a row

    def loaded(self, *_: object) -> LoadedEngine:
        return LoadedEngine(self, HELLO)

    def apply(self, verb: AnyVerb) -> VerbReply | Refusal:
        self.verbs.append(verb)
        try:
            return self._apply(verb)
        except VerbRefused as fault:
            return Refusal(verb.request, fault.code, fault.message)

    def _of(self, seq: int) -> HeldSequence:
        if seq not in self.held:
            raise SequenceUnknown(f"no sequence {seq}")
        return self.held[seq]

    def _apply(self, verb: AnyVerb) -> VerbReply:
        match verb:
            case Statistics():
                return VerbReply(verb.request, statistics={"steps": self.steps})
            case Open():
                self.held[verb.seq] = HeldSequence(len(verb.tokens))
            case Close():
                self._of(verb.seq)
                del self.held[verb.seq]
                return VerbReply(verb.request)
            case Extend():
                held = self._of(verb.seq)
                if held.until is not None:
                    raise SequenceBusy("it generates")
                held.length += len(verb.tokens)
            case Truncate():
                held = self._of(verb.seq)
                if held.epoch != verb.expect_epoch:
                    raise EpochStale(f"epoch is {held.epoch}")
                held.length, held.until, held.epoch = verb.length, None, held.epoch + 1
            case Generate():
                held = self._of(verb.seq)
                if held.until is not None:
                    raise SequenceBusy("it generates")
                held.until, held.epoch = held.length + verb.limits.max_tokens, held.epoch + 1
            case Stop():
                held = self._of(verb.seq)
                held.until, held.epoch = None, held.epoch + 1
                held.length = held.length if verb.keep is None else min(held.length, verb.keep)
            case Fork():
                parent = self._of(verb.seq)
                for child in verb.children:
                    self.held[child] = HeldSequence(parent.length if verb.at is None else verb.at)
        return VerbReply(verb.request, self.held[verb.seq].state(verb.seq))

    def step(self) -> Step | None:
        running = {seq: held for seq, held in self.held.items() if held.until is not None}
        if not running:
            return None
        self.gate.wait()
        if self.broken is not None:
            raise self.broken
        self.steps += 1
        return Step(self.steps, [self._row(seq, held) for seq, held in running.items()])

    def _row(self, seq: int, held: HeldSequence) -> Row:
        assert held.until is not None
        tokens = list(range(held.length, min(held.until, held.length + self.wide)))
        held.length += len(tokens)
        if held.length < held.until:
            return Row(seq, held.epoch, tokens, held.length)
        held.until = None
        return Row(seq, held.epoch, tokens, held.length, Finish.LENGTH, Work(0, 0, 0, len(tokens)))


def flowing(**settings: object) -> Scripted:
    """An engine that does not wait before its steps."""
    engine = Scripted(**settings)  # type: ignore[arg-type]
    engine.gate.set()
    return engine
