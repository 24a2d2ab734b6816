"""Loops over rows: norms, gated activations, and the rotation that stores K and V.

The rotation norms and rotates queries and keys and stores keys and values in one pass over the projection's
output. The arena's layout is ``[block, layer, k|v, head, slot, dim]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from .compiling import in_order, inlined
from .elements import Pointer, exp, memory, narrow, tanh, widen
from .vectors import I32, I64, LANES, across, constant, fused, load, loop

SILU, GELU_TANH = 0, 1


@intrinsic  # type: ignore[untyped-decorator]
def _sum_of_squares(typing: Any, numbers: Any, vectors: Any) -> Any:
    """Intrinsic, returns a value: the sum of the squares of the ``vectors * LANES`` fp32 numbers at the pointer
    ``numbers``, in one order wherever it is compiled. ``vectors``: a value, at least one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, count = args

        def body(step: Any, sums: list[Any]) -> list[Any]:
            vector = load(builder, types.float32, builder.gep(pointer, [builder.mul(step, I64(LANES))]))
            return [fused(builder, vector, vector, sums[0])]

        (total,) = loop(builder, count, [constant(0.0)], body)
        return builder.extract_element(across(builder, total, builder.fadd), I32(0))

    return types.float32(numbers, types.int64), codegen


@in_order
def norm_rows(low: int, high: int, x: Pointer, residual: Pointer, added: bool, weight: Pointer, normed: bool,
              total: Pointer, out: Pointer, width: int, eps: float, tag: Any) -> None:  # fmt: skip
    """RMSNorm of the rows ``[low, high)`` of ``x`` ``[rows, width]``, times ``weight`` ``[width]``; written to
    ``out``. ``tag``: a number of the element type.

    If ``added``, ``residual`` is added first, and the sum is written to ``total``; the norm is that of the
    sum as it is stored. If not ``normed``, ``out`` gets what would be normed.
    """
    line = np.zeros((width + LANES - 1) // LANES * LANES, np.float32)
    for row in range(low, high):
        at = row * width
        if added:
            for i in range(width):
                total[at + i] = narrow(widen(x[at + i]) + widen(residual[at + i]), tag)
            for i in range(width):
                line[i] = widen(total[at + i])
        else:
            for i in range(width):
                line[i] = widen(x[at + i])
        factor = np.float32(1)
        if normed:
            squares = _sum_of_squares(memory(line), line.size // LANES)
            factor = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
            for i in range(width):
                out[at + i] = narrow(line[i] * factor * widen(weight[i]), tag)
        else:
            for i in range(width):
                out[at + i] = narrow(line[i], tag)


@in_order
def gate_rows(low: int, high: int, gate_up: Pointer, out: Pointer, width: int, kind: int, tag: Any) -> None:
    """``activation(gate) * up`` of the rows ``[low, high)`` of ``[rows, 2 * width]``, gate first; written to
    ``out`` ``[rows, width]``. ``kind``: `SILU` or `GELU_TANH`. ``tag``: a number of the element type."""
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


# --- rotation -----------------------------------------------------------------------------------------------

NO_NORM, PER_HEAD, WHOLE = 0, 1, 2


@in_order
def _factor(x: Pointer, at: int, count: int, eps: float) -> Any:
    """One over the root of (the mean square plus ``eps``) of the ``count`` elements from ``x[at]`` on, in
    fp32."""
    squares, line = np.float32(0), np.zeros(LANES, np.float32)
    for begin in range(0, count, LANES):
        for i in range(LANES):
            line[i] = widen(x[at + begin + i]) if begin + i < count else np.float32(0)
        squares += _sum_of_squares(memory(line), 1)
    return np.float32(1) / np.sqrt(squares / np.float32(count) + np.float32(eps))


@in_order
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


@in_order
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
def rotate_tokens(low: int, high: int, slots: Pointer, qkv: Pointer, weight: Pointer, kind: int, eps: float,
                  cos: Pointer, sin: Pointer, arena: Pointer, query: Pointer, shape: Any,
                  tag: Any) -> None:  # fmt: skip
    """Norm and rotate the queries and keys of the tokens ``[low, high)``; write the queries to ``query``, and K
    and V to their slots in the arena.

    ``slots``: int64 ``[tokens]``; ``qkv``: ``[tokens, q_heads + 2 * kv_heads, head_dim]``; ``weight``: the
    norm's, ``[q_heads + kv_heads, head_dim]``; ``cos``, ``sin``: ``[tokens, rotary_dim]``; ``query``:
    ``[tokens, q_heads, head_dim]``. ``kind``: `NO_NORM`, `PER_HEAD` or `WHOLE` (one mean over all query heads,
    and one over all key heads). ``shape``: (q_heads, kv_heads, head_dim, rotary_dim, block_tokens, size of a
    block, offset of the layer in it), the last two in numbers. ``tag``: a number of the element type
    (`elements.TAGS`).
    """
    line = np.empty(shape[2], np.float32)
    for token in range(low, high):
        _token(token, slots[token], qkv, weight, kind, eps, cos, sin, arena, query, shape, line, tag)
