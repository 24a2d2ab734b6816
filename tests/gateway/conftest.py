"""What the gateway's tests share: asyncio alone, as uvicorn runs it."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
