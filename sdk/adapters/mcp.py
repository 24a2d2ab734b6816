"""Tools of an MCP server, for `chat.run` (the extra `mcp`).

    async for event in chat.run("...", await mcp_tools(session)):
        ...

The session is a `ClientSession` of the `mcp` package, version 1 or 2.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from ..errors import ToolFailed, ToolInvalid
from ..frames.formats import FunctionTool
from ..tools.context import ToolContext, output_text
from ..tools.tool import Tool

MAX_PAGES = 64


class MCPSession(Protocol):
    """The methods of `mcp.ClientSession` that are used here."""

    async def list_tools(self, *, params: Any = None) -> Any:
        """Return one page of the server's list of tools. `params`: says which page; None: the first."""

    async def call_tool(
        self, name: str, arguments: dict[str, Any] | None = None, *, progress_callback: Any = None
    ) -> Any:
        """Run the tool `name` at the server and return its result. `progress_callback`: is awaited with how far
        it is."""


async def mcp_tools(session: MCPSession, *, timeout: float | None = None, prefix: str = "") -> list[Tool]:
    """All tools of the MCP server that `session` talks to, each with `prefix` before its name. A call runs the
    tool at that server. `timeout`: seconds for each call; None: no limit. Raises `ToolInvalid` for a tool that
    cannot be offered and for more than `MAX_PAGES` pages, and what the session raises."""
    return [_tool(session, listed, timeout, prefix) async for listed in _listed(session)]


async def _listed(session: MCPSession) -> AsyncIterator[Any]:
    params: Any = None
    for _ in range(MAX_PAGES):
        page = await session.list_tools(params=params)
        for listed in page.tools:
            yield listed
        cursor = _either(page, "next_cursor", "nextCursor")
        if cursor is None:
            return
        from mcp.types import PaginatedRequestParams

        params = PaginatedRequestParams(cursor=cursor)
    raise ToolInvalid(f"The server lists its tools on more than {MAX_PAGES} pages")


def _tool(session: MCPSession, listed: Any, timeout: float | None, prefix: str) -> Tool:
    schema = _either(listed, "input_schema", "inputSchema")
    given = {"type": "function", "name": prefix + listed.name, "description": listed.description}
    try:
        definition = msgspec.convert({**given, "parameters": schema}, FunctionTool)
    except msgspec.ValidationError as error:
        raise ToolInvalid(f"`{listed.name}` cannot be a tool: {error}") from error

    async def invoke(arguments: str, context: ToolContext) -> str:
        decoded = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        result = await session.call_tool(listed.name, decoded, progress_callback=_progress(context))
        return _output(result)

    return Tool(definition, invoke, timeout)


def _progress(context: ToolContext) -> Callable[..., Any]:
    async def report(progress: float, total: float | None = None, message: str | None = None) -> None:
        context.progress(message or f"{progress:g}", progress / total if total else None)

    return report


def _output(result: Any) -> str:
    """The result of an MCP tool as text: its content blocks, joined by line ends, or its structured data if it
    has none. Raises `ToolFailed` if the result is an error or too long."""
    blocks = [_text(block) for block in result.content]
    structured = _either(result, "structured_content", "structuredContent")
    text = "\n".join(blocks) if blocks or structured is None else output_text(structured)
    if _either(result, "is_error", "isError"):
        raise ToolFailed(text)
    return output_text(text)


def _text(block: Any) -> str:
    """The text of a content block, or of the file in it; for another block a description, as JSON: the model
    reads no pictures."""
    file = getattr(block, "resource", None)
    for holder in (block, file):
        text = getattr(holder, "text", None)
        if isinstance(text, str):
            return text
    about = getattr(file or block, "uri", None) or _either(file or block, "mime_type", "mimeType")
    return output_text({"type": block.type, **({"about": str(about)} if about else {})})


def _either(value: Any, new: str, old: str) -> Any:
    """The attribute `new` (its name in version 2 of the package), or `old` (in version 1); None if it has
    neither."""
    return getattr(value, new, None) if hasattr(value, new) else getattr(value, old, None)
