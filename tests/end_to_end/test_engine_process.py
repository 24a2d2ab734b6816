"""The engine's process as its parent starts it: where its threads run, and what its environment says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.kernels.cpu.cores import OPERATORS, POOL
from holdfast.runtime.link.child import USUAL
from holdfast.runtime.link.process import ChildEngine
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import Sampling, TokenLimits

pytestmark = pytest.mark.anyio

SMALL = EngineSettings(model="pocket", dtype="float32", blocks=40, max_context=384, host_bytes=0)
TRIM = "MALLOC_TRIM_THRESHOLD_"


async def seen(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], dict[str, str]]:
    """Of the threads that are bound each one's processor, after a turn, and the process's environment."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(POOL))
    engine = ChildEngine(SMALL)
    async with engine as link:
        sequence = await link.open([1, 2, 3])
        assert [row async for row in await link.generate(sequence.seq, Sampling(), TokenLimits(4))]
        process = Path(f"/proc/{engine.pid}")
        cores = [os.sched_getaffinity(int(task.name)) for task in (process / "task").iterdir()]
        words = (process / "environ").read_bytes().decode().split("\0")
    return sorted(min(those) for those in cores if len(those) == 1), dict(
        word.split("=", 1) for word in words if word
    )


@pytest.mark.skipif(len(os.sched_getaffinity(0)) != POOL, reason="needs two processors")
async def test_the_engines_threads_have_a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPERATORS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(TRIM, raising=False)
    cores, environment = await seen(monkeypatch)
    assert cores == sorted(os.sched_getaffinity(0))
    assert environment[TRIM] == USUAL[TRIM]


async def test_what_an_operator_has_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    monkeypatch.setenv(TRIM, "65536")
    cores, environment = await seen(monkeypatch)
    assert cores == []
    assert environment[TRIM] == "65536"
