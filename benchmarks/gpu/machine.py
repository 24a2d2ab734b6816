"""Part ``ceilings``: what this very machine can do at all. Everything else is measured against these."""

from __future__ import annotations

import torch

from .measure import Bench, Figure, copy_rate, figure, median_us


def ceilings(bench: Bench) -> list[Figure]:
    """Device copy (read + write), bf16 matmul, pinned host to device."""
    size, side = bench.size(1 << 30, 1 << 20), bench.size(8192, 64)
    target = torch.empty(size, dtype=torch.uint8, device=bench.device)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    left, right = (torch.randn(side, side, device=bench.device).bfloat16() for _ in range(2))
    product = median_us(bench, [lambda: left @ right])
    upload = median_us(bench, [lambda: target.copy_(host)], captured=False)
    return [
        figure("device copy", copy_rate(bench) / 1e3, "GB/s"),
        figure("bf16 matmul", 2 * side**3 / product / 1e6, "TFLOP/s"),
        figure("pinned host to device", size / upload / 1e3, "GB/s"),
    ]
