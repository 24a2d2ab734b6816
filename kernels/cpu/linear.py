"""Matrix products: our loop for a few rows, torch's product for many.

With few rows torch's product spends more time on set-up than on reading the weights. With many rows it is
faster, but for types that the processor has no code for: without AVX-512 its bf16 product takes five times
as long as one in fp32 (torch 2.13, 512 rows). There the weights are converted to fp32, a part at a time,
which costs little.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import prange
from torch import Tensor

from .compiling import compiled, inlined
from .elements import Pointer, memory, narrow, offset, pointer, widen
from .products import dots

WIDTH = 64
"""How many columns of the result have their sums in fp32 at a time; a thread's columns are a multiple of it."""


@inlined
def _columns(
    part: int, parts: int, x: Pointer, weight: Pointer, bias: Pointer, biased: bool, out: Pointer,
    rows: int, n: int, k: int, tag: Any,
) -> None:  # fmt: skip
    """Compute the columns of the matrix product that belong to thread ``part`` of ``parts``, for all rows,
    and write them to ``out`` ``[rows, n]``: ``x`` ``[rows, k]`` times ``weight`` ``[n, k]`` transposed, plus
    ``bias`` ``[n]`` if ``biased``."""
    groups = (n + WIDTH - 1) // WIDTH
    low, high = groups * part // parts * WIDTH, min(n, groups * (part + 1) // parts * WIDTH)
    sums = np.empty((rows, WIDTH), np.float32)
    for at in range(low, high, WIDTH):
        width = min(WIDTH, high - at)
        dots(rows, x, width, offset(weight, at * k), k, memory(sums), WIDTH)
        for row in range(rows):
            line, to = sums[row], offset(out, row * n + at)
            if biased:
                for i in range(width):
                    line[i] += widen(bias[at + i])
            for i in range(width):
                to[i] = narrow(line[i], tag)


@compiled
def few_rows(
    parts: int, x_at: int, weight_at: int, bias_at: int, out_at: int, rows: int, n: int, k: int, tag: Any
) -> None:
    """``out = x @ weight.T + bias`` on ``parts`` threads: ``[rows, k]``, ``[n, k]``, ``[n]`` (address 0: no
    bias) to ``[rows, n]``. Compiled numba code; names with ``_at`` are addresses, ``tag`` is a number of the
    element type (`elements.TAGS`)."""
    x, weight, out = pointer(x_at, tag), pointer(weight_at, tag), pointer(out_at, tag)
    bias = pointer(bias_at, tag)
    if parts == 1:
        _columns(0, 1, x, weight, bias, bias_at != 0, out, rows, n, k, tag)
    else:
        for part in prange(parts):
            _columns(part, parts, x, weight, bias, bias_at != 0, out, rows, n, k, tag)


WIDENED = 1 << 20
"""How many weights are converted to fp32 at a time: 4 MiB, which fit the caches."""


def _native(name: str) -> bool:
    """Whether torch has a fast matrix product of the type ``name`` (``bf16`` or ``fp16``) for this processor;
    True if torch does not say."""
    ask = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return ask is None or bool(ask())


NATIVE = {torch.float32: True, torch.bfloat16: _native("bf16"), torch.float16: _native("fp16")}


def many_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` by torch: ``[tokens, k]``, ``[n, k]``, ``[n]`` to ``[tokens, n]``; computed in
    fp32 if the processor has no fast product of x's type."""
    if NATIVE[x.dtype]:
        return F.linear(x, weight, bias)
    wide, n = x.float(), weight.shape[0]
    out, step = x.new_empty((len(x), n)), max(1, WIDENED // weight.shape[1])
    for at in range(0, n, step):
        part = slice(at, at + step)
        out[:, part] = F.linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return out
