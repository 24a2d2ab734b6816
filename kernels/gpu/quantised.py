"""Products with quantised weights: codes are read as they are, and become numbers in registers.

A program computes some columns of the result for some tokens. Codes are turned into 16-bit numbers exactly
(integers less their zero, e2m1, e4m3), multiplied by tensor cores, and the sums of a group are multiplied by
its scale in fp32. The weights are the left operand, so that few tokens are the narrow side of a tile. With few
tokens the sums are split along the width over several programs, and added afterwards in one order.

Activations that a scheme rounds are rounded before, by a kernel of their own; int8 by int8 is summed in
integers. FP8 with a scale for each row goes to torch (the vendor's library) where that has it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..float8 import E4M3
from ..packed import LEAST
from ..quantised import ACTIVATIONS_GROUP, AS_THEY_ARE, FP8_FIXED, FP8_GROUPS, HALVED, INT8, Quantised
from .configurations import architecture, chosen, multiprocessors
from .softmax import wide
from .store import e4m3_of
from .support import READS_E4M3, expect

FEW = 16
"""Up to so many tokens the sums are split along the width."""
PROGRAMS, LEAST_STEPS, MOST_SPLITS = 4, 4, 16
"""Programs for each multiprocessor that a split aims at; the least steps of a program; the most splits."""

MOST_STAGES = 8
"""The most pipeline stages: steps along the width that are loaded while an earlier one is multiplied."""

INT4, INTEGERS, FLOATS, MXFP4 = (tl.constexpr(one) for one in range(4))
KINDS = {"int4": INT4, "int8": INTEGERS, "fp8": FLOATS, "mxfp4": MXFP4}
"""The codes of a scheme, for kernels."""
_LEAST = tl.constexpr(LEAST)


@triton.jit
def round_rows(
    x: tl.tensor, fixed: tl.tensor, codes: tl.tensor, scales: tl.tensor,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, FLOAT: tl.constexpr, FIXED: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: round ``GROUP`` neighbouring numbers of a token to 8 bits: ``codes``, e4m3 with ``FLOAT``, else
    int8, and their scale. With ``FIXED`` the scale is at ``fixed``. Programs are (token, group). All tensors
    are pointers. A group with a number that is not finite has a scale of NaN, unless it is fixed."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = group * GROUP + tl.arange(0, WIDE)
    there = (tl.arange(0, WIDE) < GROUP) & (columns < WIDTH)
    numbers = tl.load(x + token * WIDTH + columns, there, other=0.0).to(tl.float32)
    top: tl.constexpr = 448.0 if FLOAT else 127.0
    if FIXED:
        scale = tl.load(fixed)
        numbers = tl.math.div_rn(numbers, scale + tl.zeros([WIDE], tl.float32))
    else:
        bad = tl.max(tl.where(tl.abs(numbers) < float("inf"), 0, 1), 0) > 0
        numbers = tl.where(bad, 0.0, numbers)
        most = tl.max(tl.abs(numbers), 0)
        some = most > _LEAST
        numbers = tl.where(some, numbers * tl.math.div_rn(top, tl.where(some, most, 1.0)), 0.0)
        scale = tl.where(bad, float("nan"), tl.math.div_rn(most, top))
    if FLOAT:
        tl.store(codes + token * WIDTH + columns, e4m3_of(numbers), there)
    else:
        # 1.5 * 2^23: added to a small number, its low bits are the nearest integer
        whole = ((numbers + 12582912.0) - 12582912.0).to(tl.int32).to(tl.int8)
        tl.store(codes + token * WIDTH + columns, whole, there)
    tl.store(scales + token * tl.num_programs(1) + group, scale)


@triton.jit
def e2m1_of(codes: tl.tensor, like: tl.tensor) -> tl.tensor:
    """The numbers of codes of e2m1, 0 to 15, in the type of ``like``. Their bits, taken as the low 2 of fp16's
    exponent and the highest of its mantissa, are the number times 2^-14, also for subnormal ones."""
    bits = codes.to(tl.int16)
    half = (((bits & 7) << 9) | ((bits & 8) << 12)).to(tl.float16, bitcast=True)
    return (half * 16384.0).to(like.dtype)


@triton.jit
def numbers_of(codes: tl.tensor, zero: tl.tensor, like: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """What codes ``[columns, depth]`` (bytes; integers of 8 bits less 128) stand for, less their ``zero``
    ``[columns]`` (that of integers of 8 bits plus 128) and without their scale, in the type of ``like``."""
    if KIND == MXFP4:
        found = e2m1_of(codes, like)
    elif KIND == FLOATS:
        found = wide(codes, like)
    else:
        if KIND == INTEGERS:
            codes = codes ^ 128
        # The bits of 2^23 + code: conversions of integers are slower than a sum.
        summed = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        found = (summed - (zero.to(tl.float32) + 8388608.0)[:, None]).to(like.dtype)
    return found


@triton.jit(do_not_specialize=["tokens"])
def quantised_tile(
    x: tl.tensor, shares: tl.tensor, codes: tl.tensor, scales: tl.tensor, zeros: tl.tensor, bias: tl.tensor,
    out: tl.tensor, tokens: tl.tensor,
    IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    ZEROS: tl.constexpr, ROUNDED: tl.constexpr, SHARE: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: one tile of ``x @ weight.T + bias``, ``ROWS`` tokens by ``COLUMNS`` outputs, or the sums over one
    of ``SPLITS`` parts of the width, fp32 ``[split, token, output]``, without the bias. Programs are (tile,
    split); tiles are numbered down the rows, then over the columns. Pointers are ``x`` to ``out``.

    ``HALVES``: codes in a byte. ``ROUNDED``: 0: ``x`` is as it is; 1: int8; 2: e4m3. ``shares``: its scales;
    ``SHARE``: numbers of a token with one of them, 0: all. ``GROUP``: numbers of a weight's row with one scale,
    0: all.
    """
    down = tl.cdiv(tokens, ROWS)
    rows = tl.program_id(0) % down * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) // down * COLUMNS + tl.arange(0, COLUMNS)
    there, wanted = rows < tokens, columns < OUT
    LINE: tl.constexpr = (IN + 31) // 32 * 16 if HALVES == 2 else IN
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP if GROUP else 1
    PIECES: tl.constexpr = (IN + SHARE - 1) // SHARE if SHARE else 1
    EACH: tl.constexpr = ((IN + DEPTH - 1) // DEPTH + SPLITS - 1) // SPLITS * DEPTH
    lanes = tl.arange(0, DEPTH // HALVES)
    # Two halves of a byte are columns that are 16 apart: see `kernels.quantised`.
    spread = lanes // 16 * 32 + lanes % 16 if HALVES == 2 else lanes
    x_at = x + rows.to(tl.int64)[None, :] * IN + spread[:, None]
    codes_at = codes + columns.to(tl.int64)[:, None] * LINE + lanes[None, :]
    scales_at = scales + columns.to(tl.int64) * GROUPS
    begin = tl.program_id(1) * EACH
    acc = tl.zeros([COLUMNS, ROWS], tl.int32 if ROUNDED == 1 and not GROUP else tl.float32)
    middle: tl.constexpr = 128 if KIND == INTEGERS else 0
    zero = tl.full([COLUMNS], 8 if KIND == INT4 else middle, tl.int32)
    if ZEROS and not GROUP:
        zero = tl.load(zeros + columns, wanted, other=0).to(tl.int32) + middle
    for at in tl.range(begin, tl.minimum(begin + EACH, IN), DEPTH):
        inside = (at // HALVES + lanes < LINE)[None, :] & wanted[:, None]
        some = tl.load(codes_at + at // HALVES, inside, other=0.0)
        given = tl.load(x_at + at, (at + spread < IN)[:, None] & there[None, :], other=0.0)
        if ZEROS and GROUP:
            zero = tl.load(zeros + columns.to(tl.int64) * GROUPS + at // GROUP, wanted, other=0)
            zero = zero.to(tl.int32) + middle
        if ROUNDED == 1:
            part = tl.dot(some, given, out_dtype=tl.int32)
        else:
            if ROUNDED == 2:
                given = wide(given, tl.zeros([1], tl.float16))
            low = some & 15 if HALVES == 2 else some
            part = tl.dot(numbers_of(low, zero, given, KIND), given, input_precision="tf32x3")
            if HALVES == 2:
                more = tl.load(x_at + at + 16, (at + 16 + spread < IN)[:, None] & there[None, :], other=0.0)
                high = numbers_of(some >> 4, zero, given, KIND)
                part = tl.dot(high, more, part, input_precision="tf32x3")
        if GROUP:
            scale = tl.load(scales_at + at // GROUP, wanted, other=0)
            if KIND == MXFP4:
                bits = scale.to(tl.int32)
                scale = tl.where(bits > 0, bits << 23, 1 << 22).to(tl.float32, bitcast=True)
            part = part.to(tl.float32) * scale.to(tl.float32)[:, None]
        if SHARE:
            share = tl.load(shares + rows.to(tl.int64) * PIECES + at // SHARE, there, other=0.0)
            part = part * share[None, :]
        acc += part
    total = acc.to(tl.float32)
    if not GROUP:
        total *= tl.load(scales_at, wanted, other=0).to(tl.float32)[:, None]
    if ROUNDED and not SHARE:
        total *= tl.load(shares + rows, there, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + columns, wanted, other=0.0).to(tl.float32)[:, None]
    line = tl.program_id(1).to(tl.int64) * tokens + rows
    cells = line[None, :] * OUT + columns[:, None]
    tl.store(out + cells, total.to(out.dtype.element_ty), there[None, :] & wanted[:, None])


@triton.jit(do_not_specialize=["count"])
def sum_splits(
    parts: tl.tensor, bias: tl.tensor, out: tl.tensor, count: tl.tensor,
    OUT: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, PIECE: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: add ``parts`` ``[split, count]`` in their order, and the bias of each of ``OUT`` columns; written
    to ``out``. A program has ``PIECE`` numbers. Pointers are ``parts`` to ``out``."""
    cells = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    there = cells < count
    total = tl.zeros([PIECE], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * count.to(tl.int64) + cells, there, other=0.0)
    if BIAS:
        total += tl.load(bias + cells % OUT, there, other=0.0).to(tl.float32)
    tl.store(out + cells, total.to(out.dtype.element_ty), there)


def rounded(x: Tensor, weight: Quantised) -> tuple[Tensor, Tensor]:
    """The activations ``x`` ``[tokens, width]`` as the scheme of ``weight`` rounds them: codes, int8 or uint8
    (bytes of e4m3), and scales, float32 ``[tokens, groups]``."""
    (tokens, width), kind = x.shape, weight.scheme.activations
    group = ACTIVATIONS_GROUP if kind == FP8_GROUPS else width
    groups = triton.cdiv(width, group)
    codes = torch.empty((tokens, width), dtype=torch.int8 if kind == INT8 else torch.uint8, device=x.device)
    scales = torch.empty((tokens, groups), dtype=torch.float32, device=x.device)
    wide_group = triton.next_power_of_2(group)
    round_rows[(tokens, groups)](
        x, weight.fixed, codes, scales,
        WIDTH=width, GROUP=group, WIDE=wide_group, FLOAT=kind != INT8, FIXED=kind == FP8_FIXED,
        num_warps=1 if wide_group <= 512 else 4,
    )  # fmt: skip
    return codes, scales


def quantised_linear(x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[tokens, in]``, ``[out, in]``, ``[out]`` to ``[tokens, out]``, of x's type.
    What is launched depends on shapes alone. Raises ValueError for other shapes."""
    return _product(x, weight, bias, split=True)


def invariant_linear(x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
    """`quantised_linear`, each row with the same bits in any batch: one tile size for any number of rows, and
    each sum in one program."""
    return _product(x, weight, bias, split=False)


def _product(x: Tensor, weight: Quantised, bias: Tensor | None, *, split: bool) -> Tensor:
    tokens, (outs, width), scheme = x.shape[0], weight.shape, weight.scheme
    expect("x", x, (tokens, width))
    if bias is not None:
        expect("bias", bias, (outs,))
    out = torch.empty((tokens, outs), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    x = x.contiguous()
    given, shares = (x, None) if scheme.activations == AS_THEY_ARE else rounded(x, weight)
    if split and shares is not None and tokens > FEW and _by_torch(x, weight):
        return _scaled(given, shares, weight, bias)
    native = architecture(x.device) >= READS_E4M3
    if given.dtype == torch.uint8 and native:
        given = given.view(E4M3)
    codes = weight.codes
    if (codes.dtype == E4M3 and not native) or (codes.dtype == torch.int8 and shares is None):
        codes = codes.view(torch.uint8)
    launch = _launch(x, weight, few=split and tokens <= FEW)
    tiles = triton.cdiv(tokens, launch["ROWS"]) * triton.cdiv(outs, launch["COLUMNS"])
    splits = _splits(x, tiles, triton.cdiv(width, launch["DEPTH"])) if split and tokens <= FEW else 1
    into = out if splits == 1 else torch.empty((splits, tokens, outs), dtype=torch.float32, device=x.device)
    quantised_tile[(tiles, splits)](
        given, shares, codes, weight.scales, weight.zeros, bias, into, tokens,
        IN=width, OUT=outs, GROUP=scheme.group, KIND=KINDS[scheme.codes],
        HALVES=2 if scheme.codes in HALVED else 1, ZEROS=weight.zeros is not None,
        ROUNDED=0 if shares is None else 1 if given.dtype == torch.int8 else 2,
        SHARE=ACTIVATIONS_GROUP if scheme.activations == FP8_GROUPS else 0,
        BIAS=bias is not None and splits == 1, SPLITS=splits, **launch,
    )  # fmt: skip
    if splits > 1:
        count = tokens * outs
        sum_splits[(triton.cdiv(count, 1024),)](
            into, bias, out, count, OUT=outs, BIAS=bias is not None, SPLITS=splits, PIECE=1024, num_warps=4
        )
    return out


def _launch(x: Tensor, weight: Quantised, *, few: bool) -> dict[str, Any]:
    """The launch arguments; a step along the width lies in one group."""
    launch = chosen("quantised_few" if few else "quantised_many", x, weight.width)
    depth = launch["DEPTH"]
    share = ACTIVATIONS_GROUP if weight.scheme.activations == FP8_GROUPS else 0
    for group in (weight.scheme.group, share):
        depth = min(depth, group & -group or depth)
    # Shorter steps, and more of them on their way.
    stages = min(MOST_STAGES, launch["num_stages"] * launch["DEPTH"] // depth)
    return launch | {"DEPTH": depth, "num_stages": max(stages, launch["num_stages"])}


def _splits(x: Tensor, tiles: int, steps: int) -> int:
    """Over how many programs a tile's sums are split, for ``steps`` along the width: a power of two."""
    wanted = min(PROGRAMS * multiprocessors(x.device) // tiles, steps // LEAST_STEPS, MOST_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


def _by_torch(x: Tensor, weight: Quantised) -> bool:
    """Whether torch multiplies these: e4m3 by e4m3, with a scale for each row of both."""
    by_row = weight.scheme.codes == "fp8" and not weight.scheme.group
    fits = not any(size % 16 for size in weight.shape) and x.dtype == torch.bfloat16
    return by_row and fits and x.is_cuda and architecture(x.device) >= READS_E4M3


def _scaled(codes: Tensor, shares: Tensor, weight: Quantised, bias: Tensor | None) -> Tensor:
    scales = weight.scales.float().T.contiguous()
    product = torch._scaled_mm(
        codes.view(E4M3), weight.codes.T, scale_a=shares, scale_b=scales, out_dtype=torch.bfloat16
    )
    return product if bias is None else product + bias
