"""Fields, values and events of the Realtime standard that this server does not serve.

Each is either ignored, and listed as `unserved` in the answer, or refused as `unsupported_field` where without
it the frame would mean something else. Names that are not in the standard are refused as unknown. A path is
that of the field in its event, with `[]` for any index; items under `response.input[]` have the path `item`.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

IGNORED = frozenset(
    {
        "session.audio",
        "session.include",
        "session.output_modalities",
        "session.reasoning",
        "session.tracing",
        "response.audio",
        "response.output_modalities",
        "response.reasoning",
    }
)
"""Fields that are accepted without effect. `session.updated.session.unserved` and
`response.created.response.unserved` name those that the client gave."""

SERVED_VALUES: dict[str, Any] = {"output_modalities": ["text"]}
"""Values of ignored fields that ask for what the server does anyway; a field with such a value is not
listed."""

REFUSED_FIELDS = frozenset(
    {
        "session.prompt",
        "response.prompt",
        "response.text.verbosity",
        "item.content[].audio",
        "item.content[].detail",
        "item.content[].image_url",
        "item.content[].transcript",
    }
)
"""Fields that say what the model reads. If they were ignored it would read something else, so they are
refused."""

REFUSED_VALUES = {
    "session.type": frozenset({"transcription"}),
    "session.tools[].type": frozenset({"mcp"}),
    "session.tool_choice.type": frozenset({"mcp", "custom"}),
    "session.tool_choice.tools[].type": frozenset({"mcp", "custom"}),
    "response.tools[].type": frozenset({"mcp"}),
    "response.tool_choice.type": frozenset({"mcp", "custom"}),
    "response.tool_choice.tools[].type": frozenset({"mcp", "custom"}),
    "item.type": frozenset(
        {"mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools", "mcp_tool_call"}
    ),
    "item.content[].type": frozenset({"input_audio", "input_image", "output_audio"}),
}
"""Fields that are served with other values, and the values that are refused. If the field holds an object, its
`type` counts."""

REFUSED_EVENTS = frozenset(
    {
        "input_audio_buffer.append",
        "input_audio_buffer.clear",
        "input_audio_buffer.commit",
        "output_audio_buffer.clear",
    }
)
"""Types of the standard's client events that are refused."""


def without_effect(section: str, given: msgspec.Struct) -> list[str]:
    """The names of the fields in `given` that the client set and this server ignores, sorted; `given` is a
    `SessionPatch` for the `section` "session", a `ResponseParams` for "response"."""
    names = (path.removeprefix(f"{section}.") for path in IGNORED if path.startswith(f"{section}."))
    values = {name: getattr(given, name) for name in names}
    return sorted(
        name
        for name, value in values.items()
        if value is not msgspec.UNSET and value is not None and value != SERVED_VALUES.get(name)
    )


def is_unserved(path: str, value: Any) -> bool:
    """Whether this server refuses the field at `path`, or its `value`, although the standard has it. False for
    names that are not in the standard."""
    pattern = re.sub(r"\[\d+\]", "[]", path)
    pattern = pattern.replace("response.input[]", "item", 1)
    if pattern in REFUSED_FIELDS:
        return True
    kind = value.get("type") if isinstance(value, dict) else value
    known = REFUSED_EVENTS if pattern == "type" else REFUSED_VALUES.get(pattern, frozenset())
    return isinstance(kind, str) and kind in known
