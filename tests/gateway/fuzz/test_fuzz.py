"""Valid, damaged and rubbish frames and bodies: none is a mistake of the server, and none disturbs another."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.gateway.server import serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings

from .fuzzer import Fuzzer

pytestmark = pytest.mark.anyio

PARTS, PART = 10, 30_000
"""`make fuzz` sends so many parts, each of so many frames and bodies."""
SETTINGS = EngineSettings(model="pocket", max_context=256, blocks=1024, host_bytes=32 << 20, debug=True)


class Mistakes(logging.Handler):
    """Keeps the log lines that are errors, or hold a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.lines.append(logging.Formatter().format(record))


@contextmanager
def listened() -> Iterator[list[str]]:
    """The mistakes in all logs of this process."""
    handler, root = Mistakes(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield handler.lines
    finally:
        root.removeHandler(handler)


async def run(store: Path, first: int, count: int, forms: int) -> Fuzzer:
    """Send at least ``count`` frames and bodies to a server of their own. ``first``: the number of the first
    round. ``forms``: how often each case is damaged."""
    settings = GatewaySettings(port=0, store=store, default_max_tokens=4)
    with listened() as mistakes:
        async with serving(settings, SETTINGS) as server:
            fuzzer, number = Fuzzer(int(server.url.rpartition(":")[2]), forms), first
            while fuzzer.total < count:
                await fuzzer.round(number)
                number += 1
            assert server.engine.link.engine_number == 1, "the engine was restarted"
            assert server.service.state().alive
    found = fuzzer.findings + mistakes
    assert not found, f"{len(found)} findings in {fuzzer.total}:\n" + "\n".join(found[:20])
    return fuzzer


async def test_what_is_sent_is_served_or_refused(tmp_path: Path) -> None:
    """A short cut of the long run."""
    fuzzer = await run(tmp_path, 0, 600, 3)
    assert {200, 400} <= set(fuzzer.statuses)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
async def test_three_hundred_thousand_are_served_or_refused(tmp_path: Path, part: int) -> None:
    fuzzer = await run(tmp_path, 1_000 * (part + 1), PART, 9)
    print(f"{fuzzer.total} sent; statuses {sorted(fuzzer.statuses.items())}")
