"""The Triton kernels compiled and run on a GPU, in the types that the interpreter cannot multiply."""

from __future__ import annotations

import pytest
import torch

from holdfast.kernels.interface import Attention
from holdfast.kernels.quantised import activated
from holdfast.kernels.reference import backend as reference
from holdfast.kernels.reference import seeded_sampling
from holdfast.kernels.reference.attention import extend_attention

from ..low_rank_stage import MIXES, TOLERANCE, filled, numbers
from ..low_rank_stage import expected as with_pairs
from ..packed_stage import coded

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


@pytest.mark.parametrize(("k", "p"), [(0, 1.0), (50, 0.9), (0, 0.9)])
def test_draws(k: int, p: float) -> None:
    from holdfast.kernels.gpu.seeded_sampling import sample

    logits = torch.randn(64, 151_936, device="cuda") * 3
    ones, whole = torch.ones(64, device="cuda"), torch.arange(64, device="cuda")
    numbers = (ones, whole * 0 + k, ones * p, whole, whole)
    got = sample(logits, *numbers, min_p=ones * 0)
    assert got.tolist() == seeded_sampling.sample(logits, *numbers, min_p=ones * 0).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_invariant_kernels_are_right_and_the_same_alone(dtype: torch.dtype) -> None:
    from holdfast.kernels.gpu import invariant

    tables = [torch.arange(row * 300, row * 300 + 300).int().numpy() for row in range(3)]
    arena = torch.randn(900, 2, 2, 2, 16, 128, device="cuda", dtype=dtype)
    firsts, counts, how = [0, 70, 4400], [40, 1, 7], Attention(0.088)
    batch = invariant.lay_out(arena, firsts, counts, tables)
    query = torch.randn(48, 8, 128, device="cuda", dtype=dtype)
    got = invariant.paged_attention(query, arena, 1, batch, how)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    expected = extend_attention(query, arena, 1, batch, how)
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
    last = invariant.lay_out(arena, [4406], [1], [tables[2]])
    assert torch.equal(invariant.paged_attention(query[-1:].contiguous(), arena, 1, last, how)[0], got[-1])
    weight = torch.randn(200, 1024, device="cuda", dtype=dtype)
    flat = query.flatten(1)
    products = invariant.linear(flat, weight)
    torch.testing.assert_close(products.float(), (flat.float() @ weight.float().T), atol=0.6, rtol=2e-2)
    assert torch.equal(invariant.linear(flat[7:8], weight)[0], products[7])


def test_kv_of_8_bits() -> None:
    """Stored as torch rounds, and read by this GPU's own instructions or by ours."""
    from holdfast.kernels.gpu import backend

    tables = [torch.arange(row * 70, row * 70 + 70).int().numpy() for row in range(2)]
    arena = torch.randn(140, 1, 2, 2, 16, 128, device="cuda").to(torch.float8_e4m3fn)
    qkv = torch.randn(41, 12, 128, device="cuda").bfloat16() * 100
    batch, how = backend.lay_out(arena, [0, 1000], [40, 1], tables), Attention(0.01)
    still = (torch.ones(41, 128, device="cuda").bfloat16(), torch.zeros(41, 128, device="cuda").bfloat16())
    stored = arena.clone()
    query = backend.rotate_and_store(qkv.clone(), None, still, arena, 0, batch.slots)
    reference.rotate_and_store(qkv.clone(), None, still, stored, 0, batch.slots)
    assert torch.equal(arena.view(torch.uint8), stored.view(torch.uint8))
    got = backend.paged_attention(query, arena, 0, batch, how)
    expected = extend_attention(query, arena.bfloat16(), 0, batch, how)
    torch.testing.assert_close(got.double(), expected, atol=1.0, rtol=2e-2)


def test_penalties_and_log_probabilities() -> None:
    from holdfast.kernels.gpu import backend
    from holdfast.kernels.reference import penalties, seeded_sampling

    logits = torch.randn(5, 151_936, device="cuda") * 3
    tokens = torch.randint(0, 300, (4000,), device="cuda")
    tally, line = torch.zeros(5, 151_936, device="cuda", dtype=torch.int32), torch.arange(4, device="cuda")
    strengths = [torch.full((4,), one, device="cuda").double() for one in (1.3, 0.2, -0.4)]
    expected, got = logits.clone(), logits.clone()
    for kernels, made in ((penalties, expected), (backend, got)):
        kernels.count(tally.zero_(), torch.arange(4000, device="cuda") // 1000, tokens, tokens % 2)
        kernels.penalize(made, line + 1, tally, line, *strengths)
    assert torch.equal(got, expected)
    ids = torch.arange(5, device="cuda") * 1000
    ours, theirs = (
        backend.log_probabilities(logits, ids, 20),
        seeded_sampling.log_probabilities(logits, ids, 20),
    )
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-10, rtol=0)
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("tokens", [1, 16, 17, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantised_weights(tokens: int, dtype: torch.dtype) -> None:
    """Also FP8 by torch, and the same bits alone where that is promised."""
    from holdfast.kernels.gpu import quantised
    from holdfast.kernels.gpu.launches import SCHEMES

    for scheme in SCHEMES:
        weight = coded(scheme, 528, 1280, scale=dtype).to(torch.device("cuda"))
        x, bias = (
            torch.randn(tokens, 1280, device="cuda", dtype=dtype),
            torch.randn(528, device="cuda", dtype=dtype),
        )
        wanted = activated(x, weight).double() @ weight.numbers().double().T + bias.double()
        for product in (quantised.quantised_linear, quantised.invariant_linear):
            wrong = (product(x, weight, bias).double() - wanted).abs().max() / wanted.abs().max()
            assert wrong < (1e-3 if dtype == torch.float32 else 1e-2), (scheme, product)
        alone = quantised.invariant_linear(x[-1:].contiguous(), weight)
        assert torch.equal(alone[0], quantised.invariant_linear(x, weight)[-1]), scheme


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mix", list(MIXES))
def test_adapters(mix: str, dtype: torch.dtype) -> None:
    """Several in one batch, at the sizes of a model; a row has the same bits alone."""
    from holdfast.kernels.gpu import low_rank

    width, widths, tokens = 2048, (2048, 512, 512), MIXES[mix]
    slots, pairs = filled(width, widths, dtype, "cuda")
    x = numbers(len(tokens), width, dtype=dtype, seed=3)
    out = numbers(len(tokens), sum(widths), dtype=dtype, seed=4)
    wanted = with_pairs(out, x, pairs, widths, tokens)
    got, given, which = out.cuda(), x.cuda(), torch.tensor(tokens, device="cuda")
    low_rank.add_low_rank(got, given, slots, which)
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-2, atol=TOLERANCE[dtype])
    alone = out[-1:].cuda()
    low_rank.add_low_rank(alone, given[-1:].contiguous(), slots, which[-1:])
    assert torch.equal(alone[0], got[-1])
