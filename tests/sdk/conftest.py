"""What the SDK's tests share: asyncio alone, as `websockets` runs on it."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
