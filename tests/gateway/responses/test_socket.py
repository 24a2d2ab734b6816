"""The WebSocket: lanes, limits, what a connection remembers, steering, cancelling, and the codes of errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway.access.auth import ClientIdentity
from holdfast.gateway.net.channel import ChannelClosed, MemoryChannel, memory_pair
from holdfast.gateway.responses.face import ResponsesFace
from holdfast.gateway.responses.socket import IN_FLIGHT, ResponsesSocket
from holdfast.kvstore.log_lines import LogSettings, logging_lines
from holdfast.tests.gateway.scripted_service import END, WORDS, Scripted

from .stage import Json, Stage, staged, text_of, told
from .test_create import CALL, TOOL, user

pytestmark = pytest.mark.anyio
LONG = " ".join(f"word {number}" for number in range(300))


def talking(tokens: list[int]) -> int:
    """Words without end."""
    return WORDS[len(tokens) % len(WORDS)]


class Line:
    """The client's end of a socket."""

    def __init__(self, channel: MemoryChannel) -> None:
        self.channel = channel

    async def send(self, **event: Any) -> None:
        await self.channel.send(json.dumps(event).encode())

    async def create(self, given: Any = None, **fields: Any) -> None:
        await self.send(type="response.create", **({} if given is None else {"input": given}), **fields)

    async def next(self) -> Json:
        event: Json = json.loads(await self.channel.receive())
        return event

    async def until(self, *kinds: str) -> list[Json]:
        """All events up to the first one of these types."""
        events = [await self.next()]
        while events[-1]["type"] not in kinds:
            events.append(await self.next())
        return events

    async def response(self, given: Any = None, **fields: Any) -> Json:
        """One response from beginning to end."""
        await self.create(given, **fields)
        return (await self.until(*ENDS))[-1]["response"]

    async def error(self) -> tuple[int, str]:
        event = await self.next()
        assert event["type"] == "error" and set(event["error"]) == {"type", "code", "message", "param"}
        return event["status"], event["error"]["code"]


ENDS = ("response.completed", "response.incomplete", "response.failed")


@asynccontextmanager
async def connected(stage: Stage, face: ResponsesFace | None = None) -> AsyncIterator[Line]:
    ours, theirs = memory_pair(4096)
    face = face or ResponsesFace(stage.service)
    socket = ResponsesSocket(ours, face, ClientIdentity())
    task = asyncio.create_task(stage.service.serve(socket, ours))
    try:
        yield Line(theirs)
    finally:
        await theirs.close(1000, "")
        await task
        await ours.close(1000, "")


async def test_responses_follow_each_other_in_one_lane() -> None:
    async with staged(link=told("One.", "Two.", "Three.")) as stage, connected(stage) as line:
        await line.create("a")
        await line.create("b")
        events = await line.until("response.completed")
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created" and "stream_id" not in events[0]
        first = events[-1]["response"]
        second = (await line.until("response.completed"))[-1]["response"]
        third = await line.response("c", previous_response_id=second["id"])
        assert [text_of(one) for one in (first, second, third)] == ["One.", "Two.", "Three."]
        assert third["kv"]["prefilled"] == third["kv"]["new"]
        assert (await stage.ask("GET", f"/v1/responses/{third['id']}")).json == third


async def test_lanes_run_at_once_and_fork_from_each_others_responses() -> None:
    async with staged(link=Scripted(talking, END)) as stage, connected(stage) as line:
        root = await line.response("root", max_output_tokens=3)
        for lane in ("left", "right"):
            await line.create(lane, stream_id=lane, previous_response_id=root["id"], max_output_tokens=40)
        ended, seen = dict[str, Json](), []
        while len(ended) < 2:
            event = await line.next()
            seen.append(event["stream_id"])
            if event["type"] in ENDS:
                ended[event["stream_id"]] = event["response"]
        assert seen != sorted(seen) and seen != sorted(seen, reverse=True), "their events are mixed"
        for response in ended.values():
            assert response["previous_response_id"] == root["id"]
            assert response["kv"]["prefilled"] <= response["kv"]["new"]


async def test_a_prefilled_prompt_is_chainable_and_says_nothing() -> None:
    async with staged() as stage, connected(stage) as line:
        warm = await line.response([user("A long beginning.")], generate=False, instructions="Be brief.")
        assert warm["status"] == "completed" and warm["output"] == []
        told_next = await line.response("b", previous_response_id=warm["id"], instructions="Be brief.")
        assert told_next["status"] == "completed" and told_next["output"]
        listed = (await stage.ask("GET", f"/v1/responses/{told_next['id']}/input_items?order=asc")).json
        assert [item["content"][0]["text"] for item in listed["data"]] == ["A long beginning.", "b"]


