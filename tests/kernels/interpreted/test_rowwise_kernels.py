"""Norms, gates, rotation and storing, block copies: interpreted, against the room's reference at odd sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.gpu import rowwise, store
from holdfast.kernels.interface import HeadNorm
from holdfast.kernels.reference import backend

CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = CLOSE[expected.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 100), (7, 1024), (2, 5000)])
def test_norms_and_gates(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (
        random(rows, width, dtype=dtype),
        random(rows, width, dtype=dtype, seed=1),
        random(width, dtype=dtype),
    )
    close(rowwise.rms_norm(x, weight, 1e-6), backend.rms_norm(x, weight, 1e-6))
    for got, expected in zip(
        rowwise.add_norm(x, residual, weight, 1e-5),
        backend.add_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        close(got, expected)
    both = random(rows, 2 * width, dtype=dtype, seed=2)
    for activation in ("silu", "gelu_tanh"):
        close(rowwise.gated(both, activation), backend.gated(both, activation))


def test_rows_without_tokens_and_shapes_that_do_not_fit() -> None:
    assert rowwise.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    with pytest.raises(ValueError, match=r"weight: shape \(7,\), expected \(8,\)"):
        rowwise.rms_norm(torch.zeros(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match=r"residual: shape \(2, 7\), expected \(2, 8\)"):
        rowwise.add_norm(torch.zeros(2, 8), torch.zeros(2, 7), torch.ones(8), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("dim", "turning", "norm", "whole"),
    [
        (64, 64, False, False),
        (128, 128, True, False),
        (80, 80, True, True),
        (96, 24, True, False),
        (64, 32, False, False),
        (64, 2, False, False),
    ],
)
def test_rotate_and_store(dim: int, turning: int, norm: bool, whole: bool, dtype: torch.dtype) -> None:
    tokens, q_heads, pairs = 5, 6, 2
    qkv = random(tokens, q_heads + 2 * pairs, dim, dtype=dtype)
    half = random(tokens, turning // 2, seed=3)
    angles = tuple(torch.cat((one, one), 1).to(dtype) for one in (half.cos(), half.sin()))
    weights = HeadNorm(random(q_heads + pairs, dim, dtype=dtype, seed=4), 1e-6, whole) if norm else None
    slots = torch.tensor([17, 3, 64, 40, 16])
    arenas = [torch.full((5, 3, 2, pairs, 16, dim), 9.0, dtype=dtype) for _ in range(2)]
    expected = _expected(qkv.clone(), weights, angles, arenas[0], slots)
    got = store.rotate_and_store(qkv.clone(), weights, angles, arenas[1], 1, slots)
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, atol=4 * CLOSE[dtype], rtol=4 * CLOSE[dtype])
    torch.testing.assert_close(arenas[1], arenas[0], atol=4 * CLOSE[dtype], rtol=4 * CLOSE[dtype])


def test_a_token_of_slot_minus_one_is_not_stored() -> None:
    """Its queries are written all the same, and so are those of the tokens beside it."""
    qkv, still = random(3, 4, 64), (torch.ones(3, 64), torch.zeros(3, 64))
    arena = torch.full((3, 1, 2, 1, 16, 64), 9.0)
    got = store.rotate_and_store(qkv.clone(), None, still, arena, 0, torch.tensor([20, -1, 5]))
    assert torch.equal(got, qkv[:, :2])
    written = (arena != 9.0).nonzero()[:, [0, 4]].unique(dim=0)
    assert written.tolist() == [[0, 5], [1, 4]]


def _expected(
    qkv: torch.Tensor,
    norm: HeadNorm | None,
    angles: tuple[torch.Tensor, ...],
    arena: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """The reference's functions, put together for norms over all heads and heads that turn in part."""
    pairs, turning = arena.shape[3], angles[0].shape[1]
    heads, values = qkv.split([qkv.shape[1] - pairs, pairs], 1)
    if norm is not None and norm.whole:
        parts = zip(heads.split([6, 2], 1), norm.weight.split([6, 2]), strict=True)
        heads = torch.cat(
            [backend.rms_norm(x.flatten(1), w.flatten(), norm.eps).view(x.shape) for x, w in parts], 1
        )
    elif norm is not None:
        heads = backend.rms_norm(heads, norm.weight, norm.eps)
    turned = backend.rotary(heads[..., :turning].contiguous(), angles[0], angles[1])
    heads = torch.cat((turned, heads[..., turning:]), -1)
    backend.store_kv(arena, 1, heads[:, -pairs:], values, slots)
    return heads[:, :-pairs]


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda pair: pair[0] != pair[1]), max_size=8
    )
)
def test_copies_are_as_if_in_order(pairs: list[tuple[int, int]]) -> None:
    arena = random(5, 1, 2, 1, 16, 64)
    expected = arena.clone()
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    backend.copy_blocks(expected, sources, targets)
    store.copy_blocks(arena, sources, targets)
    assert torch.equal(arena, expected)


def test_independent_copies_are_one_wave() -> None:
    assert list(store.waves([(1, 2), (1, 3), (4, 5)])) == [[(1, 2), (1, 3), (4, 5)]]
    assert list(store.waves([(1, 2), (2, 3), (0, 2)])) == [[(1, 2)], [(2, 3)], [(0, 2)]]
