"""Which clients are admitted when, and what the probes answer, over a link that is a stub."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.gateway.errors import Draining, EngineLoading, ModelNotServed
from holdfast.gateway.service import Service
from holdfast.gateway.settings import ClientLimits, GatewaySettings
from holdfast.runtime.errors import EngineDied
from holdfast.runtime.link.messages import Heartbeat, Phase
from holdfast.runtime.model.folder import model_name

pytestmark = pytest.mark.anyio


class Link(SimpleNamespace):
    """An engine as its heartbeats tell it."""

    def on_recovery(self, told: Callable[[float], None]) -> None:
        self.recovered = told

    async def statistics(self) -> dict[str, float]:
        if not self.ready:
            raise EngineDied("there is none")
        return {"steps": 5.0}


class Book:
    closed = False

    def statistics(self) -> dict[str, float]:
        return {"sessions": 2.0}

    async def sums(self) -> dict[str, float]:
        return {"session_items": 5.0}

    async def aclose(self) -> None:
        self.closed = True


def link(phase: Phase, *, ready: bool, overdue: float = 0.0) -> Link:
    beat = Heartbeat(phase, 2.0, "model.layers.3", 0.25)
    told = {"phase": phase, "ready": ready, "overdue": overdue, "heartbeat": beat, "engine_number": 1}
    return Link(**told, expected=(), adapters={})


def service(of: Link, *, opened: bool = True) -> Service:
    made = Service(GatewaySettings(drain_seconds=0.0), "pocket", of)
    if opened:
        made.open(Book())
    return made


@pytest.mark.parametrize(
    ("engine", "opened", "alive", "ready"),
    [
        (link(Phase.LOADING, ready=False), False, True, False),
        (link(Phase.IDLE, ready=True), False, True, False),
        (link(Phase.IDLE, ready=True), True, True, True),
        (link(Phase.STEPPING, ready=True), True, True, True),
        (link(Phase.LOADING, ready=False), True, True, False),
        (link(Phase.STEPPING, ready=False, overdue=1.0), True, False, False),
    ],
    ids=["loads", "no sessions yet", "idle", "steps", "restarts", "hangs"],
)
async def test_the_probes_follow_the_engine(engine: Link, opened: bool, alive: bool, ready: bool) -> None:
    state = service(engine, opened=opened).state()
    assert (state.alive, state.ready) == (alive, ready)
    assert (state.phase, state.fraction, state.detail) == (engine.phase, 0.25, "model.layers.3")
    assert state.status == ("ready" if ready else "not ready" if alive else "hung")


async def test_no_client_is_admitted_before_the_engine_or_while_it_drains() -> None:
    loading = service(link(Phase.LOADING, ready=False), opened=False)
    with pytest.raises(EngineLoading):
        loading.admit("pocket")
    serving = service(link(Phase.IDLE, ready=True))
    assert serving.admit("pocket") is serving.admit(None) is serving.admit("")
    with pytest.raises(ModelNotServed, match="another"):
        serving.admit("another")
    await serving.drain()
    assert not serving.state().ready and serving.state().detail == "draining"
    with pytest.raises(Draining):
        serving.admit("pocket")


async def test_a_server_that_drains_is_alive_also_without_its_engine() -> None:
    leaving = service(link(Phase.STEPPING, ready=False, overdue=1.0))
    await leaving.drain()
    assert leaving.state().status == "not ready"


async def test_closing_ends_all_sessions() -> None:
    made, book = service(link(Phase.IDLE, ready=True), opened=False), Book()
    made.open(book)
    await made.close()
    assert book.closed
    with pytest.raises(Draining):
        made.admit(None)


async def test_a_snapshot_holds_all_statistics_and_none_of_an_engine_that_is_gone() -> None:
    snapshot = await service(link(Phase.IDLE, ready=True)).snapshot()
    assert snapshot.ready and snapshot.engine == {"steps": 5.0}
    assert snapshot.gateway["sessions"] == 2.0 and snapshot.gateway["sockets"] == 0
    gone = await service(link(Phase.LOADING, ready=False)).snapshot()
    assert not gone.ready and gone.engine == {}


def test_a_folder_is_called_by_its_last_name(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    assert model_name(f"{folder}/") == "Qwen3-0.6B"
    assert model_name("pocket") == "pocket"
    assert model_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


class Stuck(Book):
    async def aclose(self) -> None:
        await asyncio.Event().wait()


async def test_an_engine_that_does_not_answer_delays_closing_for_a_bounded_time() -> None:
    settings = GatewaySettings(limits=replace(ClientLimits(), close_seconds=0.05))
    made = Service(settings, "pocket", link(Phase.STEPPING, ready=False, overdue=9.0))
    made.open(Stuck())
    await made.close()
