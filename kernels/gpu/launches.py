"""The launches of kernels to compile ahead of time: every kernel at the shapes that models have.

Each function makes tensors on the given device and yields names with functions that launch: on ``meta`` a
launch compiles, on a GPU it also runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..batch import PagedBatch
from ..float8 import E4M3
from ..interface import Attention, HeadNorm
from ..low_rank import LowRank
from ..quantised import FP8, FP8_FIXED, FP8_GROUPS, HALVED, INT8, Quantised, Scheme
from . import invariant_kernels, low_rank, penalties, quantised, rowwise, seeded_sampling, store
from .decode import decode_attention
from .extend import extend_attention
from .rows import look_up

ROWS = 4
LAYERS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """The attention of a model to compile for: its heads, head size, block size and layer settings.
    ``stored``: the type of KV; None: ``dtype``. ``sinks``: whether its heads have attention sinks."""

    name: str
    q_heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    block: int = 16
    stored: torch.dtype | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False


SHAPES = (
    Shape("qwen3-8b", 32, 8, 128),
    Shape("gpt-oss", 64, 8, 64, window=128, sinks=True),
    Shape("gemma-2", 8, 4, 256, window=4096, soft_cap=50.0),
    Shape("qwen3-0.6b", 16, 8, 128),
    Shape("phi-2", 32, 32, 80, torch.float16),
    Shape("phi-3", 32, 32, 96),
    Shape("llama-70b", 64, 8, 128, block=64),
    Shape("qwen3-8b fp32", 32, 8, 128, torch.float32),
    Shape("qwen3-8b e4m3", 32, 8, 128, stored=E4M3),
)

Launch = Callable[[], object]


def empty(*shape: int, dtype: torch.dtype = torch.int64, device: torch.device) -> Tensor:
    """An int64 tensor (or of ``dtype``) of zeros, so that block ids and lengths in it are in range if it has
    memory."""
    return torch.zeros(shape, dtype=dtype, device=device)


def attention(shape: Shape, device: torch.device) -> Iterator[tuple[str, Launch]]:
    """Yield the names and launches of decode, extend and batch-invariant attention for ``shape``."""
    arena = empty(
        8, LAYERS, 2, shape.kv_heads, shape.block, shape.dim, dtype=shape.stored or shape.dtype, device=device
    )
    query = empty(ROWS, shape.q_heads, shape.dim, dtype=shape.dtype, device=device)
    ids, starts = empty(ROWS, device=device), empty(ROWS + 1, device=device)
    tables, lines = (empty(*size, dtype=torch.int32, device=device) for size in ((ROWS, 600), (ROWS,)))
    batch = PagedBatch(ids, ids, starts, ids, tables, lines, ())
    how = Attention(shape.dim**-0.5, shape.window, shape.soft_cap)
    sinks = empty(shape.q_heads, dtype=torch.float32, device=device) if shape.sinks else None
    yield f"decode {shape.name}", lambda: decode_attention(query, arena, 1, batch, how, sinks)
    yield f"extend {shape.name}", lambda: extend_attention(query, arena, 1, batch, how, sinks)
    yield (
        f"invariant {shape.name}",
        lambda: invariant_kernels.extend_attention(query, arena, 1, batch, how, sinks),
    )


def stores(shape: Shape, device: torch.device) -> Iterator[tuple[str, Launch]]:
    """Yield the names and launches of the kernel that norms, rotates and stores K and V, and of the one that
    copies blocks, for ``shape``."""
    heads = shape.q_heads + 2 * shape.kv_heads
    arena = empty(
        8, LAYERS, 2, shape.kv_heads, shape.block, shape.dim, dtype=shape.stored or shape.dtype, device=device
    )
    qkv = empty(ROWS, heads, shape.dim, dtype=shape.dtype, device=device)
    angle = empty(ROWS, shape.dim, dtype=shape.dtype, device=device)
    weight = empty(heads - shape.kv_heads, shape.dim, dtype=shape.dtype, device=device)
    norm = HeadNorm(weight, 1e-6) if "qwen" in shape.name else None
    slots = empty(ROWS, device=device)
    yield (
        f"store {shape.name}",
        lambda: store.rotate_and_store(qkv, norm, (angle, angle), arena, 1, slots),
    )
    yield f"copy {shape.name}", lambda: store.copy_blocks(arena, [0, 1], [2, 3])
    tables = empty(ROWS, 600, dtype=torch.int32, device=device)
    yield f"look up {shape.name}", lambda: look_up(tables, slots, slots, slots, slots, shape.block)


def rows(hidden: int, device: torch.device) -> Iterator[tuple[str, Launch]]:
    """Yield the names and launches of RMSNorm, of the sum with its norm, and of the gated activation, for one
    hidden size; the gate is three times as wide."""
    x = empty(ROWS, hidden, dtype=torch.bfloat16, device=device)
    wide = empty(ROWS, 6 * hidden, dtype=torch.bfloat16, device=device)
    yield f"norm {hidden}", lambda: rowwise.rms_norm(x, x[0], 1e-6)
    yield f"add and norm {hidden}", lambda: rowwise.add_norm(x, x, x[0], 1e-6)
    yield f"gate {hidden}", lambda: rowwise.gated(wide, "silu")


def draws(vocab: int, device: torch.device) -> Iterator[tuple[str, Launch]]:
    """Yield the name and launch of sampling for a vocabulary of ``vocab`` tokens."""
    logits = empty(ROWS, vocab, dtype=torch.float32, device=device)
    whole, real = empty(ROWS, device=device), empty(ROWS, dtype=torch.float64, device=device)
    arguments = (logits, real, whole, real, whole, whole)
    yield f"draw {vocab}", partial(seeded_sampling.sample, *arguments, min_p=real)


def edits(vocab: int, device: torch.device) -> Iterator[tuple[str, Launch]]:
    """Yield the names and launches of what sampling needs beside the draw, for a vocabulary of ``vocab``
    tokens: penalties, a grammar's mask, and log probabilities."""
    logits = empty(ROWS, vocab, dtype=torch.float32, device=device)
    rows, tokens = empty(ROWS, device=device), empty(300, device=device)
    strengths = [empty(ROWS, dtype=torch.float64, device=device) for _ in range(3)]
    masks = empty(ROWS, -(-vocab // 64), device=device)
    tally = empty(ROWS, vocab, dtype=torch.int32, device=device)
    yield f"count {vocab}", partial(penalties.count, tally, tokens, tokens, tokens)
    yield f"penalties {vocab}", partial(penalties.penalize, logits, rows, tally, rows, *strengths)
    yield f"mask {vocab}", partial(penalties.allow, logits, rows, masks)
    for most in (0, 20):
        yield f"scores {vocab} top {most}", partial(seeded_sampling.log_probabilities, logits, rows, most)


def linears(width: int, outs: int, device: torch.device) -> Iterator[tuple[str, Launch]]:
    """Yield the names and launches of the batch-invariant matrix product from ``width`` to ``outs`` numbers,
    in bfloat16 and float32."""
    for dtype in (torch.bfloat16, torch.float32):
        x = empty(ROWS, width, dtype=dtype, device=device)
        weight = empty(outs, width, dtype=dtype, device=device)
        kind = str(dtype).removeprefix("torch.")
        yield f"product {width} to {outs} {kind}", partial(invariant_kernels.linear, x, weight)


SCHEMES = (
    Scheme("int4", 128),
    Scheme("int4", 128, zeros=True),
    Scheme("int4", 32),
    Scheme("int8"),
    Scheme("mxfp4", 32),
    Scheme("int8", activations=INT8),
    Scheme("fp8", activations=FP8),
    Scheme("fp8", activations=FP8_FIXED),
    Scheme("fp8", 128, activations=FP8_GROUPS),
)
"""One of each kind of quantised weights."""


def quantised_products(width: int, outs: int, device: torch.device) -> Iterator[tuple[str, Launch]]:
    """Yield the names and launches of products with quantised weights from ``width`` to ``outs`` numbers, for
    few tokens and for many."""
    for scheme in SCHEMES:
        weight = quantised_weight(scheme, width, outs, device)
        for tokens in (ROWS, 8 * quantised.FEW):
            x = empty(tokens, width, dtype=torch.bfloat16, device=device)
            kind = f"{scheme.codes}-{scheme.group}{'z' * scheme.zeros} {scheme.activations or '16 bits'}"
            name = f"quantised {kind} {'many' if tokens > quantised.FEW else 'few'} {outs}"
            yield name, partial(quantised.quantised_linear, x, weight)


def quantised_weight(scheme: Scheme, width: int, outs: int, device: torch.device) -> Quantised:
    """A matrix ``[outs, width]`` of a scheme, with whatever numbers."""
    halved = scheme.codes in HALVED
    kind = torch.uint8 if halved else torch.int8 if scheme.codes == "int8" else E4M3
    codes = empty(outs, width // 2 if halved else width, dtype=kind, device=device)
    groups = scheme.groups(width)
    scale = torch.uint8 if scheme.codes == "mxfp4" else torch.bfloat16
    zeros = empty(outs, groups, dtype=torch.uint8, device=device) if scheme.zeros else None
    fixed = empty(1, dtype=torch.float32, device=device) if scheme.activations == FP8_FIXED else None
    return Quantised(scheme, width, codes, empty(outs, groups, dtype=scale, device=device), zeros, fixed)


def adapters(
    width: int, widths: tuple[int, ...], rank: int, device: torch.device
) -> Iterator[tuple[str, Launch]]:
    """Yield the names and launches of what adapters of ``rank`` add to a product of ``width`` numbers with
    parts of these ``widths``, in bfloat16 and float32."""
    for dtype in (torch.bfloat16, torch.float32):
        x, out = (empty(ROWS, size, dtype=dtype, device=device) for size in (width, sum(widths)))
        pairs = LowRank.empty(2, rank, width, widths, x)
        kind = str(dtype).removeprefix("torch.")
        name = f"adapters of rank {rank}, {width} to {len(widths)} parts, {kind}"
        yield name, partial(low_rank.add_low_rank, out, x, pairs, empty(ROWS, device=device))


def all_launches(device: torch.device) -> Iterator[tuple[str, Launch]]:
    """Yield every launch that `ahead` compiles, each with a name that says its kernel and shape."""
    for shape in SHAPES:
        yield from attention(shape, device)
        yield from stores(shape, device)
    for hidden in (1024, 4096, 8192):
        yield from rows(hidden, device)
    for width, outs in ((1024, 4096), (4096, 24_576)):
        yield from linears(width, outs, device)
    yield from quantised_products(4096, 24_576, device)
    yield from quantised_products(4096, 64, device)  # split along the width
    for width, widths in ((576, (576, 192, 192)), (4096, (12_288, 12_288)), (12_288, (4096,))):
        for rank in (16, 256):
            yield from adapters(width, widths, rank, device)
    for vocab in (256, 151_936):  # one chunk, and many
        yield from draws(vocab, device)
    yield from edits(151_936, device)
