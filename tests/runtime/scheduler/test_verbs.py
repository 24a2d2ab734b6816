"""Verbs: what each is refused for, that a refused one changes nothing, and what it costs."""

from __future__ import annotations

import math

import pytest

from holdfast.runtime.errors import fault_of
from holdfast.runtime.verbs import (
    AnyVerb,
    Close,
    Extend,
    Fork,
    Generate,
    Locate,
    Open,
    Opening,
    Refusal,
    Sampling,
    Stop,
    TokenLimits,
    Truncate,
    VerbReply,
)
from holdfast.tests.runtime.fakes import fake_engine
from holdfast.tests.runtime.worlds import VOCAB, world

GOOD = TokenLimits(5)


def refused(verb: AnyVerb) -> str:
    """The code an engine refuses with: of 9 tokens 0 is idle at epoch 0, 1 generates, 2 is empty."""
    engine, _ = fake_engine(world(max_context=20).settings)
    engine.apply(Open(1, 0, b"", list(range(9))))
    engine.apply(Open(2, 1, b"", list(range(9))))
    engine.apply(Open(3, 2, b"", []))
    engine.apply(Generate(4, 1, Sampling(), GOOD))
    before = engine.statistics()
    answer = engine.apply(verb)
    assert isinstance(answer, Refusal) and answer.request == verb.request and answer.message
    assert engine.statistics() == before, "a refused verb changed something"
    assert type(fault_of(answer.code, "")).code == answer.code
    return answer.code


