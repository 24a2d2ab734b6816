"""Part ``invariant``: whether a row of a batch has the same bits alone and among other rows, with the kernels
that promise this."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from ...kernels.batch import PagedBatch
from ...kernels.gpu import invariant_kernels
from ...kernels.gpu.decode import decode_attention
from ...kernels.interface import Attention
from .attention import QWEN_8B
from .measure import Bench, Figure, figure, median_us
from .paging import paged


def invariant(bench: Bench) -> list[Figure]:
    """Compare each row alone with the same row in 1,000 random batches, for attention and the product: all
    bits must be equal. Also what this costs."""
    rows, companies = 32, bench.size(1000, 2)
    random = np.random.default_rng(0)
    lengths = random.integers(1, bench.size(9000, 60), rows)
    made = paged(QWEN_8B, (lengths - 1).tolist(), [1] * rows, bench.device)
    how = Attention(QWEN_8B.dim**-0.5)

    def attend(some: torch.Tensor) -> torch.Tensor:
        batch = _company(made.batch, some)
        return invariant_kernels.extend_attention(made.query[some], made.arena, 0, batch, how)

    alone = torch.cat([attend(torch.tensor([row], device=bench.device)) for row in range(rows)])
    equal = 0
    for _ in range(companies):
        chosen = random.permutation(rows)[: random.integers(2, bench.size(rows, 4))]
        some = torch.from_numpy(chosen).to(bench.device)
        equal += int(torch.equal(attend(some), alone[some]))
    everyone = [lambda: decode_attention(made.query, made.arena, 0, made.batch, how)]
    whole = [lambda: invariant_kernels.extend_attention(made.query, made.arena, 0, made.batch, how)]
    own = median_us(bench, whole) / median_us(bench, everyone)
    return [
        figure("attention, companies with equal bits", equal, f"of {companies}", companies),
        *_products(bench, companies),
        figure("attention, invariant, against decode", own, "x", better="lower"),
    ]


def _products(bench: Bench, companies: int) -> list[Figure]:
    """Compare a row's matrix product alone with the same row among random others; and time it against the
    vendor's library, by the number of rows."""
    width, outs = (4096, 6144) if not bench.rehearsal else (64, 96)
    random = np.random.default_rng(1)
    x = torch.randn(512, width, device=bench.device, dtype=QWEN_8B.dtype)
    weight = torch.randn(outs, width, device=bench.device, dtype=QWEN_8B.dtype)
    alone = invariant_kernels.linear(x[:1], weight)[0]
    equal = 0
    for _ in range(companies):
        some = x[torch.from_numpy(random.permutation(511)[: random.integers(1, bench.size(500, 8))] + 1)]
        at = int(random.integers(0, len(some) + 1))
        company = torch.cat((some[:at], x[:1], some[at:]))
        equal += int(torch.equal(invariant_kernels.linear(company, weight)[at], alone))
    lines = [figure("product, companies with equal bits", equal, f"of {companies}", companies)]
    for rows in (1, 64, 512):
        ours = median_us(bench, [partial(invariant_kernels.linear, x[:rows], weight)])
        theirs = median_us(bench, [partial(F.linear, x[:rows], weight)])
        lines.append(figure(f"product of {rows} rows against cuBLAS", ours / theirs, "x", better="lower"))
    return lines


def _company(batch: PagedBatch, some: torch.Tensor) -> PagedBatch:
    """A batch of those rows of ``batch`` that ``some`` names, in that order; each row has one token."""
    starts = torch.arange(len(some) + 1, device=some.device)
    return PagedBatch(
        batch.positions[some],
        batch.slots[some],
        starts,
        batch.context_lengths[some],
        batch.tables,
        batch.lines[some],
        (),
    )
