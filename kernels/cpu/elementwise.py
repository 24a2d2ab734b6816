"""Loops over rows: norms, gated activations, and the rotation that stores K and V.

The rotation norms and rotates queries and keys and stores keys and values in one pass over the projection's
output. The arena's layout is ``[block, layer, k|v, head, slot, dim]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange, types

from .compiling import compiled, inlined
from .elements import Pointer, exp, narrow, pointer, tanh, widen

SILU, GELU_TANH = 0, 1


@inlined
def _norm_line(x: Pointer, residual: Pointer, added: bool, at: int, width: int, weight: Pointer, eps: float,
               line: Any, total: Pointer, out: Pointer, tag: Any) -> None:  # fmt: skip
    """RMSNorm of one row of ``width`` elements of ``x``, from the offset ``at`` on, times ``weight``; written
    to ``out`` at the same offset.

    If ``added``, ``residual`` is added first, and the sum is written to ``total``; the norm is that of the
    sum as it is stored. ``line``: scratch for one row in fp32. ``tag``: a number of the element type.
    """
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


@compiled
def norm(
    parts: int, x_at: int, residual_at: int, weight_at: int, total_at: int, out_at: int,
    rows: int, width: int, eps: float, tag: Any,
) -> None:  # fmt: skip
    """RMSNorm of the rows at ``x_at``, ``[rows, width]``, times the weight at ``weight_at``, ``[width]``;
    written to ``out_at``, on ``parts`` threads. With a residual (address not 0) it is the norm of ``x +
    residual``, and this sum is written to ``total_at``. Compiled numba code; names with ``_at`` are
    addresses, ``tag`` is a number of the element type (`elements.TAGS`)."""
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


@compiled
def gated(parts: int, gate_up_at: int, out_at: int, rows: int, width: int, kind: int, tag: Any) -> None:
    """``activation(gate) * up`` of ``[rows, 2 * width]`` at the address ``gate_up_at``, gate first; written
    to ``out_at`` as ``[rows, width]``, on ``parts`` threads. ``kind``: ``SILU`` or ``GELU_TANH``. Compiled
    numba code; ``tag``: a number of the element type (`elements.TAGS`)."""
    gate_up, out = pointer(gate_up_at, tag), pointer(out_at, tag)
    if parts == 1:
        _gate_rows(0, rows, gate_up, out, width, kind, tag)
    else:
        for part in prange(parts):
            _gate_rows(rows * part // parts, rows * (part + 1) // parts, gate_up, out, width, kind, tag)


# --- rotation -----------------------------------------------------------------------------------------------

NO_NORM, PER_HEAD, WHOLE = 0, 1, 2


@inlined
def _factor(x: Pointer, at: int, count: int, eps: float) -> Any:
    """One over the root of (the mean square plus ``eps``) of the ``count`` elements from ``x[at]`` on, in
    fp32."""
    squares = np.float32(0)
    for i in range(count):
        number = widen(x[at + i])
        squares += number * number
    return np.float32(1) / np.sqrt(squares / np.float32(count) + np.float32(eps))


@inlined
def _turn(line: Any, dim: int, cos: Pointer, sin: Pointer, at: int, turning: int, out: Pointer, to: int,
          tag: Any) -> None:  # fmt: skip
    """Rotate one head of one token (RoPE) and write its ``dim`` numbers to ``out[to:]``. ``line``: the head
    in fp32. The first ``turning`` numbers are rotated in pairs (i, i + turning / 2); the others are copied.
    ``at``: the token's offset in ``cos`` and ``sin``. ``tag``: a number of the element type."""
    half = turning // 2
    for i in range(half):
        first, second = line[i], line[half + i]
        out[to + i] = narrow(first * widen(cos[at + i]) - second * widen(sin[at + i]), tag)
        out[to + half + i] = narrow(
            second * widen(cos[at + half + i]) + first * widen(sin[at + half + i]), tag
        )
    for i in range(turning, dim):
        out[to + i] = narrow(line[i], tag)


