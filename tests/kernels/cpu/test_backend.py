"""The CPU backend against the reference and plain readings, over poisoned arenas, at odd sizes."""

from __future__ import annotations

import math
import threading
from itertools import product

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from holdfast.kernels.cpu import backend
from holdfast.kernels.cpu.decode import heads_together, piece_of
from holdfast.kernels.interface import Attention, HeadNorm
from holdfast.kernels.packed import plain
from holdfast.kernels.reference import backend as reference

from .cpu_stage import DTYPES, LAYER, LAYERS, SHAPES, TOLERANCE, Stage, numbers

BACKENDS = {"reference": reference, "cpu": backend}
MIXES = {
    "one": ([1], [1]),
    "short": ([9], [9]),
    "singles": ([1, 16, 257, 600, 33], [1, 1, 1, 1, 1]),
    "chunk": ([331], [290]),
    "mixed": ([64, 5, 130, 1, 300, 16, 48], [1, 5, 70, 1, 1, 16, 2]),
}
HOWS = {
    "plain": lambda dim: Attention(dim**-0.5),
    "window": lambda dim: Attention(dim**-0.5, window=40),
    "window of one": lambda dim: Attention(dim**-0.5, window=1),
    "capped": lambda dim: Attention(0.5, soft_cap=5.0),
    "window and cap": lambda dim: Attention(0.3, window=70, soft_cap=3.0),
}