async def test_a_prefilled_prompt_is_computed_to_its_last_token_and_goes_on_in_its_session() -> None:
    async with staged(link=told("", "One.", "", "Two.", "Three.")) as stage, connected(stage) as line:
        warm = await line.response(LONG, generate=False)
        (live,) = stage.service.sessions()
        before = len(stage.link.log)
        again = await line.response([], previous_response_id=warm["id"])
        assert text_of(again) == "One."
        assert again["kv"]["resident"] == warm["usage"]["input_tokens"] - 1, (
            "but the last, which is fed again"
        )
        assert not any(verb in ("begin", "open") for verb, *_ in stage.link.log[before:]), "the same sequence"
        warm = await line.response("b", generate=False, previous_response_id=again["id"])
        told_next = await line.response([], previous_response_id=warm["id"])
        assert text_of(told_next) == "Two."
        assert told_next["kv"]["resident"] == warm["usage"]["input_tokens"] - 1
        assert stage.service.sessions() == [live] and len(live.session.history) == 4
        lane = await line.response("c", previous_response_id=warm["id"])
        assert lane["status"] == "completed" and len(stage.service.sessions()) == 2, (
            "another way on is a fork"
        )


async def test_new_tokens_of_a_prefilled_prompt_count_once() -> None:
    """So a key's rate of tokens counts them once."""
    async with (
        staged(link=told("", "One.", "", "Two.", "Three.", "Four.")) as stage,
        connected(stage) as line,
    ):
        warm = await line.response(LONG, generate=False)
        assert warm["kv"]["new"] == warm["usage"]["input_tokens"] > 1000
        same = await line.response([], previous_response_id=warm["id"])
        assert same["kv"]["new"] == 1 and same["kv"].get("miss_reason") is None
        warm = await line.response("b " * 50, generate=False, previous_response_id=same["id"])
        assert 50 < warm["kv"]["new"] < 150
        more = await line.response("c", previous_response_id=warm["id"])
        assert more["kv"]["prefilled"] == more["kv"]["new"] < 50, "what comes behind it"
        other = await line.response("d", previous_response_id=warm["id"])
        assert len(stage.service.sessions()) == 2 and other["kv"]["new"] < 150
        later = await line.response("e", previous_response_id=more["id"])
        assert later["kv"]["prefilled"] == later["kv"]["new"] < 50


