"""Tile sizes, warps and pipeline stages: committed data per kernel, architecture, type width and head size.

Loaded once from ``configurations.json``; nothing is tuned when an engine starts. Knows no kernel's body: a
configuration is the keyword arguments that a launch adds to its own.
"""

from __future__ import annotations

import functools
import json
from importlib import resources

import torch
import triton

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities that the data has rows for; a device uses the nearest one not above its own."""

Table = dict[str, dict[str, dict[str, dict[str, int]]]]


@functools.cache
def table() -> Table:
    """The committed data: kernel, ``sm_NN``, ``<bits>-<size>``, keyword arguments."""
    text = resources.files(__package__).joinpath("configurations.json").read_text()
    loaded: Table = json.loads(text)
    return loaded


@functools.cache
def architecture(device: torch.device) -> int:
    """Which of `ARCHITECTURES` a device uses: triton's target; for the interpreter the first."""
    if triton.knobs.runtime.interpret:
        return ARCHITECTURES[0]
    target = triton.runtime.driver.active.get_current_target()
    return max(known for known in ARCHITECTURES if known <= target.arch)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once at least; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def configuration(kernel: str, arch: int, dtype: torch.dtype, size: int) -> dict[str, int]:
    """The launch arguments of ``kernel`` for elements of ``dtype`` and heads (or rows) of ``size`` numbers.

    Sizes without a row of their own use the next larger one.
    """
    rows = table()[kernel][f"sm_{arch}"]
    bits = dtype.itemsize * 8
    if bits == 8 and not any(name.startswith("8-") for name in rows):
        bits = 16  # KV is narrow, what computes with it is not
    known = sorted(int(name.split("-")[1]) for name in rows if name.startswith(f"{bits}-"))
    return rows[f"{bits}-{next((one for one in known if one >= size), known[-1])}"]


def chosen(kernel: str, tensor: torch.Tensor, size: int, stored: torch.dtype | None = None) -> dict[str, int]:
    """The configuration for ``tensor``'s device and type; with 16 bits, perhaps that of narrower KV."""
    narrow = stored is not None and stored.itemsize == 1 and tensor.dtype.itemsize == 2
    dtype = stored if narrow and stored is not None else tensor.dtype
    return configuration(kernel, architecture(tensor.device), dtype, size)
