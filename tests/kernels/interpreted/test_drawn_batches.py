"""Both attention kernels on drawn ragged batches: any lengths, heads, blocks, windows, caps, sinks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.kernels.batch import PagedBatch
from holdfast.kernels.gpu.attention import paged_attention
from holdfast.kernels.interface import Attention
from holdfast.kernels.reference.attention import extend_attention as reference
from holdfast.tests.kernels.interpreted.paged import paged, queries


@dataclass(frozen=True)
class Drawn:
    firsts: list[int]
    counts: list[int]
    kv_heads: int
    group: int
    dim: int
    block: int
    how: Attention
    sunk: bool
    dtype: torch.dtype
    seed: int


@st.composite
def batches(draw: st.DrawFn) -> Drawn:
    rows = draw(st.integers(1, 5))
    size = draw(st.sampled_from([1, 20, 90]))
    window = draw(st.none() | st.integers(1, 200))
    cap = draw(st.none() | st.sampled_from([2.0, 30.0]))
    return Drawn(
        firsts=draw(st.lists(st.integers(0, 150), min_size=rows, max_size=rows)),
        counts=draw(st.lists(st.integers(1, size), min_size=rows, max_size=rows)),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 9)),
        dim=draw(st.sampled_from([64, 80])),
        block=draw(st.sampled_from([16, 32, 64])),
        how=Attention(0.125, window, cap),
        sunk=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),
        seed=draw(st.integers(0, 9)),
    )


def compare(drawn: Drawn, *, single: bool) -> None:
    """Finite and equal, with NaN in every slot that holds no token."""
    counts = [1] * len(drawn.counts) if single else drawn.counts
    rows = list(zip(drawn.firsts, counts, strict=True))
    arena, batch = paged(
        rows, kv_heads=drawn.kv_heads, dim=drawn.dim, block=drawn.block, dtype=drawn.dtype, seed=drawn.seed
    )
    query = queries(batch, arena, drawn.group, drawn.seed)
    sinks = torch.linspace(-1, 1, query.shape[1]) if drawn.sunk else None
    got = paged_attention(query, arena, 1, batch, drawn.how, sinks)
    tolerance = 3e-5 if drawn.dtype == torch.float32 else 5e-3
    expected = reference(query, arena, 1, batch, drawn.how, sinks)
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("_large")
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches(), st.booleans())
def test_drawn(drawn: Drawn, single: bool) -> None:
    compare(drawn, single=single)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("single", [True, False], ids=["decode", "extend"])
@pytest.mark.usefixtures("_large")
def test_five_hundred_drawn_batches(single: bool) -> None:
    @settings(max_examples=500)
    @given(batches())
    def run(drawn: Drawn) -> None:
        compare(drawn, single=single)

    run()


def test_an_arena_beyond_two_to_the_31_numbers() -> None:
    """Only the blocks in use are ever touched, so the memory is virtual."""
    blocks, dim = 540_000, 64
    arena = torch.empty((blocks, 2, 2, 1, 16, dim), dtype=torch.float16)
    assert arena.numel() > 2**31
    small, batch = paged([(40, 1), (0, 30)], kv_heads=1, dim=dim, dtype=torch.float16)
    far = blocks - 1 - torch.arange(len(small)) * 1000
    arena[far] = small
    moved = replace(batch, tables=far[batch.tables].int())
    query = queries(batch, small, 2)
    got = paged_attention(query, arena, 1, moved, Attention(0.125))
    assert torch.equal(got, paged_attention(query, small, 1, batch, Attention(0.125)))
    single = PagedBatch(
        batch.positions[:1],
        batch.slots[:1],
        batch.row_starts[:2],
        batch.context_lengths[:1],
        moved.tables,
        batch.lines[:1],
        (),
    )
    alone = paged_attention(query[:1], arena, 1, single, Attention(0.125))
    torch.testing.assert_close(alone, got[:1], atol=2e-3, rtol=2e-3)
