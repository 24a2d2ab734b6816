"""The Triton kernels compiled and run, in the types that the interpreter cannot multiply: on a GPU alone."""

from __future__ import annotations

import pytest
import torch

from holdfast.kernels import reference, sampling
from holdfast.kernels.interface import Attention
from holdfast.kernels.reference_attention import extend_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("counts", [[1, 1, 1], [40, 1, 7]], ids=["decode", "ragged"])
def test_attention(counts: list[int], dtype: torch.dtype) -> None:
    from holdfast.kernels.gpu import backend

    firsts, widths = [0, 70, 1000], [3, 5, 64]
    tables = [torch.arange(sum(widths[:row]), sum(widths[: row + 1])).int().numpy() for row in range(3)]
    arena = torch.randn(sum(widths), 2, 2, 2, 16, 128, device="cuda", dtype=dtype)
    batch = backend.lay_out(arena, firsts, counts, tables)
    query = torch.randn(sum(counts), 8, 128, device="cuda", dtype=dtype)
    how = Attention(0.088)
    got = backend.paged_attention(query, arena, 1, batch, how)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    expected = extend_attention(query, arena, 1, batch, how)
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_rows() -> None:
    from holdfast.kernels.gpu import backend

    x, residual = (torch.randn(33, 4096, device="cuda").bfloat16() for _ in range(2))
    weight = torch.rand(4096, device="cuda").bfloat16()
    for got, expected in zip(
        backend.add_norm(x, residual, weight, 1e-6),
        reference.add_norm(x, residual, weight, 1e-6),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("k", "p", "candidates"), [(0, 1.0, 0), (50, 0.9, 50), (0, 0.9, 151_936)])
def test_draws(k: int, p: float, candidates: int) -> None:
    from holdfast.kernels.gpu.draw import sample

    logits = torch.randn(64, 151_936, device="cuda") * 3
    ones, whole = torch.ones(64, device="cuda"), torch.arange(64, device="cuda")
    numbers = (ones, whole * 0 + k, ones * p, whole, whole)
    got = sample(logits, *numbers, candidates=candidates)
    assert got.tolist() == sampling.sample(logits, *numbers, candidates=candidates).tolist()
