"""Bodies and frames that are bent at random: each is answered, none is a mistake of the server."""

from __future__ import annotations

import random
from typing import Any

import pytest

from .stage import staged
from .test_create import TOOL, user
from .test_socket import ENDS, connected

pytestmark = pytest.mark.anyio

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**63, 2**70, 1e308, -0.5, "", "x", "\0", "a" * 200, [], {}, [[]], [{}]),
    *({"type": "x"}, [{"type": "message"}], {"id": 7}, {"type": "function"}, {"a": {"b": [1]}}),
    *(["message.output_text.logprobs"], [{"type": "input_image"}], {"type": "web_search"}),
]
BODY: dict[str, Any] = {
    "model": "fake",
    "input": [
        user("hi"),
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "x"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "ok"}], "phase": "commentary"},
        {"type": "reasoning", "id": "r", "summary": []},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    "metadata": {"a": "b"},
    "include": ["message.output_text.logprobs"],
    "temperature": 1,
    "top_p": 0.5,
    "max_output_tokens": 3,
    "truncation": "auto",
    "store": True,
    "previous_response_id": None,
    "conversation": None,
    "instructions": "x",
    "parallel_tool_calls": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1},
    "stop": ["a"],
    "background": False,
    "prompt_cache_options": {"mode": "implicit"},
}
FIELDS = {
    "/v1/responses": set(BODY),
    "/v1/responses/input_tokens": {"model", "input", "instructions", "tools", "text"},
    "/v1/responses/compact": {"model", "input", "instructions"},
    "/v1/conversations": {"metadata"},
}


def bent(dice: random.Random, node: Any) -> Any:
    """A copy of JSON with one change somewhere."""
    if isinstance(node, dict) and node:
        changed, name = dict(node), dice.choice(list(node))
        way = dice.random()
        if way < 0.15:
            del changed[name]
        elif way < 0.25:
            changed[dice.choice(["odd", "type", "id", "content"])] = dice.choice(VALUES)
        elif way < 0.6 or not isinstance(changed[name], dict | list):
            changed[name] = dice.choice(VALUES)
        else:
            changed[name] = bent(dice, changed[name])
        return changed
    if isinstance(node, list) and node:
        items, at = list(node), dice.randrange(len(node))
        items[at] = bent(dice, items[at]) if dice.random() < 0.7 else dice.choice(VALUES)
        return items
    return dice.choice(VALUES)


@pytest.mark.parametrize("seed", range(4))
async def test_bent_bodies_are_served_or_refused(seed: int) -> None:
    dice = random.Random(seed)
    async with staged() as stage:
        statuses = set()
        for _ in range(150):
            path = dice.choice([*FIELDS])
            body: Any = {name: value for name, value in BODY.items() if name in FIELDS[path]}
            for _ in range(dice.randint(1, 3)):
                body = bent(dice, body)
            answer = await stage.ask("POST", path, body)
            statuses.add(answer.status)
            assert answer.status in (200, 400, 404), (body, answer.body)
            assert answer.status == 200 or set(answer.error) == {"type", "code", "message", "param"}
        assert statuses >= {200, 400}


async def test_bent_frames_are_served_or_refused() -> None:
    dice = random.Random(7)
    async with staged() as stage:
        for _ in range(4):
            async with connected(stage) as line:
                for _ in range(25):  # more bad ones in a row would end the socket
                    frame = {"type": "response.create", "stream_id": "lane", "generate": True, **BODY}
                    frame = bent(dice, bent(dice, frame))
                    await line.send(**frame) if isinstance(frame, dict) else await line.send()
                    last = (await line.until("error", *ENDS))[-1]
                    assert last["type"] != "error" or last["error"]["code"] != "internal_error", frame
                    assert last["type"] != "response.failed", frame
