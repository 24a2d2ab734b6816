"""The engine: faults that end only their culprit, verbs answered, idle audits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.kvstore.errors import LeakFound
from holdfast.runtime.engine import MOST_LOST_STEPS, PREPARE_SECONDS, Engine
from holdfast.runtime.errors import EngineDied
from holdfast.runtime.plan import Handle, Plan
from holdfast.runtime.verbs import Finish, Generate, Open, Sampling, Statistics, TokenLimits, VerbReply
from holdfast.tests.runtime.fake_device import device_engine
from holdfast.tests.runtime.fakes import fake_engine, fake_memory
from holdfast.tests.runtime.worlds import LATE_BOMB, LAUNCH_BOMB, POISON, world

STORY = list(range(30, 78))
FAILURES = pytest.mark.parametrize("token", [POISON, LAUNCH_BOMB, LATE_BOMB], ids=["row", "launch", "late"])


@FAILURES
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failure_ends_only_its_own_sequence(depth: int, token: int) -> None:
    here = world(depth=depth, blocks=40, max_sequences=5)
    for seq in range(4):
        here.open(seq, STORY[seq : seq + 3])
        here.generate(seq, 15)
    here.run(3)
    here.open(4, [*STORY[:5], token, 9])
    here.generate(4, 15)
    here.run()
    assert {seq: row.finish for seq, row in here.ended.items()} == {
        **dict.fromkeys(range(4), Finish.LENGTH),
        4: Finish.ERROR,
    }
    assert here.ended[4].error
    assert here.engine.statistics()["isolations"] == (0 if token == POISON else 1)
    here.truncate(4, 5)
    here.reply(4, 3)  # without what failed it goes on


@FAILURES
def test_an_idle_sequence_that_fails_meets_its_error_in_its_turn(token: int) -> None:
    here = world()
    here.open(0, STORY[:3])
    here.generate(0, 12)
    here.step()
    here.open(1, [*STORY[:5], token, 9])
    here.run()
    assert here.ended[0].finish is Finish.LENGTH
    assert 1 not in here.ended
    here.generate(1, 3)
    here.run()
    assert here.ended[1].finish is Finish.ERROR


@pytest.mark.parametrize("make", [fake_engine, device_engine])
def test_poison_in_a_chunk_that_samples_nothing_ends_the_turn(make) -> None:
    here = world(max_step_tokens=4, max_sequences=1, make=make)
    here.open(0, [*STORY[:2], POISON, *STORY[3:8]])
    here.generate(0, 3)
    here.run()
    assert here.ended[0].finish is Finish.ERROR
    here.open(1, [*STORY[:2], POISON, *STORY[3:8]])  # the first block is found by its key
    here.generate(1, 3)
    here.run()
    assert here.ended[1].finish is Finish.ERROR
    here.truncate(0, 2)
    here.reply(0, 3)  # what stands before the poison is sound


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_without_memory_ends_only_what_does_not_fit_alone(depth: int) -> None:
    """Sequences that fit one at a time go on; the error of one that does not says what to lower."""
    engine, device = device_engine(
        world(depth=depth).settings,
        chance=None,
        memory=None,
        disk=None,
        clock=lambda: 0.0,
        vocab_size=300,
    )
    runner = engine._runner

    class Small:
        def launch(self, plan: Plan) -> Handle:
            device.doomed = 0 if plan.size > 4 else None  # the first call of this launch
            return runner.launch(plan)

    engine = Engine(engine.scheduler, Small())
    ended = {}
    for seq, length in enumerate((3, 4, 8)):
        engine.apply(Open(seq, seq, b"", STORY[10 * seq :][:length]))
        engine.apply(Generate(seq, seq, Sampling(), TokenLimits(3)))
    while (step := engine.step()) is not None:
        ended |= {row.seq: row for row in step.rows if row.finish is not None}
    assert [ended[seq].finish for seq in range(3)] == [Finish.LENGTH, Finish.LENGTH, Finish.ERROR]
    assert "out of memory" in ended[2].error and "--max-step-tokens" in ended[2].error
    assert engine.statistics()["isolations"] > 0


def test_several_culprits_in_one_step() -> None:
    here = world(max_step_tokens=64)
    for seq, token in enumerate((9, LAUNCH_BOMB, POISON, LATE_BOMB)):
        here.open(seq, [seq, token, 5])
        here.generate(seq, 6)
    here.run()
    assert [here.ended[seq].finish for seq in range(4)] == [Finish.LENGTH] + [Finish.ERROR] * 3


class _DeadDevice:
    """Raises at every launch: an error of its own, or the one that says the device is gone."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def launch(self, plan: Plan) -> Handle:
        raise self.error


