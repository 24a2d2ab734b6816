"""The fault bench, cut short: real processes die, hang and are poisoned; nothing is lost or wrong.

Marked slow is what `tests/end_to_end` also does to one server: hung engines, dead disk tiers, orphans, drains.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable

import pytest

from holdfast.benchmarks.faults import (
    badio,
    bench,
    engine_faults,
    file_faults,
    server_faults,
    store_faults,
    tier_faults,
)
from holdfast.benchmarks.faults.crowd import FaultTally, HeardReply

FACTOR = max(1, int(os.environ.get("HOLDFAST_EXAMPLES", "1")))
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600 * FACTOR)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def unharmed(tally: FaultTally, tries: int) -> None:
    for note in tally.notes:
        if note.endswith("nothing tried"):  # it may not mount, or has no compiler
            pytest.skip(note)
    assert (tally.tries, tally.lost, tally.wrong) == (tries, 0, 0), tally.notes
    assert tally.replies > 0


async def test_engines_killed_at_any_moment_change_no_word() -> None:
    tally = await engine_faults.disturbed("killed", engine_faults.killed, 2 * FACTOR, seed=1)
    unharmed(tally, 2 * FACTOR)
    assert tally.gap > 0


@pytest.mark.slow
async def test_an_engine_that_hangs_in_a_step_is_replaced() -> None:
    unharmed(await engine_faults.hung(FACTOR, seed=2), FACTOR)


async def test_one_poisoned_sequence_fails_by_name_and_seven_others_finish() -> None:
    unharmed(await engine_faults.poisoned(FACTOR, others=7 if FACTOR == 1 else 15), FACTOR)


@pytest.mark.slow
@pytest.mark.parametrize("strike", [engine_faults.killed, tier_faults.disk_process_killed])
async def test_with_every_tier_on_engine_or_disk_process_may_be_killed(strike: engine_faults.Strike) -> None:
    tally = await tier_faults.disturbed("killed", strike, FACTOR, seed=5)
    unharmed(tally, FACTOR)


async def test_a_disk_that_another_program_fills_refuses_no_turn() -> None:
    tally = await tier_faults.filled(2 * FACTOR, seed=9)
    unharmed(tally, 2 * FACTOR)


@pytest.mark.slow
async def test_servers_killed_in_mid_reply_and_cut_sockets_lose_nothing() -> None:
    unharmed(await tier_faults.restarted(FACTOR, seed=6), FACTOR)
    tally = await tier_faults.cut(20 * FACTOR, seed=7)
    assert (tally.lost, tally.wrong) == (0, 0) and tally.tries >= 20 * FACTOR, tally.notes


@pytest.mark.parametrize(
    ("row", "tries"),
    [
        (file_faults.flipped_records, 15),
        (file_faults.truncated_records, 5),
        (file_faults.full_records, 4),
        (file_faults.flipped_journal, 25),
        (file_faults.truncated_journal, 10),
        (file_faults.damaged_pages, 8),
        (file_faults.vanished_journal, 5),
        (file_faults.full_journal, 4),
    ],
)
def test_files_that_go_bad_lose_nothing_they_should_have(
    row: Callable[[int, int], FaultTally], tries: int
) -> None:
    tally = row(tries * FACTOR, 8)
    unharmed(tally, tries * FACTOR)


@pytest.mark.parametrize("what", ["kv", "journal"])
async def test_write_errors_at_the_first_calls_lose_nothing(what: str) -> None:
    unharmed(await badio.worked(what, 12 * FACTOR), 12 * FACTOR)


@pytest.mark.parametrize(
    ("row", "tries"),
    [
        (store_faults.two_servers, len(store_faults.WAYS) + 1),
        (store_faults.moved, 2),
        (store_faults.stepped, 2),
        (store_faults.killed_in_merges, 6),
        (store_faults.emptied, 2),
    ],
    ids=["two servers", "moved", "clocks", "kills", "full disk"],
)
async def test_whatever_is_done_to_a_store_nothing_is_lost_mixed_or_silent(
    row: Callable[[int, int], Awaitable[FaultTally]], tries: int
) -> None:
    tally = await row(tries * FACTOR, 11)
    unharmed(tally, tries * FACTOR)


@pytest.mark.slow
async def test_children_of_a_killed_server_go_by_themselves() -> None:
    tally = await server_faults.orphaned(2 * FACTOR, seed=3)
    assert (tally.tries, tally.lost, tally.wrong) == (2 * FACTOR, 0, 0)


@pytest.mark.slow
async def test_a_server_that_is_asked_to_leave_ends_what_it_says() -> None:
    unharmed(await server_faults.drained(FACTOR, seed=4), FACTOR)


async def test_what_is_lost_or_wrong_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([[HeardReply("one"), HeardReply("two")], [HeardReply("one"), HeardReply("two")]])
    crowd = engine_faults.Crowd(None, [engine_faults.Talk(("a", "b"))])  # type: ignore[arg-type]

    async def listen(*_: object) -> list[HeardReply]:
        return next(said)

    monkeypatch.setattr("holdfast.benchmarks.faults.crowd.listen", listen)
    await crowd.rehearse()
    for heard in (
        [HeardReply("one"), HeardReply("too", gap=2.0)],
        [HeardReply("on", error="engine_unavailable")],
    ):
        said = iter([heard])
        tally = FaultTally("made up")
        await crowd.talk(tally)
        assert (tally.replies, tally.lost, tally.wrong) in ((2, 0, 1), (2, 2, 0))
        assert tally.notes


def test_a_row_that_cannot_go_on_is_wrong_and_those_behind_it_are_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def breaks(tries: int, seed: int) -> FaultTally:
        raise RuntimeError("an undisturbed server failed")

    async def found(tries: int, seed: int) -> FaultTally:
        return FaultTally("made up", tries=tries)

    monkeypatch.setitem(bench.ROWS, "kill", (10, breaks))
    monkeypatch.setitem(bench.ROWS, "stop", (10, found))
    assert bench.main(["--only", "kill", "stop", "--tries", "2"]) == 1
    told = json.loads("{" + capsys.readouterr().out.partition("{")[2])["faults"]
    assert [(row["tries"], row["wrong"]) for row in told] == [(0, 1), (2, 0)]
    assert "an undisturbed server failed" in told[0]["notes"][0]


async def test_a_server_is_killed_after_it_was_heard_or_early_and_never_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd = engine_faults.Crowd(None, [])  # type: ignore[arg-type]
    talking = asyncio.Event()

    async def talk(tally: FaultTally) -> None:
        await talking.wait()

    monkeypatch.setattr(crowd, "talk", talk)
    monkeypatch.setattr(tier_faults, "EARLY", 1.0)
    lives = tier_faults.Lives(crowd, FaultTally("made up"), random.Random(0))
    for _ in range(3):
        waiting = asyncio.create_task(lives.until_killed())
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done, "killed before anything was heard of it"
        crowd.stirred.set()
        await waiting
        for _ in range(tier_faults.MOST_EARLY):
            await lives.until_killed()  # nothing is heard of these
    talking.set()
    await lives.last()


def test_the_table_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def found(tries: int, seed: int) -> FaultTally:
        return FaultTally("made up", tries=tries, replies=tries, wrong=seed)

    monkeypatch.setitem(bench.ROWS, "kill", (10, found))
    assert bench.main(["--only", "kill", "--scale", "0.3"]) == 0
    table, _, told = capsys.readouterr().out.partition("{")
    assert "made up" in table and json.loads("{" + told)["faults"][0]["tries"] == 3
    assert bench.main(["--only", "kill", "--seed", "2", "--tries", "4"]) == 1
    table, _, told = capsys.readouterr().out.partition("{")
    assert json.loads("{" + told)["faults"][0]["tries"] == 4
