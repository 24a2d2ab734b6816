"""The child process: deaths, restarts, faults it names, and that nobody is left over."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.runtime.errors import EngineDied, ModelUnreadable, PoolTooSmall, SequenceUnknown
from holdfast.runtime.link.messages import Heartbeat, Limits, Phase, Sampling
from holdfast.runtime.link.process import Backoff, ChildEngine
from holdfast.runtime.settings import EngineSettings

pytestmark = pytest.mark.anyio

AT_ONCE = Backoff(first=0.0)


def settings_for(model: Path, **changes: int) -> EngineSettings:
    return EngineSettings(model=str(model), device="cpu", **{"blocks": 64, "max_context": 512, **changes})


def gone(pid: int) -> bool:
    """Whether no such process runs; for one that was waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_delays_grow_to_a_bound() -> None:
    delays = Backoff(first=1.0, factor=2.0, longest=5.0).delays()
    assert list(itertools.islice(delays, 5)) == [1.0, 2.0, 4.0, 5.0, 5.0]


async def test_a_killed_engine_ends_what_runs_and_another_goes_on_behind_the_same_link(tiny: Path) -> None:
    form = ChildEngine(settings_for(tiny), backoff=AT_ONCE)
    async with form as link:
        state = await link.open(list(range(30)))
        first_pid = form.pid
        assert os.readlink(f"/proc/{first_pid}/fd/2") == os.readlink("/proc/self/fd/2")
        said = [row.tokens async for row in await link.generate(state.seq, Sampling(), Limits(10))]
        generation = await link.generate(state.seq, Sampling(), Limits(400))
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
            await link.extend(state.seq, [1])

        await link.wait_ready()
        assert link.incarnation == 2 and link.ready
        assert form.pid not in (None, first_pid)
        with pytest.raises(SequenceUnknown):
            await link.extend(state.seq, [1])
        again = await link.open(list(range(30)))
        assert again.seq != state.seq
        assert [row.tokens async for row in await link.generate(again.seq, Sampling(), Limits(10))] == said
        last_pid = form.pid
    assert gone(first_pid) and last_pid is not None and gone(last_pid)


async def test_a_model_that_cannot_be_read_is_named_and_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    form = ChildEngine(settings_for(tmp_path / "nowhere"), backoff=AT_ONCE)
    with pytest.raises(ModelUnreadable, match="nowhere"):
        async with form:
            pass
    assert form.pid is None and form.link.incarnation == 0
    assert capfd.readouterr().err == ""  # who called says it, once


async def test_settings_that_contradict_themselves_are_named(tiny: Path) -> None:
    with pytest.raises(PoolTooSmall, match="blocks"):
        async with ChildEngine(settings_for(tiny, blocks=8)):
            pass


async def test_a_model_that_went_away_ends_the_restarts(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    form = ChildEngine(settings_for(model), backoff=AT_ONCE)
    async with form as link:
        shutil.rmtree(model)
        seq = (await link.open([1])).seq
        form.kill()
        with pytest.raises(EngineDied):
            await link.generate(seq, Sampling(), Limits(500))
        with pytest.raises(EngineDied, match="cannot start again"):
            await link.wait_ready()
        with pytest.raises(EngineDied, match="cannot start again"):
            await link.open([1])
    assert form.pid is None


async def test_one_killed_while_it_loads_is_a_death(tiny: Path) -> None:
    form: ChildEngine

    def heard(beat: Heartbeat) -> None:
        assert beat.phase is Phase.LOADING
        form.kill()

    form = ChildEngine(settings_for(tiny), heard=heard)
    with pytest.raises(EngineDied):
        async with form:
            pass
    assert form.pid is None


async def test_cancelled_while_it_loads_leaves_no_process(tiny: Path) -> None:
    loading = asyncio.Event()
    form = ChildEngine(settings_for(tiny), heard=lambda beat: loading.set())
    entering = asyncio.create_task(form.__aenter__())
    await loading.wait()
    pid = form.pid
    entering.cancel()
    await asyncio.wait([entering])
    assert entering.cancelled()
    assert pid is not None and gone(pid) and form.pid is None


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
