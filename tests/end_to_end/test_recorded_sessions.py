"""Scripted sessions and conversations tell a client the same as when they were recorded.

``HOLDFAST_RECORD=1`` writes the recordings anew: only where what clients are told is meant to change.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx2
import pytest

from holdfast.gateway.server import Serving

from .scripted_conversations import CONVERSATIONS, Recorder
from .scripted_sessions import SCRIPTS, outline

pytestmark = pytest.mark.anyio
RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("name", list(SCRIPTS))
async def test_a_scripted_session_is_told_as_it_was_recorded(name: str, server: Serving) -> None:
    heard: list[dict[str, Any]] = []
    await SCRIPTS[name](server.url, heard)
    assert outline(heard)["responses"], "a script without a response compares nothing"
    compare(name, outline(heard))


@pytest.mark.parametrize("name", list(CONVERSATIONS))
async def test_a_scripted_conversation_is_told_as_it_was_recorded(name: str, server: Serving) -> None:
    path, conversation = CONVERSATIONS[name]
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as http:
        recorder = Recorder(http, path)
        await conversation(recorder)
    compare(name, recorder.told)


def compare(name: str, found: Any) -> None:
    """With what was recorded under this name."""
    file = RECORDED / f"{name}.json"
    if os.environ.get("HOLDFAST_RECORD"):
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    assert found == json.loads(file.read_text())