@inlined
def _token(token: int, slot: int, qkv: Pointer, weight: Pointer, kind: int, eps: float, cos: Pointer,
           sin: Pointer, arena: Pointer, query: Pointer, shape: Any, line: Any, tag: Any) -> None:  # fmt: skip
    q_heads, kv_heads, dim, turning, slots, block_size, layer_at = shape
    start = token * (q_heads + 2 * kv_heads) * dim
    tile = slots * dim
    into = slot // slots * block_size + layer_at + slot % slots * dim
    factor = np.float32(1)
    for head in range(q_heads + kv_heads):
        at = start + head * dim
        if kind == WHOLE and head == 0:
            factor = _factor(qkv, at, q_heads * dim, eps)
        elif kind == WHOLE and head == q_heads:
            factor = _factor(qkv, at, kv_heads * dim, eps)
        elif kind == PER_HEAD:
            factor = _factor(qkv, at, dim, eps)
        if kind == NO_NORM:
            for i in range(dim):
                line[i] = widen(qkv[at + i])
        else:
            for i in range(dim):
                line[i] = widen(qkv[at + i]) * factor * widen(weight[head * dim + i])
        if head < q_heads:
            to = (token * q_heads + head) * dim
            _turn(line, dim, cos, sin, token * turning, turning, query, to, tag)
        else:
            _turn(line, dim, cos, sin, token * turning, turning, arena, into + (head - q_heads) * tile, tag)
    values = start + (q_heads + kv_heads) * dim
    for head in range(kv_heads):
        to = into + (kv_heads + head) * tile
        for i in range(dim):
            arena[to + i] = qkv[values + head * dim + i]


@inlined
def _tokens(low: int, high: int, slots: Pointer, qkv: Pointer, weight: Pointer, kind: int, eps: float,
            cos: Pointer, sin: Pointer, arena: Pointer, query: Pointer, shape: Any,
            tag: Any) -> None:  # fmt: skip
    line = np.empty(shape[2], np.float32)
    for token in range(low, high):
        _token(token, slots[token], qkv, weight, kind, eps, cos, sin, arena, query, shape, line, tag)


@compiled
def rotate_and_store(
    parts: int, tokens: int, slots_at: int, qkv_at: int, weight_at: int, kind: int, eps: float,
    cos_at: int, sin_at: int, arena_at: int, query_at: int, shape: Any, tag: Any,
) -> None:  # fmt: skip
    """Norm and rotate the queries and keys of ``tokens`` tokens; write the queries to ``query_at`` and K and
    V to their slots in the arena, on ``parts`` threads. Compiled numba code.

    Names with ``_at`` are addresses of tensors: ``slots`` int64 ``[tokens]``, ``qkv`` ``[tokens, q_heads + 2
    * kv_heads, head_dim]``, the norm's ``weight`` ``[q_heads + kv_heads, head_dim]``, ``cos`` and ``sin``
    ``[tokens, rotary_dim]``, ``query`` ``[tokens, q_heads, head_dim]``. ``kind``: `NO_NORM`, `PER_HEAD` or
    `WHOLE` (one mean over all query heads, and one over all key heads). ``shape``: (q_heads, kv_heads,
    head_dim, rotary_dim, block_tokens, size of a block, offset of the layer in it), the last two in numbers.
    ``tag``: a number of the element type (`elements.TAGS`).
    """
    slots, qkv = pointer(slots_at, types.int64(0)), pointer(qkv_at, tag)
    weight, cos, sin = pointer(weight_at, tag), pointer(cos_at, tag), pointer(sin_at, tag)
    arena, query = pointer(arena_at, tag), pointer(query_at, tag)
    if parts == 1:
        _tokens(0, tokens, slots, qkv, weight, kind, eps, cos, sin, arena, query, shape, tag)
    else:
        for part in prange(parts):
            low, high = tokens * part // parts, tokens * (part + 1) // parts
            _tokens(low, high, slots, qkv, weight, kind, eps, cos, sin, arena, query, shape, tag)
