"""Fixtures of the link's tests: asyncio as the only backend, and a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.benchmarks.toys import make_toy


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 78k parameters with a vocabulary of 256 and no end token."""
    return make_toy("tiny", tmp_path_factory.mktemp("models") / "tiny")
