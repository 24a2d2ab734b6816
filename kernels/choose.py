"""Which backend computes: by what is asked for, the device, and what is installed.

Knows the backends by name and how each is made ready; not what they compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from . import reference
from .interface import Kernels

log = logging.getLogger(__name__)


class BackendMissing(Exception):
    """A backend that was asked for by name cannot compute here; the text says why."""


@dataclass(frozen=True, slots=True)
class Backend:
    """``name``: ``reference`` or ``cpu``. ``note``: why not the faster one, where it could have been."""

    name: str
    kernels: Kernels
    note: str = ""


def named(asked: str, device: torch.device) -> tuple[str, str]:
    """The name of the backend that would compute, and why not the faster one; loads nothing.

    Raises:
        BackendMissing
    """
    lack = "" if device.type == "cpu" else f"it computes on the CPU, not on {device}"
    if not lack and find_spec("numba") is None:
        lack = "numba is not installed"
    if asked == "cpu" and lack:
        raise BackendMissing(f"kernels cpu: {lack}")
    if asked == "reference" or device.type != "cpu":
        return "reference", ""
    return ("reference", f"the cpu backend is not used: {lack}") if lack else ("cpu", "")


def choose(
    asked: str,
    device: torch.device,
    dtype: torch.dtype,
    compiling: Callable[[float, str], None] = lambda done, what: None,
) -> Backend:
    """The backend that ``asked`` (one of `names.BACKENDS`) means on ``device``, ready for ``dtype``.

    ``compiling`` is told how far (0 to 1) compiling is. Where the CPU backend would be right but cannot
    compute, the reference does, and a warning says so.

    Raises:
        BackendMissing: the backend was asked for by name.
    """
    name, note = named(asked, device)
    if name == "cpu":
        try:
            return Backend(name, _ready(dtype, compiling))
        except Exception as error:  # a compiler fails in many ways, and none of them keeps us from serving
            lack = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if asked == "cpu":
                raise BackendMissing(f"kernels cpu: {lack}") from error
            name, note = "reference", f"the cpu backend is not used: {lack}"
    if note:
        log.warning("computing on the slow reference kernels: %s", note)
    return Backend(name, reference, note)


def _ready(dtype: torch.dtype, compiling: Callable[[float, str], None]) -> Kernels:
    from .cpu import backend  # numba comes with it
    from .cpu.warming import warm

    warm(dtype, compiling)
    return backend
