"""Parts ``rows`` and ``draw``: kernels that are bound by memory, and the sampler."""

from __future__ import annotations

from functools import partial

import torch

from ...kernels.gpu import rowwise, store
from ...kernels.gpu.seeded_sampling import sample
from ...kernels.interface import HeadNorm
from ...kernels.reference import seeded_sampling
from .measure import Bench, Figure, figure, median_us, of_copy_rate

COPIES = 4
"""The number of sets of inputs, which together are larger than any L2 cache."""
GOAL = 85.0


def rows(bench: Bench) -> list[Figure]:
    """Time the kernels that are bound by memory (add and norm; gate; norm, rotation and store; block copy),
    each as a share of the copy rate."""
    return [*_norm(bench), *_gate(bench), *_store(bench), *_copy(bench)]


def _random(bench: Bench, *shape: int) -> torch.Tensor:
    dtype = torch.float16 if bench.rehearsal else torch.bfloat16
    return torch.randn(shape, device=bench.device, dtype=dtype)


def _norm(bench: Bench) -> list[Figure]:
    tokens, width = bench.size(8192, 2), bench.size(4096, 100)
    sets = [(_random(bench, tokens, width), _random(bench, tokens, width)) for _ in range(COPIES)]
    weight = _random(bench, width)
    works = [partial(rowwise.add_norm, *one, weight, 1e-6) for one in sets]
    moved = 4 * tokens * width * 2
    return of_copy_rate(bench, f"add and norm {tokens} x {width}", moved, median_us(bench, works), GOAL)


def _gate(bench: Bench) -> list[Figure]:
    tokens, width = bench.size(8192, 2), bench.size(12288, 100)
    sets = [_random(bench, tokens, 2 * width) for _ in range(COPIES)]
    works = [partial(rowwise.gated, one) for one in sets]
    moved = 3 * tokens * width * 2
    return of_copy_rate(bench, f"gate {tokens} x {width}", moved, median_us(bench, works), GOAL)


def _store(bench: Bench) -> list[Figure]:
    tokens, heads, pairs, dim = bench.size(8192, 3), 48, 8, 128
    sets = [_random(bench, tokens, heads, dim) for _ in range(COPIES)]
    arena = _random(bench, tokens // 16 + 1, 2, 2, pairs, 16, dim)
    angle, slots = _random(bench, tokens, dim), torch.randperm(tokens, device=bench.device)
    norm = HeadNorm(_random(bench, heads - pairs, dim), 1e-6)
    works = [partial(store.rotate_and_store, one, norm, (angle, angle), arena, 1, slots) for one in sets]
    moved = 2 * tokens * heads * dim * 2 + 2 * tokens * dim * 2
    return of_copy_rate(bench, f"norm, rotate, store {tokens} tokens", moved, median_us(bench, works), GOAL)


def _copy(bench: Bench) -> list[Figure]:
    layers, blocks = bench.size(36, 1), bench.size(64, 2)
    arena = _random(bench, 2 * blocks, layers, 2, 8, 16, 128)
    pairs = range(blocks), range(blocks, 2 * blocks)
    works = [partial(store.copy_blocks, arena, *pairs)] * COPIES  # the host prepares one during another
    micros = median_us(bench, works)
    return of_copy_rate(bench, f"copy {blocks} blocks", arena.numel() * arena.itemsize, micros, GOAL)


def draws(bench: Bench) -> list[Figure]:
    """Time the sampler on 64 rows of Qwen3's vocabulary with top-k and top-p, with top-p alone, and without
    limits, and compare it with the torch reference."""
    count, vocab = bench.size(64, 2), bench.size(151_936, 500)
    sets = [torch.randn((count, vocab), device=bench.device) * 3 for _ in range(COPIES)]
    whole = torch.arange(count, device=bench.device)
    ones = torch.ones(count, device=bench.device)
    lines = []
    for name, k, p in (("top-k 50, top-p 0.9", 50, 0.9), ("top-p 0.9 alone", 0, 0.9), ("no limits", 0, 1.0)):
        numbers = (ones, whole * 0 + k, ones * p, whole, whole)
        ours = [partial(sample, one, *numbers, min_p=ones * 0) for one in sets]
        theirs = [partial(seeded_sampling.sample, one, *numbers, min_p=ones * 0) for one in sets]
        same = sum(int((one() == other()).sum()) for one, other in zip(ours, theirs, strict=True))
        lines.append(figure(f"draw {name}, equal to the reference", same, "rows", COPIES * count))
        lines.append(figure(f"draw {count} x {vocab} {name}", median_us(bench, ours), "us", 100.0, "lower"))
        lines.append(figure(f"draw {name}, torch reference", median_us(bench, theirs), "us"))
    return lines
