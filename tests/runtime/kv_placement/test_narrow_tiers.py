"""KV of 8 bits on every tier: it comes back as the bytes it was, and says what it would have, undisturbed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.benchmarks.toys import make_toy
from holdfast.kvstore.disk.process import DiskProcess
from holdfast.runtime.build import load_engine
from holdfast.runtime.engine import Engine
from holdfast.runtime.kv_placement.tier_setup import host_memory, with_secret
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import Extend, Generate, Open, Sampling, Settle, TokenLimits, Work

PROMPT = [1 + 7 * n % 200 for n in range(77)]


@contextmanager
def engine_of(settings: EngineSettings, memory: int) -> Iterator[Engine]:
    """An engine with its disk process, as the supervisor starts them, on what ``memory`` and the store hold."""
    disk_process = DiskProcess(memory)
    control = os.dup(disk_process.theirs.fileno())
    disk_process.start()
    engine = load_engine(settings, lambda done, what: None, Liveness(), memory, control).engine
    assert isinstance(engine, Engine)
    tiers = engine.scheduler.tiers
    assert tiers.below
    costs = engine.scheduler.placement.costs
    costs.measured = type(costs.measured)()  # so that nothing is computed instead
    while not tiers.ready:
        engine.scheduler.tick(time.monotonic())
    yield engine
    engine.leave()
    disk_process.stop()


def turn(engine: Engine, seq: int, count: int = 12) -> tuple[list[int], Work]:
    engine.apply(Generate(0, seq, Sampling(), TokenLimits(count)))
    said, work = list[int](), None
    while work is None:
        step = engine.step()
        for row in step.rows if step is not None else ():
            assert row.error is None
            said += row.tokens
            work = row.work
    while engine.step() is not None:
        continue
    return said, work


def test_kv_of_8_bits_comes_back_from_the_host_tier_and_from_disk(tmp_path: Path) -> None:
    folder = make_toy("tiny", tmp_path / "model")
    settings = with_secret(
        EngineSettings(
            model=str(folder),
            device="cpu",
            kv_dtype="float8_e4m3fn",
            blocks=64,
            host_bytes=4 << 20,
            store=str(tmp_path),
            disk_bytes=64 << 20,
            debug=True,
        )
    )
    memory, another = host_memory(settings), host_memory(settings)
    assert memory is not None and another is not None
    with engine_of(settings, memory) as engine:
        engine.apply(Open(0, 1, b"", PROMPT))
        said, _ = turn(engine, 1)
        engine.apply(Extend(0, 1, [5, 6]))
        expected, resident = turn(engine, 1)
        assert resident.resident == len(PROMPT) + len(said) - 1
    whole = [*PROMPT, *said, 5, 6]
    for held, tier in ((memory, "host"), (another, "disk")):
        with engine_of(settings, held) as engine:
            engine.apply(Open(0, 1, b"", whole))
            again, work = turn(engine, 1)
            assert again == expected
            assert getattr(work, tier) >= 80 and work.host + work.disk + work.prefilled == len(whole)
            engine.apply(Settle(0, 1))
            pool = engine.scheduler.pool
            while engine.step() is not None:
                continue
            pool.distrust([*pool.index.here.values()])
            engine.apply(Extend(0, 1, [9]))
            _, work = turn(engine, 1)
            assert work.host >= 96 and not work.recomputed
            assert engine.scheduler.statistics()["host_damaged"] == 0
    os.close(memory)
    os.close(another)
