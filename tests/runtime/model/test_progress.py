"""What is told while weights load: bytes, the share of all, and an estimate once the rate is known."""

from __future__ import annotations

from holdfast.runtime.model.progress import WeightsProgress


def test_bytes_and_the_seconds_left_at_the_rate_so_far() -> None:
    now, told = [100.0], list[tuple[float, str]]()
    progress = WeightsProgress(400_000_000, lambda share, what: told.append((share, what)), lambda: now[0])
    for name, seconds, size in (("first", 0.1, 20), ("b", 1.9, 80), ("b", 2.0, 100), ("c", 1.5, 200)):
        now[0] += seconds
        progress.done(name, size * 1_000_000)
    assert told == [
        (0.05, "loading first: 20 of 400 MB"),  # too early for an estimate
        (0.25, "loading b: 100 of 400 MB, 6 s left"),
        (0.5, "loading b: 200 of 400 MB, 4 s left"),
        (1.0, "loading c: 400 of 400 MB"),
    ]
