"""Packed weights: the numbers that a file means, in whatever panel and order; the rounding of activations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels.packed import packed, rounded
from holdfast.kernels.packed_types import GGML
from holdfast.kernels.reference import backend

from ..packed_stage import blocks, dequantised, matrix


@pytest.mark.parametrize("name", GGML)
@pytest.mark.parametrize("rows", [1, 16, 37, 530])
def test_packing_loses_nothing_and_takes_hardly_more_bytes(name: str, rows: int) -> None:
    raw = blocks(name, rows, 768)
    made = matrix(name, rows, 768)
    wanted = torch.from_numpy(dequantised(name, raw))
    assert made.shape == (rows, 768) and torch.equal(made.numbers(), wanted)
    ids = torch.tensor([0, rows - 1, rows // 2, rows // 2, 0])
    assert torch.equal(made.take(ids), wanted[ids])
    assert GGML[name].unit <= 16 * 1.04 * GGML[name].bytes


def test_matrices_are_packed_one_behind_the_other_in_a_new_order() -> None:
    raws = [blocks("Q4_K", rows, 256, seed=rows) for rows in (20, 7)]
    orders = [np.random.default_rng(0).permutation(20), np.arange(7)]
    made = packed(GGML["Q4_K"], raws, 256, orders)
    wanted = np.concatenate(
        [dequantised("Q4_K", raw)[order] for raw, order in zip(raws, orders, strict=True)]
    )
    assert np.array_equal(made.numbers().numpy(), wanted)


def test_the_bytes_of_parts_are_told_and_who_is_told_can_end_it() -> None:
    kind, raw, told = GGML["Q8_0"], blocks("Q8_0", 1000, 2048), list[int]()
    made = packed(kind, [raw], 2048, [np.arange(1000)], told.append)
    assert len(told) > 1 and sum(told) == made.data.nbytes == kind.bytes_of(1000, 2048)

    def enough(count: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        packed(kind, [raw], 2048, [np.arange(1000)], enough)


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_refused(number: float) -> None:
    raw = blocks("Q6_K", 3, 512)
    raw[2, 210 + 208 :] = np.array([number], "<f2").view(np.uint8)
    with pytest.raises(ValueError, match="not finite"):
        packed(GGML["Q6_K"], [raw], 512, [np.arange(3)])


FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


@given(st.lists(FINITE, min_size=32, max_size=32))
def test_activations_are_rounded_to_the_nearest_of_255_numbers(numbers: list[float]) -> None:
    x = torch.tensor([numbers])
    step = x.abs().max() / 127
    assert (rounded(x) - x).abs().max() <= step * 0.51 + 1e-36
    assert torch.equal(rounded(-x), -rounded(x))


def test_a_run_with_a_number_that_is_not_finite_is_nan_and_no_other() -> None:
    x = torch.ones(2, 64)
    x[0, 3], x[1, 40] = torch.inf, torch.nan
    found = rounded(x).isnan().view(2, 2, 32)
    assert found.all(-1).tolist() == found.any(-1).tolist() == [[True, False], [False, True]]
    assert torch.equal(rounded(torch.zeros(1, 32)), torch.zeros(1, 32))


def test_a_product_is_that_of_the_rounded_numbers() -> None:
    x, made = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)), matrix("Q5_1", 21, 256)
    wanted = rounded(x).double() @ made.numbers().double().T
    assert torch.allclose(backend.packed_linear(x, made).double(), wanted, rtol=1e-5, atol=1e-4)
