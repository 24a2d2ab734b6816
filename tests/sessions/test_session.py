"""Sessions over a scripted engine: turns, tools, edits and overrides, and what each costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.sessions.conversation.items import FunctionCallOutput, Message, Preamble, Tool
from holdfast.sessions.journal.records import AnyOperation, Begun, Emitted, Ended, Inserted, Span
from holdfast.sessions.journal.replay import replay
from holdfast.sessions.session import Session
from holdfast.sessions.token_ids import packed
from holdfast.sessions.turn.events import (
    EndReason,
    MissReason,
    ReplyCallDone,
    ReplyCallStarted,
    ReplyStatus,
    ReplyTextDelta,
)
from holdfast.sessions.turn.request import TurnRequest

from .scripted_link import ScriptedLink
from .session_stage import (
    END,
    LANGUAGE,
    NAME,
    Kept,
    ask,
    one_shot,
    prompts,
    read,
    reciting,
    run,
    say,
    session_on,
    text_of,
    toks,
)
from .text.chat_languages import ours


@run
async def test_turns_send_only_what_is_new_and_the_model_sees_the_whole() -> None:
    link = reciting("Hello", "Fine", "Bye")
    session = session_on(link)
    before = 0  # tokens of the branch after the last turn
    for asked, answer in [("Hi", "Hello"), ("How?", "Fine"), ("Done", "Bye")]:
        done = await ask(session, asked)
        assert done.status is ReplyStatus.COMPLETED
        assert [item.text for item in done.items] == [answer]
        appended = len(prompts(link)[-1]) - before
        assert link.sent() == appended
        # truly new: what was sent, and the pending end token of the reply before
        assert done.usage.new_tokens == done.usage.prefilled_tokens == appended + (before > 0)
        assert done.usage.cached_tokens == done.usage.input_tokens - done.usage.new_tokens
        assert done.usage.output_tokens == len(toks(answer)) + 1
        assert done.usage.miss_reason is None
        before = len(prompts(link)[-1]) + done.usage.output_tokens
    turns = [
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "How?"),
        ("assistant", "Fine"),
        ("user", "Done"),
    ]
    assert prompts(link)[-1] == one_shot(*turns)
    assert [item.text for item in session.history.items()] == ["Hi", "Hello", "How?", "Fine", "Done", "Bye"]


@run
async def test_deltas_add_up_to_the_item_and_leave_out_the_end_token() -> None:
    session = session_on(reciting("Привет 🎉 there"))
    say(session, "Hi")
    events, done = await read(session)
    assert text_of(events) == done.items[0].text == "Привет 🎉 there"
    assert {event.item_id for event in events if isinstance(event, ReplyTextDelta)} == {done.items[0].id}
    assert session.history.head.reply.ids.tolist() == [*toks("Привет 🎉 there"), END]


@run
async def test_a_tool_call_and_its_output() -> None:
    written = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    link = reciting(written, "21 degrees")
    session = session_on(link, Preamble(tools=(Tool(name="weather"),)))
    say(session, "Paris?")
    events, done = await read(session)
    message, call = done.items
    assert (message.text, message.complete) == ("I look.", True)
    assert (call.name, call.arguments, call.complete) == ("weather", '{"city": "Paris"}', True)
    started = next(event for event in events if isinstance(event, ReplyCallStarted))
    assert (started.item_id, started.call_id) == (call.id, call.call_id)
    ended = next(event for event in events if isinstance(event, ReplyCallDone))
    assert (ended.arguments, ended.complete) == (call.arguments, True)
    session.history.insert(FunctionCallOutput(id="o", call_id=call.call_id, output="21"))
    _, done = await read(session)
    assert done.items[0].text == "21 degrees"
    decoded = ours(NAME).backend.decode(prompts(link)[-1], skip_special_tokens=False)
    answer = "<|im_start|>user\n<tool_response>\n21\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert decoded.endswith(f"{written}<|im_end|>\n{answer}")


@run
async def test_calls_are_text_when_they_are_not_wanted() -> None:
    written = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tool = Tool(name="f")
    for tools, fields in (((tool,), {"tool_choice": "none"}), ((), {}), ((tool,), {"tools": []})):
        session = session_on(reciting(written), Preamble(tools=tools))
        done = await ask(session, "Hi", **fields)
        assert [item.text for item in done.items] == [written]
    session = session_on(reciting(written))
    done = await ask(session, "Hi", tools=[tool])
    assert [item.name for item in done.items] == ["f"]


@run
async def test_out_of_band_runs_beside_and_leaves_no_trace() -> None:
    shared = Preamble(instructions="Always answer in one word")
    link = ScriptedLink(lambda tokens: END if tokens[-1] == toks("x")[0] else toks("x")[0], END)
    session = session_on(link, shared)
    await ask(session, "Hi")
    say(session, "How?")
    main = session.respond(TurnRequest.checked())
    await anext(main)
    await anext(main)
    items = session.history.items()
    _, aside = await read(session, TurnRequest.checked(out_of_band=True))
    assert aside.status is ReplyStatus.COMPLETED
    assert session.history.items() == items
    begun = [entry[1] for entry in link.log if entry[0] == "begin"]
    assert begun[0] == b"" and begun[1][0] == 1, "it is a fork, and shares the branch's KV"
    assert aside.usage.prefilled_tokens <= aside.usage.new_tokens
    topic = Message(id="t", role="user", text="What is this about?")
    request = TurnRequest.checked(out_of_band=True, input=[topic], instructions="Sum up")
    _, other = await read(session, request)
    assert other.usage.input_tokens == len(one_shot(("user", topic.text), system="Sum up"))
    assert [event async for event in main][-1].status is ReplyStatus.COMPLETED
    assert len(link.held) == 1  # their sequences were closed
    assert [item.role for item in session.history.items()] == ["user", "assistant"] * 2


@run
async def test_overrides_run_aside_and_the_reply_joins_the_branch() -> None:
    link = reciting("Hello", "Arr", "Fine")
    session = session_on(link, Preamble(instructions="Be kind"))
    await ask(session, "Hi")
    done = await ask(session, "Talk", instructions="Be a pirate")
    assert done.items[0].text == "Arr"
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "Talk")]
    assert prompts(link)[1] == one_shot(*turns, system="Be a pirate")
    done = await ask(session, "And now?")
    turns += [("assistant", "Arr"), ("user", "And now?")]
    assert prompts(link)[2] == one_shot(*turns, system="Be kind")
    assert len(link.held) == 1


@pytest.mark.parametrize(
    ("preamble", "reason"),
    [
        (Preamble(instructions="Be brief"), MissReason.INSTRUCTIONS_CHANGED),
        (Preamble(tools=(Tool(name="f"),)), MissReason.TOOLS_CHANGED),
    ],
)
@run
async def test_a_changed_head_renders_anew_and_says_why(preamble: Preamble, reason: MissReason) -> None:
    link = reciting("Hello", "Fine", "Ok")
    session = session_on(link)
    await ask(session, "Hi")
    session.history.preamble = preamble
    done = await ask(session, "How?")
    assert done.usage.miss_reason is reason
    decoded = ours(NAME).backend.decode(prompts(link)[1], skip_special_tokens=False)
    assert "Hello<|im_end|>\n<|im_start|>user\nHow?" in decoded
    done = await ask(session, "And?")
    assert done.usage.miss_reason is None
    assert done.usage.prefilled_tokens == done.usage.new_tokens


@run
async def test_a_turn_that_is_cheaper_to_compute_than_to_bring_up_says_so() -> None:
    link = reciting("Hello", "Fine", "Ok")
    session = session_on(link)
    await ask(session, "Hi")
    link.chosen = 40
    done = await ask(session, "How?")
    assert done.usage.miss_reason is MissReason.CHEAPER_TO_COMPUTE
    link.chosen = 0
    assert (await ask(session, "And?")).usage.miss_reason is None


@run
async def test_a_deleted_item_keeps_the_common_prefix() -> None:
    link = reciting("Hello", "Fine", "Ok")
    session = session_on(link)
    await ask(session, "Hi")
    await ask(session, "How?")
    session.history.delete(session.history.items()[2].id)
    link.sent()
    done = await ask(session, "And?")
    assert done.usage.miss_reason is MissReason.HISTORY_EDITED
    assert prompts(link)[2][: len(prompts(link)[0])] == prompts(link)[0]
    assert link.sent() < len(prompts(link)[2]) - len(prompts(link)[0])
    decoded = ours(NAME).backend.decode(prompts(link)[2], skip_special_tokens=False)
    assert "How?" not in decoded
    assert "Fine" in decoded


@run
async def test_input_that_comes_while_a_reply_runs_stands_after_it() -> None:
    link = reciting("Hello there", "Ok")
    session = session_on(link)
    say(session, "Hi")
    response = session.respond(TurnRequest.checked())
    await anext(response)
    say(session, "By the way")
    assert [event async for event in response][-1].status is ReplyStatus.COMPLETED
    assert [item.text for item in session.history.items()] == ["Hi", "Hello there", "By the way"]
    _, done = await read(session)
    assert done.usage.miss_reason is None
    assert prompts(link)[1] == one_shot(("user", "Hi"), ("assistant", "Hello there"), ("user", "By the way"))


@run
async def test_a_reply_becomes_history_only_after_its_last_delta() -> None:
    session = session_on(reciting("Hello there", tokens_per_row=50))
    say(session, "Hi")
    response = session.respond(TurnRequest.checked())
    while not isinstance(await anext(response), ReplyTextDelta):
        pass
    assert len(session.history.items()) == 1


@run
async def test_an_empty_reply_leaves_nothing() -> None:
    link = reciting("", "Ok")
    session = session_on(link)
    done = await ask(session, "Hi")
    assert (done.status, done.items) == (ReplyStatus.COMPLETED, ())
    await ask(session, "And?")
    assert prompts(link)[1] == one_shot(("user", "Hi"), ("user", "And?"))


@run
async def test_a_reply_without_items_that_an_earlier_version_kept_is_dropped() -> None:
    """Its tokens were in each later prompt. The journal can be replayed after that, too."""
    first = one_shot(("user", "Hi"))
    item = Message(id="hi", role="user", text="Hi")
    operations: list[AnyOperation] = [Inserted(item=item), Begun(response="old", request={})]
    operations += [Emitted(response="old", ids=packed(toks("The capital")))]
    span = Span(node="turn_old", keep=0, prompt=packed(first))
    operations += [
        Ended(
            response="old",
            status=ReplyStatus.COMPLETED,
            reason=EndReason.STOP,
            kept=True,
            spans=(span,),
        )
    ]
    link = reciting("Ok", "Fine")
    for said in (("user", "And?"), ("user", "More?")):
        replayed = replay(operations, max_items=10).history
        session = Session("s", link, LANGUAGE, history=replayed, log=(log := Kept(operations)))
        session.history.drop_silent()
        before = tuple((item.role, item.text) for item in session.history.items())
        await ask(session, said[1])
        assert prompts(link)[-1] == one_shot(*before, said)
        operations = log.operations


@run
async def test_a_long_conversation_is_rendered_on_a_thread_to_the_same_ids() -> None:
    link = reciting("Hello")
    session = session_on(link)
    long = "word " * 10_000
    link.max_context = 100_000
    await ask(session, long)
    assert prompts(link)[0] == one_shot(("user", long))


def test_sessions_do_not_need_torch() -> None:
    """The gateway's process must not pay for torch: neither sessions nor the link import it."""
    code = (
        "import sys, holdfast.sessions.registry, holdfast.sessions.text.language\n"
        "import holdfast.runtime.link.messages\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
