"""Paged attention of ragged batches, interpreted, against the dense reference and the room's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from holdfast.kernels.gpu import invariant_kernels
from holdfast.kernels.gpu.attention import paged_attention
from holdfast.kernels.gpu.extend import extend_attention
from holdfast.kernels.gpu.parts import WHOLE
from holdfast.kernels.interface import Attention
from holdfast.kernels.reference import backend as torch_kernels
from holdfast.kernels.reference.attention import extend_attention as reference
from holdfast.tests.kernels.interpreted.paged import paged, queries

ROWS = [(0, 1), (0, 40), (63, 1), (64, 1), (30, 35), (129, 3), (200, 1)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


WAYS = pytest.mark.parametrize(
    ("how", "sunk", "dtype"),
    [
        (Attention(0.125), False, torch.float32),
        (Attention(0.125), False, torch.float16),
        (Attention(0.125, window=20), True, torch.float32),
        (Attention(0.3, window=1), False, torch.float32),
        (Attention(0.125, soft_cap=3.0), False, torch.float32),
        (Attention(0.125, window=70, soft_cap=5.0), True, torch.float32),
        (Attention(0.125, window=70, soft_cap=5.0), True, torch.float16),
    ],
    ids=["plain", "plain fp16", "window, sinks", "only itself", "soft cap", "all", "all fp16"],
)


@WAYS
def test_equals_the_reference(how: Attention, sunk: bool, dtype: torch.dtype) -> None:
    arena, batch = paged(ROWS, dtype=dtype)
    query = queries(batch, arena, 3)
    sinks = torch.linspace(-2, 2, query.shape[1]) if sunk else None
    got = paged_attention(query, arena, 1, batch, how, sinks)
    expected = reference(query, arena, 1, batch, how, sinks)
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@WAYS
@pytest.mark.usefixtures("_large")
def test_in_parts_equals_the_reference(how: Attention, sunk: bool, dtype: torch.dtype) -> None:
    test_equals_the_reference(how, sunk, dtype)


@pytest.mark.usefixtures("_large")
def test_few_queries_behind_a_long_history_are_cut() -> None:
    arena, batch = paged([(1000, 9), (0, 20), (500, 1), (3, 2)])
    query, how = queries(batch, arena, 2), Attention(0.125)
    got = paged_attention(query, arena, 1, batch, how)
    chunks = batch.splits[WHOLE, 16, 16, False]
    assert chunks[:-1, 2].tolist() == [16, 1, 0, 1]
    assert chunks[-1, 0] == 16 + 2 + 1  # the second row has two tiles of 16 tokens
    torch.testing.assert_close(got.double(), reference(query, arena, 1, batch, how), atol=2e-5, rtol=2e-5)


def test_tiles_that_fill_the_device_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.kernels.gpu.parts.SHORTEST", 16)
    arena, batch = paged([(300, 40)])  # tokens // 16 tiles, and one multiprocessor
    extend_attention(queries(batch, arena, 2), arena, 1, batch, Attention(0.125))
    assert batch.splits[WHOLE, 16, 0, False][0, 2] == 1


def test_rows_of_one_token_and_tokens_of_no_row_are_left_as_they_are() -> None:
    arena, batch = paged([(20, 1), (3, 5), (0, 1), (7, 4)])
    query, how = queries(batch, arena, 2), Attention(0.125)
    ends = torch.tensor([0, 1, 6, 7, 7])  # the last row has no token, as those that pad a batch
    expected, out = reference(query, arena, 1, batch, how), torch.full_like(query, 7.0)
    extend_attention(query, arena, 1, replace(batch, row_starts=ends), how, None, out)
    assert (out[0] == 7.0).all() and (out[6:] == 7.0).all()
    torch.testing.assert_close(out[1:6].double(), expected[1:6], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("dim", "block", "group"), [(64, 32, 1), (80, 16, 4), (96, 64, 8), (128, 16, 5), (256, 16, 2)]
)
def test_every_shape(dim: int, block: int, group: int) -> None:
    arena, batch = paged([(0, 1), (5, 30), (70, 1)], dim=dim, block=block)
    query, how = queries(batch, arena, group), Attention(dim**-0.5)
    got = paged_attention(query, arena, 0, batch, how)
    torch.testing.assert_close(
        got, torch_kernels.paged_attention(query, arena, 0, batch, how), atol=2e-5, rtol=2e-5
    )


def test_shapes_that_do_not_fit_are_refused_with_both() -> None:
    arena, batch = paged([(0, 3)])
    with pytest.raises(ValueError, match=r"query \(3, 3, 64\) does not fit an arena \(4, 2, 2, 2, 16, 64\)"):
        extend_attention(torch.zeros(3, 3, 64), arena, 0, batch, Attention(1.0))
    with pytest.raises(ValueError, match=r"positions: shape \(3,\), expected \(5,\)"):
        extend_attention(torch.zeros(5, 2, 64), arena, 0, batch, Attention(1.0))


@pytest.mark.parametrize(
    "kernel", [paged_attention, invariant_kernels.extend_attention], ids=["extend", "stretches"]
)
def test_blocks_before_the_window_are_not_read(kernel: Callable[..., torch.Tensor]) -> None:
    """Blocks that no query sees may be freed and poisoned: their NaN must not reach the result."""
    rows, how = [(100, 1), (100, 30), (205, 3)], Attention(0.125, window=20)
    arena, batch = paged(rows, kv_heads=1)
    query = queries(batch, arena, 2)
    expected = kernel(query, arena, 1, batch, how)
    freed = {
        int(block)
        for (first, _), table in zip(rows, batch.tables[batch.lines], strict=True)
        for block in table[: (first + 1 - 20) // 16]
    }
    arena[sorted(freed)] = float("nan")
    got = kernel(query, arena, 1, batch, how)
    assert len(freed) == 5 + 5 + 11 and torch.isfinite(expected).all()
    torch.testing.assert_close(got, expected, atol=0, rtol=0)
