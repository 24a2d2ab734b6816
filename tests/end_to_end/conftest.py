"""What the end-to-end tests share: the pocket model behind an embedded client, and behind a server that runs.

``client``: the SDK over an engine in this process, in float32 so that equal tokens are owed on every path, in
debug, so that a leaked block ends the test. ``server``: a gateway on a free loopback port, with its engine in
a thread of this process (`tests/threaded.py`); files about the engine's process have a ``server`` of their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from holdfast.gateway.embedded import embedded
from holdfast.gateway.server import Serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Client
from holdfast.tests.threaded import serving

POCKET = EngineSettings(model="pocket", dtype="float32", blocks=1024, max_context=2048, debug=True)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def pocket() -> EngineSettings:
    return POCKET


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[Client]:
    async with embedded(engine=POCKET) as client:
        yield client


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[Serving]:
    async with serving(GatewaySettings(port=0), POCKET) as running:
        yield running
