"""Paged decode attention, interpreted, against the dense reference: odd lengths, groups, windows, sinks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from holdfast.kernels.batch import PagedBatch
from holdfast.kernels.gpu.attention import paged_attention
from holdfast.kernels.gpu.decode import decode_attention
from holdfast.kernels.interface import Attention
from holdfast.kernels.reference.attention import extend_attention as reference
from holdfast.tests.kernels.interpreted.paged import paged, queries

LENGTHS = (1, 15, 16, 17, 64, 65, 129, 300)
ROWS = [(length - 1, 1) for length in LENGTHS]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}

WAYS = pytest.mark.parametrize(
    ("how", "sunk", "dtype"),
    [
        (Attention(0.125), False, torch.float32),
        (Attention(0.125), False, torch.float16),
        (Attention(0.125, window=40), True, torch.float32),
        (Attention(0.3, window=1), False, torch.float32),
        (Attention(0.125, soft_cap=3.0), False, torch.float32),
        (Attention(0.125), True, torch.float32),
        (Attention(0.125, window=70, soft_cap=5.0), True, torch.float32),
        (Attention(0.125, window=150, soft_cap=5.0), True, torch.float16),
    ],
    ids=["plain", "plain fp16", "window, sinks", "only itself", "soft cap", "sinks", "all", "all fp16"],
)


def compare(how: Attention, sunk: bool, dtype: torch.dtype) -> PagedBatch:
    arena, batch = paged(ROWS, dtype=dtype)
    query = queries(batch, arena, 3)
    sinks = torch.linspace(-2, 2, query.shape[1]) if sunk else None
    expected = reference(query, arena, 1, batch, how, sinks)
    got = paged_attention(query, arena, 1, batch, how, sinks)
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    return batch


@WAYS
def test_whole_rows_equal_the_reference(how: Attention, sunk: bool, dtype: torch.dtype) -> None:
    (split,) = compare(how, sunk, dtype).splits.values()
    assert set(split[:-1, 2].tolist()) == {1}


@WAYS
@pytest.mark.usefixtures("_large")
def test_rows_in_parts_equal_the_reference(how: Attention, sunk: bool, dtype: torch.dtype) -> None:
    (split,) = compare(how, sunk, dtype).splits.values()
    assert (split[:-1, 2].max() > 1) == (how.window != 1)


@pytest.mark.usefixtures("_large")
def test_more_parts_than_are_merged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.kernels.gpu.parts.SHORTEST", 16)
    arena, batch = paged([(1290, 1), (3, 1)], kv_heads=1)
    query, how = queries(batch, arena, 2), Attention(0.125)
    got = paged_attention(query, arena, 0, batch, how)
    (split,) = batch.splits.values()
    assert split[:-1, 2].tolist() == [62, 1]
    expected = reference(query, arena, 0, batch, how)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


def padded(batch: PagedBatch, rows: int) -> PagedBatch:
    """The batch with ``rows`` more rows of one token without a slot, of any line."""
    more = torch.arange(1, rows + 1)
    return PagedBatch(
        torch.cat((batch.positions, more * 0)),
        torch.cat((batch.slots, more * 0 - 1)),
        torch.cat((batch.row_starts, batch.row_starts[-1] + more)),
        torch.cat((batch.context_lengths, more * 0 + 1)),
        batch.tables,
        torch.cat((batch.lines, batch.lines[:1].expand(rows))),
        (),
    )


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.usefixtures("_large")
def test_a_padded_batch_has_the_bits_of_the_bare_one(window: int | None) -> None:
    how = Attention(0.125, window)
    arena, batch = paged([(length - 1, 1) for length in (700, 1, 64, 301, 330)])
    bare = paged_attention(queries(batch, arena, 2), arena, 0, batch, how)
    longer = padded(batch, 11)
    got = paged_attention(queries(longer, arena, 2), arena, 0, longer, how)
    assert torch.equal(got[:5], bare) and torch.isfinite(bare).all()
    cut = {
        rows: split[:5, 2].tolist()
        for rows, one in ((5, batch), (16, longer))
        for split in one.splits.values()
    }
    assert cut[5] == cut[16] and max(cut[5]) > 2


@pytest.mark.usefixtures("_large")
def test_one_very_long_row_among_many_is_cut() -> None:
    rows = [(9, 1)] * 20 + [(2500, 1)] + [(17, 1)] * 11
    arena, batch = paged(rows, kv_heads=1)
    query, how = queries(batch, arena, 2), Attention(0.125)
    got = paged_attention(query, arena, 0, batch, how)
    (split,) = batch.splits.values()
    assert split[20, 2] > 25 and sum(split[:-1, 2].tolist()) == split[20, 2] + 31 == split[-1, 0]
    torch.testing.assert_close(got.double(), reference(query, arena, 0, batch, how), atol=2e-5, rtol=2e-5)


def test_rows_of_several_tokens_are_left_as_they_are() -> None:
    arena, batch = paged([(20, 1), (3, 5), (0, 1)])
    query, how = queries(batch, arena, 2), Attention(0.125)
    out = torch.full_like(query, 7.0)
    decode_attention(query, arena, 1, batch, how, None, out)
    expected = reference(query, arena, 1, batch, how)
    assert (out[1:6] == 7.0).all()
    torch.testing.assert_close(out[[0, 6]].double(), expected[[0, 6]], atol=2e-5, rtol=2e-5)


def test_a_batch_of_other_lengths_is_another_batch() -> None:
    """Plans are not carried over to it."""
    arena, batch = paged([(20, 1)])
    paged_attention(queries(batch, arena, 2), arena, 1, batch, Attention(0.125))
    assert batch.splits and not replace(batch, context_lengths=batch.context_lengths - 3).splits