def _engine_on(device: _DeadDevice) -> Engine:
    engine, _ = fake_engine(world().settings)
    engine = Engine(engine.scheduler, device, debug=True)
    engine.apply(Open(1, 0, b"", STORY[:5]))
    return engine


def test_a_device_that_computes_nothing_is_given_up() -> None:
    engine = _engine_on(_DeadDevice(RuntimeError("no device")))
    for request in range(MOST_LOST_STEPS - 1):
        engine.apply(Generate(request, 0, Sampling(), TokenLimits(5)))
        step = engine.step()
        assert step is not None and [row.finish for row in step.rows] == [Finish.ERROR]
    engine.apply(Generate(99, 0, Sampling(), TokenLimits(5)))
    with pytest.raises(EngineDied, match="no device"):
        engine.step()


def test_a_runner_that_lost_its_device_ends_the_engine_at_once() -> None:
    engine = _engine_on(_DeadDevice(EngineDied("device lost")))
    engine.apply(Generate(2, 0, Sampling(), TokenLimits(5)))
    with pytest.raises(EngineDied, match="device lost"):
        engine.step()


def test_statistics_is_a_verb() -> None:
    engine, _ = fake_engine(world().settings)
    answer = engine.apply(Statistics(7))
    assert isinstance(answer, VerbReply) and answer.request == 7 and answer.statistics == engine.statistics()


def test_an_engine_knows_when_it_is_idle() -> None:
    engine, _ = fake_engine(world().settings)
    assert engine.idle
    engine.apply(Open(1, 0, b"", STORY[:5]))
    assert not engine.idle
    assert engine.step() is not None
    assert engine.step() is None and engine.idle


def test_an_idle_engine_prepares_what_it_will_fill_and_then_rests() -> None:
    engine, _ = fake_engine(world().settings, memory=fake_memory(20, 4))
    for _ in range(3):  # one in eight
        assert engine.step() is None and engine.idle and engine.due() == PREPARE_SECONDS
    assert engine.step() is None and engine.due() is None


@pytest.mark.parametrize("debug", [True, False])
def test_an_idle_engine_audits_itself(debug: bool) -> None:
    engine, device = fake_engine(replace(world().settings, depth=1))
    engine = Engine(engine.scheduler, device, debug=debug)
    engine.scheduler.pool.allocate(1, "leak")
    if debug:
        with pytest.raises(LeakFound):
            engine.step()
    else:
        assert engine.step() is None
        while engine.due() is not None:  # a slice at each step
            assert engine.step() is None
    assert engine.statistics()["leaks"] == 1


def test_an_audit_that_a_verb_interrupts_finds_no_leak() -> None:
    engine, device = fake_engine(replace(world().settings, depth=1, max_context=16))
    engine = Engine(engine.scheduler, device)
    for seq in range(40):  # a turn in each
        engine.step()
        assert isinstance(engine.apply(Open(seq, seq, b"", STORY[:8])), VerbReply)
        for _ in range(seq % 7):
            engine.step()
    while engine.step() is not None or engine.due() is not None:
        continue
    assert engine.statistics()["leaks"] == 0


def test_the_clock_is_virtual() -> None:
    here = world(depth=1, max_step_tokens=8)
    here.open(0, STORY[:16])
    here.reply(0, 4)
    assert here.device.clock == pytest.approx(5 * here.device.step_time + 19 * here.device.token_time)
