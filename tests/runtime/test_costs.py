"""What restoring costs here: measured on a runner whose times are known, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.runtime.costs import CostBook, Measured, measure
from holdfast.runtime.plan import Outcome, Plan

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
        for row in plan.rows:
            self.now += sum(2e-3 + 1e-6 * at for at in range(row.first, row.first + row.count))
        return self

    def tokens(self) -> list[Outcome]:
        return []


def test_what_is_measured_is_what_it_takes() -> None:
    runner = Timed()
    found = measure(runner, slots=8, blocks=100, block_tokens=16, block_bytes=BLOCK_BYTES, clock=runner.clock)
    assert found.copy == pytest.approx(BLOCK_BYTES / 1e-3)
    assert found.token == pytest.approx(2e-3, rel=1e-2) and found.history == pytest.approx(1e-6, rel=1e-2)


def test_nothing_is_told_before_all_is_measured_and_it_outlives_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "kv" / "costs.json"
    book = CostBook(path)
    assert not book.calibrated and book.costs() is None
    book.calibrate(Measured(copy=5e9, token=1e-4, history=1e-8))
    assert book.calibrated and book.costs() is None, "the disk has not been seen at work"
    book.fetched(1_000_000, 0.01)
    book.fetched(1_000_000, 0.02)
    book.save()
    again = CostBook(path).costs()
    assert again is not None and again.fetch == pytest.approx(0.75 * 1e8 + 0.25 * 0.5e8)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b'{"layout":99,"copy":1.0,"token":1.0}', b'{"copy":1.0,"token":1.0,"fetch":-1}'],
)
def test_what_cannot_be_read_counts_for_nothing(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(text)
    assert not CostBook(path).calibrated
