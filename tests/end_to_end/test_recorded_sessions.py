"""Scripted sessions tell a client the same as when they were recorded.

``HOLDFAST_RECORD=1`` writes the recordings anew: only where what clients are told is meant to change.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway.server import Serving

from .scripted_sessions import SCRIPTS, outline

pytestmark = pytest.mark.anyio
RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("name", list(SCRIPTS))
async def test_a_scripted_session_is_told_as_it_was_recorded(name: str, server: Serving) -> None:
    heard: list[dict[str, Any]] = []
    await SCRIPTS[name](server.url, heard)
    found, file = outline(heard), RECORDED / f"{name}.json"
    if os.environ.get("HOLDFAST_RECORD"):
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    assert found == json.loads(file.read_text())
    assert found["responses"], "a script without a response compares nothing"
