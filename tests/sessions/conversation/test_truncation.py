"""A full context: which turns leave it, what is told of them, and how edits treat what has left."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest

from holdfast.sessions.conversation.history import ROOT, History
from holdfast.sessions.conversation.items import (
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Preamble,
    Tool,
)
from holdfast.sessions.conversation.tree import Draft, Script, Segment, TurnReply
from holdfast.sessions.errors import CallUnknown, ItemInvalid, PromptTooLong
from holdfast.sessions.journal.replay import replay
from holdfast.sessions.session import ForkSummary, Session
from holdfast.sessions.settings import SessionSettings
from holdfast.sessions.text.renderer import SHARED, Renderer
from holdfast.sessions.token_ids import ids_of
from holdfast.sessions.turn.events import MissReason, ReplyDone, ReplyTextDelta
from holdfast.sessions.turn.fitting import PromptFit, older_turns, steps_of
from holdfast.sessions.turn.request import Truncation, TurnRequest

from ..scripted_link import ScriptedLink
from ..session_stage import END, LANGUAGE, ask, one_shot, prompts, read, reciting, run, say, session_on, toks
from ..test_verbs_machine import Kept

AUTO = Truncation()
CONTEXT = 300
WORDS = "one two three four five six seven"


def cutting(**more: object) -> TurnRequest:
    return TurnRequest.checked(**{"truncation": AUTO, "max_output_tokens": 20, **more})


async def turn(session: Session, text: str, **more: object) -> ReplyDone:
    say(session, text)
    return (await read(session, cutting(**more)))[1]


def inside(session: Session) -> list[str]:
    """The texts in the context."""
    segments = session.history.segments()
    items = [item for one in segments for item in (one.items if isinstance(one, TurnReply) else (one,))]
    return [item.text if isinstance(item, Message) else item.call_id for item in items]


async def full(
    context: int = CONTEXT, instructions: str = "", settings: SessionSettings | None = None
) -> tuple[ScriptedLink, Session, list[ReplyDone]]:
    """A session after the first turn that left something out of its context."""
    link = reciting(*["yes"] * 40, max_context=context)
    session = session_on(link, Preamble(instructions=instructions), settings)
    dones = [await turn(session, f"{number} {WORDS}") for number in range(1)]
    while dones[-1].left_out is None:
        dones.append(await turn(session, f"{len(dones)} {WORDS}"))
    return link, session, dones


def yes_to_all(tokens: list[int]) -> int:
    """The next token of "yes" or the end token, by the last tokens alone."""
    said = toks("yes")
    spoken = next((count for count in range(len(said), 0, -1) if tokens[-count:] == said[:count]), 0)
    return END if spoken == len(said) else said[spoken]


# --- which turns go -----------------------------------------------------------------------------------------


@run
async def test_the_oldest_turns_leave_a_full_context_and_their_ids_are_told() -> None:
    link, session, dones = await full(instructions="Be brief.")
    last = dones[-1]
    assert last.left_out is not None
    gone = len(last.left_out.items) // 2
    assert last.left_out.items == tuple(item.id for item in session.history.items()[: 2 * gone])
    kept = [
        (role, text)
        for n in range(gone, len(dones) - 1)
        for role, text in (("user", f"{n} {WORDS}"), ("assistant", "yes"))
    ]
    prompt = one_shot(*kept, ("user", f"{len(dones) - 1} {WORDS}"), system="Be brief.")
    assert prompts(link)[-1] == prompt
    before = dones[-2].usage
    whole = before.input_tokens + before.output_tokens + last.usage.new_tokens
    assert whole - SHARED <= last.left_out.tokens + len(prompt) <= whole, "a lower bound, as it did not fit"
    assert last.usage.miss_reason is MissReason.CONTEXT_TRUNCATED
    most = CONTEXT - 20
    instructions = len(one_shot(("user", ""), system="Be brief.")) - len(
        toks("<|im_end|>\n<|im_start|>assistant\n")
    )
    wanted = instructions + int(0.8 * (most - instructions))
    one = len(prompt) - len(one_shot(*kept[2:], ("user", f"{len(dones) - 1} {WORDS}"), system="Be brief."))
    assert wanted - one < len(prompt) <= wanted, "no more goes than has to"


@run
async def test_after_a_cut_only_new_tokens_are_prefilled_and_instructions_stay_resident() -> None:
    _, session, dones = await full(instructions="Be brief and kind to each of them.")
    assert dones[-1].usage.cached_tokens > len(toks("Be brief and kind to each of them."))
    after = await turn(session, "Hi")
    assert after.left_out is None
    assert after.usage.prefilled_tokens == after.usage.new_tokens < 30


@run
async def test_a_ratio_and_a_limit_behind_the_instructions_are_kept() -> None:
    _, session, _ = await full()
    assert (await turn(session, "Hi", truncation=Truncation(0.0))).left_out is None, "it fits"
    limited = Truncation(1.0, post_instructions=40)
    for _ in range(4):
        done = await turn(session, "Hi", truncation=limited)
        heading = len(one_shot(("user", ""))) - len(toks("<|im_end|>\n<|im_start|>assistant\n"))
        assert done.usage.input_tokens - heading <= 40
    assert done.left_out is not None, "with a ratio of one each turn leaves something out"
    done = await turn(session, WORDS, truncation=Truncation(0.0, post_instructions=20))
    assert inside(session) == [WORDS, "yes"]


@run
async def test_a_disabled_truncation_refuses_and_leaves_all_as_it_was() -> None:
    link = reciting(*["yes"] * 9, max_context=100)
    session = session_on(link)
    await ask(session, WORDS)
    say(session, WORDS * 9)
    with pytest.raises(
        PromptTooLong, match=r"it has .* tokens\. This model's maximum context length is 100 tokens$"
    ):
        await read(session)
    assert len(inside(session)) == len(session.history.items())
    assert (await turn(session, "Hi")).left_out is not None


@run
async def test_an_item_longer_than_the_context_is_refused_and_the_next_turn_goes_on_without_it() -> None:
    link = reciting(*["yes"] * 9, max_context=100)
    session = session_on(link)
    await turn(session, "Hello")
    before = inside(session)
    with pytest.raises(PromptTooLong, match="delete its last item or send a shorter one") as refused:
        await turn(session, WORDS * 30)
    assert "\n" not in refused.value.message
    assert inside(session) == [*before, WORDS * 30], "a refused turn leaves nothing out"
    done = await turn(session, "Hi")
    assert done.left_out is not None and inside(session) == ["Hi", "yes"]


@run
async def test_instructions_longer_than_the_context_are_named() -> None:
    session = session_on(reciting("yes", "yes", max_context=60), Preamble(instructions=WORDS * 20))
    with pytest.raises(PromptTooLong, match=r"instructions and tools have .* shorten them"):
        await turn(session, "Hi")
    session.history.preamble = Preamble(instructions="Be brief.")
    assert (await read(session, cutting()))[1].items[0].text == "yes"


@run
async def test_input_of_its_own_is_never_truncated() -> None:
    session = session_on(reciting("yes", max_context=60))
    items = [Message(id=f"m{n}", role="user", text=WORDS) for n in range(9)]
    with pytest.raises(PromptTooLong) as refused:
        await read(session, cutting(input=items, out_of_band=True))
    assert refused.value.param == "input"


class CountingRenderer(Renderer):
    """Counts its drafts."""

    drafts = 0

    def draft(self, *args: Any, **more: Any) -> Draft:
        self.drafts += 1
        return super().draft(*args, **more)


@pytest.mark.parametrize("text", ["ok", WORDS * 3])
def test_a_long_conversation_that_was_put_in_at_once_is_cut_in_few_tries(text: str) -> None:
    talk: list[Segment] = []
    for number in range(600):
        role = ("user", "assistant")[number % 2]
        talk.append(Message(id=f"m{number}", role=role, text=text))
    talk.append(Message(id="last", role="user", text="Hi"))
    now, rules = datetime(2025, 3, 1), LANGUAGE.report.rules
    renderer = CountingRenderer(LANGUAGE.tokenizer, now, LANGUAGE.prefix_rule, rules)
    script = Script(Preamble(), tuple(talk))
    fit = PromptFit(renderer, script, 1000, 100, AUTO)
    whole = fit.whole()
    assert fit.is_full(whole)
    found = fit.shortened(whole)
    assert renderer.drafts < 16
    wanted = renderer.heading(Preamble(), 1000)
    wanted += int(0.8 * (900 - wanted))
    assert found.tokens <= wanted
    assert found.indexes == tuple(range(len(found.indexes))) and len(found.indexes) % 2 == 0
    one_less = renderer.draft(script.without(range(len(found.indexes) - 2)))
    assert len(one_less.tokens()) > wanted, "no more goes than has to"


# --- beside the conversation --------------------------------------------------------------------------------


@run
async def test_out_of_band_something_is_left_out_of_that_response_alone() -> None:
    link, session, _ = await full()
    before = inside(session)
    while len(one_shot(*(("user", text) for text in inside(session)))) < CONTEXT:
        say(session, WORDS)
    more = [Message(id="more", role="user", text="What was that?")]
    _, done = await read(session, cutting(out_of_band=True, more=more))
    assert done.left_out is not None and done.left_out.items
    assert inside(session)[: len(before)] == before, "the conversation is as it was"
    assert prompts(link)[-1][-len(toks("What was that?<|im_end|>\n<|im_start|>assistant\n")) :] == toks(
        "What was that?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "more" not in session.history
    assert (await turn(session, "Hi")).left_out is not None, "it leaves the conversation with the next turn"


@run
async def test_responses_beside_one_another_are_cut_each_for_itself() -> None:
    link, session, _ = await full()
    link.model = yes_to_all  # a recital would lose its thread where three replies alternate
    while len(one_shot(*(("user", text) for text in inside(session)))) < CONTEXT:
        say(session, WORDS)
    requests = [cutting(out_of_band=True), cutting(), cutting(out_of_band=True)]
    told = await asyncio.gather(*(read(session, request) for request in requests))
    first, second, third = (done.left_out for _, done in told)
    assert first is not None and first == second == third, "the same prompt, cut at the same point"
    assert not set(first.items) & {
        item.id
        for one in session.history.segments()
        for item in (one.items if isinstance(one, TurnReply) else (one,))
    }


@run
async def test_items_that_follow_out_of_band_are_prefilled_alone() -> None:
    link = reciting("yes", "a summary", "no")
    session = session_on(link)
    await turn(session, "Hello")
    more = [Message(id="more", role="user", text="Sum it up")]
    _, done = await read(session, cutting(out_of_band=True, more=more))
    assert prompts(link)[-1] == one_shot(("user", "Hello"), ("assistant", "yes"), ("user", "Sum it up"))
    assert done.usage.prefilled_tokens == done.usage.new_tokens
    await turn(session, "And now?")
    assert prompts(link)[-1] == one_shot(("user", "Hello"), ("assistant", "yes"), ("user", "And now?"))


@run
async def test_with_instructions_of_its_own_a_turn_leaves_things_out_for_itself_alone() -> None:
    _, session, _ = await full()
    before = inside(session)
    _, done = await read(session, cutting(instructions="Be " + WORDS * 5))
    assert done.left_out is not None
    assert inside(session) == [*before, "yes"]


# --- what has left ------------------------------------------------------------------------------------------


@run
async def test_what_has_left_can_be_read_deleted_and_gone_back_to() -> None:
    link, session, dones = await full()
    history = session.history
    left = dones[-1].left_out
    assert left is not None
    assert history.get(left.items[0]).id == left.items[0]
    last_before = history.items()[-2].id  # the message on which the cut was made
    session.rewind(last_before)
    assert len(inside(session)) < len(history.items()), "before the reply the cut stands"
    _, again = await read(session, cutting())
    assert again.left_out is None and again.usage.input_tokens == dones[-1].usage.input_tokens
    history.delete(left.items[1])
    assert left.items[1] not in history
    session.rewind(left.items[2])
    assert len(inside(session)) == len(history.items()) == 2, "all is in the context again, and shown"
    done = await turn(session, "Hi")
    assert prompts(link)[-1] == one_shot(("user", f"0 {WORDS}"), ("user", f"1 {WORDS}"), ("user", "Hi"))
    assert done.left_out is None


@run
async def test_an_item_put_behind_one_that_has_left_is_in_the_context() -> None:
    link, session, dones = await full()
    left = dones[-1].left_out
    assert left is not None
    kept = inside(session)
    session.history.insert(Message(id="note", role="user", text="A note"), left.items[0])
    session.history.insert(Message(id="first", role="user", text="First"), ROOT)
    assert inside(session) == ["First", "A note", *kept]
    await turn(session, "Hi")
    assert toks("First<|im_end|>\n<|im_start|>user\nA note")[2] in prompts(link)[-1]


@run
async def test_a_fork_of_what_was_before_a_cut_has_it_in_its_context() -> None:
    _, session, dones = await full()
    left = dones[-1].left_out
    assert left is not None
    history, _ = session.branch(left.items[1])
    assert len(history.segments()) == 2
    history, _ = session.branch()
    assert [id(one) for one in history.segments()] == [id(one) for one in session.history.segments()]


async def about_to_cut() -> tuple[Session, Kept]:
    """A session on a journal in which the next turn leaves something out."""
    log = Kept([])
    link = reciting(*["yes"] * 40, max_context=CONTEXT)
    session = Session("s", link, LANGUAGE, now=datetime(2025, 3, 1), log=log)
    for _ in range(6):
        await turn(session, WORDS)
    assert len(inside(session)) == 12
    say(session, WORDS * 2)
    return session, log


@run
async def test_a_fork_during_the_cutting_turn_has_the_same_context() -> None:
    session, log = await about_to_cut()
    response = session.respond(cutting())
    said = [await anext(response) for _ in range(2)]
    assert any(isinstance(event, ReplyTextDelta) for event in said)
    fork, operations = session.branch()
    again = replay([*log.operations, *operations], max_items=100).history
    assert [one.id for one in again.items()] == [one.id for one in fork.items()]
    async for _ in response:
        pass
    left = len(session.history.items()) - len(inside(session))
    assert left > 0
    for history in (fork, again):
        assert len(history.items()) - len(history.segments()) == left
        assert history.head is not None and history.told is history.head


@run
async def test_edits_during_the_cutting_turn_and_what_it_leaves_out_go_together() -> None:
    session, log = await about_to_cut()
    items = session.history.items()
    response = session.respond(cutting())
    await anext(response)
    session.history.delete(items[0].id)
    session.history.delete(items[-1].id)
    session.history.insert(Message(id="note", role="user", text="A note"), items[1].id)
    say(session, "Late")
    done = [event async for event in response][-1]
    assert isinstance(done, ReplyDone) and done.left_out is not None
    gone = set(done.left_out.items)
    kept = [item.text for item in items[1:-1] if item.id not in gone and isinstance(item, Message)]
    assert inside(session) == ["A note", *kept, "yes", "Late"]
    again = replay(log.operations, max_items=100).history
    assert [one.id for one in again.items()] == [one.id for one in session.history.items()]
    assert len(again.segments()) == len(session.history.segments())
    assert (await read(session, cutting()))[1].usage.miss_reason in (
        MissReason.HISTORY_EDITED,
        MissReason.CONTEXT_TRUNCATED,
    )


@run
async def test_a_full_history_makes_room_by_forgetting_what_has_left() -> None:
    most = len((await full())[1].history)
    _, session, dones = await full(settings=SessionSettings(max_items=most))
    history = session.history
    oldest = history.items()[0].id
    say(session, "Hi")
    assert oldest not in history and len(history.items()) == most
    whole = History(max_items=1)
    whole.insert(Message(id="a", role="user", text="a"))
    with pytest.raises(ItemInvalid):
        whole.insert(Message(id="b", role="user", text="b"))
    assert dones


@run
async def test_compaction_puts_a_summary_before_the_last_turns_of_a_fork() -> None:
    link, session, _ = await full()
    before = inside(session)
    summary = Message(id="summary", role="user", text="They counted.")
    history, operations = session.branch(None, ForkSummary(summary, 1))
    texts = [one.text if isinstance(one, Message) else one.items[0].text for one in history.segments()]
    assert texts == ["They counted.", *before[-2:]]
    assert inside(session) == before
    assert [type(one).__name__ for one in operations] == ["Compacted", "Branched"]
    everything = history.items()
    history.rewind(everything[0].id)
    assert [item.id for item in history.items()] == [everything[0].id]
    assert len(history.segments()) == 1, "going back to before the summary takes in what it stood for"
    assert link


# --- calls and their outputs --------------------------------------------------------------------------------


def called(*call_ids: str) -> TurnReply:
    calls = tuple(FunctionCall(id=f"i{name}", call_id=name, name="f", arguments="{}") for name in call_ids)
    return TurnReply(calls, ids_of([1]), True)


def output(call_id: str) -> FunctionCallOutput:
    return FunctionCallOutput(id=f"o{call_id}", call_id=call_id, output="fine")


def user(name: str) -> Message:
    return Message(id=name, role="user", text=name)


def reply(name: str) -> TurnReply:
    return TurnReply((Message(id=name, role="assistant", text=name),), ids_of([1]), True)


TALKS: dict[str, tuple[list[Segment], list[list[list[int]]]]] = {
    "turns": (
        [user("a"), reply("b"), user("c"), user("d"), reply("e"), user("f")],
        [[[0, 1], [2, 3, 4]], [], []],
    ),
    "a turn with calls": (
        [user("a"), called("1"), output("1"), reply("b"), user("c")],
        [[[0, 1, 2, 3]], [], []],
    ),
    "rounds of the running turn": (
        [
            user("a"),
            called("1"),
            output("1"),
            called("2", "3"),
            output("3"),
            output("2"),
            called("4"),
            output("4"),
        ],
        [[], [], [[1, 2], [3, 4, 5]]],
    ),
    "an output that comes late": (
        [user("a"), called("1"), user("b"), reply("c"), user("d"), reply("e"), output("1"), user("f")],
        [[[2, 3], [0, 1, 4, 5, 6]], [], []],
    ),
    "a call that waits": (
        [user("a"), called("1"), user("b"), reply("c"), user("d")],
        [[[2, 3]], [[0, 1]], []],
    ),
    "a late output in the running turn": (
        [user("a"), called("1"), user("b"), reply("c"), user("d"), output("1")],
        [[[2, 3]], [], []],
    ),
    "messages of the running turn": ([user("a"), user("b"), user("c")], [[], [], [[0], [1]]]),
    "nothing": ([], [[], [], []]),
    "a reply first": ([reply("a"), user("b"), reply("c"), user("d")], [[[0], [1, 2]], [], []]),
}


@pytest.mark.parametrize("name", list(TALKS))
def test_what_goes_together(name: str) -> None:
    talk, steps = TALKS[name]
    assert list(steps_of(talk)) == steps


def test_a_call_that_waits_is_not_summarised_away() -> None:
    talk = TALKS["a call that waits"][0]
    assert older_turns(talk, 1) == (2, 3)
    assert older_turns(talk, 9) == ()
    assert older_turns([user("a"), reply("b")], 0) == (0, 1)


@run
async def test_a_long_tool_loop_leaves_out_its_oldest_rounds_and_keeps_the_question() -> None:
    calls = [f'<tool_call>\n{{"name": "look", "arguments": {{"at": {n}}}}}\n</tool_call>' for n in range(12)]
    link = reciting(*calls, "done", max_context=400)
    session = session_on(link, Preamble(tools=(Tool(name="look"),)))
    say(session, "Look around")
    gone: list[str] = []
    for _ in calls:
        _, done = await read(session, cutting(max_output_tokens=60))
        gone += [] if done.left_out is None else done.left_out.items
        (call,) = done.items
        assert isinstance(call, FunctionCall)
        made = FunctionCallOutput(id=f"out_{call.call_id}"[:60], call_id=call.call_id, output=WORDS)
        session.history.insert(made)
    assert gone, "the loop outgrew the context"
    assert inside(session)[0] == "Look around"
    paired: list[Item] = [
        item
        for one in session.history.segments()[1:]
        for item in (one.items if isinstance(one, TurnReply) else (one,))
    ]
    assert [item.call_id for item in paired[::2]] == [item.call_id for item in paired[1::2]]
    with pytest.raises(CallUnknown):
        session.history.calls().check(session.history.get(gone[0]).call_id)
    huge = session.history.items()[-1]
    session.history.delete(huge.id)
    session.history.insert(FunctionCallOutput(id="huge", call_id=huge.call_id, output=WORDS * 60))
    with pytest.raises(PromptTooLong):
        await read(session, cutting())
    session.history.delete("huge")
    session.history.insert(FunctionCallOutput(id="small", call_id=huge.call_id, output="ok"))
    assert (await read(session, cutting()))[1].items[0].text == "done"
