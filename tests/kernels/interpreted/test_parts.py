"""How contexts are cut into parts, interpreted: within bounds for any lengths, and the same beside padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.kernels.batch import PagedBatch
from holdfast.kernels.gpu import parts
from holdfast.kernels.gpu.parts import SHORTEST, WHOLE, Parts


def batch_of(counts: np.ndarray, lengths: np.ndarray) -> PagedBatch:
    starts = torch.from_numpy(np.concatenate(([0], np.cumsum(counts))))
    numbers = torch.zeros(int(starts[-1]), dtype=torch.int64)
    table, lines = torch.zeros((1, 1), dtype=torch.int32), torch.zeros(len(counts), dtype=torch.int32)
    return PagedBatch(numbers, numbers, starts, torch.from_numpy(lengths), table, lines, ())


def cut_up(batch: PagedBatch, extra: int, span: int, each: int, singles: bool) -> Parts:
    query = torch.zeros((batch.positions.numel(), 2, 64))
    return Parts.of(batch, query, 100, extra, span, each, singles=singles)


@pytest.mark.parametrize("singles", [True, False])
@pytest.mark.parametrize(
    ("rows", "span"), [(1, WHOLE), (5, WHOLE), (300, 4160), (1024, WHOLE), (2500, WHOLE)]
)
def test_parts_are_within_bounds_and_stand_one_behind_the_other(rows: int, span: int, singles: bool) -> None:
    random = np.random.default_rng(rows)
    counts = random.integers(0, 4, rows) * random.integers(1, 40, rows)
    counts[random.random(rows) < 0.3] = 1
    lengths = counts + (10 ** random.uniform(0, 5.5, rows)).astype(np.int64)
    extra, each = 66, 1 if singles else 16
    split = cut_up(batch_of(counts, lengths), extra, span, each, singles).split.numpy()
    tiles = np.where(counts == 1, 1, 0) if singles else np.where(counts > 1, -(-counts // each), 0)
    cut = split[:-1, 2]
    assert ((cut > 0) == (tiles > 0)).all()
    assert (tiles * np.maximum(cut - 1, 0)).sum() <= extra
    assert (cut <= np.maximum(-(-np.minimum(lengths, span) // SHORTEST), 1)).all()
    assert (split[:, 0] == np.concatenate(([0], np.cumsum(tiles * cut)))).all()
    entries = np.where(cut > 1, tiles * cut, 0)
    assert (split[:-1, 1] == np.cumsum(entries) - entries).all() and entries.sum() <= 2 * extra


def test_parts_are_many_and_as_long_as_one_another() -> None:
    """64 rows of 8k on a device for 1,056 programs: two parts each for 8 heads; one row: as many as it may."""
    ones = np.ones(64, np.int64)
    assert set(cut_up(batch_of(ones, ones * 8192), 66, WHOLE, 1, True).split[:-1, 2].tolist()) == {2}
    assert cut_up(batch_of(ones[:1], ones[:1] * 32768), 66, WHOLE, 1, True).split[0, 2] > 60


def test_sizes_depend_on_shapes_alone() -> None:
    """So a captured launch holds for any lengths."""
    counts, sizes = np.array([1, 3, 1, 1]), set()
    for lengths in ([3, 3, 3, 3], [1, 90_000, 70_000, 2]):
        for singles in (True, False):
            made = cut_up(batch_of(counts, np.array(lengths)), 5, WHOLE, 4, singles)
            sizes.add((made.programs, made.values.shape, made.lse.shape, made.split.shape))
    assert sizes == {(105, (10, 4, 2, 64), (10, 4, 2), (5, 3))}


def test_a_share_covers_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "multiprocessors", lambda device: 132)
    assert [parts.share_of(torch.device("cpu"), 4, heads) for heads in (1, 8, 32)] == [528, 66, 17]