PAIRS = [
    pytest.param(mix, shape, list(HOWS)[(i + j) % len(HOWS)], id=f"{mix}-{shape}")
    for i, mix in enumerate(MIXES)
    for j, shape in enumerate(SHAPES)
]
"""Every mix with every shape, and each of both with every kind of attention."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mix", "shape", "how"), PAIRS)
def test_attention_follows_the_definition(mix: str, shape, how: str, dtype: torch.dtype) -> None:
    heads, share, dim, block = shape
    stage = Stage(*MIXES[mix], heads, share, dim, block, dtype)
    expected = stage.expected(HOWS[how](dim))
    result = stage.attended(backend, HOWS[how](dim))
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", list(BACKENDS))
@pytest.mark.parametrize("mix", list(MIXES))
def test_both_backends_pass_the_same_stage(mix: str, name: str) -> None:
    stage, how = Stage(*MIXES[mix], 2, 2, 64, 16, torch.float32), Attention(0.125)
    torch.testing.assert_close(
        stage.attended(BACKENDS[name], how).double(), stage.expected(how), rtol=0, atol=4e-6
    )


@pytest.mark.parametrize(
    ("rows", "spans", "heads", "parts"), list(product([1, 3, 8], [1, 9], [1, 4], [1, 3, 16]))
)
def test_every_piece_is_one_part_s_and_parts_have_about_as_many(
    rows: int, spans: int, heads: int, parts: int
) -> None:
    counts, seen = [], []
    for part in range(parts):
        number = 0
        while (piece := piece_of(number, part, parts, rows, spans, heads))[0] < rows:
            seen.append(piece)
            number += 1
        counts.append(number)
    assert sorted(seen) == [
        (row, head, span) for row in range(rows) for head in range(heads) for span in range(spans)
    ]
    assert max(counts) - min(counts) <= heads_together(rows, spans, heads, parts)
    assert max(counts) <= 1.25 * len(seen) / parts + 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_token_has_the_same_numbers_in_any_company_and_on_any_threads(dtype, monkeypatch) -> None:
    alone = Stage([600], [1], 2, 2, 64, 16, dtype)
    beside = Stage([600, 31, 700], [1, 31, 1], 2, 2, 64, 16, dtype)
    alone.query = beside.query[:1]
    one = alone.attended(backend, Attention(0.125))
    assert torch.equal(one[0], beside.attended(backend, Attention(0.125))[0])
    monkeypatch.setattr(backend, "parts_for", lambda work, grain: 2)
    assert torch.equal(one, alone.attended(backend, Attention(0.125)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turning", [64, 32, 20])
@pytest.mark.parametrize("kind", ["none", "per head", "whole"])
def test_rotate_and_store(kind: str, turning: int, dtype: torch.dtype) -> None:
    tokens, queries, pairs, dim = 5, 4, 2, 64
    qkv = numbers(tokens, queries + 2 * pairs, dim, dtype=dtype, seed=1)
    angle = numbers(tokens, turning // 2, dtype=torch.float32, seed=2).repeat(1, 2)
    angles = angle.cos().to(dtype), angle.sin().to(dtype)
    weight = 1 + 0.1 * numbers(queries + pairs, dim, dtype=dtype, seed=3)
    norm = None if kind == "none" else HeadNorm(weight, 1e-5, kind == "whole")
    arena = torch.full((4, LAYERS, 2, pairs, 4, dim), float("nan"), dtype=dtype)
    slots = torch.tensor([13, 2, 7, 0, 8])
    query = backend.rotate_and_store(qkv.clone(), norm, angles, arena, LAYER, slots)

    turned = qkv[:, : queries + pairs].double()
    for part in (turned[:, :queries], turned[:, queries:]) if norm else ():
        axes = (1, 2) if kind == "whole" else (2,)
        part /= (part.pow(2).mean(axes, keepdim=True) + 1e-5).sqrt()
    if norm:
        turned *= weight.double()
    cos, sin = (one.double()[:, None] for one in angles)
    first, second = turned[..., :turning].chunk(2, -1)
    rotated = turned[..., :turning] * cos + torch.cat((-second, first), -1) * sin
    expected = torch.cat((rotated, turned[..., turning:]), -1)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(query.double(), expected[:, :queries], **close)
    for token, slot in enumerate(slots.tolist()):
        stored = arena[slot // 4, LAYER, :, :, slot % 4]
        torch.testing.assert_close(stored[0].double(), expected[token, queries:], **close)
        assert torch.equal(stored[1], qkv[token, queries + pairs :])
    assert int((~arena.isnan()).sum()) == tokens * 2 * pairs * dim


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (37, 80), (21, 96), (64, 33), (700, 256)])
def test_products(n: int, k: int, dtype: torch.dtype) -> None:
    for rows, biased in product((1, 2, 3, 4, 5, 9, 19, 40), (False, True)):
        x, weight = numbers(rows, k, dtype=dtype, seed=1), numbers(n, k, dtype=dtype, seed=2)
        bias = numbers(n, dtype=dtype, seed=3) if biased else None
        expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
        got, panels = backend.packed_linear(x, plain(weight), bias), plain(weight)
        assert got.dtype == dtype
        atol = TOLERANCE[dtype] * math.sqrt(k)
        torch.testing.assert_close(
            got.double(), expected, rtol=TOLERANCE[dtype], atol=atol, msg=f"{rows} {biased}"
        )
        ids = torch.tensor([n - 1, 0, n // 2])
        assert torch.equal(backend.packed_rows(panels, ids, dtype), weight[ids])
        assert torch.equal(panels.take(ids), weight[ids].float())
        assert torch.equal(panels.numbers(), weight.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [33, 96])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_a_product_is_the_same_in_any_company(
    threads: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "parts_for", lambda work, grain: threads)
    x, weight = numbers(90, k, dtype=dtype, seed=1), plain(numbers(77, k, dtype=dtype, seed=2))
    whole = backend.packed_linear(x, weight)
    for rows in (1, 2, 3, 4, 7, 8, 9, 60):
        for first in (0, 5, 30):
            some = x[first : first + rows].contiguous()
            assert torch.equal(whole[first : first + rows], backend.packed_linear(some, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 600])
def test_norms_and_gates(rows: int, dtype: torch.dtype) -> None:
    x, residual = (numbers(rows, 96, dtype=dtype, seed=seed) for seed in (1, 2))
    weight, close = numbers(96, dtype=dtype, seed=3), {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(
        backend.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), **close
    )
    both = backend.add_norm(x.clone(), residual.clone(), weight, 1e-6)
    for ours, theirs in zip(both, reference.add_norm(x, residual, weight, 1e-6), strict=True):
        torch.testing.assert_close(ours, theirs, **close)
    wide = 3 * numbers(rows, 96, dtype=dtype, seed=4)
    for activation in ("silu", "gelu_tanh"):
        torch.testing.assert_close(
            backend.gated(wide, activation), reference.gated(wide, activation), **close
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_not_a_number_and_infinity_stay_what_they_are(dtype: torch.dtype) -> None:
    x = torch.ones(3, 32, dtype=dtype)
    x[1, 5] = float("nan")
    normed = backend.rms_norm(x, torch.ones(32, dtype=dtype), 1e-6)
    assert normed.isnan().any(-1).tolist() == [False, True, False]
    assert backend.gated(x, "silu").isnan().any(-1).tolist() == [False, True, False]
    for outputs in (4, 24):  # without tiles, with them
        product = backend.linear(x, torch.ones(outputs, 32, dtype=dtype))
        assert product.isnan().all(-1).tolist() == [False, True, False]
        huge = backend.linear(torch.full((3, 32), 3e38).to(dtype), torch.ones(outputs, 32, dtype=dtype))
        assert huge.isinf().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    one = torch.ones(1, 1, dtype=dtype)
    for bits in (0x3C00, 0x3C01, 0x7B00, 0x0001, 0x8001, 0xBC00):
        x = torch.tensor([[bits - (bits >> 15 << 16)]], dtype=torch.int16).view(dtype)
        assert torch.equal(backend.linear(x, one), x)
    step = torch.finfo(dtype).eps
    sums = torch.tensor([[1.0, step / 2], [1.0 + step, step / 2]], dtype=dtype)
    assert backend.linear(sums, torch.ones(1, 2, dtype=dtype)).flatten().tolist() == [1.0, 1.0 + 2 * step]
    wide = torch.zeros(2, 32, dtype=dtype)
    wide[:, :2] = sums
    tiled = backend.linear(wide, torch.ones(8, 32, dtype=dtype))
    assert tiled.tolist() == [[1.0] * 8, [1.0 + 2 * step] * 8]


def test_calls_from_two_threads_do_not_disturb_each_other(monkeypatch) -> None:
    monkeypatch.setattr(backend, "parts_for", lambda work, grain: 2)
    stages = [Stage(*MIXES[mix], 2, 2, 64, 16, torch.float32) for mix in ("mixed", "singles")]
    how, wrong = Attention(0.125), []
    expected = [stage.expected(how) for stage in stages]

    def run(at: int) -> None:
        for _ in range(40):
            error = (stages[at].attended(backend, how).double() - expected[at]).abs().max()
            if not error <= 4e-6:
                wrong.append((at, float(error)))

    threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("size", [8, 24, 13, 1 << 17])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_pieces_are_copied_and_nothing_beside_them_is_touched(size: int, count: int) -> None:
    stride = size + 8 if size % 8 == 0 else size + 3
    source = torch.randint(0, 256, (2 * count * stride,), dtype=torch.uint8)
    order = np.random.default_rng(size).permutation(2 * count)
    pieces = np.stack((order[:count] * stride, np.arange(count) * stride), axis=1).astype(np.int64)
    expected = torch.full((count * stride,), 7, dtype=torch.uint8)
    for begin, to in pieces.tolist():
        expected[to : to + size] = source[begin : begin + size]
    for kernels in BACKENDS.values():
        target = torch.full_like(expected, 7)
        kernels.copy_pieces(source, target, pieces, size)
        assert torch.equal(target, expected)
        back = torch.full_like(source, 7)
        kernels.copy_pieces(target, back, pieces[:, ::-1], size)
        for begin, to in pieces.tolist():
            assert torch.equal(back[begin : begin + size], expected[to : to + size])


@pytest.mark.parametrize("parts", [1, 2])
def test_penalties_are_the_references_to_the_last_bit(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "parts_for", lambda work, grain: parts)
    chance = torch.Generator().manual_seed(parts)
    logits = torch.randn((6, 1001), generator=chance) * 5
    tally = torch.zeros((7, 1001), dtype=torch.int32)
    lines, tokens = (torch.randint(0, most, (4000,), generator=chance) for most in (7, 900))
    backend.count(tally, lines, tokens, torch.arange(4000) % 2)
    rows, lines = torch.tensor([4, 0, 2]), torch.tensor([1, 6, 3])
    strengths = [torch.rand(3, generator=chance).double() * 2 - one for one in (-0.1, 1, 1)]
    expected = logits.clone()
    reference.penalize(expected, rows, tally, lines, *strengths)
    backend.penalize(logits, rows, tally, lines, *strengths)
    assert torch.equal(logits, expected)
