"""KV in e4m3, interpreted: the same bytes as the reference's, read as the same numbers."""

from __future__ import annotations

import pytest
import torch

from holdfast.kernels.float8 import E4M3
from holdfast.kernels.gpu import backend, invariant_kernels
from holdfast.kernels.gpu.store import rotate_and_store
from holdfast.kernels.interface import Attention
from holdfast.kernels.reference import attention
from holdfast.kernels.reference import backend as reference
from holdfast.tests.kernels.interpreted.paged import paged, queries

ROWS = [(40, 1), (0, 17), (30, 5)]


def narrow(arena: torch.Tensor) -> torch.Tensor:
    """The same KV in e4m3; what is not there is NaN in both."""
    return arena.float().clamp(-448, 448).to(E4M3)


def test_every_byte_is_stored_and_read_as_torch_does() -> None:
    """All 254 numbers, the middles between neighbours, numbers beyond both ends, NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    exact = codes.view(E4M3).float()
    exact = exact[~exact.isnan()].sort().values
    middles = (exact[1:] + exact[:-1]) / 2
    odd = torch.tensor([1e9, -1e9, 449.0, 1e-4, -1e-12, float("nan")])
    numbers = torch.cat((exact, middles, middles.nextafter(torch.zeros(())), odd))
    count = -(-len(numbers) // 64)
    padded = torch.zeros(count * 64)
    padded[: len(numbers)] = numbers
    keys = padded.view(count, 1, 64)
    qkv = torch.cat((torch.zeros_like(keys), keys, -keys), 1)
    still = (torch.ones(count, 64), torch.zeros(count, 64))
    arena = torch.zeros((count // 16 + 1, 1, 2, 1, 16, 64), dtype=E4M3)
    expected = arena.clone()
    rotate_and_store(qkv, None, still, arena, 0, torch.arange(count))
    reference.rotate_and_store(qkv.clone(), None, still, expected, 0, torch.arange(count))
    assert torch.equal(arena.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_reads_it(dtype: torch.dtype) -> None:
    arena, batch = paged(ROWS, dtype=dtype)
    query, stored, how = queries(batch, arena, 2), narrow(arena), Attention(0.125)
    expected = attention.extend_attention(query, stored.to(dtype), 1, batch, how)
    for got in (
        backend.paged_attention(query, stored, 1, batch, how),
        invariant_kernels.extend_attention(query, stored, 1, batch, how),
        reference.paged_attention(query, stored, 1, batch, how),
    ):
        bound = 2e-5 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(got.double(), expected, atol=bound, rtol=bound)


def test_single_tokens_read_it() -> None:
    arena, batch = paged([(40, 1), (33, 1), (60, 1)])
    query, stored, how = queries(batch, arena, 2), narrow(arena), Attention(0.125)
    expected = attention.extend_attention(query, stored.float(), 0, batch, how)
    got = backend.paged_attention(query, stored, 0, batch, how)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


def test_the_error_of_e4m3_is_what_three_bits_leave() -> None:
    """Each stored number is off by at most a sixteenth; what attention makes of them by less."""
    arena, batch = paged(ROWS)
    query, how = queries(batch, arena, 2), Attention(0.125)
    exact = attention.extend_attention(query, arena, 0, batch, how)
    rough = backend.paged_attention(query, narrow(arena), 0, batch, how).double()
    off = ((rough - exact).norm() / exact.norm()).item()
    assert 0 < off < 1 / 16


def test_blocks_are_copied() -> None:
    arena, _ = paged(ROWS)
    stored = narrow(arena)
    expected = stored[2].view(torch.uint8).clone()
    backend.copy_blocks(stored, [2], [0])
    assert torch.equal(stored[0].view(torch.uint8), expected)


def test_other_types_are_refused_with_both() -> None:
    arena, batch = paged(ROWS)
    with pytest.raises(ValueError, match=r"query is torch\.float32, the arena torch\.float16"):
        backend.paged_attention(queries(batch, arena, 2), arena.half(), 0, batch, Attention(1.0))
