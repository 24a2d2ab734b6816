"""The fields that the standard requires of responses, their items and the events of their streams.

From the Open Responses specification, https://www.openresponses.org, and the `openai` package; that package
itself reads the same in `tests/clients/test_openai_types.py`.
"""

from __future__ import annotations

from typing import Any

NUMBER, TEXT, LIST, TRUTH = (int, float), (str,), (list,), (bool,)
NONE = type(None)
RESOURCE: dict[str, tuple[type, ...]] = {
    "id": TEXT,
    "object": TEXT,
    "created_at": (int,),
    "completed_at": (int, NONE),
    "status": TEXT,
    "incomplete_details": (dict, NONE),
    "model": TEXT,
    "previous_response_id": (str, NONE),
    "instructions": (str, NONE),
    "output": LIST,
    "error": (dict, NONE),
    "tools": LIST,
    "tool_choice": (str, dict),
    "truncation": TEXT,
    "parallel_tool_calls": TRUTH,
    "text": (dict,),
    "top_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "top_logprobs": (int,),
    "temperature": NUMBER,
    "reasoning": (dict, NONE),
    "user": (str, NONE),
    "usage": (dict, NONE),
    "max_output_tokens": (int, NONE),
    "max_tool_calls": (int, NONE),
    "store": TRUTH,
    "background": TRUTH,
    "service_tier": TEXT,
    "metadata": (dict,),
    "safety_identifier": (str, NONE),
    "prompt_cache_key": (str, NONE),
}
"""Of a response, with their types."""
ITEMS: dict[str, set[str]] = {
    "message": {"id", "status", "role", "content"},
    "function_call": {"id", "status", "call_id", "name", "arguments"},
    "function_call_output": {"id", "status", "call_id", "output"},
    "reasoning": {"id", "summary"},
    "compaction": {"id", "encrypted_content"},
}
PARTS: dict[str, set[str]] = {
    "input_text": {"text"},
    "output_text": {"text", "annotations", "logprobs"},
    "reasoning_text": {"text"},
}
_PLACE = {"output_index", "item_id"}
_PART = _PLACE | {"content_index"}
EVENTS: dict[str, set[str]] = {
    **{
        f"response.{name}": {"response"}
        for name in ("created", "in_progress", "completed", "incomplete", "failed")
    },
    **{f"response.output_item.{change}": {"output_index", "item"} for change in ("added", "done")},
    **{f"response.content_part.{change}": _PART | {"part"} for change in ("added", "done")},
    "response.output_text.delta": _PART | {"delta", "logprobs"},
    "response.output_text.done": _PART | {"text", "logprobs"},
    "response.reasoning_text.delta": _PART | {"delta"},
    "response.reasoning_text.done": _PART | {"text"},
    "response.function_call_arguments.delta": _PLACE | {"delta"},
    "response.function_call_arguments.done": _PLACE | {"arguments"},
}
STATUSES = {"in_progress", "completed", "incomplete"}


def check_item(item: dict[str, Any]) -> None:
    """Raises AssertionError if an item lacks something, whatever its status is."""
    assert ITEMS[item["type"]] <= item.keys(), item
    assert item.get("status", "completed") in STATUSES, item
    for part in item.get("content", ()):
        assert PARTS[part["type"]] <= part.keys(), item
    if item["type"] == "message" and item["status"] != "in_progress":
        assert item["content"], item
    if item["type"] == "message" and item["role"] == "assistant":
        assert all(part["type"] == "output_text" for part in item["content"]), item


def check_response(response: dict[str, Any]) -> None:
    """Raises AssertionError if a response lacks something, or one of its items does."""
    for name, types in RESOURCE.items():
        assert isinstance(response[name], types), (name, response)
    assert response["object"] == "response"
    assert (response["status"] == "failed") == (response["error"] is not None), response
    assert (response["status"] == "incomplete") == (response["incomplete_details"] is not None), response
    for item in response["output"]:
        check_item(item)
        assert item.get("status") != "in_progress", response


def check_events(events: list[dict[str, Any]], first: int = 0) -> None:
    """Raises AssertionError if an event lacks something, if they are not in order from the number ``first``
    on, or if the last one is not the end."""
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    for event in events:
        assert EVENTS[event["type"]] <= event.keys(), event
        if "item" in event:
            check_item(event["item"])
        if "response" in event:
            check_response(event["response"])
        if "part" in event:
            assert PARTS[event["part"]["type"]] <= event["part"].keys(), event
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    output = events[-1]["response"]["output"]
    assert done == output[len(output) - len(done) :], "each item that has ended is in the response"
