"""Parts ``correct``, ``decode`` and ``prefill``: the attention kernels, first their correctness, then their
speed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...kernels.gpu.attention import paged_attention
from ...kernels.gpu.decode import decode_attention
from ...kernels.gpu.extend import extend_attention
from ...kernels.interface import Attention
from ...kernels.reference.attention import extend_attention as reference
from . import peers
from .measure import Bench, Figure, compared, figure, median_us, note, of_copy_rate, reason
from .paging import LAYERS, Heads, Paged, paged

QWEN_8B = Heads(32, 8, 128)
ODD = (
    (Heads(6, 2, 64, 32), Attention(0.125, window=37)),
    (Heads(8, 8, 80, 16, torch.float16), Attention(0.11)),
    (Heads(15, 3, 96), Attention(0.1, soft_cap=20.0)),
    (QWEN_8B, Attention(0.088)),
    (Heads(8, 4, 256), Attention(0.06, window=100, soft_cap=50.0)),
    (Heads(64, 8, 64, 64), Attention(0.125)),
)
DEEP = 36
MOST_OF_FREE = 0.7
MOST_WRONG = 0.02
"""The greatest allowed absolute error against fp64, for values of about 1; bf16 rounds them by up to 0.004."""


def correct(bench: Bench) -> list[Figure]:
    """The greatest error of every attention kernel against fp64, for several odd shapes, in 16-bit types."""
    lines = []
    firsts, counts = [0, 16, 200, 1030, 5], [1, 33, 1, 130, 70]
    if bench.rehearsal:
        firsts, counts = [0, 16, 20], [1, 33, 1]
    for heads, how in ODD:
        kind = f"{heads.query}/{heads.kv} heads of {heads.dim}, block {heads.block}"
        dtype = torch.float16 if bench.rehearsal else heads.dtype  # the interpreter's bf16 product is wrong
        shape = Heads(heads.query, heads.kv, heads.dim, heads.block, dtype)
        for name, kernel, made in (
            ("extend", paged_attention, paged(shape, firsts, counts, bench.device)),
            ("decode", decode_attention, paged(shape, firsts, [1] * len(firsts), bench.device)),
        ):
            try:
                got = kernel(made.query, made.arena, 1, made.batch, how)
                wrong = (got.double() - reference(made.query, made.arena, 1, made.batch, how)).abs().max()
                lines.append(figure(f"{name} {kind}, error", float(wrong), "", MOST_WRONG, "lower"))
            except Exception as error:  # one shape that fails must not hide the others
                lines.append(note(f"{name} {kind}, error", reason(error)) | {"met": False})
    return lines


def _kv_bytes(heads: Heads, tokens: int) -> int:
    return 2 * tokens * heads.kv * heads.dim * heads.dtype.itemsize


def decode(bench: Bench) -> list[Figure]:
    """Time decode attention with 64 sequences of 1k to 64k tokens, and with one of 32k: as a share of the copy
    rate, two of them against other libraries."""
    lines = []
    how = Attention(QWEN_8B.dim**-0.5)
    goals = {(64, 8192): 90.0, (1, 32768): 75.0}
    for rows, length in (*goals, (64, 1024), (64, 32768), (64, 65536)):
        goal = goals.get((rows, length))
        rows, length = bench.size(rows, 2), bench.size(length, 40)
        made = paged(QWEN_8B, [length - 1] * rows, [1] * rows, bench.device)
        name = f"decode {rows} x {length}"
        micros = median_us(bench, calls(decode_attention, made, how))
        lines += of_copy_rate(bench, name, rows * _kv_bytes(QWEN_8B, length), micros, goal)
        if goal is not None:
            others = peers.flashinfer(bench, made, QWEN_8B)
            if rows == 1:
                others |= peers.sdpa(bench, made, causal=False) | peers.flex(bench, made)
            lines += compared(name, micros, others, {"FlashInfer": 1.0})
        bench.tell(lines)
        del made
    return lines + _deep(bench, how)


def _deep(bench: Bench, how: Attention) -> list[Figure]:
    """Time decode attention with 64 sequences of 8k tokens in an arena with a whole model's number of layers,
    which makes blocks longer."""
    rows, length = bench.size(64, 2), bench.size(8192, 40)
    layer = rows * _kv_bytes(QWEN_8B, length)
    layers = DEEP
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        layers = min(DEEP, int(MOST_OF_FREE * torch.cuda.mem_get_info()[0]) // layer)
    if layers <= LAYERS:
        return [note(f"decode {rows} x {length}, {DEEP} layers", "does not fit into this device's memory")]
    made = paged(QWEN_8B, [length - 1] * rows, [1] * rows, bench.device, layers=layers)
    micros = median_us(bench, calls(decode_attention, made, how))
    return of_copy_rate(bench, f"decode {rows} x {length}, {layers} layers", layer, micros)


def calls(kernel: Callable[..., Tensor], made: Paged, how: Attention) -> list[Callable[[], object]]:
    """A call of the kernel for each layer, so that each call reads data that the ones before have not."""
    layers = made.arena.shape[1]
    return [partial(kernel, made.query, made.arena, at, made.batch, how) for at in range(layers)]


def prefill(bench: Bench) -> list[Figure]:
    """Time the kernel for prompts (`extend_attention`) with a prompt of 8k tokens, and with 256 tokens behind
    8k. Rates count only the pairs of tokens that the causal mask allows."""
    lines = []
    how = Attention(QWEN_8B.dim**-0.5)
    for first, count in ((0, 8192), (8192, 256)):
        first, count = bench.size(first, first and 40), bench.size(count, 33)
        made = paged(QWEN_8B, [first], [count], bench.device)
        name = f"prefill {count} on {first}"
        micros = median_us(bench, calls(extend_attention, made, how))
        pairs = count * first + count * (count + 1) // 2
        rate = 4 * QWEN_8B.query * QWEN_8B.dim * pairs / micros / 1e6
        lines += [figure(f"{name}, time", micros, "us"), figure(f"{name}, rate", rate, "TFLOP/s")]
        dense = peers.sdpa(bench, made, causal=True)
        others = dense | peers.flashinfer(bench, made, QWEN_8B) | peers.flex(bench, made)
        times = [one for one in dense.values() if isinstance(one, float)]
        if times:
            lines.append(figure(f"{name}, ours against the fastest SDPA", min(times) / micros, "x", 0.6))
        lines += compared(name, micros, others, {"FlashInfer": 1.0})
    return lines
