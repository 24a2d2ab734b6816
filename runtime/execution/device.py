"""What an exception of torch leaves behind: a device that is lost for this process, or one that goes on.

After an illegal access, a failed assertion or a hardware error each later call of the process fails: CUDA calls
such errors sticky, and only a new process can use the device again. A refusal of a single call (out of memory,
a launch out of bounds) leaves the device as it was, and it goes on with what it was given before. Numbers:
``cudaError_t`` of the CUDA runtime API.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import clear_frames

import torch

from ...kernels.device import Device
from ..errors import EngineDied
from ..kv_placement.sizing import MORE_FOR_STEPS

REFUSALS = frozenset({1, 2, 9, 98, 200, 209, 701, 712, 713, 801})
"""CUDA error codes of a call that was refused, and left the device as it was: invalid value, memory, launch
configuration or function; no image or kernel for it; out of resources; host memory that is registered
already, or is not; an operation that is not supported here."""

NO_MEMORY = ("out of memory", "ALLOC_FAILED")
REFUSED = (
    *NO_MEMORY,
    "invalid argument",
    "invalid configuration",
    "out of resource",
    "already mapped",
    "does not correspond to a registered memory region",
    "operation not supported",
)
SICK = ("CUDA error", "Triton Error [CUDA]", "HIP error")


def is_lost(error: Exception) -> bool:
    """Whether ``error``, from torch, means that the device is lost for this process. False if a single call
    was refused."""
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if not isinstance(error, torch.AcceleratorError) and not any(sign in text for sign in SICK):
        return False
    code = getattr(error, "error_code", None)
    if code is not None:
        return code not in REFUSALS
    first = text.split("\n", 1)[0]
    return not any(refusal in first for refusal in REFUSED)


@contextmanager
def device_watched(device: Device) -> Iterator[None]:
    """A context that an exception leaves only when ``device`` is done with all that it was given: a step that
    failed half way has no copy under way, and its slots, blocks and tensors are free. Raises ``EngineDied`` in
    place of an exception which means that the device is lost, and ``OutOfMemoryError``, with what to lower, in
    place of one which means that it lacks memory; others pass."""
    try:
        yield
    except Exception as error:
        lost = error if is_lost(error) else _unfinished(device)
        if lost is not None:
            raise EngineDied("the device is lost: " + str(lost).split("\n", 1)[0][:200]) from lost
        clear_frames(error.__traceback__)  # else it keeps the memory that the next step may lack
        first = str(error).split("\n", 1)[0]
        if isinstance(error, RuntimeError) and any(sign in first for sign in NO_MEMORY):
            raise torch.OutOfMemoryError(f"{first[:200]}: {MORE_FOR_STEPS}") from error
        raise


def _unfinished(device: Device) -> Exception | None:
    """Wait until the device has nothing to do. Returns what it raised; None if it is done."""
    try:
        device.synchronize()
    except Exception as error:
        return error
    return None
