"""Branches over a common prefix, interpreted, against the dense reference."""

from __future__ import annotations

import pytest
import torch

from holdfast.kernels.batch import lay_out_families
from holdfast.kernels.gpu.prefix import prefix_attention
from holdfast.kernels.interface import Attention
from holdfast.kernels.reference.attention import prefix_attention as reference
from holdfast.tests.kernels.interpreted.paged import paged, queries

CONTEXTS = [300, 281, 299, 340, 30, 21, 600, 19, 18]
FAMILIES = ([4, 2, 1, 2], [277, 16, 590, 0])


@pytest.mark.parametrize(
    ("how", "sunk", "dtype"),
    [
        (Attention(0.125), False, torch.float32),
        (Attention(0.125, soft_cap=4.0), True, torch.float32),
        (Attention(0.125, soft_cap=4.0), True, torch.float16),
        (Attention(0.125, window=30), False, torch.float32),
    ],
    ids=["plain", "soft cap, sinks", "soft cap, sinks fp16", "window"],
)
def test_equals_the_reference(how: Attention, sunk: bool, dtype: torch.dtype) -> None:
    arena, batch = paged([(length - 1, 1) for length in CONTEXTS], dtype=dtype)
    families = lay_out_families(*FAMILIES, CONTEXTS, arena.device)
    query = queries(batch, arena, 3)
    sinks = torch.linspace(-1, 1, query.shape[1]) if sunk else None
    if how.window is None:  # only a family's first row need hold the prefix
        expected = reference(query, arena, 1, batch, how, families, sinks)
    else:
        expected = reference(query, arena, 1, batch, how, lay_out_families([9], [0], CONTEXTS, arena.device))
    got = prefix_attention(query, arena, 1, batch, how, families, sinks)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_row_without_a_token_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has 16 tokens and shares 16"):
        lay_out_families([2], [16], [17, 16], torch.device("cpu"))
