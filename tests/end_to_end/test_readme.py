"""The Python of the README and of the SDK's guide runs as it stands there, against a server as the README
starts it (but for the port)."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from holdfast.gateway.server import Serving
from holdfast.gateway.settings import DEFAULT_HOST, DEFAULT_PORT

ROOT = Path(__file__).resolve().parent.parent.parent
SNIPPETS = [
    snippet
    for page in ("README.md", "sdk/README.md")
    for snippet in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]
FRAGMENTS = 3
"""Blocks of the SDK's guide that show a part of a program, marked ``py``."""

TOLD = (
    (("Marisol",), ("Marisol",)),
    (("get_weather", "Oslo"), ("It is 7 degrees and cloudy in Oslo.", "completed")),
    (("Marisol",), ("fox",), ("Marisol",)),
    (("in Oslo.",), ("in Rome.",), ("in Paris.",)),
    (("4821",), ("1357",), ("Marisol",)),
    (("['city', 'days']",), ("True",), ("['city', 'days']",)),
)
"""For each snippet, what its lines of output must have."""

pytestmark = pytest.mark.anyio


def test_the_readme_has_snippets() -> None:
    assert len(SNIPPETS) == len(TOLD)
    fragments = re.findall(r"```py\n(.*?)```", (ROOT / "sdk/README.md").read_text(), re.DOTALL)
    assert len(fragments) == FRAGMENTS and not any("connect(" in one for one in fragments)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
async def test_a_snippet_of_the_readme_holds_its_conversation(number: int, server: Serving) -> None:
    told = f"ws://{DEFAULT_HOST}:{DEFAULT_PORT}"
    without = "from holdfast import LLM" in SNIPPETS[number]
    assert without or told in SNIPPETS[number], "the README shows another port than the server's default"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SNIPPETS[number].replace(told, server.url.removesuffix("/v1/realtime")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = (text.decode() for text in await process.communicate())
    assert process.returncode == 0, err
    said = out.strip().splitlines()
    assert len(said) == len(TOLD[number])
    assert all(word in line for line, words in zip(said, TOLD[number], strict=True) for word in words), said
