"""How our loops are compiled: once per element type, kept on disk, on torch's own pool of threads.

Knows numba; nothing of what the loops compute.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

# Torch first: it brings its libgomp into the global scope, where numba's pool then finds it too. So both
# compute on one pool, and neither's waiting threads spin on the cores that the other needs.
import torch
from numba import config, njit, set_num_threads

__all__ = [
    "FAST",
    "LAYER",
    "cache_folder",
    "compiled",
    "in_order",
    "inlined",
    "join_torch",
    "leave_compiler",
    "parts_for",
]

LAYER = "omp"
"""Numba's threading layer: the default one aborts under concurrent calls, tbb has a pool of its own."""

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Liberties with sums and products; not those that would let NaN or infinity be anything else."""

LEFT = ("libllvmlite", "libtorch_cpu", "libtorch_python")
"""Libraries whose code is mostly for starting: compiling, and registering thousands of operators."""

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def cache_folder() -> str | None:
    """Where machine code is kept: beside the package, else in the user's cache; None where neither can be.

    Named after all our sources: numba itself looks only at the file that a function stands in, and would go
    on using what it inlined from another that has changed since.
    """
    here = Path(__file__).resolve().parent
    digest = blake2b(digest_size=8)
    for source in sorted(here.glob("*.py")):
        digest.update(source.read_bytes())
    for base in (here / "__pycache__", Path.home() / ".cache" / "holdfast"):
        folder = base / f"numba-{digest.hexdigest()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return str(folder)
    log.warning("no folder to keep compiled kernels in: they are compiled at every start")
    return None


def compiled(function: Function, **options: Any) -> Function:
    """A kernel that Python calls: machine code on disk, the interpreter lock released."""
    folder, before = cache_folder(), config.CACHE_DIR
    config.CACHE_DIR = folder or before
    try:
        made: Function = njit(
            cache=folder is not None, nogil=True, error_model="numpy", fastmath=FAST, **options
        )(function)
    finally:
        config.CACHE_DIR = before
    return made


def inlined(function: Function) -> Function:
    """A loop that kernels call; compiled into them."""
    made: Function = njit(nogil=True, error_model="numpy", fastmath=FAST)(function)
    return made


def in_order(function: Function) -> Function:
    """The same without liberties with the order of sums; numba grants them by function, to IR of ours too."""
    made: Function = njit(nogil=True, error_model="numpy", fastmath={"contract"})(function)
    return made


def join_torch() -> None:
    """Let numba use as many threads as torch does in this thread.

    Numba's start sets OpenMP's own number, which is torch's too now: it is put back.
    """
    threads = torch.get_num_threads()
    config.THREADING_LAYER = LAYER
    set_num_threads(min(threads, config.NUMBA_NUM_THREADS))
    torch.set_num_threads(threads)


def leave_compiler() -> None:
    """Give back the pages of code that only a start needs: the compiler's, 60 MB, and torch's, some 30 MB.

    They are mapped from their files, unwritten, and come back from there, one by one, where they are called.
    """
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not on Linux: they stay
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in maps:
        place, rights, *_ = line.split()
        if rights == "r-xp" and any(
            library in line for library in LEFT
        ):  # others hold what the loader has written
            first, last = (int(address, 16) for address in place.split("-"))
            advise(first, last - first, mmap.MADV_DONTNEED)


def parts_for(work: int, grain: int) -> int:
    """Into how many parts to cut ``work`` (of any unit), none smaller than ``grain``; at least one."""
    return max(1, min(torch.get_num_threads(), work // grain))
