"""Norm, rotation and storing of a step's queries, keys and values in one pass; copies of whole blocks.

A program takes one token and some of its heads: queries are returned, keys and values go into the arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import Device, device_of
from ..float8 import E4M3, as_bytes
from ..interface import HeadNorm
from .configurations import chosen
from .support import expect


@triton.jit
def inverse_rms(
    heads_at: tl.tensor, eps: tl.tensor, COUNT: tl.constexpr, MOST: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """One over the root of (the mean square plus ``eps``) of all numbers of ``COUNT`` heads of one token, which
    lie one behind the other at the pointer ``heads_at``. Returns a single value."""
    heads, dims = tl.arange(0, MOST), tl.arange(0, WIDE)
    inside = (heads < COUNT)[:, None] & (dims < DIM)[None, :]
    wide = tl.load(heads_at + heads[:, None] * DIM + dims[None, :], inside, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / (COUNT * DIM) + eps)


@triton.jit
def e4m3_of(x: tl.tensor) -> tl.tensor:
    """The e4m3 byte nearest to fp32 ``x``, the even one of two equally near; ±448 beyond that; NaN for NaN."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # 20 of 23 bits of mantissa go; an exponent of 2^-7, biased by 127, becomes 0.
    usual = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Under 2^-6 numbers are multiples of 2^-9; adding 2^23 rounds to whole ones.
    small = ((size * 512.0 + 8388608.0) - 8388608.0).to(tl.int32)
    code = tl.where(size < 0.015625, small, usual)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=["layer"])
