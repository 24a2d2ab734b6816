"""What terminal agents sent (`tests/clients/test_terminal_agents.py` keeps it) is served, without them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.gateway.clients import IGNORED
from holdfast.gateway.responses.frames import decoded_event
from holdfast.tests.clients.calls import FACES, paths
from holdfast.tests.gateway.messages.messages_stage import stage
from holdfast.tests.sessions.text.chat_languages import ours

from .recorded import FOLDER, kept

pytestmark = pytest.mark.anyio

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
SEARCH = ["tools[2]: web_search"]


def socket_events(name: str) -> list[Any]:
    return [one["body"] for one in kept(name)["requests"] if one["body"].get("type") == "response.create"]


@pytest.mark.parametrize("name", [name for name in NAMES if not socket_events(name)])
async def test_its_requests_are_served(name: str) -> None:
    requests = kept(name)["requests"]
    async with stage(*["one"] * len(requests), max_context=1 << 16) as on:
        for request in requests:
            body = {key: value for key, value in request["body"].items() if key != "model"}
            answer = await on.http.post(request["path"], json={**body, "model": "scripted"})
            assert answer.status_code == 200, answer.text
            assert '"error"' not in answer.text.replace('"error":null', "")
            unserved = answer.headers.get("x-holdfast-unserved")
            assert unserved == ("web_search" if name.startswith("codex") else None)
        read = [ours("chatml").backend.decode(prompt) for prompt in on.link.model.prompts]  # type: ignore[attr-defined]
    asked = "What time is it?" if name == "llm" else "Hello." if name == "codex_namespace" else "Say hello."
    assert len(read) == len(requests) and asked in read[-1]
    if name != "aider":
        assert "<tool_response>" in read[-1] or name == "codex_namespace"


def test_events_on_a_socket_are_served() -> None:
    events = socket_events("codex_socket")
    assert [event.get("generate") for event in events] == [False, None, None]
    for event in events:
        assert decoded_event(json.dumps(event).encode()).unserved == SEARCH


@pytest.mark.parametrize(
    ("name", "called"),
    [("codex_namespace", ("multi_agent_v1", "spawn_agent")), ("codex_mcp", ("mcp__loud", "shout"))],
)
def test_calls_of_a_namespace_are_sent_back_with_both_names(name: str, called: tuple[str, str]) -> None:
    items = [item for one in kept(name)["requests"] for item in one["body"]["input"]]
    calls = [item for item in items if item["type"] == "function_call"]
    assert {(item.get("namespace"), item["name"]) for item in calls} == {called}


def test_the_table_names_clients_that_send_these_fields() -> None:
    sent: dict[str, set[tuple[str, str]]] = {}
    for name in NAMES:
        recorded = kept(name)
        for request in recorded["requests"]:
            face = FACES.get(request["path"])
            found = {(face, field) for field in paths(request["body"])}
            sent.setdefault(recorded["client"], set()).update(found)
    for row in IGNORED:
        senders = tuple(sorted(client for client, fields in sent.items() if (row.face, row.path) in fields))
        assert row.clients == senders, f"{row.face}: {row.path}"