async def test_a_prefilled_prompt_is_there_for_the_next_server(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, connected(stage) as line:
        warm = await line.response("a", generate=False)
    async with staged(tmp_path, link=told("One.")) as stage:
        response = await stage.create("b", previous_response_id=warm["id"])
        assert text_of(response) == "One."
        (live,) = stage.service.sessions()
        assert [item.text for item in live.session.history.items()] == ["a", "b", "One."]


async def test_a_prefill_that_fails_leaves_no_session() -> None:
    link = told("")
    async with staged(link=link) as stage, connected(stage) as line:
        link.model = broken
        failed = await line.response("a", generate=False)
        assert failed["status"] == "failed" and stage.service.sessions() == []


def broken(tokens: list[int]) -> int:
    """Nothing can be sampled."""
    raise RuntimeError("broken")


async def test_what_is_not_stored_is_remembered_for_its_connection_alone() -> None:
    async with staged(link=told("One.", "Two.", "Three.")) as stage:
        face = ResponsesFace(stage.service)
        async with connected(stage, face) as line:
            first = await line.response("a", store=False)
            second = await line.response("b", store=False, previous_response_id=first["id"])
            assert second["kv"]["prefilled"] == second["kv"]["new"]
            kept = await line.response("c", previous_response_id=second["id"])
            listed = await stage.ask("GET", f"/v1/responses/{kept['id']}/input_items?order=asc")
            texts = [item["content"][0]["text"] for item in listed.json["data"]]
            assert texts == ["a", "One.", "b", "Two.", "c"], "what is stored has its whole past"
        async with connected(stage, face) as line:
            await line.create("c", store=False, previous_response_id=second["id"])
            assert await line.error() == (400, "previous_response_not_found")
            items = [user("a"), *first["output"], user("b"), *second["output"], user("c")]
            recovered = await line.response(items, store=False)
            assert recovered["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_a_failed_continuation_evicts_what_it_referred_to() -> None:
    async with staged() as stage, connected(stage) as line:
        for bad in (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            {"input": "x", "temperature": 9},
        ):
            first = await line.response("a", store=False)
            await line.send(type="response.create", previous_response_id=first["id"], store=False, **bad)
            assert await line.error() == (400, "invalid_value")
            await line.create("b", previous_response_id=first["id"], store=False)
            assert await line.error() == (400, "previous_response_not_found")
        stored = await line.response("a")
        await line.create([{"type": "item_reference", "id": "?"}], previous_response_id=stored["id"])
        assert await line.error() == (400, "invalid_value")
        assert (await line.response("b", previous_response_id=stored["id"]))["status"] == "completed"


async def test_a_steered_response_ends_and_its_successor_answers() -> None:
    async with staged(link=told(LONG)) as stage, connected(stage) as line:
        await line.create("go", stream_id="s", max_output_tokens=4000, instructions="Be brief.")
        begun = (await line.until("response.created"))[-1]["response"]
        await line.until("response.output_text.delta")
        await line.send(type="response.steer", previous_response_id=begun["id"], input="Stop, and say hi.")
        await line.send(type="response.steer", previous_response_id=begun["id"], input=[user("Please.")])
        events = await line.until("response.incomplete")
        accepted = [event for event in events if event["type"] == "response.steer.accepted"]
        assert len(accepted) == 2 and {event["stream_id"] for event in accepted} == {"s"}
        assert all(event["steer"]["previous_response_id"] == begun["id"] for event in accepted)
        steered = events[-1]["response"]
        assert steered["incomplete_details"] == {"reason": "steered"} and text_of(steered)
        successor = await line.next()
        assert successor["type"] == "response.created" and successor["stream_id"] == "s"
        assert successor["response"]["previous_response_id"] == begun["id"]
        assert successor["response"]["instructions"] == "Be brief."
        done = (await line.until(*ENDS))[-1]["response"]
        assert done["kv"]["prefilled"] == done["kv"]["new"]
        listed = await stage.ask("GET", f"/v1/responses/{done['id']}/input_items?limit=2")
        texts = [item["content"][0]["text"] for item in listed.json["data"]]
        assert texts == ["Please.", "Stop, and say hi."]


async def test_a_steer_waits_for_the_output_that_a_call_owes() -> None:
    async with staged(link=told("Well. " * 40 + CALL, "Sunny.")) as stage, connected(stage) as line:
        await line.create("weather?", tools=[TOOL], max_output_tokens=4000)
        begun = (await line.until("response.created"))[-1]["response"]
        stage.unstoppable(begun["id"])  # the reply comes to its own end
        await line.send(type="response.steer", previous_response_id=begun["id"], input="In Celsius.")
        events = await line.until("response.steer.pending")
        pending = events[-1]
        (call,) = [item for item in events[-2]["response"]["output"] if item["type"] == "function_call"]
        assert pending["reason"] == "waiting_for_required_input"
        assert pending["required_input"] == [
            {"type": "function_call_output", "call_id": call["call_id"], "name": "get_weather"}
        ]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
        done = await line.response([output], previous_response_id=begun["id"], tools=[TOOL])
        listed = await stage.ask("GET", f"/v1/responses/{done['id']}/input_items?limit=2")
        assert {item["type"] for item in listed.json["data"]} == {"message", "function_call_output"}


async def test_steers_wait_for_outputs_of_a_few_calls_alone_and_the_oldest_is_given_back() -> None:
    async with (
        staged(link=told(*["Well. " * 40 + CALL] * (IN_FLIGHT + 1))) as stage,
        connected(stage) as line,
    ):
        names = []
        for number in range(IN_FLIGHT + 1):
            await line.create("weather?", tools=[TOOL], max_output_tokens=4000)
            begun = (await line.until("response.created"))[-1]["response"]
            stage.unstoppable(begun["id"])
            names.append(begun["id"])
            await line.send(type="response.steer", previous_response_id=begun["id"], input=f"{number}")
            await line.until("response.steer.pending")
        failed = await line.next()
        assert failed["type"] == "response.steer.failed"
        assert failed["steer"]["previous_response_id"] == names[0] and failed["steer"]["input"] == "0"
        assert failed["error"]["code"] == "successor_creation_failed"


async def test_steers_that_cannot_be_taken_are_given_back() -> None:
    async with staged(link=told("One.", LONG)) as stage, connected(stage) as line:
        await line.send(type="response.steer", previous_response_id="resp_0", input="x")
        failed = await line.next()
        assert failed["type"] == "response.steer.failed"
        assert failed["error"]["code"] == "response_not_found"
        assert failed["steer"] == {"previous_response_id": "resp_0", "input": "x"}
        first = await line.response("a")
        await line.send(type="response.steer", previous_response_id=first["id"], input="x")
        assert (await line.next())["error"]["code"] == "response_already_completed"
        await line.create("b", max_output_tokens=4000)
        begun = (await line.until("response.created"))[-1]["response"]
        system = {"role": "system", "content": "x"}
        await line.send(type="response.steer", previous_response_id=begun["id"], input=[system])
        events = await line.until("response.steer.failed")
        assert events[-1]["error"]["code"] == "invalid_input"
        await line.send(type="response.cancel")
        await line.until(*ENDS)


async def test_a_cancel_ends_the_response_and_cancelling_nothing_is_an_error() -> None:
    async with staged(link=told(LONG, "Two.")) as stage, connected(stage) as line:
        await line.send(type="response.cancel")
        assert await line.error() == (400, "response_cancel_not_active")
        await line.create("a", max_output_tokens=4000)
        begun = (await line.until("response.created"))[-1]["response"]
        await line.send(type="response.cancel", response_id=begun["id"])
        last = (await line.until(*ENDS))[-1]
        assert last["type"] == "response.incomplete" and last["response"]["status"] == "cancelled"
        assert (await line.response("b", max_output_tokens=5))["status"] in ("completed", "incomplete")


async def test_a_socket_has_limits() -> None:
    link = told(LONG)
    link.flowing = False
    async with staged(link=link) as stage, connected(stage) as line:
        for number in range(16):
            await line.create("a", stream_id=f"lane {number % 4}", max_output_tokens=5)
        await line.create("a", stream_id="lane 1")
        error = await line.next()
        while error["type"] != "error":
            error = await line.next()
        assert (error["status"], error["error"]["code"]) == (429, "websocket_connection_limit_reached")
        assert error["stream_id"] == "lane 1"
    async with staged(link=told(*["x"] * 40)) as stage, connected(stage) as line:
        for number in range(32):
            await line.response("a", stream_id=f"lane {number}")
        await line.create("a", stream_id="one more")
        assert await line.error() == (429, "websocket_stream_limit_reached")
        assert (await line.response("a", stream_id="lane 7"))["status"] == "completed"


async def test_bad_frames_are_refused_and_the_socket_goes_on() -> None:
    async with staged() as stage, connected(stage) as line:
        for frame, code in (
            (b"{", "invalid_json"),
            (b"[]", "invalid_type"),
            (b'{"type": "session.update"}', "invalid_value"),
            (b'{"type": "response.create"}', "missing_required_parameter"),
            (b'{"type": "response.create", "input": "x", "odd": 1}', "unknown_parameter"),
            (b'{"type": "response.create", "input": "x", "background": true}', "invalid_value"),
            (b'{"type": "response.create", "input": "x", "model": "other"}', "model_not_found"),
        ):
            await line.channel.send(frame)
            assert (await line.error())[1] == code, frame
        image = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
        await line.create(image, stream_id="pictures")
        event = await line.next()
        assert (event["error"]["code"], event["stream_id"]) == ("unsupported_field", "pictures")
        assert (await line.response("a"))["status"] == "completed"


async def test_each_refusal_on_a_socket_has_a_log_line(capsys: pytest.CaptureFixture[str]) -> None:
    link = told(LONG)
    link.flowing = False
    async with staged(link=link) as stage, connected(stage) as line:
        capsys.readouterr()
        with logging_lines("holdfast", LogSettings(form="json")):
            for _ in range(IN_FLIGHT + 1):
                await line.create("a", max_output_tokens=5)
            while (await line.next())["type"] != "error":
                pass
            await line.send(type="response.cancel", stream_id="none")
            await line.channel.send(b"{")
            codes = [(await line.error())[1] for _ in range(2)]
        written = [json.loads(one) for one in capsys.readouterr().err.splitlines()]
    told_codes = ["websocket_connection_limit_reached", *codes]
    assert [one["code"] for one in written if one["message"] == "event refused"] == told_codes


async def test_a_client_that_leaves_ends_its_responses() -> None:
    async with staged(link=told(LONG)) as stage:
        async with connected(stage) as line:
            await line.create("a", max_output_tokens=4000)
            begun = (await line.until("response.created"))[-1]["response"]
        kept = await stage.ended(begun["id"])
        assert kept["status"] == "cancelled"
        assert not any(live.running for live in stage.service.sessions())


async def test_a_server_that_leaves_says_goodbye() -> None:
    async with staged() as stage, connected(stage) as line:
        await line.response("a", max_output_tokens=1)
        closing = asyncio.create_task(stage.service.close())
        with pytest.raises(ChannelClosed) as closed:
            await line.next()
        assert closed.value.code == 1012
        await closing


async def test_tools_that_cannot_be_run_are_left_out_and_named() -> None:
    tools = [{"type": "web_search"}]
    async with staged() as stage, connected(stage) as line:
        first = await line.response("one", tools=tools, client_metadata={"turn_id": "1"})
        assert first["unserved"] == ["tools[0]: web_search"] and first["tools"] == []
        await line.create("two", tools=tools, tool_choice="required")
        assert await line.error() == (400, "unsupported_field")