def rotate_heads(
    qkv: tl.tensor, weight: tl.tensor, cos: tl.tensor, sin: tl.tensor, arena: tl.tensor, slots: tl.tensor,
    out: tl.tensor,
    layer: tl.tensor, eps: tl.tensor, stride_token: tl.tensor,
    stride_block: tl.tensor, stride_layer: tl.tensor, stride_side: tl.tensor, stride_head: tl.tensor,
    stride_slot: tl.tensor,
    Q: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TURNING: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, WHOLE: tl.constexpr,
    MOST_Q: tl.constexpr, MOST_KV: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: norm (with ``NORM``) and rotate ``HEADS`` of the heads of one token's queries and keys; values
    stay as they are. Queries are written to ``out``, keys and values to the token's slot in the arena (a token
    of slot -1 is not stored). Programs are (token, group of heads). Pointers are ``qkv`` to ``out``; the other
    tensors are single values."""
    token, dims = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    # A number is rotated with its partner, half the rotary part away; the second read is a cache hit.
    partners = tl.where(dims < TURNING // 2, dims + TURNING // 2, dims - TURNING // 2)
    there = (heads < Q + 2 * KV)[:, None] & (dims < DIM)[None, :]
    turns = (heads < Q + KV)[:, None] & (dims < TURNING)[None, :]
    line, mate = heads[:, None] * DIM + dims[None, :], heads[:, None] * DIM + partners[None, :]
    start = qkv + token * stride_token
    own = tl.load(start + line, there, other=0.0)
    other = tl.load(start + mate, turns, other=0.0)
    if NORM:
        normed = (heads < Q + KV)[:, None]
        if WHOLE:
            of_queries = inverse_rms(start, eps, Q, MOST_Q, DIM, WIDE)
            of_keys = inverse_rms(start + Q * DIM, eps, KV, MOST_KV, DIM, WIDE)
            factor = tl.where(heads < Q, of_queries, of_keys)[:, None]
        else:
            wide = own.to(tl.float32)
            factor = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        weights = tl.load(weight + line, normed & there, other=0.0).to(tl.float32)
        scaled = (own.to(tl.float32) * factor).to(own.dtype).to(tl.float32) * weights
        own = tl.where(normed, scaled.to(own.dtype), own)
        weights = tl.load(weight + mate, turns, other=0.0).to(tl.float32)
        other = ((other.to(tl.float32) * factor).to(other.dtype).to(tl.float32) * weights).to(other.dtype)
    angles = token * TURNING + dims
    cosine = tl.load(cos + angles, dims < TURNING, other=1.0).to(tl.float32)[None, :]
    sine = tl.load(sin + angles, dims < TURNING, other=0.0).to(tl.float32)[None, :]
    against = tl.where((dims < TURNING // 2)[None, :], -other.to(tl.float32), other.to(tl.float32))
    turned = (own.to(tl.float32) * cosine + against * sine).to(own.dtype)
    own = tl.where(turns, turned, own)
    tl.store(out + token * (Q * DIM) + line, own, (heads < Q)[:, None] & there)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    cell = slot // BLOCK * stride_block + slot % BLOCK * stride_slot + layer.to(tl.int64) * stride_layer
    side, pair = (heads >= Q + KV).to(tl.int64), (heads - Q) % KV
    lines = cell + side * stride_side + pair * stride_head
    stored = (heads >= Q)[:, None] & there
    if arena.dtype.element_ty == tl.uint8:
        tl.store(arena + lines[:, None] + dims[None, :], e4m3_of(own.to(tl.float32)), stored)
    else:
        tl.store(arena + lines[:, None] + dims[None, :], own, stored)


def rotate_and_store(
    qkv: Tensor,
    norm: HeadNorm | None,
    angles: tuple[Tensor, Tensor],
    arena: Tensor,
    layer: int,
    slots: Tensor,
) -> Tensor:
    """Norm (if ``norm``) and rotate queries and keys, and store K and V in ``arena``; returns the queries,
    ``[tokens, q_heads, head_dim]``.

    ``qkv``: ``[tokens, q_heads + 2 * kv_heads, head_dim]``. ``angles``: cos and sin, each ``[tokens,
    rotary_dim]``. ``layer``: its index in ``arena``. ``slots``: int64 ``[tokens]``, ``block * block_tokens +
    offset``; a token of slot -1 is not stored. Raises ValueError for other shapes or types.
    """
    tokens, heads, dim = qkv.shape
    pairs, block = arena.shape[3:5]
    q_heads, turning = heads - 2 * pairs, angles[0].shape[1]
    expect("queries, keys and values", qkv, (tokens, heads, arena.shape[5]))
    expect("slots", slots, (tokens,))
    for name, one in zip(("cos", "sin"), angles, strict=True):
        expect(name, one, (tokens, turning))
    if norm is not None:
        expect("norm weight", norm.weight, (heads - pairs, dim))
    if arena.dtype not in (qkv.dtype, E4M3):
        raise ValueError(f"queries, keys and values are {qkv.dtype}, the arena {arena.dtype}")
    out = torch.empty((tokens, q_heads, dim), dtype=qkv.dtype, device=qkv.device)
    launch = chosen("store", qkv, dim)
    if tokens:
        rotate_heads[(tokens, triton.cdiv(heads, launch["HEADS"]))](
            qkv, None if norm is None else norm.weight, *angles, as_bytes(arena), slots, out,
            layer, 0.0 if norm is None else norm.eps, qkv.stride(0), *arena.stride()[:5],
            Q=q_heads, KV=pairs, DIM=dim, WIDE=triton.next_power_of_2(dim), TURNING=turning, BLOCK=block,
            NORM=norm is not None, WHOLE=norm is not None and norm.whole,
            MOST_Q=triton.next_power_of_2(q_heads), MOST_KV=triton.next_power_of_2(pairs), **launch,
        )  # fmt: skip
    return out


@triton.jit
def copy_runs(
    arena: tl.tensor, sources: tl.tensor, targets: tl.tensor, size: tl.tensor, PIECE: tl.constexpr
) -> None:
    """Kernel: copy ``PIECE`` numbers of a block of ``size`` numbers to another block. Programs are (pair of
    source and target, piece). No block may be both a source and a target. Pointers are ``arena``, ``sources``
    and ``targets``."""
    pair, cells = tl.program_id(0), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    source, target = tl.load(sources + pair).to(tl.int64), tl.load(targets + pair).to(tl.int64)
    inside = cells < size
    tl.store(arena + target * size + cells, tl.load(arena + source * size + cells, inside), inside)


def copy_blocks(
    arena: Tensor, sources: Iterable[int], targets: Iterable[int], device: Device | None = None
) -> None:
    """Copy whole blocks of ``arena``, ``sources[i]`` to ``targets[i]``, as if one after the other in the
    order given; in most cases in one launch. ``device``: the arena's; None: found from it."""
    device = device or device_of(arena.device)
    if arena.dtype == E4M3:
        arena = arena.view(torch.int16)
    size, launch = arena.stride(0), chosen("copy", arena, 0)
    for wave in waves(zip(sources, targets, strict=True)):
        columns = [np.array(column, dtype=np.int64) for column in zip(*wave, strict=True)]
        origins, ends = device.upload(columns)
        copy_runs[(len(wave), triton.cdiv(size, launch["PIECE"]))](arena, origins, ends, size, **launch)


def waves(pairs: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cut block copies, (source, target), into lists of copies that can run in one launch, as none depends on
    another; the lists in order. A new list begins before a copy that reads a target of an earlier one of its
    list, or writes a source or target of one."""
    wave: list[tuple[int, int]] = []
    read, written = set[int](), set[int]()
    for source, target in pairs:
        if source in written or target in read or target in written:
            yield wave
            wave, read, written = [], set(), set()
        wave.append((source, target))
        read.add(source)
        written.add(target)
    if wave:
        yield wave
