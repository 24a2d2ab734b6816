"""Low-rank pairs on a CPU: the reference and the loop against the definition; a row's bits in any company."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from holdfast.kernels.cpu import backend
from holdfast.kernels.reference import backend as reference

from ..low_rank_stage import MIXES, RANKS, TOLERANCE, expected, filled, numbers

SHAPES = {
    "one part": (96, (48,)),
    "three parts": (64, (64, 32, 32)),
    "odd": (41, (7, 30)),
    "wide": (160, (272,)),
}


@pytest.mark.parametrize("kernels", [reference, backend], ids=["reference", "cpu"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_pairs_add_what_the_definition_says(shape: str, mix: str, dtype: torch.dtype, kernels) -> None:
    (width, widths), tokens = SHAPES[shape], MIXES[mix]
    slots, pairs = filled(width, widths, dtype)
    x = numbers(len(tokens), width, dtype=dtype, seed=3)
    out = numbers(len(tokens), sum(widths), dtype=dtype, seed=4)
    wanted = expected(out, x, pairs, widths, tokens)
    kernels.add_low_rank(out, x, slots, torch.tensor(tokens))
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    slots, _ = filled(96, (64, 32), dtype)
    tokens = [2, 2, 2, 0, 3, 3, -1, 1] + [3] * 40
    x, out = numbers(48, 96, dtype=dtype, seed=3), numbers(48, 96, dtype=dtype, seed=4)
    whole = out.clone()
    backend.add_low_rank(whole, x, slots, torch.tensor(tokens))
    for row, slot in enumerate(tokens):
        alone = out[row : row + 1].clone()
        backend.add_low_rank(alone, x[row : row + 1].contiguous(), slots, torch.tensor([slot]))
        assert torch.equal(alone, whole[row : row + 1])


def test_an_adapter_of_a_lower_rank_leaves_nothing_of_the_one_before() -> None:
    """`filled` puts a full adapter into each slot first: what it left is beyond the rank, and is not read."""
    slots, _ = filled(32, (32,), torch.float32)
    for slot, rank in enumerate(RANKS):
        used = int(slots.ranks[slot, 0])
        assert rank <= used < rank + 16
        assert not slots.a[slot, 0, :, rank:used].any() and not slots.b_of(slot, 0, used)[rank:].any()
