"""Part ``ceilings``: the limits of this machine, with which the other parts' figures are compared."""

from __future__ import annotations

import mmap
import os
import time

import torch
from torch import Tensor

from ...kernels.device import device_of
from ...kvstore.host.registration import PIECE_BYTES
from ...kvstore.host.slots import make_memory
from .measure import Bench, Figure, copy_rate, figure, median_us, note


def ceilings(bench: Bench) -> list[Figure]:
    """Measure the rate of a copy on the device (read + write), of a bf16 matrix product, and of copies from
    pinned host memory."""
    size, side = bench.size(1 << 30, 1 << 20), bench.size(8192, 64)
    target = torch.empty(size, dtype=torch.uint8, device=bench.device)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    left, right = (torch.randn(side, side, device=bench.device).bfloat16() for _ in range(2))
    product = median_us(bench, [lambda: left @ right])
    upload = median_us(bench, [lambda: target.copy_(host)], captured=False)
    return [
        *_registered(bench, target),
        figure("device copy", copy_rate(bench) / 1e3, "GB/s"),
        figure("bf16 matmul", 2 * side**3 / product / 1e6, "TFLOP/s"),
        figure("pinned host to device", size / upload / 1e3, "GB/s"),
    ]


def _registered(bench: Bench, target: Tensor) -> list[Figure]:
    """Measure the host tier's memory: the time to register a piece of it with the device, and the rate of
    copies from it afterwards."""
    size = bench.size(16 * PIECE_BYTES, 1 << 20)
    fd = make_memory(size)
    memory = mmap.mmap(fd, size)
    os.close(fd)
    host, device = torch.frombuffer(memory, dtype=torch.uint8), device_of(bench.device)
    begun = time.perf_counter()
    refusal = device.register(host.data_ptr(), size)
    took = (time.perf_counter() - begun) * PIECE_BYTES / size * 1e3
    if refusal:
        return [note("host tier's memory registered", refusal)]
    upload = median_us(bench, [lambda: target[:size].copy_(host, non_blocking=True)], captured=False)
    device.unregister([host.data_ptr()])
    return [
        figure("register 16 MiB of the host tier's memory", took, "ms"),
        figure("registered host to device", size / upload / 1e3, "GB/s"),
    ]
