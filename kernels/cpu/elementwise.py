"""Norms and gated activations, row by row. Knows pointers and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from .compiling import compiled, inlined
from .elements import Pointer, exp, narrow, pointer, tanh, widen

SILU, GELU_TANH = 0, 1


@inlined
def _norm_line(x: Pointer, residual: Pointer, added: bool, at: int, width: int, weight: Pointer, eps: float,
               line: Any, total: Pointer, out: Pointer, tag: Any) -> None:  # fmt: skip
    """One row: its sum with the residual where there is one, then the norm of the sum as it is stored."""
    squares = np.float32(0)
    if added:
        for i in range(width):
            line[i] = widen(x[at + i]) + widen(residual[at + i])
        for i in range(width):
            total[at + i] = narrow(line[i], tag)
        for i in range(width):
            line[i] = widen(total[at + i])
    else:
        for i in range(width):
            line[i] = widen(x[at + i])
    for i in range(width):
        squares += line[i] * line[i]
    factor = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
    for i in range(width):
        out[at + i] = narrow(line[i] * factor * widen(weight[i]), tag)


@inlined
def _norm_rows(low: int, high: int, x: Pointer, residual: Pointer, added: bool, weight: Pointer,
               total: Pointer, out: Pointer, width: int, eps: float, tag: Any) -> None:  # fmt: skip
    line = np.empty(width, np.float32)
    for row in range(low, high):
        _norm_line(x, residual, added, row * width, width, weight, eps, line, total, out, tag)


def _norm(
    parts: int, x_at: int, residual_at: int, weight_at: int, total_at: int, out_at: int,
    rows: int, width: int, eps: float, tag: Any,
) -> None:  # fmt: skip
    """RMSNorm of ``[rows, width]``; with a residual (address not 0) of the sum, which goes to ``total``."""
    x, residual, weight = pointer(x_at, tag), pointer(residual_at, tag), pointer(weight_at, tag)
    total, out = pointer(total_at, tag), pointer(out_at, tag)
    added = residual_at != 0
    if parts == 1:
        _norm_rows(0, rows, x, residual, added, weight, total, out, width, eps, tag)
    else:
        for part in prange(parts):
            low, high = rows * part // parts, rows * (part + 1) // parts
            _norm_rows(low, high, x, residual, added, weight, total, out, width, eps, tag)


@inlined
def _gate_rows(low: int, high: int, gate_up: Pointer, out: Pointer, width: int, kind: int, tag: Any) -> None:
    for row in range(low, high):
        gate, up, to = 2 * row * width, (2 * row + 1) * width, row * width
        if kind == SILU:
            for i in range(width):
                g = widen(gate_up[gate + i])
                out[to + i] = narrow(g / (np.float32(1) + exp(-g)) * widen(gate_up[up + i]), tag)
        else:
            for i in range(width):
                g = widen(gate_up[gate + i])
                inner = np.float32(0.7978845608028654) * (g + np.float32(0.044715) * g * g * g)
                half = np.float32(0.5) * g * (np.float32(1) + tanh(inner))
                out[to + i] = narrow(half * widen(gate_up[up + i]), tag)


def _gated(parts: int, gate_up_at: int, out_at: int, rows: int, width: int, kind: int, tag: Any) -> None:
    """``activation(gate) * up``: ``[rows, 2 * width]`` to ``[rows, width]``; ``SILU`` or ``GELU_TANH``."""
    gate_up, out = pointer(gate_up_at, tag), pointer(out_at, tag)
    if parts == 1:
        _gate_rows(0, rows, gate_up, out, width, kind, tag)
    else:
        for part in prange(parts):
            _gate_rows(rows * part // parts, rows * (part + 1) // parts, gate_up, out, width, kind, tag)


norm = compiled(_norm, parallel=True)
gated = compiled(_gated, parallel=True)
