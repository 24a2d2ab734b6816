"""Engine settings: they cross the link whole, and resolve into the scheduler's numbers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.runtime.errors import SettingsInvalid
from holdfast.runtime.settings import EngineSettings, StepSize


def test_they_cross_the_link() -> None:
    asked = EngineSettings(
        model="pocket", kv_bytes=1 << 20, depth=2, secret=b"0123456789abcdef", capture_sizes=(4, 8)
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=EngineSettings) == asked


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"blocks": 1, "kv_bytes": 1}, "both say how much"),
        ({"blocks": 0}, "blocks is 0"),
        ({"kv_bytes": 0}, "kv_bytes is 0"),
        ({"max_context": 0}, "max_context is 0"),
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"capture_sizes": (4, 0)}, "--cudagraph-capture-sizes 4,0: a graph has 1 row or more"),
        ({"memory_utilization": 0.0}, "--gpu-memory-utilization 0 is not more than 0 and at most 1"),
        ({"memory_utilization": 1.5}, "--gpu-memory-utilization 1.5 is not"),
        ({"memory_utilization": float("nan")}, "--gpu-memory-utilization nan is not"),
    ],
)
def test_they_are_checked_at_birth(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsInvalid, match=told):
        EngineSettings(model="pocket", **wrong)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("asked", "device_bytes", "step"),
    [
        ({}, None, (512, 64)),
        ({}, 24 * GIB, (2048, 128)),
        ({}, 80 * GIB, (8192, 256)),
        ({"max_sequences": 600}, None, (600, 600)),
        ({"max_step_tokens": 16}, 80 * GIB, (16, 16)),
        ({"max_step_tokens": 16, "max_sequences": 32}, None, (16, 32)),
    ],
)
def test_a_step_is_as_large_as_the_device_allows(
    asked: dict[str, int], device_bytes: int | None, step: tuple[int, int]
) -> None:
    assert EngineSettings(model="m", **asked).step_size(device_bytes) == step  # type: ignore[arg-type]


def test_graphs_have_as_many_rows_as_asked_and_no_more_than_a_step() -> None:
    def singles(rows: int, **asked: object) -> list[int]:
        sizes = EngineSettings(model="m", **asked).captures(StepSize(512, rows))  # type: ignore[arg-type]
        assert sizes == sorted(sizes, reverse=True), "the largest first"
        assert all(one.rows <= rows and one.tokens <= 512 for one in sizes)
        assert bool(sizes) == any(not one.single for one in sizes)
        return [one.rows for one in sizes if one.single]

    assert singles(20) == [20, 16, 8, 4, 2, 1]
    assert singles(4) == [4, 2, 1]
    assert singles(20, capture_sizes=(2, 64, 8, 2)) == [8, 2]
    assert singles(20, capture_sizes=()) == singles(20, enforce_eager=True, capture_sizes=(2,)) == []
