"""What adapters add, interpreted, against the definition; a row's bits in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.kernels.gpu import low_rank
from holdfast.kernels.low_rank import LowRank
from holdfast.tests.kernels.low_rank_stage import MIXES, TOLERANCE, expected, filled, numbers

SHAPES = {
    "one part": (96, (48,)),
    "three parts": (64, (64, 32, 32)),
    "odd": (41, (7, 150)),
    "long": (2100, (40,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_pairs_add_what_the_definition_says(shape: str, mix: str, dtype: torch.dtype) -> None:
    (width, widths), tokens = SHAPES[shape], MIXES[mix]
    slots, pairs = filled(width, widths, dtype)
    x = numbers(len(tokens), width, dtype=dtype, seed=3)
    out = numbers(len(tokens), sum(widths), dtype=dtype, seed=4)
    wanted = expected(out, x, pairs, widths, tokens)
    low_rank.add_low_rank(out, x, slots, torch.tensor(tokens))
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE[dtype])


def test_a_row_has_the_same_bits_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLAS, by which the interpreter multiplies, may sum otherwise where a row stands elsewhere in a tile."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ij,jk->ik", a, b, dtype=dtype))
    slots, _ = filled(1500, (64, 32), torch.float32)
    tokens = [2, 2, 2, 0, 3, 3, -1, 1] + [3] * 12
    x, out = (numbers(20, size, dtype=torch.float32, seed=3) for size in (1500, 96))
    whole = out.clone()
    low_rank.add_low_rank(whole, x, slots, torch.tensor(tokens))
    for row, slot in enumerate(tokens):
        alone = out[row : row + 1].clone()
        low_rank.add_low_rank(alone, x[row : row + 1].contiguous(), slots, torch.tensor([slot]))
        assert torch.equal(alone, whole[row : row + 1])


def test_what_does_not_fit_is_refused() -> None:
    slots, _ = filled(32, (32,), torch.float32)
    x, out, one = torch.zeros(2, 32), torch.zeros(2, 32), torch.zeros(2, dtype=torch.int64)
    low_rank.add_low_rank(torch.zeros(0, 32), torch.zeros(0, 32), slots, one[:0])
    with pytest.raises(ValueError, match=r"out: shape \(2, 31\), expected \(2, 32\)"):
        low_rank.add_low_rank(out[:, :31], x, slots, one)
    with pytest.raises(ValueError, match=r"slots: shape \(1,\), expected \(2,\)"):
        low_rank.add_low_rank(out, x, slots, one[:1])
    with pytest.raises(ValueError, match=r"pairs of torch\.float32 in 1 parts, x of torch\.float16"):
        low_rank.add_low_rank(out, x.half(), slots, one)
    with pytest.raises(ValueError, match="in 4 parts"):
        low_rank.add_low_rank(out, x, LowRank.empty(1, 16, 32, (8, 8, 8, 8), x), one)
