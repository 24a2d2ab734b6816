"""The fault bench, cut short: real processes die, hang and are poisoned; nothing is lost or wrong."""

from __future__ import annotations

import json
import os

import pytest

from holdfast.benchmarks.faults import bench, engine_faults, server_faults
from holdfast.benchmarks.faults.crowd import Heard, Tally

FACTOR = max(1, int(os.environ.get("HOLDFAST_EXAMPLES", "1")))
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600 * FACTOR)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def unharmed(tally: Tally, tries: int) -> None:
    assert (tally.tries, tally.lost, tally.wrong) == (tries, 0, 0), tally.notes
    assert tally.replies > 0


async def test_engines_killed_at_any_moment_change_no_word() -> None:
    tally = await engine_faults.disturbed("killed", engine_faults.killed, 20 * FACTOR, seed=1)
    unharmed(tally, 20 * FACTOR)
    assert tally.gap > 0


async def test_an_engine_that_hangs_in_a_step_is_replaced() -> None:
    unharmed(await engine_faults.hung(FACTOR, seed=2), FACTOR)


async def test_one_poisoned_sequence_fails_by_name_and_fifteen_others_finish() -> None:
    unharmed(await engine_faults.poisoned(FACTOR), FACTOR)


async def test_children_of_a_killed_server_go_by_themselves() -> None:
    tally = await server_faults.orphaned(2 * FACTOR, seed=3)
    assert (tally.tries, tally.lost, tally.wrong) == (2 * FACTOR, 0, 0)


async def test_a_server_that_is_asked_to_leave_ends_what_it_says() -> None:
    unharmed(await server_faults.drained(FACTOR, seed=4), FACTOR)


async def test_what_is_lost_or_wrong_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([[Heard("one"), Heard("two")], [Heard("one"), Heard("two")]])
    crowd = engine_faults.Crowd(None, [engine_faults.Talk(("a", "b"))])  # type: ignore[arg-type]

    async def listen(*_: object) -> list[Heard]:
        return next(said)

    monkeypatch.setattr("holdfast.benchmarks.faults.crowd.listen", listen)
    await crowd.rehearse()
    for heard in ([Heard("one"), Heard("too", gap=2.0)], [Heard("on", error="engine_unavailable")]):
        said = iter([heard])
        tally = Tally("made up")
        await crowd.talk(tally)
        assert (tally.replies, tally.lost, tally.wrong) in ((2, 0, 1), (2, 2, 0))
        assert tally.notes


def test_the_table_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def found(tries: int, seed: int) -> Tally:
        return Tally("made up", tries=tries, replies=tries, wrong=seed)

    monkeypatch.setitem(bench.ROWS, "kill", (10, found))
    assert bench.main(["--only", "kill", "--scale", "0.3"]) == 0
    table, _, told = capsys.readouterr().out.partition("{")
    assert "made up" in table and json.loads("{" + told)["faults"][0]["tries"] == 3
    assert bench.main(["--only", "kill", "--seed", "2"]) == 1
