"""Tenant, route and protocol in log lines and metrics: in the server's own words, and never more of them for
what clients send."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from starlette.types import ASGIApp

from holdfast.gateway.access.admission import TURN_ROUTES
from holdfast.gateway.access.attribution import MOST_NAMED, OTHER, Attribution, TenantLabels
from holdfast.gateway.access.tenants import Tenants
from holdfast.gateway.app import SOCKETS, build_app
from holdfast.gateway.metrics.prometheus import exposition
from holdfast.kvstore.log_lines import LogSettings, logging_lines
from holdfast.tests.gateway.keyed_service import FILE, keyed
from holdfast.tests.sessions.scripted_link import Pulled

pytestmark = pytest.mark.anyio
OPERATED = f'[operators]\nkeys = ["ops"]\n{FILE}'
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS = "/v1/completions"
REQUESTS = "holdfast_requests_total"


async def asked(
    app: ASGIApp, path: str, key: str = "", body: Any = None, method: str = "", kind: str = "http"
) -> tuple[int, bytes]:
    """The status and the body of the answer to one request."""
    data = b"" if body is None else json.dumps(body).encode()
    sent: list[Any] = []
    first = {"type": "http.request", "body": data} if kind == "http" else {"type": "websocket.connect"}
    heard = iter([first])

    async def receive() -> Any:
        message = next(heard, None)
        return message or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer " + key.encode())]
    scope: dict[str, Any] = {
        "type": kind,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "asgi": {"spec_version": "2.4"},
        "extensions": {"websocket.http.response": {}},
    }
    if kind == "http":
        scope |= {"method": method or ("GET" if body is None else "POST")}
    await app(scope, receive, send)
    status = next(one["status"] for one in sent if one["type"].endswith("response.start"))
    return status, b"".join(one.get("body", b"") for one in sent)


def samples(text: bytes) -> list[Sample]:
    return [one for family in text_string_to_metric_families(text.decode()) for one in family.samples]


def series(text: bytes) -> set[tuple[str, Any]]:
    return {(one.name, frozenset(one.labels.items())) for one in samples(text)}


def total(told: Iterable[Sample], name: str, **labels: str) -> float:
    return sum(one.value for one in told if one.name == name and labels.items() <= one.labels.items())


def talk(text: str = "begin", model: str = "scripted") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}


async def rubbish(app: ASGIApp, at: int) -> None:
    """What a client makes up, and different each time."""
    for key in ("free", f"made-up-{at}", ""):
        for path in (
            f"/{at}",
            f"/v1/{at}/x",
            f"/v1/models/{at}/{at}",
            f"{RESPONSES}/resp_{at}",
            f"/page/{at}",
            f"{CHAT}/{at}",
            f"/metrics{at}",
        ):
            await asked(app, path, key)
            await asked(app, path, key, kind="websocket")
        await asked(app, CHAT, key, method=f"M{at}")
        await asked(app, CHAT, key, talk(model=f"model-{at}"))
        await asked(app, CHAT, key, {**talk(), f"field_{at}": at})
        await asked(app, RESPONSES, key, {"input": "begin", "model": f"model-{at}"})
        await asked(app, MESSAGES, key, talk(model=f"model-{at}") | {"metadata": {"user_id": f"tenant-{at}"}})
        await asked(app, MESSAGES, key, {"stop_sequences": [at]})


async def test_nothing_that_clients_send_adds_a_series(tmp_path: Path) -> None:
    async with keyed(tmp_path, OPERATED, metrics_compat="vllm") as served:
        app = build_app(served.service)
        await rubbish(app, 0)
        first = exposition(await served.service.snapshot())
        for at in range(1, 12):
            await rubbish(app, at)
        then = exposition(await served.service.snapshot())
        assert series(first) == series(then)
        told = samples(then)
        counted = total(told, "holdfast_requests_total", route=OTHER)
        assert counted > 11 * total(samples(first), "holdfast_requests_total", route=OTHER) / 2 > 0
        assert total(told, "holdfast_requests_total", tenant="free", route=RESPONSES, status="404") == 12


async def test_so_many_tenants_have_a_name_and_the_others_are_one(tmp_path: Path) -> None:
    def file(names: Iterable[str]) -> str:
        return "".join(f'[tenants.{name}]\nkeys = ["key-{name}"]\n' for name in names)

    names = [f"t{at}" for at in range(MOST_NAMED + 20)]
    async with keyed(tmp_path, file(names)) as served:
        app = build_app(served.service)
        for name in names:
            assert (await asked(app, CHAT, f"key-{name}", talk()))[0] == 200
        later = [f"later{at}" for at in range(MOST_NAMED)]
        (tmp_path / "keys.toml").write_text(file(later))
        served.service.change_tenants(Tenants.of(served.service.settings))
        assert (await asked(app, CHAT, f"key-{later[0]}", talk()))[0] == 200
        told = samples(exposition(await served.service.snapshot()))
        named = {one.labels["tenant"] for one in told if one.name == "holdfast_turns_total"}
        assert named == {*names[:MOST_NAMED], OTHER}
        first = "holdfast_time_to_first_token_seconds_count"
        assert total(told, first, tenant="t0") == 1 and total(told, first, tenant=OTHER) == 21
        assert total(told, first) == total(told, "holdfast_turns_total") == len(names) + 1


def test_a_tenant_with_the_name_of_the_others_is_one_of_them() -> None:
    assert TenantLabels([OTHER]).of(OTHER) == TenantLabels().of("unknown") == OTHER
    assert TenantLabels(["acme"]).of("acme") == "acme" and TenantLabels().of("") == ""


async def test_an_operator_sees_each_tenants_turns_and_a_tenant_sees_no_others(tmp_path: Path) -> None:
    async with keyed(tmp_path, OPERATED) as served:
        app = build_app(served.service)
        for _ in range(4):  # the fourth is beyond the key's rate
            await asked(app, CHAT, "alpha", talk())
        await asked(app, MESSAGES, "gamma", talk())
        async with served.wire("delta") as wire:
            await wire.say()
        told = samples((await asked(app, "/metrics", "ops"))[1])
        assert total(told, "holdfast_turns_total", tenant="acme", protocol="chat") == 3
        assert total(told, "holdfast_turns_refused_total", tenant="acme", protocol="chat") == 1
        assert total(told, "holdfast_turns_total", tenant="zenith", protocol="messages") == 1
        assert total(told, "holdfast_turns_total", tenant="small", protocol="realtime") == 1
        assert total(told, "holdfast_time_to_first_token_seconds_count", tenant="acme") == 3
        assert total(told, "holdfast_requests_total", tenant="acme", route=CHAT, status="200") == 3
        assert total(told, "holdfast_requests_total", tenant="acme", route=CHAT, status="429") == 1
        tokens = ("holdfast_prompt_tokens_total", "holdfast_generation_tokens_total")
        assert all(total(told, name, tenant="zenith") > 0 for name in tokens)
        status, text = await asked(app, "/metrics", "alpha")
        assert status == 200 and b"acme" in text
        assert not [
            name for name in (b"zenith", b"small", b"holdfast_turns", b"requests_total") if name in text
        ]


async def test_a_websocket_that_is_refused_is_counted_with_the_status_of_its_answer(tmp_path: Path) -> None:
    async with keyed(tmp_path, OPERATED) as served:
        app = build_app(served.service)
        for key, path in (("made-up", "/v1/realtime"), ("gamma", "/nowhere")):
            await asked(app, path, key, kind="websocket")
        told = samples(exposition(await served.service.snapshot()))
        found = {(one.labels["route"], one.labels["status"]) for one in told if one.name == REQUESTS}
        assert found == {("/v1/realtime", "401"), (OTHER, "404")}


def lines(served: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in served.splitlines()]


KNOWN = {"tenant", "route", "protocol", "session"}


async def test_each_line_of_a_request_says_where_it_belongs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with keyed(tmp_path, OPERATED) as served:
        app = build_app(served.service)
        capsys.readouterr()
        with logging_lines("holdfast", LogSettings(form="json")):
            for _ in range(4):
                await asked(app, CHAT, "alpha", talk())
            await asked(app, RESPONSES, "gamma", {"input": "begin"})
            await asked(app, f"{RESPONSES}/resp_1", "gamma")
            await asked(app, "/v1/secret/path", "gamma")
            await asked(app, CHAT, "made-up", talk())
        told = lines(capsys.readouterr().err)
    acme = {"tenant": "acme", "route": CHAT, "protocol": "chat"}
    for message in ("session opened", "response completed"):
        found = [one for one in told if one["message"] == message]
        assert found and all(acme.items() <= one.items() or one["tenant"] == "zenith" for one in found)
        assert all(one["session"] == one["id"] for one in found)
    refused = [
        tuple(one.get(name) for name in ("tenant", "route", "protocol", "code"))
        for one in told
        if one["message"] == "request refused"
    ]
    assert refused == [
        ("acme", CHAT, "chat", "rate_limit_exceeded"),
        ("zenith", "/v1/responses/{response_id}", "responses", "response_not_found"),
        ("zenith", OTHER, None, "not_found"),
        (None, CHAT, "chat", "invalid_api_key"),
    ]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_turn_is_found_by_the_id_of_the_answer_that_its_client_got(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, streamed: bool
) -> None:
    bodies = {CHAT: {**talk(), "n": 2}, MESSAGES: talk("two"), RESPONSES: {"input": "three"}}
    bodies[COMPLETIONS] = {"model": "scripted", "prompt": [1, 2]}
    async with keyed(tmp_path, OPERATED) as served:
        app = build_app(served.service)
        capsys.readouterr()
        with logging_lines("holdfast", LogSettings(form="json")):
            answers = {
                path: (await asked(app, path, "gamma", {**body, "stream": streamed}))[1]
                for path, body in bodies.items()
            }
        told = lines(capsys.readouterr().err)
    ended = [one for one in told if one["message"].startswith("response ")]
    for path, answer in answers.items():
        found = re.search(rb'"id":"((chatcmpl-|cmpl-|msg_|resp_)[^"]+)"', answer)
        assert found is not None, answer
        turns = [one["route"] for one in ended if one["reply"] == found[1].decode()]
        assert turns == [path] * (2 if path == CHAT else 1)
    assert not any(one["response"].startswith("resp_") for one in ended), "such an id is a client's"


async def test_a_turn_that_is_refused_on_a_websocket_has_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with keyed(tmp_path, OPERATED) as served, served.wire("alpha") as wire:
        (live,) = served.service.sessions()
        for _ in range(3):
            await wire.say()
        capsys.readouterr()
        with logging_lines("holdfast", LogSettings(form="json")):
            assert (await wire.say())["code"] == "rate_limit_exceeded"
        (line,) = lines(capsys.readouterr().err)
    assert (line["message"], line["code"]) == ("event refused", "rate_limit_exceeded")
    assert (line["tenant"], line["protocol"], line["session"]) == ("acme", "realtime", live.id)


async def test_lines_of_a_turn_far_below_know_its_session_and_tenant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keyed(tmp_path, OPERATED) as served, served.wire("gamma") as wire:
        capsys.readouterr()
        (live,) = served.service.sessions()

        async def fails(*_: object, **__: object) -> None:
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(Pulled, "next_row", fails)
        with logging_lines("holdfast", LogSettings(form="json")):
            await wire.say()
        told = lines(capsys.readouterr().err)
    assert any(one["level"] == "error" and "ZeroDivisionError" in one.get("traceback", "") for one in told)
    for one in told:
        assert (one["tenant"], one["protocol"], one["session"]) == ("zenith", "realtime", live.id), one


async def test_a_session_that_makes_room_for_another_tenant_is_told_as_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with keyed(tmp_path, OPERATED, places=2) as served:
        app = build_app(served.service)
        for text in ("one", "two"):
            await asked(app, CHAT, "alpha", talk(text))
        live, _ = served.service.sessions()
        capsys.readouterr()
        with logging_lines("holdfast", LogSettings(form="json")):
            await asked(app, RESPONSES, "gamma", {"input": "begin"})
        told = lines(capsys.readouterr().err)
        (line,) = [one for one in told if one["message"] == "session closed" and one["id"] == live.id]
        assert (line["tenant"], line["protocol"], line["session"]) == ("acme", "chat", live.id)


def test_each_route_that_begins_turns_has_a_protocol() -> None:
    for route in (*TURN_ROUTES, *(row.path for row in SOCKETS)):
        assert Attribution.of("", route).protocol
    assert Attribution.of("", "/v1/responses/{response_id}").protocol == "responses"
    assert not Attribution.of("", "/v1/chat/completionsx").protocol and not Attribution.of("", "/").protocol
