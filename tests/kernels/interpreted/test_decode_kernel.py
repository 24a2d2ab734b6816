"""Paged decode attention, interpreted, against the dense reference: odd lengths, groups, windows, sinks."""

from __future__ import annotations

import pytest
import torch

from holdfast.kernels.gpu.decode import decode_attention
from holdfast.kernels.interface import Attention
from holdfast.kernels.reference.attention import extend_attention as reference
from holdfast.tests.kernels.interpreted.paged import paged, queries

LENGTHS = (1, 15, 16, 17, 64, 65, 129, 300)
ROWS = [(length - 1, 1) for length in LENGTHS]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


@pytest.mark.parametrize(
    ("how", "sunk", "dtype"),
    [
        (Attention(0.125), False, torch.float32),
        (Attention(0.125), False, torch.float16),
        (Attention(0.125, window=40), True, torch.float32),
        (Attention(0.3, window=1), False, torch.float32),
        (Attention(0.125, soft_cap=3.0), False, torch.float32),
        (Attention(0.125), True, torch.float32),
        (Attention(0.125, window=70, soft_cap=5.0), True, torch.float32),
        (Attention(0.125, window=70, soft_cap=5.0), True, torch.float16),
    ],
    ids=["plain", "plain fp16", "window, sinks", "only itself", "soft cap", "sinks", "all", "all fp16"],
)
def test_equals_the_reference(how: Attention, sunk: bool, dtype: torch.dtype) -> None:
    arena, batch = paged(ROWS, dtype=dtype)
    query = queries(batch, arena, 3)
    sinks = torch.linspace(-2, 2, query.shape[1]) if sunk else None
    expected = reference(query, arena, 1, batch, how, sinks)
    for stretch in (None, 64) if dtype == torch.float32 else (None,):  # whole, and in parts
        got = decode_attention(query, arena, 1, batch, how, sinks, stretch=stretch)
        torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
