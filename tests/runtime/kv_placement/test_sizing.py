"""How many blocks: what is asked for goes first, then what memory allows, then what is sensible."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from holdfast.runtime.errors import SettingsInvalid
from holdfast.runtime.kv_placement.sizing import (
    HOST_MOST_BYTES,
    MOST_TOKENS,
    PROCESS_BYTES,
    DeviceMemory,
    blocks_of,
    check_budget,
    context_of,
    host_kv_bytes,
    memory_line,
    rule_of,
    shown,
)
from holdfast.runtime.kv_placement.tier_setup import clipped, disk_bytes, file_bytes, host_bytes
from holdfast.runtime.settings import EngineSettings

KIB = 1024


@pytest.mark.parametrize(
    ("asked", "allowed", "blocks"),
    [
        ({"blocks": 7}, 1, 7),
        ({"kv_bytes": 100 * KIB}, 1, 25),
        ({}, 100 * KIB, 25),
        ({}, 0, 0),
        ({}, 1 << 50, MOST_TOKENS // 16),
        ({"block_tokens": 32}, 1 << 50, MOST_TOKENS // 32),
    ],
)
def test_blocks(asked: dict[str, int], allowed: int, blocks: int) -> None:
    assert blocks_of(EngineSettings(model="m", **asked), 4 * KIB, allowed) == blocks  # type: ignore[arg-type]


def test_memory_that_holds_no_block_is_refused_by_its_flag() -> None:
    with pytest.raises(SettingsInvalid, match=r"--kv-bytes 1 holds no block: .* takes 4096 bytes"):
        blocks_of(EngineSettings(model="m", kv_bytes=1), 4 * KIB, 0)


@pytest.mark.parametrize(("asked", "context"), [(None, 160), (64, 64), (1000, 1000), (9000, 4096)])
def test_a_context_that_was_asked_for_is_not_cut_to_the_pool(asked: int | None, context: int) -> None:
    settings = EngineSettings(model="m", max_context=asked)
    assert context_of(settings, blocks=10, model_context=4096) == context


def test_a_small_model_s_context_is_its_own() -> None:
    assert context_of(EngineSettings(model="m"), blocks=1000, model_context=512) == 512


def test_defaults_leave_room_for_others() -> None:
    assert 0 < host_kv_bytes() <= HOST_MOST_BYTES


GIB = 1 << 30
H100 = DeviceMemory(
    total=80 * GIB, utilization=0.9, weights=16 * GIB, activations=2 * GIB, graphs=GIB, others=GIB
)


def test_kv_on_a_gpu_is_what_the_parts_leave() -> None:
    assert H100.kv == 52 * GIB
    assert H100.line(50 * GIB) == (
        "weights 16.0 GiB + activations 2.0 GiB + graphs 1.0 GiB + context and others 1.0 GiB + KV 50.0 GiB"
        " = 70.0 GiB of at most 0.9 × 80.0 GiB"
    )
    H100.check(EngineSettings(model="m"), 52, GIB)


@pytest.mark.parametrize(
    ("asked", "parts", "blocks", "cause"),
    [
        ({"kv_bytes": 53 * GIB}, H100, 53, "kv_bytes = 53.0 GiB, as asked, does not fit: "),
        ({"blocks": 60}, H100, 60, "blocks = 60, as asked, does not fit: "),
        ({}, replace(H100, weights=70 * GIB), 0, "there is no room for KV: weights 70.0 GiB + "),
    ],
)
def test_kv_that_does_not_fit_a_gpu_is_refused_with_each_part_and_what_to_lower(
    asked: dict[str, int], parts: DeviceMemory, blocks: int, cause: str
) -> None:
    with pytest.raises(SettingsInvalid) as refused:
        parts.check(EngineSettings(model="m", **asked), blocks, GIB)  # type: ignore[arg-type]
    told = refused.value.message
    assert told.startswith(cause)
    for word in ("weights", "activations 2.0 GiB", "graphs 1.0 GiB", "others 1.0 GiB", "0.9 × 80.0 GiB"):
        assert word in told
    for option in ("max-step-tokens", "max-sequences", "cudagraph-capture-sizes", "kv-bytes", "max-context"):
        assert f"--{option}" in told
    assert told.endswith("raise --gpu-memory-utilization")


def test_what_is_not_measured_yet_is_said_to_be_an_estimate() -> None:
    told = replace(H100, activations=None, graphs=None).line(0)
    assert told.startswith("an estimate, ? is measured at start: weights 16.0 GiB + activations ? + graphs ?")


def test_the_memory_is_a_sum_that_adds_up() -> None:
    line = memory_line(weights=100 << 20, blocks=3000, block_bytes=1 << 15, tokens=48_000)
    assert line.startswith("weights 100 MiB + KV 93.75 MiB (3,000 blocks × 32,768 B = 48,000 tokens)")
    assert line.endswith(f" = {shown((100 << 20) + 3000 * (1 << 15) + PROCESS_BYTES)} without host memory")


def test_the_rule_for_the_pool_is_the_one_that_was_followed() -> None:
    assert rule_of(EngineSettings(model="m", blocks=1234), True) == "blocks = 1,234, as asked"
    assert rule_of(EngineSettings(model="m", kv_bytes=3 << 20), True) == "kv_bytes = 3 MiB, as asked"
    assert shown(host_kv_bytes()) in rule_of(EngineSettings(model="m"), True)
    assert rule_of(EngineSettings(model="m", memory_utilization=0.75), False).startswith(
        "0.75 of the device's"
    )


def test_a_budget_larger_than_the_machine_is_refused_with_the_sum(tmp_path: Path) -> None:
    check_budget("host_bytes", 4 * KIB, 4 * KIB, "the memory")
    with pytest.raises(SettingsInvalid, match=r"^host_bytes = 6 KiB is 2 KiB more than the memory, 4 KiB$"):
        check_budget("host_bytes", 6 * KIB, 4 * KIB, "the memory")
    with pytest.raises(SettingsInvalid, match="more than this machine's memory"):
        host_bytes(EngineSettings(model="m", host_bytes=1 << 60))
    with pytest.raises(SettingsInvalid, match="more than the store's disk"):
        disk_bytes(EngineSettings(model="m", disk_bytes=1 << 60), tmp_path)


def test_kv_on_disk_is_clipped_to_what_the_journal_leaves(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    (kv / "0123").mkdir(parents=True)
    free = shutil.disk_usage(tmp_path).free
    wide = EngineSettings(model="m", store=str(tmp_path), disk_bytes=1 << 20)
    assert clipped(wide) is None
    tight = msgspec.structs.replace(wide, disk_reserve=free)
    told = clipped(tight)
    assert told is not None and told.startswith("KV on disk is clipped to 0 B of the 1 MiB of --disk-bytes: ")
    assert str(kv) in told and "it grows when there is room" in told
    assert disk_bytes(msgspec.structs.replace(tight, disk_bytes=None), kv) == 0
    (kv / "0123" / "data.mdb").write_bytes(bytes(range(256)) * 4096)
    assert file_bytes(tmp_path) == 1 << 20, "what KV has already counts as its own"
    assert file_bytes(tmp_path / "none") == 0
