"""Terminal agents, unmodified, against a real server: each reads a task, runs one of its tools and says how it
went, with its own prompts. The model is scripted (`scripted_agents.py`).

What they send is kept, shortened, in `tests/gateway/agents/`, and `make test` sends it again, without them.
``HOLDFAST_RECORD=1`` writes it anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.tests.gateway.agents.recorded import FOLDER, kept, kinds, shortened

from .calls import ROOT, Calls
from .conftest import SECONDS
from .scripted_agents import ANSWER, Script, scripted_server

pytestmark = pytest.mark.anyio

SAYS = "echo hello from $((40+2))"
CODEX = """\
model = "pocket"
model_provider = "holdfast"
[model_providers.holdfast]
name = "Holdfast"
base_url = "{url}/v1"
wire_api = "responses"
supports_websockets = {sockets}
request_max_retries = 0
stream_max_retries = 0
"""
LOUD = f"""\
[mcp_servers.loud]
command = {json.dumps(sys.executable)}
args = [{json.dumps(str(Path(__file__).with_name("loud_mcp.py")))}]
"""
OPENCODE: dict[str, Any] = {
    "provider": {
        "holdfast": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "k"},
            "models": {"pocket": {}},
        }
    },
    "model": "holdfast/pocket",
}
LLM = """\
- model_id: holdfast
  model_name: pocket
  api_base: {url}/v1
  supports_tools: true
"""


@dataclass(frozen=True)
class Agent:
    """A program: the ``environment`` with its ``command``, variables and files of its home, each with ``{url}``
    for the server's, and what the script needs of it."""

    client: str
    environment: str
    command: tuple[str, ...]
    tool: str
    arguments: dict[str, Any]
    says: str
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    async def run(self, url: str, home: Path) -> str:
        """Run it in ``home``. Returns what it printed."""
        work = home / "work"
        work.mkdir()
        for name, text in self.files.items():
            (home / name).parent.mkdir(exist_ok=True, parents=True)
            (home / name).write_text(text.replace("{url}", url))
        folder = ROOT / f".venv-clients-{self.environment}"
        binaries = [folder / "bin", folder / "node_modules" / ".bin"]
        variables = {
            "PATH": os.pathsep.join([*map(str, binaries), os.environ["PATH"]]),
            "HOME": str(home),
            "NO_PROXY": "127.0.0.1",
            **{
                name: value.replace("{url}", url).replace("{home}", str(home))
                for name, value in self.variables.items()
            },
        }
        process = await asyncio.create_subprocess_exec(
            *self.command,
            cwd=work,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(SECONDS):
                printed = (await process.communicate())[0].decode(errors="replace")
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, printed
        return printed


def codex(
    *, sockets: bool, tool: str = "exec_command", arguments: Any = None, says: str = "", more: str = ""
) -> Agent:
    return Agent(
        "@openai/codex (npm)",
        "agents",
        (
            "codex",
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "Say hello.",
        ),
        tool,
        arguments or {"cmd": SAYS},
        says or "hello from 42",
        {"CODEX_HOME": "{home}/codex"},
        {"codex/config.toml": CODEX.replace("{sockets}", "true" if sockets else "false") + more},
    )


AGENTS = {
    "codex": codex(sockets=False),
    "codex_socket": codex(sockets=True),
    "codex_namespace": codex(
        sockets=False, tool="multi_agent_v1.spawn_agent", arguments={"message": "Hello."}, says='"agent_id":'
    ),
    "codex_mcp": codex(
        sockets=False, tool="mcp__loud.shout", arguments={"text": "hello"}, says="HELLO", more=LOUD
    ),
    "claude_code": Agent(
        "@anthropic-ai/claude-code (npm)",
        "agents",
        ("claude", "-p", "--model", "pocket", "--dangerously-skip-permissions", "Say hello."),
        "Bash",
        {"command": SAYS, "description": "Says hello"},
        "hello from 42",
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "k",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        },
    ),
    "opencode": Agent(
        "opencode-ai (npm)",
        "agents",
        ("opencode", "run", "Say hello."),
        "bash",
        {"command": SAYS, "description": "Says hello"},
        "hello from 42",
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {".config/opencode/opencode.json": json.dumps(OPENCODE)},
    ),
    "qwen_code": Agent(
        "@qwen-code/qwen-code (npm)",
        "agents",
        ("qwen", "--auth-type", "openai", "-y", "-p", "Say hello."),
        "run_shell_command",
        {"command": SAYS, "is_background": False},
        "hello from 42",
        {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "k", "OPENAI_MODEL": "pocket"},
    ),
    "llm": Agent(
        "llm",
        "llm",
        ("llm", "-m", "holdfast", "--key", "k", "-T", "llm_time", "What time is it?"),
        "llm_time",
        {},
        "utc_time_iso",
        {"LLM_USER_PATH": "{home}/llm"},
        {"llm/extra-openai-models.yaml": LLM},
    ),
}


def ready(agent: Agent) -> None:
    """Skip the test where the environment of the agent is missing."""
    if not (ROOT / f".venv-clients-{agent.environment}" / "ready").exists():
        pytest.skip(f"no .venv-clients-{agent.environment} here: `make clients` makes it")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.client(agent.client)) for name, agent in AGENTS.items()]
)
async def test_an_agent_runs_its_tool_and_reads_the_output(name: str, calls: Calls, tmp_path: Path) -> None:
    agent = AGENTS[name]
    ready(agent)
    script = Script(agent.tool, agent.arguments)
    async with scripted_server(script) as url:
        printed = await agent.run(url, tmp_path)
    assert ANSWER in printed
    assert any(agent.says in prompt.rpartition("<tool_response>")[2] for prompt in script.prompts)
    keep(name, agent.client, calls, tmp_path)


@pytest.mark.client("aider-chat")
async def test_aider_writes_a_file(calls: Calls, tmp_path: Path) -> None:
    options = (
        "--no-git --yes-always --no-check-update --no-show-release-notes --analytics-disable --no-pretty"
    )
    agent = Agent(
        "aider-chat",
        "aider",
        ("aider", "--model", "openai/pocket", *options.split(), "--message", "Say hello.", "hello.py"),
        "none",
        {},
        "",
        {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "k"},
    )
    ready(agent)
    script = Script("none", {}, plain='hello.py\n```\nprint("hello")\n```\n')
    async with scripted_server(script) as url:
        await agent.run(url, tmp_path)
    assert (tmp_path / "work" / "hello.py").read_text() == 'print("hello")\n'
    keep("aider", agent.client, calls, tmp_path)


def keep(name: str, client: str, calls: Calls, home: Path) -> None:
    """Compare what the agent sent with what is kept of it, or keep it."""
    sent = [{"path": path, "body": shortened(body, str(home))} for path, body in calls.bodies]
    if os.environ.get("HOLDFAST_RECORD") == "1":
        told = {"client": client, "requests": sent}
        (FOLDER / f"{name}.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    assert kinds(sent) == kinds(kept(name)["requests"]), "HOLDFAST_RECORD=1 keeps it anew"
