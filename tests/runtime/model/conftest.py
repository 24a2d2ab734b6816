"""Toy models on disk, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.benchmarks.toys import make_toy


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied tiny model in one file. Tests that change it copy it first."""
    return make_toy("tiny", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied tiny model in several shards."""
    folder = tmp_path_factory.mktemp("sharded")
    return make_toy("tiny", folder, shard_size="100KB", tie_word_embeddings=False)
