"""Fields, values and events of the Realtime standard that this server does not serve.

Each is either accepted and echoed without effect, or refused as `unsupported_field`. Names that are not in the
standard are refused as unknown. A path is that of the field in its event, with `[]` for any index; items under
`response.input[]` have the path `item`.
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
"""Accepted without effect; `session.updated` repeats those of the session."""

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
"""Fields that would change what the model reads, so they are refused."""

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
"""Refused values of fields that are served with other values; of an object, its `type`."""

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
    """Whether the standard has this field with this value, and this server refuses it."""
    pattern = re.sub(r"\[\d+\]", "[]", path)
    pattern = pattern.replace("response.input[]", "item", 1)
    if pattern in REFUSED_FIELDS:
        return True
    kind = value.get("type") if isinstance(value, dict) else value
    known = REFUSED_EVENTS if pattern == "type" else REFUSED_VALUES.get(pattern, frozenset())
    return isinstance(kind, str) and kind in known
