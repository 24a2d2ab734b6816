"""Tile sizes, warps and pipeline stages: committed data per kernel, architecture, type width and head size.

They are loaded once from ``configurations.json``; nothing is tuned when an engine starts. A configuration is
keyword arguments for a launch.
"""

from __future__ import annotations

import functools
import json
from importlib import resources

import torch
import triton

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities in the data; a device uses the nearest one not above its own."""

Table = dict[str, dict[str, dict[str, dict[str, int]]]]


@functools.cache
def table() -> Table:
    """The content of ``configurations.json``: a kernel's launch arguments, by the kernel's name, the
    architecture (``sm_NN``), and ``<bits>-<size>``: the bits of an element and the numbers of a head or
    row."""
    text = resources.files(__package__).joinpath("configurations.json").read_text()
    loaded: Table = json.loads(text)
    return loaded


@functools.cache
def architecture(device: torch.device) -> int:
    """The compute capability that configurations of the current GPU are listed under: the nearest of
    `ARCHITECTURES` not above its own; the first for triton's interpreter."""
    if triton.knobs.runtime.interpret:
        return ARCHITECTURES[0]
    target = triton.runtime.driver.active.get_current_target()
    return max(known for known in ARCHITECTURES if known <= target.arch)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of the GPU's multiprocessors; 1 if ``device`` is not a GPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def configuration(kernel: str, arch: int, dtype: torch.dtype, size: int) -> dict[str, int]:
    """The launch arguments of ``kernel`` on architecture ``arch`` for elements of ``dtype`` and heads (or
    rows) of ``size`` numbers.

    A size without an entry uses the next larger one, or the largest there is.
    """
    rows = table()[kernel][f"sm_{arch}"]
    bits = dtype.itemsize * 8
    if bits == 8 and not any(name.startswith("8-") for name in rows):
        bits = 16  # only KV is stored in 8 bits
    known = sorted(int(name.split("-")[1]) for name in rows if name.startswith(f"{bits}-"))
    return rows[f"{bits}-{next((one for one in known if one >= size), known[-1])}"]


def chosen(kernel: str, tensor: torch.Tensor, size: int, stored: torch.dtype | None = None) -> dict[str, int]:
    """The launch arguments of ``kernel`` for the device and type of ``tensor``, and heads or rows of ``size``
    numbers. ``stored``: the type of stored KV; if it is of 8 bits and ``tensor`` of 16, the arguments for 8
    bits are used."""
    narrow = stored is not None and stored.itemsize == 1 and tensor.dtype.itemsize == 2
    dtype = stored if narrow and stored is not None else tensor.dtype
    return configuration(kernel, architecture(tensor.device), dtype, size)
