"""Chooses the backend, the implementation of the kernels: by the name that is asked for, the device, the
model's shapes, and what is installed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import torch

from .interface import Kernels
from .reference import backend as reference

log = logging.getLogger(__name__)

TRITON = {"triton": ".gpu.backend", "triton-invariant": ".gpu.invariant"}
"""The Triton backends: the name of each, and its module relative to this package."""


class BackendMissing(Exception):
    """A backend that was asked for by name cannot compute here; the text says why."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A chosen backend.

    ``name``: one of `names.BACKENDS`, never ``auto``. ``kernels``: its module. ``note``: why a faster backend
    was passed over; empty if none was.
    """

    name: str
    kernels: Kernels
    note: str = ""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model needs of a backend: its ``dtype``; ``caches``: (head_dim, block_tokens) of each KV group;
    ``stored``: the type in which KV is stored, None for ``dtype``; ``packed``: the types of its packed weights,
    sorted."""

    dtype: torch.dtype
    caches: Sequence[tuple[int, int]] = ()
    stored: torch.dtype | None = None
    packed: Sequence[str] = ()

    @property
    def narrow(self) -> bool:
        """Whether KV is stored in another type than the model's."""
        return self.stored not in (None, self.dtype)


def named(asked: str, device: torch.device, needs: Needs | None = None) -> tuple[str, str]:
    """The name of the backend that ``asked`` (one of `names.BACKENDS`) means on ``device``, and why a faster
    one is passed over ("" if none is). Compiles nothing. Without ``needs`` only the device and the
    installation count.

    Raises:
        BackendMissing: ``asked`` names a backend that cannot compute here.
    """
    if asked == "reference":
        return asked, ""
    if asked == "auto":
        best = "triton" if device.type == "cuda" else "cpu"
    else:
        best = asked
    lack = _cpu_lack(device, needs) if best == "cpu" else _triton_lack(device, needs)
    if not lack:
        return best, ""
    if asked == best:
        raise BackendMissing(f"kernels {asked}: {lack}")
    return "reference", f"the {best} backend is not used: {lack}"


def choose(
    asked: str,
    device: torch.device,
    needs: Needs,
    compiling: Callable[[float, str], None] = lambda done, what: None,
) -> Backend:
    """The backend that ``asked`` (one of `names.BACKENDS`) means on ``device``, compiled and ready for a
    model with these ``needs``.

    ``compiling`` is called while kernels are compiled: with the progress, 0 to 1, and a text that names the
    next kernel. If ``auto`` finds that the faster backend cannot compute here, it takes the reference and
    logs a warning.

    Raises:
        BackendMissing: the backend was asked for by name and cannot compute here.
    """
    name, note = named(asked, device, needs)
    if name != "reference":
        try:
            return Backend(name, _ready(name, needs, compiling))
        except Exception as error:  # a compiler can fail in many ways; serving goes on without it
            lack = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if asked == name:
                raise BackendMissing(f"kernels {name}: {lack}") from error
            name, note = "reference", f"the {name} backend is not used: {lack}"
    if note:
        log.warning("computing on the slow reference kernels: %s", note)
    return Backend(name, reference, note)


def tell_compiling(begun: Callable[[str], None], ended: Callable[[], None]) -> None:
    """From now on call ``begun`` with a kernel's name before this thread compiles a Triton kernel or reads it
    from disk, and ``ended`` after it. ``ended`` is not called if compiling fails. Does nothing if Triton is
    not installed."""
    if find_spec("triton") is not None:
        from .gpu import compiling

        compiling.tell_compiling(begun, ended)


def _cpu_lack(device: torch.device, needs: Needs | None) -> str:
    if device.type != "cpu":
        return f"it computes on the CPU, not on {device}"
    if needs is not None and needs.narrow:
        return f"it does not read KV of {str(needs.stored).removeprefix('torch.')}"
    return "numba is not installed" if find_spec("numba") is None else ""


def _triton_lack(device: torch.device, needs: Needs | None) -> str:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"it computes on a CUDA device, not on {device}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if needs is None:
        return ""
    from .gpu.support import Unsupported, check_supported

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    try:
        for head_dim, block_tokens in needs.caches:
            check_supported(head_dim, needs.dtype, block_tokens, capability)
    except Unsupported as error:
        return str(error)
    return ""


def _ready(name: str, needs: Needs, compiling: Callable[[float, str], None]) -> Kernels:
    if name in TRITON:
        return cast(Kernels, import_module(TRITON[name], __package__))
    from .cpu import backend  # imports numba
    from .cpu.warmup import warm

    warm(needs.dtype, needs.packed, compiling)
    return backend
