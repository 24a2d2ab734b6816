"""How the loops are compiled: once per element type, cached on disk, running on torch's own thread pool."""

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

# Import torch first: it loads its libgomp into the global scope. A numba that asks for libgomp.so.1 finds it
# there, and both use one pool of threads. The wheel of numba 0.68.1 asks for libgomp.so.1.0.0 and gets the
# system's, a second pool: its threads wait for GOMP_SPINCOUNT turns on the cores that torch needs.
import torch
from numba import config, njit, set_num_threads

LAYER = "omp"
"""Numba's threading layer: the default one aborts under concurrent calls, and tbb has its own pool."""

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Relaxations of floating point: sums and products may be reordered; NaN and infinity keep their meaning."""

LEFT = ("libllvmlite", "libtorch_cpu", "libtorch_python")
"""Parts of the names of libraries with much code that only a start runs: compiling, and registering thousands
of operators. `leave_compiler` gives their pages back."""

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def cache_folder() -> str | None:
    """The folder of the compiled code, made if it is not there: beside the package, else in the user's cache;
    None if neither can be written.

    Its name is a digest of all sources of this package. Numba checks only the file of a function, and would
    go on using code that it inlined from another file that has changed.
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


def compiled(function: Function, fast: object = FAST, parallel: bool = True) -> Function:
    """Decorator: compile a function that Python calls with numba. Its ``prange`` loops run on several
    threads, the machine code is cached on disk, and it runs without the interpreter's lock. ``fast``: how
    operations may be changed, also those of functions that are inlined into it. ``parallel``: whether it has
    such loops."""
    folder, before = cache_folder(), config.CACHE_DIR
    config.CACHE_DIR = folder or before
    try:
        made: Function = njit(
            cache=folder is not None, nogil=True, error_model="numpy", fastmath=fast, parallel=parallel
        )(function)
    finally:
        config.CACHE_DIR = before
    return made


def inlined(function: Function) -> Function:
    """Decorator: compile a function with numba that other compiled functions call; the compiler inlines it
    there."""
    made: Function = njit(nogil=True, error_model="numpy", fastmath=FAST)(function)
    return made


def in_order(function: Function) -> Function:
    """Decorator: compile a function with numba that other compiled functions call, inlined there, without
    reordering its sums (`inlined` lets them be reordered). Numba sets that per function, and LLVM IR of our
    own that the function calls is compiled with the same setting."""
    made: Function = njit(nogil=True, error_model="numpy", fastmath={"contract"})(function)
    return made


def exact(function: Function) -> Function:
    """Decorator: as `compiled`, with each operation rounded as it is written."""
    return compiled(function, fast=False)


def alone(function: Function) -> Function:
    """Decorator: as `exact`, for a function that runs on the calling thread alone."""
    return compiled(function, fast=False, parallel=False)


def join_torch() -> None:
    """Let numba use as many threads as torch does in this thread, on OpenMP.

    With one pool (see the import of torch) numba's start sets torch's number of threads too, so it is set back.
    """
    threads = torch.get_num_threads()
    config.THREADING_LAYER = LAYER
    set_num_threads(min(threads, config.NUMBA_NUM_THREADS))
    torch.set_num_threads(threads)


def leave_compiler() -> None:
    """Give the system back the memory pages of code that only a start needs: 60 MB of the compiler, some 30
    MB of torch.

    They are unmodified pages of mapped files, and are read again page by page if they are called.
    """
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not on Linux: the pages stay
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in maps:
        span, rights, *_ = line.split()
        # Other mappings hold data that the loader has written.
        if rights == "r-xp" and any(library in line for library in LEFT):
            first, last = (int(address, 16) for address in span.split("-"))
            advise(first, last - first, mmap.MADV_DONTNEED)


def parts_for(work: int, grain: int) -> int:
    """How many parts to cut ``work`` (a number of any unit) into, for the threads: at most one for each
    thread, none smaller than ``grain``, at least one."""
    return max(1, min(torch.get_num_threads(), work // grain))