@pytest.mark.parametrize(
    ("verb", "code"),
    [
        (Open(9, 0, b"", [1]), "sequence_exists"),
        (Open(9, 5, b"", [-1]), "length_invalid"),
        (Open(9, 5, b"", [VOCAB]), "length_invalid"),
        (Open(9, 5, b"", [1 << 63]), "length_invalid"),
        (Open(9, 5, b"", [1 << 64]), "length_invalid"),
        (Open(9, 5, b"", [1] * 21), "context_exceeded"),
        (Extend(9, 5, [1]), "sequence_unknown"),
        (Extend(9, 1, [1]), "sequence_busy"),
        (Extend(9, 0, [VOCAB]), "length_invalid"),
        (Extend(9, 0, [1] * 12), "context_exceeded"),
        (Truncate(9, 5, 1, 0), "sequence_unknown"),
        (Truncate(9, 0, 1, 1), "epoch_stale"),
        (Truncate(9, 0, 10, 0), "length_invalid"),
        (Truncate(9, 0, -1, 0), "length_invalid"),
        (Generate(9, 5, Sampling(), GOOD), "sequence_unknown"),
        (Generate(9, 1, Sampling(), GOOD), "sequence_busy"),
        (Generate(9, 2, Sampling(), GOOD), "length_invalid"),
        (Generate(9, 0, Sampling(temperature=-0.1), GOOD), "sampling_invalid"),
        (Generate(9, 0, Sampling(temperature=math.nan), GOOD), "sampling_invalid"),
        (Generate(9, 0, Sampling(temperature=math.inf), GOOD), "sampling_invalid"),
        (Generate(9, 0, Sampling(top_p=0.0), GOOD), "sampling_invalid"),
        (Generate(9, 0, Sampling(top_p=math.nan), GOOD), "sampling_invalid"),
        (Generate(9, 0, Sampling(top_p=1.1), GOOD), "sampling_invalid"),
        (Generate(9, 0, Sampling(top_k=-1), GOOD), "sampling_invalid"),
        (Generate(9, 0, Sampling(), TokenLimits(0)), "sampling_invalid"),
        (Generate(9, 0, Sampling(), GOOD, 5), "sampling_invalid"),
        (Generate(9, 0, Sampling(), GOOD, -1), "sampling_invalid"),
        (Generate(9, 0, Sampling(), GOOD, 0, [VOCAB]), "length_invalid"),
        (Generate(9, 0, Sampling(), GOOD, 0, [1], Opening()), "sequence_exists"),
        (Generate(9, 5, Sampling(), GOOD, 0, [], Opening()), "length_invalid"),
        (Generate(9, 5, Sampling(), GOOD, 0, [VOCAB], Opening()), "length_invalid"),
        (Generate(9, 5, Sampling(), GOOD, 0, [1] * 20, Opening()), "context_exceeded"),
        (Generate(9, 5, Sampling(), TokenLimits(0), 0, [1], Opening()), "sampling_invalid"),
        (Generate(9, 5, Sampling(), GOOD, 0, [1], Opening(parent=7)), "sequence_unknown"),
        (Generate(9, 5, Sampling(), GOOD, 0, [1], Opening(parent=0, at=10)), "length_invalid"),
        (Generate(9, 5, Sampling(), GOOD, 0, [1] * 11, Opening(parent=0, at=9)), "context_exceeded"),
        (Generate(9, 0, Sampling(), GOOD, 0, [1] * 11), "context_exceeded"),
        (Generate(9, 1, Sampling(), GOOD, 0, [1]), "sequence_busy"),
        (Stop(9, 5), "sequence_unknown"),
        (Stop(9, 1, -1), "length_invalid"),
        (Fork(9, 5, [6]), "sequence_unknown"),
        (Fork(9, 0, [6, 6]), "sequence_exists"),
        (Fork(9, 0, [6, 1]), "sequence_exists"),
        (Fork(9, 0, [0]), "sequence_exists"),
        (Fork(9, 0, [6], 10), "length_invalid"),
        (Fork(9, 0, [6], -1), "length_invalid"),
        (Close(9, 5), "sequence_unknown"),
        (Locate(9, 5), "sequence_unknown"),
        (Locate(9, None, b"", [VOCAB]), "length_invalid"),
        (Locate(9, None, b"", [1] * 21), "context_exceeded"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_refusals(verb: AnyVerb, code: str) -> None:
    assert refused(verb) == code


def test_a_full_context_cannot_generate() -> None:
    here = world(max_context=8)
    here.open(0, [1] * 8)
    here.generate(0, 1)
    here.truncate(0, 7)
    here.reply(0, 1)


def test_tokens_that_come_with_a_generation_are_computed_by_the_step_that_samples() -> None:
    here = world(depth=1, max_step_tokens=16)
    here.open(0, [1, 2, 3])
    here.run()
    before = here.steps
    here.generate(0, 1, tokens=[4, 5, 6, 7])
    here.run()
    assert here.steps == before + 1 and here.ended[0].length == 8
    here.open(1, [])
    here.generate(1, 1, tokens=[9])
    here.run()
    assert here.ended[1].length == 2


def test_only_so_many_sequences_may_be_open() -> None:
    engine, _ = fake_engine(world(max_open=3).settings)
    engine.apply(Open(1, 0, b"", [1]))
    for verb in (Fork(2, 0, [1, 2, 3]), Fork(3, 0, [1, 2]), Open(4, 9, b"", [1])):
        answer = engine.apply(verb)
        expected = VerbReply if verb.request == 3 else Refusal
        assert isinstance(answer, expected)
    assert isinstance(answer, Refusal) and answer.code == "engine_overloaded"
    engine.apply(Close(5, 1))
    assert isinstance(engine.apply(Open(6, 9, b"", [1])), VerbReply)


@pytest.mark.parametrize("wait", [0, 1, 2, 5])
def test_truncation_ends_a_running_turn(wait: int) -> None:
    here = world()
    here.open(0, list(range(9)))
    here.generate(0, 20)
    here.run(wait)
    here.truncate(0, 4)
    assert here.engine.statistics()["running"] == here.engine.statistics()["waiting"] == 0
    here.reply(0, 3)


@pytest.mark.parametrize("verb", ["generate", "stop", "truncate"])
def test_three_verbs_raise_the_epoch(verb: str) -> None:
    here = world()
    here.open(0, [1, 2, 3])
    here.extend(0, [4])
    here.fork(0, [1])
    assert here.state(0).epoch == 0
    if verb == "generate":
        here.reply(0, 1)
    elif verb == "stop":
        here.stop(0)
    else:
        here.truncate(0, 2)
    assert here.state(0).epoch == 1


def test_closing_without_keeping_leaves_nothing_to_be_found() -> None:
    for keep in (True, False):
        here = world()
        here.open(0, list(range(9)))
        here.run()
        here.close(0, keep_kv=keep)
        here.open(1, list(range(9)))
        assert here.state(1).computed == (8 if keep else 0)
