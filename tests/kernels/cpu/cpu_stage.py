"""Sequences in an arena for the CPU backend's tests, and their attention by definition."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.kernels.interface import Attention, Kernels

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)
LAYERS, LAYER = 2, 1
SHAPES = [  # heads, share, dim, block
    (2, 2, 64, 16),
    (1, 4, 80, 16),
    (3, 1, 96, 32),
    (1, 7, 128, 64),
    (2, 3, 256, 16),
    (1, 1, 16, 5),
]


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Stage:
    """Sequences stored by a backend's own `rotate_and_store` in scattered blocks of a poisoned arena."""

    contexts: list[int]
    counts: list[int]
    heads: int
    share: int
    dim: int
    block: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        widths = [-(-context // self.block) for context in self.contexts]
        order = np.random.default_rng(0).permutation(sum(widths) + 3).astype(np.int32)
        self.tables = np.split(order[: sum(widths)], np.cumsum(widths)[:-1])
        self.blocks = len(order)
        self.keys = [numbers(n, self.heads, self.dim, dtype=self.dtype, seed=n) for n in self.contexts]
        self.values = [numbers(n, self.heads, self.dim, dtype=self.dtype, seed=n + 1) for n in self.contexts]
        self.query = numbers(sum(self.counts), self.heads * self.share, self.dim, dtype=self.dtype, seed=7)
        self.firsts = [c - n for c, n in zip(self.contexts, self.counts, strict=True)]

    def filled(self, kernels: Kernels) -> torch.Tensor:
        shape = (self.blocks, LAYERS, 2, self.heads, self.block, self.dim)
        arena = torch.full(shape, float("nan"), dtype=self.dtype)
        for table, keys, values in zip(self.tables, self.keys, self.values, strict=True):
            batch = kernels.lay_out(arena, [0], [len(keys)], [table])
            qkv = torch.cat((torch.zeros_like(keys), keys, values), dim=1)
            still = torch.ones(len(keys), self.dim, dtype=self.dtype)
            angles = (still, torch.zeros_like(still))
            kernels.rotate_and_store(qkv, None, angles, arena, LAYER, batch.slots)
        return arena

    def attended(self, kernels: Kernels, how: Attention) -> torch.Tensor:
        arena = self.filled(kernels)
        batch = kernels.lay_out(arena, self.firsts, self.counts, self.tables)
        return kernels.paged_attention(self.query.clone(), arena, LAYER, batch, how)

    def expected(self, how: Attention) -> torch.Tensor:
        """In float64, from the definition."""
        rows = zip(self.query.split(self.counts), self.keys, self.values, self.firsts, strict=True)
        return torch.cat([self._row(how, *row) for row in rows])

    def _row(self, how: Attention, query, keys, values, first: int) -> torch.Tensor:
        spread = [side.double().repeat_interleave(self.share, 1) for side in (keys, values)]
        scores = torch.einsum("qhd,khd->hqk", query.double(), spread[0]) * how.scale
        if how.soft_cap is not None:
            scores = how.soft_cap * torch.tanh(scores / how.soft_cap)
        at, to = torch.arange(first, first + len(query))[:, None], torch.arange(len(keys))
        seen = (to <= at) & (to > at - (how.window or len(keys) + 1))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), spread[1])
