"""Matrix products whose every row has the same bits in any company: one tile size for any number of rows.

The vendor's library chooses another algorithm, with another order of summing, for another number of rows. Here
a number is summed over the inner axis in steps of one length by one program, however many rows there are; no
sum is split. (He et al., "Defeating nondeterminism in LLM inference", Thinking Machines, 2025.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configurations import chosen
from .support import expect


@triton.jit(do_not_specialize=["tokens"])
def product_tile(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor,
    tokens: tl.tensor, stride_x: tl.tensor, stride_weight: tl.tensor,
    IN: tl.constexpr, OUT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Programs are tiles of ``ROWS`` tokens and ``COLUMNS`` outputs; one after the other over rows."""
    down = tl.cdiv(tokens, ROWS)
    rows = tl.program_id(0) % down * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) // down * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    there, wanted = (rows < tokens)[:, None], (columns < OUT)[None, :]
    x_at = x + rows.to(tl.int64)[:, None] * stride_x + depth[None, :]
    weight_at = weight + columns.to(tl.int64)[None, :] * stride_weight + depth[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, IN, DEPTH):
        if IN % DEPTH == 0:
            left, right = tl.load(x_at + at, there, other=0.0), tl.load(weight_at + at, wanted, other=0.0)
        else:
            inside = at + depth < IN
            left = tl.load(x_at + at, there & inside[None, :], other=0.0)
            right = tl.load(weight_at + at, wanted & inside[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="tf32x3")
    if BIAS:
        acc += tl.load(bias + columns, columns < OUT, other=0.0).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), there & wanted)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[tokens, in]``, ``[out, in]``, ``[out]`` to ``[tokens, out]``, of x's type."""
    tokens, width = x.shape
    outs = weight.shape[0]
    expect("x", x, (tokens, width))
    expect("weight", weight, (outs, width))
    if bias is not None:
        expect("bias", bias, (outs,))
    if weight.dtype != x.dtype:
        raise ValueError(f"weight is {weight.dtype}, x {x.dtype}")
    out = torch.empty((tokens, outs), dtype=x.dtype, device=x.device)
    launch = chosen("product", x, width)
    if tokens:
        tiles = triton.cdiv(tokens, launch["ROWS"]) * triton.cdiv(outs, launch["COLUMNS"])
        product_tile[(tiles,)](
            x, weight, bias, out, tokens, x.stride(0), weight.stride(0),
            IN=width, OUT=outs, BIAS=bias is not None, **launch,
        )  # fmt: skip
    return out
