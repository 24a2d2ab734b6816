"""A server with its engine in a child process, over real sockets: routes, bad input, others unharmed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from websockets import Subprotocol
from websockets.asyncio.client import connect as websocket_connect

import holdfast
from holdfast.benchmarks import toys
from holdfast.gateway.server import Serving, serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import ConnectionFailed, connect

from .wires import Wire, get, text_of, wire

pytestmark = pytest.mark.anyio

DEEP = "[" * 30_000 + "]" * 30_000
FRAMES = [
    ("", "invalid_json"),
    ("no json", "invalid_json"),
    ('{"type": "input_text_buffer.append", "text": "\\ud800"}', "invalid_json"),
    (b"\xff\xfe", "invalid_json"),
    ("[]", "invalid_type"),
    ("{}", "missing_required_parameter"),
    ('{"type": "response.create"', "invalid_json"),
    ('{"type": "session.update", "session": {"audio": ' + DEEP + "}}", "invalid_json"),
    ({"type": "response.destroy"}, "invalid_value"),
    ({"type": "conversation.item.truncate"}, "missing_required_parameter"),
    ({"type": "conversation.item.truncate", "item_id": "item_none", "text_end": 1}, "item_not_found"),
    ({"type": "conversation.item.truncate", "item_id": "i", "audio_end_ms": 1}, "item_not_found"),
    ({"type": "session.rewind", "to": "item_none"}, "item_not_found"),
    ({"type": "session.rewind", "to": 1}, "invalid_value"),
    ({"type": "session.rewind", "to": -1}, "invalid_value"),
    ({"type": "session.rewind", "to": None}, "invalid_type"),
    ({"type": "response.create", "colour": "red"}, "unknown_parameter"),
    ({"type": "conversation.item.create"}, "missing_required_parameter"),
    (
        {
            "type": "conversation.item.create",
            "item": {"type": "function_call_output", "call_id": "call_none", "output": "1"},
        },
        "invalid_tool_call_id",
    ),
    ({"type": "conversation.item.retrieve", "item_id": 7}, "invalid_type"),
    ({"type": "conversation.item.retrieve", "item_id": "item_none"}, "item_not_found"),
    ({"type": "conversation.item.delete", "item_id": "item_none"}, "item_not_found"),
    ({"type": "response.cancel"}, "response_cancel_not_active"),
    ({"type": "input_text_buffer.commit"}, "invalid_value"),
    ({"type": "input_text_buffer.append"}, "missing_required_parameter"),
    ({"type": "input_text_buffer.append", "text": "x", "role": "assistant"}, "invalid_value"),
    ({"type": "input_text_buffer.replace", "from": -1, "text": ""}, "invalid_value"),
    ({"type": "input_text_buffer.replace", "from": 1, "text": ""}, "invalid_value"),
    ({"type": "session.update", "session": {"model": "another"}}, "invalid_value"),
    ({"type": "session.update", "session": {"temperature": 2.1}}, "invalid_value"),
    ({"type": "session.update", "session": {"max_output_tokens": 2**31}}, "invalid_value"),
    ({"type": "response.create", "response": {"top_p": -0.1}}, "invalid_value"),
    ({"type": "session.update", "session": {"prompt": {"id": "pmpt_1"}}}, "unsupported_field"),
    ({"type": "session.update", "session": {"model": "gpt-realtime"}}, "invalid_value"),
    ({"type": "response.create", "response": {"max_output_tokens": 0}}, "invalid_value"),
]


async def works(connection: Wire) -> None:
    response = await connection.say("My name is Marisol.")
    assert response["status"] == "completed" and text_of(response)


@pytest.fixture(scope="module")
async def server(pocket: EngineSettings) -> AsyncIterator[Serving]:
    """With its engine in a child process."""
    async with serving(GatewaySettings(port=0), pocket) as running:
        yield running


async def test_bad_frames_get_typed_errors_and_other_sessions_go_on(server: Serving) -> None:
    async with wire(server.url) as bad, wire(server.url) as good:
        for number, (frame, code) in enumerate(FRAMES):
            if isinstance(frame, dict):
                frame = {**frame, "event_id": f"bad_{number}"}
            await bad.send(frame)
            told = await bad.receive()
            assert told["type"] == "error" and told["error"]["code"] == code, (frame, told)
            assert told["error"]["type"] == "invalid_request_error" and told["error"]["message"]
            if isinstance(frame, dict):
                assert told["error"]["event_id"] == f"bad_{number}"
        await works(good)
        await works(bad)


async def test_a_frame_beyond_the_limit_is_refused_and_its_session_goes_on(server: Serving) -> None:
    async with wire(server.url) as long:
        await long.send(" " * (server.service.settings.limits.frame_bytes + 1))
        assert (await long.receive())["error"]["code"] == "frame_too_large"
        await works(long)


async def test_a_frame_beyond_what_is_read_closes_its_socket_alone(server: Serving) -> None:
    async with wire(server.url) as giant, wire(server.url) as good:
        await giant.send(b" " * (server.service.settings.limits.socket_bytes + 1))
        await giant.socket.wait_closed()
        assert giant.socket.close_code == 1009
        await works(good)


async def test_text_that_is_no_utf8_closes_its_socket_alone_and_is_no_fault_of_the_server(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    async with wire(server.url) as broken, wire(server.url) as good:
        await broken.socket.send(b"\xff\xfe", text=True)
        await broken.socket.wait_closed()
        assert broken.socket.close_code == 1007
        await works(good)
    assert not caplog.records


async def test_the_plain_routes(server: Serving) -> None:
    status, body = await get(server.url, "/v1/models")
    listed = json.loads(body)
    assert status == 200 and listed["object"] == "list"
    assert [(model["id"], model["object"]) for model in listed["data"]] == [("pocket", "model")]
    assert (await get(server.url, "/v1/models/pocket"))[0] == 200
    status, body = await get(server.url, "/v1/models/another")
    assert status == 404 and json.loads(body)["error"]["code"] == "model_not_found"
    status, body = await get(server.url, "/version")
    assert json.loads(body) == {"name": "holdfast", "version": holdfast.__version__}
    assert (await get(server.url, "/health"))[0] == 200
    assert (await get(server.url, "/ready"))[0] == 200
    status, body = await get(server.url, "/v1/embeddings")
    error = json.loads(body)["error"]
    assert status == 404 and error["code"] == "not_found"
    assert "GET /v1/embeddings is not served" in error["message"]
    status, body = await get(server.url, "/v1/responses")
    assert status == 405 and "/v1/responses has POST" in json.loads(body)["error"]["message"]
    status, body = await get(server.url, "/v1/realtime")
    assert status == 426 and json.loads(body)["error"]["code"] == "upgrade_required"


async def at_rest(server: Serving) -> None:
    """Return when what a turn left to do is done: a step may still carry its KV down."""
    before, steps = -1.0, 0.0
    while before != steps:
        before, steps = steps, (await server.engine.link.statistics())["steps"]


async def test_metrics_are_the_statistics_of_all_rooms(server: Serving) -> None:
    async with wire(server.url) as connection:
        await works(connection)
        await at_rest(server)
        status, body = await get(server.url, "/metrics")
        engine = await server.engine.link.statistics()
    assert status == 200
    values = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in body.splitlines()
        if line and not line.startswith("#")
    }
    assert values["holdfast_ready"] == 1.0 and values["holdfast_sockets"] == 1.0
    assert values["holdfast_sessions"] == 1.0 and values["holdfast_session_items"] == 2.0
    assert values["holdfast_engine_steps_total"] == engine["steps"] > 0
    assert values['holdfast_tokens_total{class="computed"}'] == engine["computed"] > 0
    assert values["holdfast_engine_pool_free"] == engine["pool_free"]


async def test_another_model_is_refused_before_the_socket_opens(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConnectionFailed, match="404"):
        async with connect(server.url, model="another") as client, client.session():
            pass
    async with connect(server.url, model="pocket") as client, client.session() as chat:
        assert chat.session.model == "pocket"
    assert not caplog.records, "a refusal is no fault of the server"


async def test_every_name_of_the_model_is_served_and_told_back(pocket: EngineSettings) -> None:
    names = ("little", "gpt-realtime", "org/little-1B")
    async with serving(GatewaySettings(port=0, served_names=names), pocket) as running:
        body = json.loads((await get(running.url, "/v1/models"))[1])
        assert [model["id"] for model in body["data"]] == list(names)
        for name in names:
            status, one = await get(running.url, f"/v1/models/{name}")
            assert status == 200 and json.loads(one)["id"] == name
            async with connect(running.url, model=name) as client, client.session() as chat:
                assert chat.session.model == name
                (child,) = await chat.fork(1)
                assert child.session.model == name
        async with connect(running.url) as client, client.session() as chat:
            assert chat.session.model == "little"
        status, one = await get(running.url, "/v1/models/pocket")
        assert status == 404
        told = json.loads(one)["error"]["message"]
        assert all(repr(name) in told for name in (*names, "pocket"))
        async with wire(running.url) as socket:
            await socket.send({"type": "session.update", "session": {"model": "gpt-realtime"}})
            updated = (await socket.until("session.updated"))[-1]
            assert updated["session"]["model"] == "gpt-realtime"


async def test_a_client_that_vanishes_leaves_nothing_behind(server: Serving) -> None:
    async with wire(server.url) as leaving:
        await leaving.send({"type": "response.create"})
        await leaving.until("response.created")
        leaving.socket.transport.abort()
    async with wire(server.url) as good:
        await works(good)
    while (await server.service.snapshot()).gateway["sockets"]:
        pass
    engine = await server.engine.link.statistics()
    assert engine["sequences"] == engine["running"] == 0 and engine["leaks"] == 0


async def test_a_browsers_subprotocols_are_answered(server: Serving) -> None:
    """A browser ends a connection on which the server takes up none of those that the page offered."""
    key = Subprotocol("openai-insecure-api-key.any")
    address = server.url.replace("http", "ws") + "/v1/realtime"
    for offered, chosen in (([Subprotocol("realtime"), key], "realtime"), ([key], key)):
        async with websocket_connect(address, subprotocols=offered) as socket:
            assert socket.subprotocol == chosen
            assert json.loads(await socket.recv())["type"] == "session.created"


async def test_what_an_operator_should_know_of_a_model_is_logged_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = toys.teach(toys.make_toy("tiny", tmp_path, family="ministral3"))
    config = json.loads((folder / "config.json").read_text())
    text = {**config, "sliding_window": None}
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": text,
    }
    whole["auto_map"] = {"AutoModel": "modeling_vision.Mistral3"}
    (folder / "config.json").write_text(json.dumps(whole))
    model = EngineSettings(model=str(folder), device="cpu", blocks=64, max_context=256)
    async with serving(GatewaySettings(port=0), model) as running, wire(running.url) as one:
        assert len(text_of(await one.say(toys.text_of([5, 6, 7]), max_output_tokens=40))) == 40
    assert [record.message for record in caplog.records if record.name == "holdfast.gateway.service"] == [
        f"{folder / 'config.json'}: auto_map is ignored: code in a checkpoint is not run",
        "Mistral3ForConditionalGeneration: the text part is served; its vision weights are not loaded",
    ]
