"""The child process: deaths, restarts, faults that it reports, and that no process is left over."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.runtime.errors import EngineDied, ModelUnreadable, PoolTooSmall, SequenceUnknown
from holdfast.runtime.link.child import SpawnedEngine
from holdfast.runtime.link.messages import Heartbeat, Phase
from holdfast.runtime.link.process import ChildEngine
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import Sampling, TokenLimits
from holdfast.tests.runtime.link.memory import extended

pytestmark = pytest.mark.anyio

AT_ONCE = (0.0,)


def settings_for(model: Path, **changes: int) -> EngineSettings:
    return EngineSettings(model=str(model), device="cpu", **{"blocks": 64, "max_context": 512, **changes})


def gone(pid: int) -> bool:
    """Whether no such process runs; for one that was waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_killed_engine_fails_its_calls_and_another_serves_the_same_link(tiny: Path) -> None:
    form = ChildEngine(settings_for(tiny, blocks=600, max_context=8192), delays=AT_ONCE)
    async with form as link:
        state = await link.open(list(range(30)))
        first_pid = form.pid
        assert os.readlink(f"/proc/{first_pid}/fd/2") == os.readlink("/proc/self/fd/2")
        said = [row.tokens async for row in await link.generate(state.seq, Sampling(), TokenLimits(10))]
        generation = await link.generate(state.seq, Sampling(), TokenLimits(8000))  # runs when it dies
        await anext(generation)
        assert first_pid is not None
        os.kill(first_pid, signal.SIGSTOP)  # so that it cannot answer any more
        pending = asyncio.create_task(link.statistics())
        await asyncio.sleep(0)
        os.kill(first_pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await pending
        with pytest.raises(EngineDied):
            async for _ in generation:
                pass
        with pytest.raises(EngineDied):
            await extended(link, state.seq, [1])

        await link.wait_ready()
        assert link.engine_number == 2 and link.ready
        assert form.pid not in (None, first_pid)
        with pytest.raises(SequenceUnknown):
            await extended(link, state.seq, [1])
        again = await link.open(list(range(30)))
        assert again.seq != state.seq
        assert [
            row.tokens async for row in await link.generate(again.seq, Sampling(), TokenLimits(10))
        ] == said
        last_pid = form.pid
    assert gone(first_pid) and last_pid is not None and gone(last_pid)


async def test_an_unreadable_model_is_named_and_not_retried(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    form = ChildEngine(settings_for(tmp_path / "nowhere"), delays=AT_ONCE)
    with pytest.raises(ModelUnreadable, match="nowhere"):
        async with form:
            pass
    assert form.pid is None and form.link.engine_number == 0
    assert capfd.readouterr().err == ""  # the caller reports it, once


async def test_contradicting_settings_are_named(tiny: Path) -> None:
    with pytest.raises(PoolTooSmall, match="blocks"):
        async with ChildEngine(settings_for(tiny, blocks=8)):
            pass


async def test_an_engine_without_free_descriptors_is_started_later(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full file table passes: the server must not be without an engine for good."""
    form, failures = ChildEngine(settings_for(tiny), delays=AT_ONCE), [1, 2]
    async with form as link:
        spawned = SpawnedEngine.of

        def starved(*program: Any) -> SpawnedEngine:
            if failures:
                raise OSError(errno.EMFILE, f"Too many open files, {failures.pop()}")
            return spawned(*program)

        monkeypatch.setattr(SpawnedEngine, "of", starved)
        before = len(os.listdir("/proc/self/fd"))
        seq = (await link.open([1])).seq
        form.kill()
        with pytest.raises(EngineDied):
            await link.generate(seq, Sampling(), TokenLimits(500))
        await link.wait_ready()
        assert not failures and (await link.open([1])).length == 1
        assert len(os.listdir("/proc/self/fd")) <= before, "what failed left no descriptor open"
    said = [record.message for record in caplog.records if "tried again" in record.message]
    assert len(said) == 2 and "RLIMIT_NOFILE is " in said[0]


async def test_a_missing_model_ends_the_restarts(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    form = ChildEngine(settings_for(model), delays=AT_ONCE)
    async with form as link:
        shutil.rmtree(model)
        seq = (await link.open([1])).seq
        form.kill()
        with pytest.raises(EngineDied):
            await link.generate(seq, Sampling(), TokenLimits(500))
        with pytest.raises(EngineDied, match="cannot start again"):
            await link.wait_ready()
        with pytest.raises(EngineDied, match="cannot start again"):
            await link.open([1])
    assert form.pid is None


async def test_an_engine_killed_while_it_loads_raises_engine_died(tiny: Path) -> None:
    form: ChildEngine

    def heard(beat: Heartbeat) -> None:
        assert beat.phase is Phase.LOADING
        form.kill()

    form = ChildEngine(settings_for(tiny), on_heartbeat=heard)
    with pytest.raises(EngineDied):
        async with form:
            pass
    assert form.pid is None


async def test_cancelled_while_it_loads_leaves_no_process(tiny: Path) -> None:
    loading = asyncio.Event()
    form = ChildEngine(settings_for(tiny), on_heartbeat=lambda beat: loading.set())
    entering = asyncio.create_task(form.__aenter__())
    await loading.wait()
    pid = form.pid
    entering.cancel()
    await asyncio.wait([entering])
    assert entering.cancelled()
    assert pid is not None and gone(pid) and form.pid is None


MADE_UP = """
import sys, threading, types
from holdfast.runtime import __main__ as child
from holdfast.runtime.link.messages import Phase
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.link.engine_end import LoadedEngine
from holdfast.tests.runtime.link.scripted import HELLO, Scripted

class Engine(Scripted):
    def __init__(self, liveness):
        super().__init__()
        self.liveness = liveness
        self.gate.set()

    def step(self):
        running = frozenset(seq for seq, held in self.held.items() if held.until is not None)
        if running:
            self.liveness.enter(Phase.STEPPING, 0.5)
            self.liveness.engage(running)
            {act}
        return super().step()

    def hang_in_a_step(self):
        threading.Event().wait()

load = lambda settings, progress, liveness, *lower: LoadedEngine(Engine(liveness), HELLO)
made_up = types.SimpleNamespace(load_engine=load)
sys.modules["holdfast.runtime.build"] = made_up  # no torch, no model
raise SystemExit(child.main())
"""


def made_up(act: str, recovered: list[float] | None = None) -> ChildEngine:
    """A child without a model, that does this in a step of turns."""
    program = (sys.executable, "-c", MADE_UP.format(act=act))
    form = ChildEngine(EngineSettings(model="none"), delays=AT_ONCE, program=program)
    form.link.on_recovery((recovered if recovered is not None else []).append)
    return form


async def test_an_engine_that_hangs_leaves_its_stacks_and_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recovered: list[float] = []
    form = made_up("self.hang_in_a_step()", recovered)
    async with form as link:
        idle = await link.open([1])
        turn = await link.open([1, 2])
        generation = await link.generate(turn.seq, Sampling(), TokenLimits(5))
        with pytest.raises(EngineDied, match="hung while stepping"):
            await anext(generation)
        assert not link.ready
        await link.wait_ready()
        (death,) = link.deaths
        assert death.engine_number == 1 and link.engine_number == 2
        assert "hang_in_a_step" in death.stacks and "SIGKILL" in death.cause
        assert death.step == {turn.seq} and idle.seq not in death.step
        assert not death.outside, "no other process did it"
        assert "hang_in_a_step" in caplog.text, "the stacks are saved"
        (seconds,) = recovered
        assert seconds > 0


async def test_a_stopped_engine_is_replaced_and_no_sequence_is_blamed() -> None:
    form = made_up("pass")
    async with form as link:
        seq = (await link.open([1])).seq
        assert form.pid is not None
        first = form.pid
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(EngineDied, match="is stopped"):
            await link.generate(seq, Sampling(), TokenLimits(500))
        await link.wait_ready()
        (death,) = link.deaths
        assert death.outside and death.stacks == "" and "process is stopped" in death.cause
    assert gone(first)


@pytest.mark.parametrize(
    ("act", "outside", "told"),
    [
        ("import os; os._exit(7)", False, "exit code 7"),
        ("import os; os.kill(os.getpid(), 11)", False, "SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", True, "SIGKILL"),
        ("raise ZeroDivisionError('by chance')", False, "by chance"),
    ],
    ids=["exit", "crash", "killed", "raises"],
)
async def test_a_death_has_its_step_and_whether_it_came_from_outside(
    act: str, outside: bool, told: str
) -> None:
    form = made_up(act)
    async with form as link:
        first, second = (await link.open([1])).seq, (await link.open([2])).seq
        generation = await link.generate(first, Sampling(), TokenLimits(5))
        with pytest.raises(EngineDied):
            await anext(generation)
        await link.wait_ready()
        assert link.death_of(2) is None
        death = link.death_of(1)
        assert death is not None and death.outside is outside and told in death.cause
        assert death.step == {first} and second not in death.step
        assert ("Segmentation fault" in death.stacks) is (told == "SIGSEGV")


async def test_an_engine_stopped_while_it_loads_raises_engine_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.runtime.link.gateway_end.FIRST_HEARTBEAT", 0.2)
    program = (sys.executable, "-c", "import os; os.kill(os.getpid(), 19)")
    form = ChildEngine(EngineSettings(model="none"), delays=AT_ONCE, program=program)
    with pytest.raises(EngineDied, match="hung while starting"):
        async with form:
            pass
    assert form.pid is None


PARENT = """
import asyncio, sys
from holdfast.runtime.link.process import ChildEngine
from holdfast.runtime.settings import EngineSettings

async def main() -> None:
    form = ChildEngine(EngineSettings(model=sys.argv[1], device="cpu", blocks=64, max_context=512))
    if sys.argv[2] == "loading":
        asyncio.create_task(form.__aenter__())
        while form.link.heartbeat is None:
            await asyncio.sleep(0.01)
    else:
        await form.__aenter__()
    print(form.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["loading", "idle"])
def test_a_killed_parent_leaves_no_orphan(tiny: Path, when: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tiny), when], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        watch = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert not select.select([watch], [], [], 0)[0]
            parent.kill()
            parent.wait()
            assert select.select([watch], [], [], 60)[0], "the child outlives its parent"
        finally:
            os.close(watch)


def test_a_process_that_waits_for_its_settings_imports_meanwhile_and_ends_with_its_socket() -> None:
    waiting = SpawnedEngine.of()
    maps = Path(f"/proc/{waiting.process.pid}/maps")
    while "libtorch" not in maps.read_text():
        assert waiting.process.poll() is None
    waiting.sock.close()
    assert waiting.process.wait() == 0
    waiting.report.close()
