"""Tools in the instructions, for models with a chat template that does not show tools.

The texts are those of Qwen 2.5 and Hermes. The model is told to write calls in the hermes form
(`CallForm.HERMES`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""  # noqa: E501 - the model's text


def instructions_with(instructions: str, tools: Iterable[dict[str, Any]]) -> str:
    """The instructions, and behind them the tools' schemas and how to call them."""
    told = _TOOLS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    return f"{instructions}\n\n{told}" if instructions else told


def called(function: str) -> str:
    """A call as the model is told to write it. ``function``: its name and arguments as a JSON object."""
    return f"<tool_call>\n{function}\n</tool_call>"


def answered(output: str) -> str:
    """A tool's output as the text of a user message: between ``<tool_response>`` tags."""
    return f"<tool_response>\n{output}\n</tool_response>"
