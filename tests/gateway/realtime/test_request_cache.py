"""What responses of one session ask for: the same as if nothing were kept of those before."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.gateway.realtime import translate
from holdfast.gateway.realtime.translate import RequestCache, request_of
from holdfast.sdk.frames.formats import AllowedTools, FunctionTool, NamedFunction
from holdfast.sdk.frames.items import InputItem, MessageItem, TextPart
from holdfast.sdk.frames.response import ResponseParams
from holdfast.sdk.frames.session import SessionResource
from holdfast.sessions.conversation.items import Item, Message
from holdfast.sessions.errors import SamplingInvalid
from holdfast.sessions.turn.request import RequestBounds, TurnRequest

TOOL = FunctionTool(name="add", parameters={"type": "object"})
SESSIONS = [
    SessionResource(id="s", model="m"),
    SessionResource(id="s", model="m", temperature=0.5, seed=3, max_output_tokens=7),
    SessionResource(id="s", model="m", tools=[TOOL], tool_choice=NamedFunction(name="add")),
    SessionResource(
        id="s",
        model="m",
        tools=[TOOL, FunctionTool(name="look")],
        tool_choice=AllowedTools(mode="required", tools=[NamedFunction(name="look")]),
    ),
]
PARAMS: list[dict[str, Any]] = [
    {},
    {"events": "brief", "metadata": {"a": "b"}},
    {"temperature": 1.0},
    {},
    {"seed": 11},
    {"conversation": "none"},
    {"instructions": "Be brief."},
    {"events": "brief"},
]


def unknown(item: InputItem) -> Item:
    raise AssertionError("nothing is referred to")


def test_a_cached_request_equals_one_made_anew() -> None:
    requests = RequestCache(RequestBounds(100))
    seeds = iter(range(1000))
    for session in (*SESSIONS, *SESSIONS[::-1]):
        for fields in PARAMS:
            params, seed = ResponseParams(**fields), next(seeds)
            made = requests.of(params, session, unknown, seed)
            assert made == request_of(params, session, unknown, RequestBounds(100), seed)


def test_some_tools_are_allowed() -> None:
    request = request_of(ResponseParams(), SESSIONS[3], unknown)
    assert (request.tool_choice, request.tool, request.allowed) == ("required", None, ("look",))


def test_a_request_with_the_same_fields_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[ResponseParams] = []

    def counted(params: ResponseParams, *rest: Any) -> TurnRequest:
        checked.append(params)
        return request_of(params, *rest)

    monkeypatch.setattr(translate, "request_of", counted)
    requests = RequestCache(RequestBounds(100))
    fields = {"max_output_tokens": 5, "instructions": "Be brief."}
    made = [
        requests.of(ResponseParams(**fields, metadata={"turn": str(seed)}), SESSIONS[0], unknown, seed)
        for seed in range(3)
    ]
    assert len(checked) == 1
    assert [request.sampling.seed for request in made] == [0, 1, 2]
    requests.of(ResponseParams(max_output_tokens=6), SESSIONS[0], unknown, 3)
    requests.of(ResponseParams(max_output_tokens=6), SESSIONS[1], unknown, 3)
    assert len(checked) == 3


def test_items_of_a_request_are_resolved_each_time() -> None:
    requests, seen = RequestCache(RequestBounds(100)), []

    def resolve(item: InputItem) -> Item:
        seen.append(item)
        return Message(id=f"item_{len(seen)}", role="user", text="Hi")

    asked = ResponseParams(input=[MessageItem(role="user", content=[TextPart(type="input_text", text="Hi")])])
    made = [requests.of(asked, SESSIONS[0], resolve, 1) for _ in range(2)]
    assert [request.input[0].id for request in made if request.input] == ["item_1", "item_2"]


def test_a_refused_request_is_not_cached() -> None:
    requests = RequestCache(RequestBounds(100))
    wrong = msgspec.structs.replace(SESSIONS[2], tools=[])
    for _ in range(2):
        with pytest.raises(SamplingInvalid):
            requests.of(ResponseParams(), wrong, unknown, 1)
    assert requests.of(ResponseParams(), SESSIONS[0], unknown, 1).tool_choice == "auto"
