"""Turns with a grammar through the scheduler, on the fake device: waiting, following, ending, coming back."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from msgspec.structs import replace

from holdfast.runtime.grammar.queue import COMPILE_SECONDS, MOST_WAITING
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import (
    AnyVerb,
    Close,
    Extend,
    Finish,
    Fork,
    Generate,
    Locate,
    Open,
    Refusal,
    Row,
    Sampling,
    SequenceState,
    Statistics,
    Stop,
    TokenLimits,
    VerbReply,
)
from holdfast.tests.runtime.fake_grammars import FakeCompiler, grammar
from holdfast.tests.runtime.fakes import fake_engine

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
PROMPT = list(range(30, 41))
END = 7


@dataclass
class Stage:
    """An engine, its compiler, its clock; ``rows`` of each sequence."""

    depth: int = 2
    blocks: int = 32
    slow: bool = False
    compiled: bool = True
    now: float = 0.0
    rows: dict[int, list[Row]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.compiler = FakeCompiler(slow=self.slow)
        settings = SchedulerSettings(
            blocks=self.blocks, vocab_size=256, max_context=48, block_tokens=4, max_step_tokens=8,
            max_sequences=4, depth=self.depth,
        )  # fmt: skip
        self.engine, self.device = fake_engine(
            settings, clock=lambda: self.now, compiler=self.compiler if self.compiled else None
        )

    def apply(self, verb: AnyVerb) -> SequenceState:
        answer = self.engine.apply(verb)
        assert isinstance(answer, VerbReply), answer
        return answer.state or SequenceState(0, 0, 0, 0)

    def begin(
        self,
        seq: int,
        text: str | None,
        most: int = 12,
        said: tuple[int, ...] = (),
        least: int = 0,
        gather: int = 1,
    ):
        if isinstance(self.engine.apply(Locate(0, seq)), Refusal):
            self.apply(Open(0, seq, b"", [*PROMPT, seq, *said]))
        sampling = Sampling(grammar=None if text is None else grammar(text))
        return self.engine.apply(
            Generate(0, seq, sampling, TokenLimits(most, (END,), least, gather), len(said))
        )

    def run(self, steps: int = 200) -> None:
        for _ in range(steps):
            step = self.engine.step()
            for row in step.rows if step else ():
                self.rows.setdefault(row.seq, []).append(row)
            if step is None:
                return

    def said(self, seq: int) -> list[int]:
        return [token for row in self.rows.get(seq, ()) for token in row.tokens]

    def end(self, seq: int) -> Row:
        return self.rows[seq][-1]


@DEPTHS
def test_a_reply_follows_its_grammar_and_ends_where_nothing_may_follow(depth: int) -> None:
    here = Stage(depth)
    here.begin(0, "5 4")
    here.begin(1, None)
    here.run()
    assert [token % 5 for token in here.said(0)] == [0, 1, 2, 3]
    assert here.end(0).finish is Finish.STOP and here.end(1).finish is Finish.LENGTH
    assert here.compiler.matchers[0].taken == here.said(0)
    assert len(here.said(1)) == 12 and [token % 5 for token in here.said(1)][:4] != [0, 1, 2, 3], (
        "no other turn is bound"
    )


def test_a_turn_with_a_grammar_sits_out_no_step() -> None:
    """Its row is in flight before it is known what the row before has drawn."""
    here = Stage(depth=2)
    here.device.keep_plans = True
    here.begin(0, "5 12")
    here.begin(1, None)
    here.run()
    rows = [set(plan.seqs[plan.draws].tolist()) for plan in here.device.plans]
    assert rows.count({0, 1}) >= 10


@pytest.mark.parametrize("text", ["5 12", "3 9 4 1", "5 20 3", "4 30 7 2", "2", "1 1", "6 11 2"])
def test_steps_in_flight_change_no_reply(text: str) -> None:
    """Also where the grammar forces tokens instead of what a step in flight is drawing."""
    told = []
    for depth in (1, 2):
        here = Stage(depth)
        here.begin(0, text, most=25)
        here.begin(1, None)
        here.begin(2, text, most=3)
        here.run()
        told.append([(here.said(seq), here.end(seq).finish, here.end(seq).length) for seq in range(3)])
        assert not here.engine.statistics()["leaks"]
    assert told[0] == told[1]


@pytest.mark.parametrize("seed", range(12))
def test_any_company_and_steps_in_flight_change_no_reply(seed: int) -> None:
    """Turns with and without grammars, in blocks that are too few for all of them at once."""
    random, told = Random(seed), []
    texts = [random.choice((None, "5 12", "3 9 4 1", "5 20 3", "4 30 7 2", "2", "6 11 2")) for _ in range(6)]
    asks = [(random.randint(3, 30), random.choice((0, 0, 4)), random.choice((1, 1, 5))) for _ in texts]
    for depth, blocks in ((1, 128), (2, 128), (1, 22), (2, 22)):
        here = Stage(depth, blocks)
        for seq, (text, (most, least, gather)) in enumerate(zip(texts, asks, strict=True)):
            here.begin(seq, text, most=most, least=least, gather=gather)
        here.run(2000)
        told.append([(here.said(seq), here.end(seq).finish, here.end(seq).length) for seq in range(6)])
        assert not here.engine.statistics()["leaks"]
    assert told[0] == told[1] == told[2] == told[3]


@DEPTHS
def test_what_must_come_last_is_computed_with_what_comes_next(depth: int) -> None:
    here = Stage(depth)
    here.begin(0, "5 9 4 1")  # three follow the last choice
    here.run()
    length = here.end(0).length
    pending, counters = here.end(0).work.pending, here.engine.scheduler.counters
    assert pending == 4 and here.end(0).finish is Finish.STOP
    assert counters.computed == length - pending, "no step for a few tokens that no turn waits for"
    steps = counters.steps
    here.engine.apply(Generate(0, 0, Sampling(), TokenLimits(1, (END,)), 0, [40, 41]))
    here.run()
    assert here.end(0).work.prefilled == pending + 2 and counters.computed == length + 2
    assert counters.steps - steps <= 2, "one step for both, and its moves"
    assert here.end(0).length == length + 3


@DEPTHS
@pytest.mark.parametrize(("gather", "told"), [(1, 9), (5, 2), (9, 1), (100, 1)])
def test_tokens_that_are_not_read_one_by_one_are_told_together(depth: int, gather: int, told: int) -> None:
    here, plain = Stage(depth), Stage(depth)
    for stage, together in ((plain, 1), (here, gather)):
        stage.begin(0, "5 20", most=9, gather=together)
        stage.begin(1, None)
        stage.run()
    assert here.said(0) == plain.said(0) and len(here.rows[0]) == told
    assert here.end(0) == replace(plain.end(0), tokens=here.end(0).tokens), (
        "the same end, and the same account"
    )
    assert len(here.rows[1]) == 12, "the other turn does not wait"


def test_what_a_sequence_has_said_and_not_told_is_its_own() -> None:
    here = Stage()
    here.begin(0, "5 20", gather=100)
    for _ in range(6):
        here.run(1)
    assert 0 not in here.rows
    kept = here.apply(Stop(0, 0)).length
    assert kept > len(PROMPT) + 1, "a stop keeps all that was sampled"
    here.begin(0, None, most=2)
    here.run()
    assert here.said(0) == here.said(0)[-2:] and here.end(0).length == kept + 2, "and no later turn tells it"


@DEPTHS
@pytest.mark.parametrize("text", ["5 9 3", "5 9 3 2", "6 9 9 8", "5 9 4 1"])
def test_what_must_come_is_said_without_being_drawn(depth: int, text: str) -> None:
    step, count, run, *first = map(int, text.split())
    here = Stage(depth)
    here.begin(0, text)
    here.begin(1, None)
    here.run()
    said, counters = here.said(0), here.engine.scheduler.counters
    chosen = {place for place in range(count) if not (place - (first or [0])[0]) % run}
    assert [token % step for token in said] == [place % step for place in range(count)]
    assert all(said[place] == place % step for place in range(count) if place not in chosen)
    assert counters.forced == count - len(chosen) and counters.sampled == len(chosen) + len(here.said(1))
    assert here.end(0).finish is Finish.STOP and here.end(0).work.decoded == count
    assert here.end(0).length == len(PROMPT) + 1 + count


def test_a_reply_without_any_choice_takes_no_step() -> None:
    here = Stage()
    here.begin(0, "9 4 9 8")
    here.run()
    assert [row.tokens for row in here.rows[0]] == [[0, 1, 2, 3]] and here.end(0).finish is Finish.STOP
    assert here.engine.scheduler.counters.sampled == 0


@DEPTHS
def test_an_end_token_comes_only_where_the_grammar_accepts(depth: int) -> None:
    here = Stage(depth)
    here.begin(0, "1", most=40)  # everything but the end, at first
    here.run()
    assert here.end(0).finish in (Finish.STOP, Finish.CONTEXT) and END not in here.said(0)[:-1]
    matcher = here.compiler.matchers[0]
    assert matcher.taken == [token for token in here.said(0) if token != END], "an end is none of its words"


@DEPTHS
def test_a_grammar_that_ends_first_goes_before_the_least_number_of_tokens(depth: int) -> None:
    here = Stage(depth)
    here.begin(0, "3 2", least=9)
    here.run()
    assert len(here.said(0)) == 2 and here.end(0).finish is Finish.STOP


def test_the_last_of_all_allowed_tokens_may_complete_it() -> None:
    here = Stage()
    here.begin(0, "3 6", most=6)
    here.begin(1, "3 7", most=6)
    here.run()
    assert (here.end(0).finish, here.end(1).finish) == (Finish.STOP, Finish.LENGTH)


@DEPTHS
def test_a_turn_waits_for_its_grammar_without_a_step_and_others_go_on(depth: int) -> None:
    here = Stage(depth, slow=True)
    here.begin(0, "5 4")
    here.begin(1, None, most=6)
    here.device.keep_plans = True
    here.run()
    assert here.end(1).finish is Finish.LENGTH and not here.said(0)
    assert all((plan.seqs == 1).all() for plan in here.device.plans)
    assert here.engine.due() is not None and here.engine.statistics()["compiling"] == 1
    here.compiler.finish()
    here.run()
    assert here.end(0).finish is Finish.STOP and here.engine.statistics()["compiling"] == 0


def test_what_is_not_compiled_in_time_ends_its_turn_with_an_error_and_its_sequence_stays() -> None:
    here = Stage(slow=True)
    here.begin(0, "5 4")
    here.run()
    here.now = COMPILE_SECONDS + 0.01
    here.run()
    assert (here.end(0).finish, here.end(0).code) == (Finish.ERROR, "grammar_invalid")
    assert here.end(0).work is not None and here.end(0).length == len(PROMPT) + 1
    here.compiler.finish()
    here.run()
    here.begin(0, None, most=3)
    here.run()
    assert here.end(0).finish is Finish.LENGTH, "and speaks again"


def test_loading_what_is_loaded_once_is_not_held_against_a_grammar() -> None:
    here = Stage(slow=True)
    here.compiler.warm = False
    here.begin(0, "5 4")
    here.now = 10 * COMPILE_SECONDS
    here.run()
    here.compiler.warm = True
    here.run()
    here.compiler.finish()
    here.run()
    assert here.end(0).finish is Finish.STOP


def test_what_cannot_be_compiled_is_told_as_that() -> None:
    here = Stage()
    here.begin(0, "nonsense")
    here.begin(1, "2 " + "0" * (256 << 10) + "1")
    here.run()
    for seq in (0, 1):
        assert (here.end(seq).finish, here.end(seq).code) == (Finish.ERROR, "grammar_invalid")
    assert [text for text, _ in here.compiler.asked] == ["nonsense"], "the other is too long to be looked at"


def test_only_so_many_wait() -> None:
    here = Stage(slow=True)
    for seq in range(MOST_WAITING + 1):
        here.apply(Open(0, seq, b"", [*PROMPT, seq]))
        here.begin(seq, "5 4")
    here.run()
    assert list(here.rows) == [MOST_WAITING] and here.end(MOST_WAITING).code == "grammar_invalid"


def test_without_a_compiler_a_grammar_is_refused_and_changes_nothing() -> None:
    here = Stage(compiled=False)
    answer = here.begin(0, "5 4")
    assert isinstance(answer, Refusal) and answer.code == "grammar_unavailable"
    assert "pip install '.[engine]'" in answer.message
    assert isinstance(here.begin(0, None, most=2), VerbReply)
    here.run()
    assert here.end(0).finish is Finish.LENGTH


@pytest.mark.parametrize("verb", [Stop(0, 0), Close(0, 0)])
def test_a_turn_that_is_given_up_while_it_waits_leaves_nothing(verb: AnyVerb) -> None:
    here = Stage(slow=True)
    here.begin(0, "5 4")
    here.apply(verb)
    here.compiler.finish()
    here.run()
    assert not here.rows and here.engine.statistics()["compiling"] == 0
    if isinstance(verb, Stop):
        here.apply(Extend(0, 0, [1, 2]))
        here.begin(0, None, most=2)
        here.run()
        assert here.end(0).finish is Finish.LENGTH


def test_the_grammar_of_a_turn_that_was_stopped_is_not_the_next_ones() -> None:
    here = Stage(slow=True)
    here.begin(0, "5 4")
    here.apply(Stop(0, 0))
    here.begin(0, "3 2")
    here.compiler.finish()
    here.run()
    assert [token % 3 for token in here.said(0)] == [0, 1] and here.end(0).finish is Finish.STOP


@DEPTHS
def test_a_preempted_reply_says_what_it_would_have_said(depth: int) -> None:
    def talk(blocks: int) -> tuple[Stage, list[list[int]]]:
        here = Stage(depth, blocks=blocks)
        for seq in range(4):
            here.begin(seq, f"{seq + 2} 20", most=30)
        here.run()
        return here, [here.said(seq) for seq in range(4)]

    roomy, calm = talk(80)
    tight, pressed = talk(16)
    assert roomy.engine.scheduler.counters.preempted == 0 < tight.engine.scheduler.counters.preempted
    assert calm == pressed and all(len(said) == 20 for said in calm)


@DEPTHS
def test_a_reply_begun_again_goes_on_from_what_was_said(depth: int) -> None:
    first = Stage(depth)
    first.begin(0, "5 9")
    first.run()
    whole = first.said(0)
    again = Stage(depth)
    again.begin(0, "5 9", said=tuple(whole[:4]))
    again.run()
    assert again.compiler.asked == [("5 9", whole[:4])]
    assert again.said(0) == whole[4:] and again.end(0).finish is Finish.STOP


def test_a_fork_in_mid_reply_goes_on_by_the_same_grammar() -> None:
    here = Stage(1)
    here.begin(0, "5 9")
    here.run(7)
    said = here.said(0)
    assert 0 < len(said) < 9
    here.apply(Fork(0, 0, [1]))
    sampling = Sampling(grammar=grammar("5 9"))
    here.apply(Generate(0, 1, sampling, TokenLimits(12, (END,)), len(said)))
    here.run()
    assert here.said(0) == said + here.said(1) and here.end(1).finish is Finish.STOP


def test_where_the_grammar_leaves_nothing_the_turn_ends_with_that_error() -> None:
    here = Stage()
    here.apply(Open(0, 0, b"", PROMPT))
    here.apply(
        Generate(0, 0, Sampling(grammar=grammar("3 0")), TokenLimits(12, ()))
    )  # complete, and no end to say
    here.run()
    assert (here.end(0).finish, here.end(0).code) == (Finish.ERROR, "grammar_stuck")


def test_statistics_tell_of_grammars() -> None:
    answer = Stage().engine.apply(Statistics(0))
    assert isinstance(answer, VerbReply) and answer.statistics is not None
    assert {"compiling", "grammars_kept"} <= set(answer.statistics)


# --- tenants ------------------------------------------------------------------------------------------------


def waits(here: Stage, seq: int, salt: bytes, text: str) -> None:
    """A turn of this tenant that waits for its grammar."""
    here.apply(Open(0, seq, salt, [*PROMPT, seq]))
    here.begin(seq, text)


def test_of_each_tenant_one_grammar_is_compiled_at_a_time() -> None:
    here = Stage(slow=True)
    for seq in range(10):
        waits(here, seq, b"flood", f"{seq + 2} 4")
    waits(here, 10, b"victim", "5 3")
    assert here.compiler.running == ["2 4", "5 3"]
    here.compiler.finish("5 3")
    here.run()
    assert here.end(10).finish is Finish.STOP, "it waited for none of the others"
    begun = []
    for _ in range(10):
        begun += here.compiler.running
        assert len(here.compiler.running) <= 1
        here.compiler.finish()
        here.run()
    assert begun == [f"{seq + 2} 4" for seq in range(10)], "in the order in which they came"


def test_tenants_take_turns_at_the_threads() -> None:
    here = Stage(slow=True)
    here.compiler.threads = 2
    for seq in range(6):
        waits(here, seq, b"one" if seq < 3 else b"two", f"{seq + 2} 4")
    waits(here, 6, b"three", "20 4")
    waits(here, 7, b"four", "21 4")
    order = []
    while here.compiler.running:
        assert len(here.compiler.running) <= 2
        order.append(here.compiler.running[0])
        here.compiler.finish(order[-1])
        here.run()
    assert order == ["2 4", "5 4", "20 4", "21 4", "3 4", "6 4", "4 4", "7 4"]


def test_a_grammar_that_is_compiled_already_waits_for_none() -> None:
    here = Stage(slow=True)
    waits(here, 0, b"flood", "5 4")
    here.compiler.finish()
    here.run()
    waits(here, 1, b"flood", "6 4")
    waits(here, 2, b"flood", "5 4")
    here.run()
    assert here.end(2).finish is Finish.STOP and here.compiler.running == ["6 4"]


def test_a_job_that_was_given_up_keeps_its_tenant_s_place_until_it_ends() -> None:
    here = Stage(slow=True)
    waits(here, 0, b"flood", "5 4")
    ((job, *_),) = here.compiler.jobs
    assert job.set_running_or_notify_cancel()  # a thread is at it: it cannot be stopped
    here.apply(Stop(0, 0))
    waits(here, 1, b"flood", "6 4")
    here.run()
    assert here.compiler.running == ["5 4"]
    here.compiler.finish()
    here.run()
    assert here.compiler.running == ["6 4"]


def test_one_tenant_s_waiting_turns_leave_others_room_to_wait() -> None:
    here = Stage(slow=True)
    for seq in range(MOST_WAITING + 1):
        waits(here, seq, b"flood", f"{seq + 2} 4")
    waits(here, MOST_WAITING + 1, b"victim", "5 3")
    here.compiler.finish("5 3")
    here.run()
    assert here.end(MOST_WAITING).code == "grammar_invalid"
    assert here.end(MOST_WAITING + 1).finish is Finish.STOP
