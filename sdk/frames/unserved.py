"""What the Realtime standard has and this server does not serve yet, by name.

Real clients send these. Each is either accepted and echoed without effect, or refused as `unsupported_field`;
what no standard knows is refused as unknown. A path is the field's in its event, with `[]` for any index;
items under `response.input[]` are looked up as `item`.
"""

from __future__ import annotations

import re
from typing import Any

ECHOED = frozenset(
    {
        "session.audio",
        "session.include",
        "session.parallel_tool_calls",
        "session.reasoning",
        "session.tracing",
        "response.audio",
        "response.parallel_tool_calls",
        "response.reasoning",
    }
)
"""Accepted without effect; the session's are shown again in `session.updated`."""

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
"""Fields that would change what the model reads: silence about them would mislead."""

REFUSED_VALUES = {
    "session.type": frozenset({"transcription"}),
    "session.output_modalities[]": frozenset({"audio"}),
    "session.tools[].type": frozenset({"mcp"}),
    "session.tool_choice.type": frozenset({"mcp", "allowed_tools", "custom"}),
    "session.truncation": frozenset({"auto", "retention_ratio"}),
    "response.output_modalities[]": frozenset({"audio"}),
    "response.tools[].type": frozenset({"mcp"}),
    "response.tool_choice.type": frozenset({"mcp", "allowed_tools", "custom"}),
    "item.type": frozenset(
        {"mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools", "mcp_tool_call"}
    ),
    "item.content[].type": frozenset({"input_audio", "input_image", "output_audio"}),
}
"""Values (or, for an object, its `type`) of fields that are served with other values."""

REFUSED_EVENTS = frozenset(
    {
        "input_audio_buffer.append",
        "input_audio_buffer.clear",
        "input_audio_buffer.commit",
        "output_audio_buffer.clear",
    }
)
"""Client events of the standard that are not served."""


def is_unserved(path: str, value: Any) -> bool:
    """Whether the standard knows this field with this value, though it is not served here."""
    pattern = re.sub(r"\[\d+\]", "[]", path)
    pattern = pattern.replace("response.input[]", "item", 1)
    if pattern in REFUSED_FIELDS:
        return True
    kind = value.get("type") if isinstance(value, dict) else value
    known = REFUSED_EVENTS if pattern == "type" else REFUSED_VALUES.get(pattern, frozenset())
    return isinstance(kind, str) and kind in known
