"""A chunk's attention on the CPU: what a token's numbers depend on, bit by bit, and what they do not."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from holdfast.kernels.cpu import backend
from holdfast.kernels.cpu.batch import CHUNK_VECTORS
from holdfast.kernels.cpu.lanes import SPAN, TILE
from holdfast.kernels.cpu.prefill import block_tokens
from holdfast.kernels.interface import Attention

from .cpu_stage import DTYPES, LAYER, SHAPES, TOLERANCE, Stage

HOWS = [Attention(0.125), Attention(0.125, window=90), Attention(0.5, window=33, soft_cap=4.0)]


def attended(stage: Stage, arena: torch.Tensor, how: Attention, first: int, end: int) -> torch.Tensor:
    """The tokens ``[first, end)`` of the stage's only sequence, which is computed from its start."""
    batch = backend.lay_out(arena, [first], [end - first], stage.tables)
    return backend.paged_attention(stage.query[first:end].clone(), arena, LAYER, batch, how)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", HOWS, ids=["plain", "window", "window and cap"])
@pytest.mark.parametrize("cut", [1, 2, 50, TILE, 300])
def test_a_prompt_has_the_same_numbers_however_it_is_cut(
    cut: int, how: Attention, dtype: torch.dtype
) -> None:
    tokens = 2 * SPAN + 50
    stage = Stage([tokens], [tokens], 2, 3, 64, 16, dtype)
    arena = stage.filled(backend)
    parts = [attended(stage, arena, how, at, min(at + cut, tokens)) for at in range(0, tokens, cut)]
    assert torch.equal(attended(stage, arena, how, 0, tokens), torch.cat(parts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_prompt_has_the_same_numbers_in_every_shape(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    stage, how = Stage([150], [150], *shape, dtype), Attention(0.2)
    arena = stage.filled(backend)
    cuts = [0, 1, 2, 3, 64, 71, 72, 140, 149, 150]
    parts = [attended(stage, arena, how, *each) for each in pairwise(cuts)]
    assert torch.equal(attended(stage, arena, how, 0, 150), torch.cat(parts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_chunk_has_the_same_numbers_in_any_company_and_on_any_threads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, count = Attention(0.125), 21
    alone = Stage([300], [count], 2, 3, 64, 16, dtype)
    beside = Stage([300, 90, 40, 700], [count, 70, 1, 5], 2, 3, 64, 16, dtype)
    alone.query = beside.query[:count]
    one = alone.attended(backend, how)
    assert torch.equal(one, beside.attended(backend, how)[:count])
    for parts in (1, 2, 5):
        monkeypatch.setattr(backend, "parts_for", lambda work, grain, parts=parts: parts)
        assert torch.equal(one, alone.attended(backend, how))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("token", [0, 1, 63, 64, 100])
def test_later_tokens_and_those_before_the_window_change_nothing(token: int, dtype: torch.dtype) -> None:
    window, how = 20, Attention(0.125, window=20)
    stage = Stage([130], [130], 2, 2, 80, 16, dtype)
    seen = attended(stage, stage.filled(backend), how, 0, 130)[token]
    for side in (*stage.keys, *stage.values):
        side[token + 1 :] = -7.0
        side[: max(0, token - window + 1)] = 11.0
    assert torch.equal(seen, attended(stage, stage.filled(backend), how, 0, 130)[token])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_that_rise_or_fall_from_tile_to_tile(dtype: torch.dtype) -> None:
    """The greatest moves with nearly every tile, or never after the first one; shares span all of fp32."""
    rising = (
        np.linspace(-9, 9, 5 * TILE) * 16
    ).round() / 16  # so that their products are exact in every type
    for steps in (rising, rising[::-1].copy()):
        stage, how = Stage([5 * TILE], [40], 1, 2, 64, 16, dtype), Attention(0.125)
        stage.keys = [torch.from_numpy(steps).to(dtype)[:, None, None].expand(-1, 1, 64).contiguous()]
        stage.query = torch.ones_like(stage.query)
        got, expected = stage.attended(backend, how), stage.expected(how)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("share", [1, 2, 3, 4, 7, 16, 71])
@pytest.mark.parametrize("parts", [1, 2, 5, 64])
@pytest.mark.parametrize("alike", [1, 3, 8])
def test_a_block_fits_its_workspace(share: int, parts: int, alike: int) -> None:
    for most in range(2, 600, 7):
        assert 0 < block_tokens(most, share, alike, parts) * share <= CHUNK_VECTORS


@pytest.mark.parametrize(
    ("most", "share", "alike", "parts", "tokens"),
    [(83, 2, 4, 2, 88), (512, 2, 4, 2, 128), (64, 4, 1, 2, 32), (40, 4, 1, 1, 40), (83, 2, 4, 16, 24)],
)
def test_fewer_threads_get_larger_blocks(most: int, share: int, alike: int, parts: int, tokens: int) -> None:
    assert block_tokens(most, share, alike, parts) == tokens
