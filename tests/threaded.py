"""A real server on a loopback port, with its engine in a thread of the test's process.

A process of the engine's own imports torch and loads its kernels, which takes longer than most of these tests.
Tests of what such a process does start one with `holdfast.gateway.server.serving`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast.gateway import server
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.thread import ThreadEngine

POCKET = EngineSettings(model="pocket", kv_bytes=64 << 20)
"""An engine as users start it, with a small arena: the usual one takes as long to allocate as to load."""


@asynccontextmanager
async def serving(settings: GatewaySettings, engine: EngineSettings) -> AsyncIterator[server.Serving]:
    """As `holdfast.gateway.server.serving`; for engines without tenants or a disk tier."""
    async with server.serving(settings, engine, engine=ThreadEngine(engine)) as running:
        yield running
