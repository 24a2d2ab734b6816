"""Bodies of Chat Completions and Completions become requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.gateway.chat.frames import ChatRequest
from holdfast.gateway.chat.translate import ask_of
from holdfast.sessions.errors import SamplingInvalid
from holdfast.sessions.turn.request import UNBOUNDED, TurnRequest


def request_of(default_tokens: int | None = None, **fields: Any) -> TurnRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return ask_of(msgspec.convert(body, ChatRequest), UNBOUNDED, {}, default_tokens).request


ADD, LOOK = ({"type": "function", "function": {"name": name}} for name in ("add", "look"))


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_tools_are_allowed_and_all_are_in_the_prompt(mode: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [LOOK]}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [ADD, LOOK], "tool_choice": choice}
    ask = ask_of(msgspec.convert(body, ChatRequest), UNBOUNDED, {}, None)
    assert [tool.name for tool in ask.transcript.preamble.tools] == ["add", "look"]
    request = ask.request
    assert (request.tool_choice, request.tool, request.allowed) == (mode, None, ("look",))
    assert request.tools is None, "those of the conversation"


def test_a_tool_that_is_not_offered_is_not_allowed() -> None:
    with pytest.raises(SamplingInvalid, match="no tool 'look'") as refused:
        request_of(
            tools=[ADD],
            tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [LOOK]}},
        )
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_reply_that_ignores_its_end_has_as_many_tokens_as_its_limit(field: str) -> None:
    """Load generators ask for it, for replies of one length. ``stop`` is null in their bodies."""
    request = request_of(ignore_eos=True, stop=None, **{field: 32})
    assert request.min_output_tokens == request.max_output_tokens == 32
    assert request_of(ignore_eos=True, default_tokens=7).min_output_tokens == 7
    assert request_of(ignore_eos=False, **{field: 32}).min_output_tokens == 0


@pytest.mark.parametrize(
    "fields", [{}, {"max_tokens": 9, "stop": "a"}, {"max_tokens": 9, "stop_token_ids": [1]}]
)
def test_what_cannot_stand_beside_it_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SamplingInvalid) as refused:
        request_of(ignore_eos=True, **fields)
    assert refused.value.param == "ignore_eos"
