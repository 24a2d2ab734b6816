"""The openai-agents package against a real server, through the SDK's model for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.gateway.settings import GatewaySettings
from holdfast.sessions.tools.forms import CallForm
from holdfast.tests.threaded import POCKET, serving

from .conftest import needs

ROOT = Path(holdfast.__file__).resolve().parent

pytestmark = [pytest.mark.anyio, pytest.mark.client("openai-agents")]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts find this checkout; skipped where the package is not installed."""
    needs("agents", "msgspec")
    (tmp_path / "holdfast").symlink_to(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


async def test_an_agent_with_a_tool_runs_on_the_pocket_model(
    client_script: Callable[..., Any],
) -> None:
    async with serving(GatewaySettings(port=0), POCKET) as server:
        told = await asyncio.to_thread(client_script, "openai_agents_run.py", server.url)
    first, second, third = told["said"]
    assert "Marisol" in first and "Marisol" in third
    assert "21" in second and "sunny" in second and "Rome" in second
    assert "".join(told["pieces"]) == third
    assert told["ran"] == ["Rome"]
    assert told["sessions"] == 1, "each step goes on in the session that has the steps before"
    assert all(cached > 0 for cached in told["cached"][1:])
    assert told["input"] == sorted(told["input"])


async def test_a_session_with_a_reply_that_was_left_is_not_used_again(
    client_script: Callable[..., Any],
) -> None:
    """It holds words that the agent was never given. A tool is named to a model by its name alone."""
    told = await asyncio.to_thread(client_script, "openai_agents_left.py")
    choice = {"type": "function", "name": "get_weather"}
    asked = {"tool_choice": choice, "parallel_tool_calls": False}
    assert told == {"kept": [0, 0], "sessions": 2, "asked": asked}


async def test_an_output_type_is_followed_with_tools_and_without(
    client_script: Callable[..., Any],
) -> None:
    async with serving(GatewaySettings(port=0), POCKET) as server:
        told = await asyncio.to_thread(client_script, "openai_agents_typed.py", server.url)
    is_trip, trip = told["trip"]
    assert is_trip and trip["city"] in ("Oslo", "Rome") and 1 <= trip["days"] <= 9
    assert told["nested"] and told["lenient"]
    assert [type(value) for value in told["wrapped"]] == [bool, bool]
    assert told["answered"] == [True, True, True]
    assert told["steps"] == [2, 1, 2] and len(told["ran"]) == 2, "a call and then the answer, or that at once"
    assert told["ran"][0] == "Rome"
    assert told["sessions"] == [1, 1, 1], "each step goes on in the session that has the steps before"
    assert json.loads("".join(told["pieces"])) == told["streamed"] and len(told["pieces"]) > 1
    kind, why = told["refused"]
    assert kind == "UserError" and "uniqueItems" in why and "strict_json_schema=False" in why
    for cut in ("cut", "cut_before_a_word", "cut_stream"):
        kind, why = told[cut]
        assert kind == "ModelBehaviorError" and "max_output_tokens" in why, cut


async def test_an_output_type_with_tools_is_refused_for_a_model_with_bare_json_calls(
    client_script: Callable[..., Any],
) -> None:
    settings = GatewaySettings(port=0, calls=CallForm.LLAMA3_JSON)
    async with serving(settings, POCKET) as server:
        kind, why = await asyncio.to_thread(client_script, "openai_agents_typed.py", server.url, "bare")
    assert kind == "UserError" and "bare JSON" in why
    assert "strict_json_schema" not in why, "which would not help"
