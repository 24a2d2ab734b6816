"""Which backend computes: by what is asked for, the device, the model's shapes, and what is installed.

Knows the backends by name and how each is made ready; not what they compute.
"""

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
"""Names of the Triton backends, and their modules."""


class BackendMissing(Exception):
    """A backend that was asked for by name cannot compute here; the text says why."""


@dataclass(frozen=True, slots=True)
class Backend:
    """``name``: one of `names.BACKENDS` but ``auto``. ``note``: why not the faster one, if any."""

    name: str
    kernels: Kernels
    note: str = ""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model asks of the kernels: its type, (head_dim, block_tokens) of each KV group, and KV's type."""

    dtype: torch.dtype
    caches: Sequence[tuple[int, int]] = ()
    stored: torch.dtype | None = None

    @property
    def narrow(self) -> bool:
        """Whether KV is of another type than the model."""
        return self.stored not in (None, self.dtype)


def named(asked: str, device: torch.device, needs: Needs | None = None) -> tuple[str, str]:
    """The name of the backend that would compute, and why not the faster one; loads nothing.

    Without ``needs`` nothing is known of the model, and only device and installation count.

    Raises:
        BackendMissing
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
    """The backend that ``asked`` (one of `names.BACKENDS`) means on ``device``, ready for ``needs``.

    ``compiling`` is told how far (0 to 1) compiling is. Where a faster backend would be right but cannot
    compute, the reference does, and a warning says so.

    Raises:
        BackendMissing: the backend was asked for by name.
    """
    name, note = named(asked, device, needs)
    if name != "reference":
        try:
            return Backend(name, _ready(name, needs.dtype, compiling))
        except Exception as error:  # a compiler fails in many ways, and none of them keeps us from serving
            lack = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if asked == name:
                raise BackendMissing(f"kernels {name}: {lack}") from error
            name, note = "reference", f"the {name} backend is not used: {lack}"
    if note:
        log.warning("computing on the slow reference kernels: %s", note)
    return Backend(name, reference, note)


def tell_compiling(begun: Callable[[str], None], ended: Callable[[], None]) -> None:
    """Of what is compiled when it is first called, which the Triton kernels are: see `gpu.compiling`."""
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


def _ready(name: str, dtype: torch.dtype, compiling: Callable[[float, str], None]) -> Kernels:
    if name in TRITON:
        return cast(Kernels, import_module(TRITON[name], __package__))
    from .cpu import backend  # numba comes with it
    from .cpu.warming import warm

    warm(dtype, compiling)
    return backend
