"""How many blocks: what is asked for goes first, then what memory allows, then what is sensible."""

from __future__ import annotations

import pytest

from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.sizing import (
    HOST_MOST_BYTES,
    MOST_TOKENS,
    blocks_of,
    context_of,
    cuda_kv_bytes,
    host_kv_bytes,
)

KIB = 1024


@pytest.mark.parametrize(
    ("asked", "allowed", "blocks"),
    [
        ({"blocks": 7}, 1, 7),
        ({"kv_bytes": 100 * KIB}, 1, 25),
        ({"kv_bytes": 4 * KIB - 1}, 1 << 40, 0),
        ({}, 100 * KIB, 25),
        ({}, 0, 0),
        ({}, 1 << 50, MOST_TOKENS // 16),
        ({"block_tokens": 32}, 1 << 50, MOST_TOKENS // 32),
    ],
)
def test_blocks(asked: dict[str, int], allowed: int, blocks: int) -> None:
    assert blocks_of(EngineSettings(model="m", **asked), 4 * KIB, allowed) == blocks  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "context"), [(None, 160), (64, 4096), (1000, 4096)])
def test_a_context_that_was_asked_for_is_not_cut_to_the_pool(asked: int | None, context: int) -> None:
    settings = EngineSettings(model="m", max_context=asked)
    assert context_of(settings, blocks=10, model_context=4096) == context


def test_a_small_model_s_context_is_its_own() -> None:
    assert context_of(EngineSettings(model="m"), blocks=1000, model_context=512) == 512


def test_defaults_leave_room_for_others() -> None:
    assert 0 < host_kv_bytes() <= HOST_MOST_BYTES
    assert 0 < cuda_kv_bytes(1000) < 1000
