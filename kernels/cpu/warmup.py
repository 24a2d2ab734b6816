"""Compiles every kernel for one element type before the first step; later starts load them from disk.

Memory used for compiling would stay with the process, so another process does it: ``python -m
holdfast.kernels.cpu.warmup DTYPE [TYPE OF PACKED WEIGHTS …]``.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numba
import numpy as np
import torch
from llvmlite import binding

from ..low_rank import LowRank
from ..packed import Packed, plain
from ..packed_types import PANEL, TYPES
from . import backend, cores
from .compiling import LAYER, cache_folder, join_torch, leave_compiler

log = logging.getLogger(__name__)


class Unfit(Exception):
    """This machine or process cannot run the backend; the text says why."""


def warm(
    dtype: torch.dtype,
    packed: Sequence[str] = (),
    compiling: Callable[[float, str], None] = lambda done, what: None,
) -> None:
    """Make every kernel ready for ``dtype``, and for weights of the types ``packed`` (`kernels.packed.TYPES`):
    compiled, or loaded from the cache on disk. ``compiling`` is called before each kernel with the progress,
    0 to 1, and a text that names it.

    Raises:
        Unfit: a processor without conversions of ``dtype``, no OpenMP library, or another threading layer in
            this process.
    """
    if dtype == torch.float16 and not binding.get_host_cpu_features().get("f16c"):
        raise Unfit("this processor has no float16 conversions (f16c)")
    try:
        join_torch()
    except ValueError as error:  # numba's, which does not say what is missing
        raise Unfit("numba finds no OpenMP library (libgomp.so.1; Debian's package libgomp1)") from error
    mark = _mark(dtype, packed)
    if mark is not None and not mark.exists():
        _compile_apart(dtype, packed, compiling)
    run(dtype, packed, compiling)
    layer = numba.threading_layer()
    if layer != LAYER:
        raise Unfit(f"numba computes on the threading layer {layer!r} in this process, not on {LAYER!r}")
    if mark is not None:
        mark.touch()
    leave_compiler()


def run(dtype: torch.dtype, packed: Sequence[str], told: Callable[[float, str], None]) -> None:
    """Run every kernel once on a few numbers of ``dtype``, which compiles those that are not on disk.
    ``told`` is called before each with the progress, 0 to 1, and a text that names it."""
    steps = [*_steps(dtype), *_packed_steps(dtype, packed)]
    for number, (name, call) in enumerate(steps):
        told(number / len(steps), f"compiling {name}")
        with torch.inference_mode():
            call()


def _mark(dtype: torch.dtype, packed: Sequence[str]) -> Path | None:
    """The path of an empty file: if it exists, all kernels for ``dtype``, the types ``packed`` and this
    processor are on disk. None if the cache has no folder that can be written."""
    folder = cache_folder()
    machine = f"{binding.get_host_cpu_name()} {sorted(binding.get_host_cpu_features().items())} {sys.version}"
    digest = hashlib.blake2b(f"{machine} {numba.__version__}".encode(), digest_size=8).hexdigest()
    return None if folder is None else Path(folder) / "-".join((_name(dtype), *packed, digest))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compile_apart(
    dtype: torch.dtype, packed: Sequence[str], compiling: Callable[[float, str], None]
) -> None:
    """Compile all kernels for ``dtype`` in another process, which fills the cache on disk. ``compiling`` is
    called with its progress, 0 to 1, and a text. If the process fails, a warning is logged, and this process
    compiles when it runs the kernels."""
    command = [sys.executable, "-m", __name__, _name(dtype), *packed]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            share, _, what = line.strip().partition(" ")
            compiling(float(share), what)
    if process.returncode:
        log.warning("compiling the kernels apart ended with %s; compiling them here", process.returncode)


def _steps(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield for each kernel its name and a function that calls it once, on a few numbers of ``dtype``; the
    call compiles it."""
    dim, rows = 32, 3
    x, weight = torch.ones((rows, dim), dtype=dtype), torch.ones((dim, dim), dtype=dtype)
    panels, first = plain(weight), torch.zeros(1, dtype=torch.int64)
    pieces = np.zeros((1, 2), dtype=np.int64)
    some = torch.zeros(64, dtype=torch.uint8)
    yield "cores", lambda: cores.computing(1)
    yield "copying", lambda: backend.copy_pieces(some, some.clone(), pieces, 64)
    yield "the operations of layers", lambda: backend.rms_norm(x, weight[0], 1e-6)
    pairs, slots = LowRank.empty(1, 1, dim, (dim,), x), torch.zeros(rows, dtype=torch.int64)
    yield "adapters", lambda: backend.add_low_rank(x.clone(), x, pairs, slots)
    yield "products", lambda: backend.packed_linear(x, panels)
    yield "rows", lambda: backend.packed_rows(panels, first, dtype)
    cells, strengths = torch.zeros((rows, dim), dtype=torch.int32), [torch.ones(1).double()] * 3
    yield "penalties", lambda: backend.penalize(cells.float(), first, cells, first, *strengths)


def _packed_steps(dtype: torch.dtype, packed: Sequence[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """As `_steps`, the kernels for weights of the types ``packed``."""
    for name in packed:
        kind = TYPES[name]
        matrix = Packed(kind, PANEL, kind.block, torch.zeros((1, 1, kind.unit), dtype=torch.uint8))
        x, ids = torch.ones((1, kind.block), dtype=dtype), torch.zeros(1, dtype=torch.int64)
        yield f"products of {name}", partial(backend.packed_linear, x, matrix)
        yield f"rows of {name}", partial(backend.packed_rows, matrix, ids, dtype)


if __name__ == "__main__":
    join_torch()
    run(getattr(torch, sys.argv[1]), sys.argv[2:], lambda done, what: print(f"{done:.2f} {what}", flush=True))
