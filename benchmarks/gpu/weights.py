"""Part ``weights``: products with quantised weights, right and how fast, against bf16 and the copy rate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.gpu import quantised as ours
from ...kernels.gpu.launches import SCHEMES
from ...kernels.quantised import (
    FP8_FIXED,
    HALVED,
    Quantised,
    Scheme,
    activated,
    halved,
    quantised,
)
from .measure import Bench, Figure, figure, median_us, note, of_copy_rate, reason

SHAPES = ((4096, 6144), (4096, 24_576), (12_288, 4096))
"""Width and outputs of Qwen3-8B's maps to queries, keys and values, to gate and up, and down."""
ODD = (1088, 1040)
"""A width that no step divides, and outputs that no tile divides; torch's FP8 needs multiples of 16."""
FEW, MANY = (1, 4, 16), (64, 512, 4096)
COPIES = 4
"""The number of weights that are read one after the other: together they are larger than any L2 cache."""
MOST_WRONG = 0.01
"""The greatest error against the reference, as a share of its greatest number: bf16 rounds results by up to
0.004, and activations may be rounded to the next code."""


def weights(bench: Bench) -> list[Figure]:
    """The greatest error of every scheme against the reference; then the time of its products, for few tokens
    as a share of the copy rate, and how many times faster they are than those in bf16."""
    lines = _errors(bench)
    bench.tell(lines)
    for width, outs in SHAPES[: bench.size(len(SHAPES), 1)]:
        width, outs = bench.size(width, 256), bench.size(outs, 96)
        dense = _dense(bench, width, outs)
        for scheme in SCHEMES:
            lines += _timed(bench, scheme, dense)
            bench.tell(lines)
    return lines


def _dtype(bench: Bench) -> torch.dtype:
    return torch.float16 if bench.rehearsal else torch.bfloat16  # the interpreter's bf16 product is wrong


def _random(bench: Bench, *shape: int) -> Tensor:
    return torch.randn(shape, device=bench.device, dtype=_dtype(bench))


def weight_of(bench: Bench, scheme: Scheme, width: int, outs: int) -> Quantised:
    """A matrix of a scheme with random codes, and numbers around 1."""
    device, groups = bench.device, scheme.groups(width)
    scales = torch.rand(outs, groups, device=device) + 0.5
    if scheme.codes == "fp8":
        made = quantised(torch.randn(outs, width, device=device), Scheme("fp8"))
        return replace(
            made,
            scheme=scheme,
            scales=made.scales.expand(outs, groups).contiguous(),
            fixed=torch.full((1,), 0.02, device=device) if scheme.activations == FP8_FIXED else None,
        )
    if scheme.codes in HALVED:
        codes = halved(torch.randint(0, 16, (outs, width), device=device, dtype=torch.uint8))
        scales = (scales / 5).to(_dtype(bench))
    else:
        codes = torch.randint(-127, 128, (outs, width), device=device, dtype=torch.int8)
        scales = (scales / 60).to(_dtype(bench))
    if scheme.codes == "mxfp4":
        scales = torch.randint(124, 128, (outs, groups), device=device, dtype=torch.uint8)
    zeros = torch.randint(1, 16, (outs, groups), device=device, dtype=torch.uint8) if scheme.zeros else None
    return Quantised(scheme, width, codes, scales, zeros)


def _errors(bench: Bench) -> list[Figure]:
    lines = []
    width, outs = ODD if not bench.rehearsal else (160, 48)
    for scheme in SCHEMES:
        wide = width // 128 * 128 if scheme.group == 128 and scheme.codes != "fp8" else width
        try:
            weight = weight_of(bench, scheme, wide, outs)
            for tokens in (1, 16, 17, bench.size(200, 18)):
                x = _random(bench, tokens, wide)
                wanted = activated(x, weight).double() @ weight.numbers().double().T
                for name, product in (("", ours.quantised_linear), (" invariant", ours.invariant_linear)):
                    wrong = (product(x, weight).double() - wanted).abs().max() / wanted.abs().max()
                    told = f"{scheme}, {tokens} tokens{name}, error"
                    lines.append(figure(told, float(wrong), "", MOST_WRONG, "lower"))
        except Exception as error:  # one scheme that fails must not hide the others
            lines.append(note(f"{scheme}, error", reason(error)) | {"met": False})
    return lines


@dataclass(frozen=True, slots=True)
class _Dense:
    """Products in bf16 of one shape: the weights, and microseconds by the number of tokens."""

    width: int
    outs: int
    micros: dict[int, float]


def _tokens(bench: Bench) -> tuple[int, ...]:
    return (1, 18) if bench.rehearsal else (*FEW, *MANY)


def _dense(bench: Bench, width: int, outs: int) -> _Dense:
    some = [_random(bench, outs, width) for _ in range(COPIES)]
    micros = {
        tokens: median_us(bench, [partial(F.linear, _random(bench, tokens, width), one) for one in some])
        for tokens in _tokens(bench)
    }
    return _Dense(width, outs, micros)


def _timed(bench: Bench, scheme: Scheme, dense: _Dense) -> list[Figure]:
    some = [weight_of(bench, scheme, dense.width, dense.outs) for _ in range(COPIES)]
    lines = []
    for tokens, bf16 in dense.micros.items():
        x = _random(bench, tokens, dense.width)
        name = f"{scheme}, {dense.width} to {dense.outs}, {tokens} tokens"
        micros = median_us(bench, [partial(ours.quantised_linear, x, one) for one in some])
        if tokens <= FEW[-1]:
            moved = some[0].nbytes + x.nbytes + tokens * dense.outs * x.itemsize
            lines += of_copy_rate(bench, name, moved, micros)
        else:
            rate = 2 * tokens * dense.width * dense.outs / micros / 1e6
            lines += [figure(f"{name}, time", micros, "us"), figure(f"{name}, rate", rate, "TFLOP/s")]
        lines.append(figure(f"{name}, against bf16", bf16 / micros, "x"))
    return lines
