"""What restoring costs here: measured on a runner with known times, and kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.runtime.kv_placement.costs import (
    CostBook,
    Costs,
    measure,
    this_machine,
)
from holdfast.runtime.plan import Outcomes, Plan

BLOCK_BYTES = 1000


class Timed:
    """A runner and its clock: a copied block takes 1 ms, a token 2 ms and 1 us for each before it."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def launch(self, plan: Plan) -> Timed:
        assert plan.step < 0
        self.now += 1e-3 * len(plan.loads)
        for first, count in zip(plan.firsts.tolist(), plan.counts.tolist(), strict=True):
            self.now += sum(2e-3 + 1e-6 * at for at in range(first, first + count))
        return self

    def draw(self) -> None:
        """Does nothing."""

    def tokens(self) -> Outcomes:
        return Outcomes.of([])

    def moved(self, *, wait: bool = False) -> bool:
        return True


def test_what_is_measured_is_what_it_takes() -> None:
    runner = Timed()
    found = measure(runner, slots=8, blocks=100, block_tokens=16, block_bytes=BLOCK_BYTES, clock=runner.clock)
    assert found.copy == pytest.approx(BLOCK_BYTES / 1e-3)
    assert found.token == pytest.approx(2e-3, rel=1e-2) and found.history == pytest.approx(1e-6, rel=1e-2)


def test_nothing_is_told_before_all_is_measured_and_it_outlives_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "kv" / "costs.json"
    book = CostBook(path)
    assert not book.calibrated and book.costs() is None
    book.calibrate(Costs(copy=5e9, token=1e-4, history=1e-8))
    assert book.calibrated and book.costs() is None, "the disk has not been seen at work"
    book.fetched(2_000_000, 0.02)
    book.fetched(2_000_000, 0.04)
    book.save()
    assert not CostBook(path, machine="another").calibrated, "a store that was carried there"
    again = CostBook(path).costs()
    assert again is not None and again.fetch == pytest.approx(0.75 * 1e8 + 0.25 * 0.5e8)
    assert again.latency == 0.0


def test_a_full_disk_keeps_no_piece_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, _: bytes) -> int:
        path.open("w").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    book = CostBook(tmp_path / "costs.json")
    monkeypatch.setattr(Path, "write_bytes", full)
    book.save()
    assert not list(tmp_path.iterdir())


def test_a_small_fetch_tells_the_latency_and_nothing_of_the_rate() -> None:
    """One tail of 64 KiB for which a turn waits 8 ms does not make the disk one of 8 MB/s."""
    book = CostBook(None)
    book.calibrate(Costs(copy=5e9, token=5e-4, history=1e-7))
    book.fetched(1 << 16, 0.008)
    assert book.costs() is None, "how fast bytes come has not been seen"
    book.fetched(2_000_000, 0.018)
    costs = book.costs()
    assert costs is not None
    assert costs.latency == pytest.approx(0.008) and costs.fetch == pytest.approx(2e8)
    book.fetched(1 << 16, 0.004)
    again = book.costs()
    assert again is not None
    assert again.latency == pytest.approx(0.007) and again.fetch == pytest.approx(2e8)


def test_latency_that_was_a_stall_does_not_make_a_large_fetch_look_free() -> None:
    book = CostBook(None)
    book.calibrate(Costs(copy=5e9, token=5e-4, history=1e-7))
    book.fetched(1, 3.0)
    book.fetched(2_000_000, 0.02)
    costs = book.costs()
    assert costs is not None and costs.fetch == pytest.approx(2e8)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b'{"layout":99,"copy":1.0,"token":1.0}', b'{"copy":1.0,"token":1.0,"fetch":-1}'],
)
def test_what_cannot_be_read_counts_for_nothing(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(text)
    assert not CostBook(path).calibrated


def test_a_machine_is_told_from_one_that_computes_otherwise() -> None:
    assert this_machine("2 threads") == this_machine("2 threads") != this_machine("4 threads")


def test_one_stall_does_not_keep_turns_from_the_disk_for_ever() -> None:
    """Were the first fetch one of seconds, all would be computed from then on, and nothing seen of the disk."""
    book = CostBook(None, beside=False)
    book.calibrate(Costs(copy=5e9, token=5e-4, history=1e-7))
    book.fetched(2_000_000, 5.0)
    tries = 0
    while (costs := book.costs()) and costs.blocks_to_compute(
        0, [1] * 26, [1] * 26, 16, 1 << 16, beside=False
    ):
        book.passed_over()
        tries += 1
        assert tries < 100
    assert tries > 1, "one look at a slow disk counts for a while"
