"""Tools of a real MCP server, over its standard streams, called by the pocket model."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.sdk import Client, Tool, ToolContext, ToolInvalid
from holdfast.sdk.adapters.mcp import mcp_tools

pytestmark = pytest.mark.anyio

SERVER = '''
import logging
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("pocket", log_level="CRITICAL")

@server.tool(structured_output=False)
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return '{"temperature": 7, "sky": "cloudy"}'

@server.tool()
async def slow(steps: int, context: Context) -> str:
    """Takes its time."""
    for step in range(steps):
        await context.report_progress(step, steps, f"step {step}")
    return "done"

@server.tool()
def broken() -> str:
    """Fails."""
    raise ValueError("out of order")

server.run("stdio")
'''


@asynccontextmanager
async def tools_of_server(folder: Path) -> AsyncIterator[dict[str, Tool]]:
    mcp = pytest.importorskip("mcp")
    script = folder / "server.py"
    script.write_text(SERVER)
    parameters = mcp.StdioServerParameters(command=sys.executable, args=[str(script)])
    with (folder / "errors").open("w") as errors:
        async with (
            mcp.stdio_client(parameters, errlog=errors) as streams,
            mcp.ClientSession(*streams) as session,
        ):
            await session.initialize()
            yield {tool.name: tool for tool in await mcp_tools(session, timeout=30.0)}


async def test_the_model_calls_tools_of_an_mcp_server(client: Client, tmp_path: Path) -> None:
    async with tools_of_server(tmp_path) as tools, client.session(temperature=0) as chat:
        done = await chat.run("What is the weather in Oslo?", [tools["get_weather"]]).done()
        assert (done.text, done.calls) == ("It is 7 degrees and cloudy in Oslo.", 1)
        assert tools["get_weather"].definition.description == "Get the weather in a city."

        seen: list[Any] = []
        context = ToolContext("c", lambda note, fraction: seen.append((note, fraction)))
        assert (await tools["slow"].call('{"steps": 2}', context)).output == "done"
        assert seen == [("step 0", 0.0), ("step 1", 0.5)]

        failed = await tools["broken"].call("{}")
        assert failed.kind == "failed" and "broken" in json.loads(failed.output)["error"]
        assert (await tools["broken"].call("[1]")).kind == "invalid_arguments"
        assert "city" in (await tools["get_weather"].call('{"town": 1}')).output


class Session:
    """A server of the first version of the package, in pages."""

    def __init__(self, *names: str) -> None:
        self._names = names

    async def list_tools(self, *, params: Any = None) -> Any:
        at = 0 if params is None else int(params.cursor)
        schema = {"type": "object", "properties": {}}
        tool = SimpleNamespace(name=self._names[at], description="", inputSchema=schema)
        following = str(at + 1) if at + 1 < len(self._names) else None
        return SimpleNamespace(tools=[tool], nextCursor=following)

    async def call_tool(self, name: str, arguments: Any = None, *, progress_callback: Any = None) -> Any:
        picture = SimpleNamespace(type="image", mimeType="image/png")
        return SimpleNamespace(content=[picture], structuredContent=None, isError=name == "b")


async def test_pages_prefixes_and_older_names() -> None:
    pytest.importorskip("mcp")
    tools = await mcp_tools(Session("a", "b"), prefix="far.")
    assert [tool.name for tool in tools] == ["far.a", "far.b"]
    told = [await tool.call("") for tool in tools]
    assert [outcome.kind for outcome in told] == ["completed", "failed"]
    assert told[0].output == '{"type": "image", "about": "image/png"}'


async def test_a_tool_that_cannot_be_offered_is_named() -> None:
    with pytest.raises(ToolInvalid, match="no such name"):
        await mcp_tools(Session("no such name"))


class Answering(Session):
    """A server that answers with these blocks."""

    def __init__(self, *blocks: Any) -> None:
        super().__init__("read")
        self._blocks = blocks

    async def call_tool(self, name: str, arguments: Any = None, *, progress_callback: Any = None) -> Any:
        return SimpleNamespace(content=[*self._blocks], structuredContent=None, isError=False)


async def test_the_words_of_a_file_are_read() -> None:
    words = SimpleNamespace(uri="file:///a.txt", mimeType="text/plain", text="what it says")
    picture = SimpleNamespace(uri="file:///a.png", mimeType="image/png", blob="AAAA")
    blocks = [SimpleNamespace(type="resource", resource=resource) for resource in (words, picture)]
    (tool,) = await mcp_tools(Answering(*blocks))
    assert (await tool.call("")).output == 'what it says\n{"type": "resource", "about": "file:///a.png"}'


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [("a\ud800b", "completed", "a\ufffdb"), ("x" * (512 << 10), "failed", "at most 524288 are allowed")],
)
async def test_words_that_no_frame_holds_do_not_end_the_run(text: str, kind: str, told: str) -> None:
    (tool,) = await mcp_tools(Answering(SimpleNamespace(type="text", text=text)))
    outcome = await tool.call("")
    assert outcome.kind == kind
    assert told in outcome.output


async def test_a_list_of_tools_without_end_is_refused() -> None:
    pytest.importorskip("mcp")
    with pytest.raises(ToolInvalid, match="64 pages"):
        await mcp_tools(Session(*(f"tool_{number}" for number in range(65))))
