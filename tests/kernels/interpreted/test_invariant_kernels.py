"""The batch-invariant kernels, interpreted: right, and the same bits alone, in company and in any chunk."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.batch import PagedBatch, lay_out
from holdfast.kernels.gpu import configurations, invariant_kernels
from holdfast.kernels.interface import Attention
from holdfast.kernels.reference import attention
from holdfast.tests.kernels.interpreted.paged import paged, queries

pytestmark = pytest.mark.usefixtures("_rows_alike")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "width", "outs"), [(1, 64, 70), (65, 100, 33)])
def test_products(tokens: int, width: int, outs: int, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight, add = torch.randn(tokens, width), torch.randn(outs, width), torch.randn(outs)
    got = invariant_kernels.linear(x, weight, add if bias else None)
    expected = x.double() @ weight.double().T + (add.double() if bias else 0)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)
    if not bias:
        alone = invariant_kernels.linear(x[-1:], weight)
        assert torch.equal(alone[0], got[-1])


def test_products_of_unfit_shapes_are_refused_with_both() -> None:
    with pytest.raises(ValueError, match=r"weight: shape \(3, 4\), expected \(3, 5\)"):
        invariant_kernels.linear(torch.zeros(2, 5), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="weight is"):
        invariant_kernels.linear(torch.zeros(2, 4), torch.zeros(3, 4, dtype=torch.float16))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> int:
    """Stretches of two tiles, so that small contexts have several."""
    tile = configurations.configuration("stretch", 80, torch.float32, 64)["TILE"]
    monkeypatch.setattr(invariant_kernels, "STRETCH", 2 * tile)
    return 2 * tile


@pytest.mark.parametrize(
    ("how", "sinks"),
    [
        (Attention(0.125), False),
        (Attention(0.125), True),
        (Attention(0.125, window=20), True),
        (Attention(0.2, soft_cap=7.0), False),
    ],
)
def test_attention(how: Attention, sinks: bool, short: int) -> None:
    arena, batch = paged([(150, 1), (0, 20), (70, 9), (0, 1)])
    query = queries(batch, arena, 2)
    extra = torch.linspace(-1, 2, query.shape[1]) if sinks else None
    got = invariant_kernels.extend_attention(query, arena, 1, batch, how, extra)
    expected = attention.extend_attention(query, arena, 1, batch, how, extra)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [None, 90])
def test_a_program_reads_several_stretches_of_a_long_context(
    window: int | None, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant_kernels, "PARTS", 2)
    arena, batch = paged([(5 * short + 7, 1), (3 * short - 4, 9), (0, 3)])
    query, how = queries(batch, arena, 2), Attention(0.125, window)
    got = invariant_kernels.extend_attention(query, arena, 1, batch, how)
    expected = attention.extend_attention(query, arena, 1, batch, how)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)
    alone = replace(
        _row(batch, arena, 5 * short + 7, 1), tables=torch.nn.functional.pad(batch.tables, (0, 900))
    )
    alone = replace(alone, lines=batch.lines[:1])  # of tables as wide as the longest context that may come
    again = invariant_kernels.extend_attention(query[:1], arena, 1, alone, how)
    assert torch.equal(again[0], got[0])


@pytest.fixture(scope="module")
def in_company() -> dict[int | None, torch.Tensor]:
    """What a row's tokens come to, computed at once and beside others, by window; once for all examples."""
    return {}


@settings(max_examples=3, deadline=None)
@given(cuts=st.lists(st.integers(1, 133), max_size=4, unique=True), window=st.sampled_from([None, 40]))
def test_a_token_has_the_same_bits_in_any_chunk_and_company(
    in_company: dict[int | None, torch.Tensor], cuts: list[int], window: int | None
) -> None:
    how, length = Attention(0.125, window=window), 134
    arena, batch = paged([(0, length), (90, 7), (64, 1)], kv_heads=1)
    query = queries(batch, arena, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariant_kernels, "STRETCH", 64)
        if window not in in_company:
            in_company[window] = invariant_kernels.extend_attention(query, arena, 0, batch, how)[:length]
        whole = in_company[window]
        bounds = [0, *sorted(cuts), length]
        for first, end in pairwise(bounds):
            alone = _row(batch, arena, first, end - first)
            got = invariant_kernels.extend_attention(query[first:end].contiguous(), arena, 0, alone, how)
            assert torch.equal(got, whole[first:end])


def _row(batch: PagedBatch, arena: torch.Tensor, first: int, count: int) -> PagedBatch:
    """Some tokens of the first row, alone."""
    return lay_out(arena, [first], [count], [batch.tables[batch.lines[0]].numpy()])
