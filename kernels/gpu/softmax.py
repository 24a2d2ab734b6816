"""Parts of attention that its kernels share: addresses, scores, the running softmax.

Scores and log-sum-exps are in powers of two (scaled by log2 e), as the hardware has exp2. The running softmax
is that of Milakov and Gimelshein (2018), as in FlashAttention (Dao et al., 2022).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def cells_of(
    table: tl.tensor, tokens: tl.tensor, seen: tl.tensor, stride_block: tl.tensor, stride_slot: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """For each of ``tokens`` (positions) the offset, in elements, of its K or V within its head and layer of
    the arena, found through ``table``, a pointer to the row's block table; a block of values, int64, as arenas
    exceed 4 GiB. Tokens that are not ``seen`` are looked up in block 0.

    There is a look-up per token, as triton 3.6 does not pipeline the loads of K and V behind one per block that
    is spread over its tokens; a look-up takes a stage, so K and V have ``(num_stages - 1) // 2`` buffers."""
    blocks = tl.load(table + tokens // BLOCK, mask=seen, other=0).to(tl.int64)
    return blocks * stride_block + (tokens % BLOCK).to(tl.int64) * stride_slot


@triton.jit
def wide(stored: tl.tensor, asked: tl.tensor) -> tl.tensor:
    """Stored keys or values in the type of the queries ``asked``; bytes are e4m3, for GPUs without an
    instruction to convert it.

    Its exponent and mantissa, taken as the low 4 bits of fp16's exponent and the high 3 of its mantissa, are
    the number divided by 256, also for subnormal ones. NaN is read as 480.
    """
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.int16)
        half = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)
        return (half * 256.0).to(asked.dtype)
    return stored.to(asked.dtype)


@triton.jit
def scores_of(query: tl.tensor, keys: tl.tensor, scale: tl.tensor, SOFT_CAP: tl.constexpr) -> tl.tensor:
    """Attention scores ``[queries, tokens]``: scaled, capped (``SOFT_CAP`` 0: not), times log2 e. ``query``:
    ``[queries, dim]``; ``keys``: ``[dim, tokens]``."""
    scores = tl.dot(query, keys, input_precision="tf32x3")
    if SOFT_CAP > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), exact at both ends
        grown = tl.math.exp2(scores * (scale * 2 * LOG2E / SOFT_CAP))
        scores = (SOFT_CAP * LOG2E) * (1 - 2 / (grown + 1))
    else:
        scores = scores * (scale * LOG2E)
    return scores


@triton.jit
def fold(
    scores: tl.tensor, values: tl.tensor, best: tl.tensor, total: tl.tensor, acc: tl.tensor
) -> tl.tensor:
    """Add one tile of keys and values to a running softmax. ``scores`` ``[queries, tokens]``: times log2 e,
    -inf for a key that is not seen; ``values``: ``[tokens, dim]``. Returns the new state: each query's
    greatest score so far, the sum of its weights, and the weighted sum of values."""
    top = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)  # a query that has seen nothing yet
    weights = tl.math.exp2(scores - safe[:, None])
    decay = tl.math.exp2(best - safe)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="tf32x3")
    return top, total, acc


@triton.jit
def with_sink(best: tl.tensor, total: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """``total``, the sum of a query's weights, plus the weight of the head's attention sink: a score ``sink``
    that has no value. ``best``: the query's greatest score, times log2 e."""
    safe = tl.where(best == float("-inf"), 0.0, best)
    return total + tl.math.exp2(sink * LOG2E - safe)


@triton.jit
def normal(acc: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The weighted mean of the values, which is the result of attention: ``acc / total``; 0 if no key was
    seen."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def log_sum(best: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The log-sum-exp of each query's scores, to base 2, from its running softmax: ``best``, its greatest
    score (times log2 e), and ``total``, the sum of its weights; -inf if no key was seen."""
    return best + tl.math.log2(tl.where(total == 0.0, 1.0, total))
