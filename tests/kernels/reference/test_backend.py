"""The reference kernels against plain readings of their definitions, in float64, over poisoned arenas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from holdfast.kernels.batch import lay_out
from holdfast.kernels.interface import Attention, HeadNorm
from holdfast.kernels.reference.backend import (
    copy_blocks,
    gated,
    paged_attention,
    rms_norm,
    rotary,
    rotate_and_store,
    store_kv,
)

LAYERS, LAYER, DIM = 3, 1, 8
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Rows:
    """Sequences with K and V of their own, stored in scattered blocks of a poisoned arena."""

    def __init__(self, contexts, counts, *, heads, block_tokens, dtype=torch.float32, seed=0) -> None:
        generator = torch.Generator().manual_seed(seed)
        widths = [-(-context // block_tokens) for context in contexts]
        order = np.random.default_rng(seed).permutation(sum(widths) + 5).astype(np.int32)
        self.counts, self.firsts = counts, [c - n for c, n in zip(contexts, counts, strict=True)]
        self.tables = np.split(order[: sum(widths)], np.cumsum(widths)[:-1])
        self.arena = torch.full((len(order), LAYERS, 2, heads, block_tokens, DIM), float("nan"), dtype=dtype)
        self.keys, self.values = (
            [torch.randn(context, heads, DIM, generator=generator).to(dtype) for context in contexts]
            for _ in range(2)
        )
        for table, keys, values in zip(self.tables, self.keys, self.values, strict=True):
            at = torch.arange(len(keys))
            slots = (
                torch.from_numpy(table.astype(np.int64))[at // block_tokens] * block_tokens
                + at % block_tokens
            )
            store_kv(self.arena, LAYER, keys, values, slots)

    def batch(self):
        return lay_out(self.arena, self.firsts, self.counts, self.tables)


PLAIN = Attention(DIM**-0.5)


def attend_plainly(query, keys, values, first: int, how: Attention = PLAIN) -> torch.Tensor:
    """One row, one head at a time, in float64."""
    share = query.shape[1] // keys.shape[1]
    result = torch.empty(query.shape, dtype=torch.float64)
    for token in range(len(query)):
        seen = slice(max(0, first + token + 1 - (how.window or 10**9)), first + token + 1)
        for head in range(query.shape[1]):
            k, v = keys[seen, head // share].double(), values[seen, head // share].double()
            scores = k @ query[token, head].double() * how.scale
            if how.soft_cap is not None:
                scores = how.soft_cap * (scores / how.soft_cap).tanh()
            result[token, head] = scores.softmax(0) @ v
    return result


MIXES = {
    "one token": ([1], [1]),
    "first chunk": ([9], [9]),
    "later chunk": ([41], [7]),
    "singles": ([1, 16, 17, 250, 33], [1, 1, 1, 1, 1]),
    "all mixed": ([64, 5, 130, 1, 31, 16, 48], [1, 5, 30, 1, 1, 16, 2]),
    "equal singles": ([32, 32, 32], [1, 1, 1]),
}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("heads", "share"), [(2, 2), (1, 4), (3, 1)])
@pytest.mark.parametrize("mix", list(MIXES))
def test_attention_follows_the_definition(mix: str, heads: int, share: int, dtype: torch.dtype) -> None:
    contexts, counts = MIXES[mix]
    rows = Rows(contexts, counts, heads=heads, block_tokens=16, dtype=dtype)
    query = torch.randn(sum(counts), heads * share, DIM, generator=torch.Generator().manual_seed(9)).to(dtype)
    result = paged_attention(query, rows.arena, LAYER, rows.batch(), PLAIN)
    expected = torch.cat(
        [
            attend_plainly(*row)
            for row in zip(query.split(counts), rows.keys, rows.values, rows.firsts, strict=True)
        ]
    )
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 33, 1000])
def test_windows_and_caps_follow_the_definition(
    window: int | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    contexts, counts = MIXES["all mixed"]
    rows = Rows(contexts, counts, heads=2, block_tokens=16, dtype=dtype)
    query = torch.randn(sum(counts), 4, DIM, generator=torch.Generator().manual_seed(9)).to(dtype)
    how = Attention(0.7, window, soft_cap)
    result = paged_attention(query, rows.arena, LAYER, rows.batch(), how)
    expected = torch.cat(
        [
            attend_plainly(*row, how)
            for row in zip(query.split(counts), rows.keys, rows.values, rows.firsts, strict=True)
        ]
    )
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 64])
def test_the_block_size_does_not_matter(block_tokens: int) -> None:
    contexts, counts = MIXES["all mixed"]
    query = torch.randn(sum(counts), 4, DIM, generator=torch.Generator().manual_seed(8))
    results = [
        paged_attention(query, rows.arena, LAYER, rows.batch(), Attention(0.5))
        for rows in (Rows(contexts, counts, heads=2, block_tokens=size) for size in (block_tokens, 256))
    ]
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)


def test_store_writes_its_cells_and_no_others() -> None:
    arena = torch.full((6, LAYERS, 2, 2, 4, DIM), float("nan"))
    keys, values = torch.randn(2, 3, 2, DIM).unbind(0)
    store_kv(arena, 2, keys, values, torch.tensor([5 * 4 + 3, 0, 2 * 4 + 1]))
    for token, (block, offset) in enumerate([(5, 3), (0, 0), (2, 1)]):
        assert torch.equal(arena[block, 2, 0, :, offset], keys[token])
        assert torch.equal(arena[block, 2, 1, :, offset], values[token])
    assert int((~arena.isnan()).sum()) == 2 * 3 * 2 * DIM


def test_copies_run_in_the_order_given() -> None:
    arena = torch.arange(4.0).view(4, 1, 1, 1, 1, 1).expand(4, 2, 2, 1, 3, 2).clone()
    copy_blocks(arena, [0, 1, 3], [1, 2, 0])
    assert arena[:, 0, 0, 0, 0, 0].tolist() == [3.0, 0.0, 0.0, 3.0]


def test_rms_norm_is_torchs() -> None:
    x, weight = torch.randn(5, 4, 32), torch.randn(32)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (32,), weight, 1e-6))


def test_rms_norm_takes_a_weight_per_head_and_is_wide_inside() -> None:
    x, weight = torch.randn(5, 4, 32), torch.randn(4, 32)
    expected = torch.stack([rms_norm(x[:, head], weight[head], 1e-6) for head in range(4)], dim=1)
    assert torch.equal(rms_norm(x, weight, 1e-6), expected)
    large = torch.full((1, 8), 1000.0, dtype=torch.float16)  # its squares exceed fp16
    assert torch.equal(rms_norm(large, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones_like(large))


def test_rotary_turns_pairs_by_their_angle() -> None:
    heads, angles = torch.randn(3, 2, 6, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    turned = rotary(heads, torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin())
    numbers = (
        torch.complex(heads[..., :3], heads[..., 3:]) * torch.polar(torch.ones(3, 3), angles.float())[:, None]
    )
    expected = torch.cat((numbers.real, numbers.imag), dim=-1)
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-6)


def test_numbers_behind_the_angles_stay() -> None:
    heads, angles = torch.randn(3, 2, 10), torch.randn(3, 3)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    turned = rotary(heads, cos, sin)
    assert torch.equal(turned[..., :6], rotary(heads[..., :6], cos, sin))
    assert torch.equal(turned[..., 6:], heads[..., 6:])


def test_a_whole_norm_is_over_all_heads_of_a_side() -> None:
    arena, still = torch.zeros(2, 1, 2, 2, 4, DIM), (torch.ones(3, DIM), torch.zeros(3, DIM))
    qkv, weight, slots = torch.randn(3, 3 + 2 + 2, DIM), torch.randn(5, DIM), torch.tensor([5, 0, 3])
    query = rotate_and_store(qkv.clone(), HeadNorm(weight, 1e-6, whole=True), still, arena, 0, slots)
    expected = F.rms_norm(qkv[:, :3].flatten(1), (3 * DIM,), weight[:3].flatten(), 1e-6)
    torch.testing.assert_close(query.flatten(1), expected)
    keys = F.rms_norm(qkv[:, 3:5].flatten(1), (2 * DIM,), weight[3:].flatten(), 1e-6)
    torch.testing.assert_close(arena[slots // 4, 0, 0, :, slots % 4].flatten(1), keys)
    assert torch.equal(arena[slots // 4, 0, 1, :, slots % 4], qkv[:, 5:])


def test_the_other_gate_is_gelu_by_tanh() -> None:
    gate, up = torch.randn(2, 4, 5)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    expected = 0.5 * gate * (1 + inner.tanh()) * up
    torch.testing.assert_close(gated(torch.cat((gate, up), -1), "gelu_tanh"), expected)


def test_gated_gates_with_the_first_half() -> None:
    gate_up = torch.randn(4, 10)
    expected = gate_up[:, :5] / (1 + (-gate_up[:, :5]).exp()) * gate_up[:, 5:]
    torch.testing.assert_close(gated(gate_up), expected)
