"""Operations on each token's row: RMSNorm, also of the sum with the residual, and the gated activation.

They are bound by memory: every number is read once and written once. A row's result is the same in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configurations import chosen
from .support import expect

ROOT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit(do_not_specialize=["rows"])
def norm_rows(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, total: tl.tensor, out: tl.tensor,
    rows: tl.tensor, eps: tl.tensor,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: RMSNorm of ``ROWS`` rows of ``WIDTH`` numbers of ``x``, written to ``out``. With ``ADD`` it is
    the norm of ``x + residual``, and this sum is written to ``total``. Pointers are ``x`` to ``out``."""
    some, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    inside = (some < rows)[:, None] & (columns < WIDTH)[None, :]
    cells = some[:, None] * WIDTH + columns[None, :]
    wide = tl.load(x + cells, inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + cells, inside, other=0.0).to(tl.float32)
        summed = wide.to(x.dtype.element_ty)
        tl.store(total + cells, summed, inside)
        wide = summed.to(tl.float32)
    mean = tl.sum(wide * wide, 1) / WIDTH
    scaled = (wide * tl.rsqrt(mean + eps)[:, None]).to(x.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, columns < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + cells, (scaled * factor[None, :]).to(x.dtype.element_ty), inside)


@triton.jit
def gate_rows(
    gate_up: tl.tensor, out: tl.tensor,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, GELU: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: ``activation(gate) * up`` for ``COLUMNS`` columns of one row of ``[rows, 2 * WIDTH]``, written to
    ``out``; GELU (tanh) with ``GELU``, else SiLU. Programs are (row, stretch of columns). Both tensors are
    pointers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + columns, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + columns, inside, other=0.0).to(tl.float32)
    # tanh as 2 sigmoid(2 x) - 1: x (1 + tanh(u)) / 2 = x sigmoid(2 u)
    bent = 2 * ROOT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    active = (gate * tl.sigmoid(bent)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (active * up).to(out.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, ``x / sqrt(mean(x ** 2) + eps) * weight``, over the last axis of a contiguous ``x``;
    ``weight``: ``[width]``."""
    out = torch.empty_like(x)
    _norm(x, None, weight, eps, None, out)
    return out


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum ``x + residual`` and its RMSNorm with ``weight`` ``[width]``, in this order; ``x`` and
    ``residual`` are contiguous and of one shape."""
    expect("residual", residual, tuple(x.shape))
    total, out = torch.empty_like(x), torch.empty_like(x)
    _norm(x, residual, weight, eps, total, out)
    return total, out


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, total: Tensor | None, out: Tensor
) -> None:
    width = x.shape[-1]
    expect("weight", weight, (width,))
    rows = x.numel() // width
    launch = chosen("norm", x, width)
    if rows:
        norm_rows[(triton.cdiv(rows, launch["ROWS"]),)](
            x, residual, weight, total, out, rows, eps,
            WIDTH=width, WIDE=triton.next_power_of_2(width), ADD=residual is not None, **launch,
        )  # fmt: skip


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """``activation(gate) * up`` of a contiguous ``[tokens, 2 * width]``, gate first: ``[tokens, width]``.

    ``activation``: ``silu`` or ``gelu_tanh``.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    expect("gate and up", gate_up, (rows, 2 * width))
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    launch = chosen("gate", gate_up, width)
    if rows:
        gate_rows[(rows, triton.cdiv(width, launch["COLUMNS"]))](
            gate_up, out, WIDTH=width, GELU=activation == "gelu_tanh", **launch
        )
    return out
