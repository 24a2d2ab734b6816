"""How much memory KV gets: blocks of the device as asked, or a share of the free memory. Allocates nothing."""

from __future__ import annotations

import os
from pathlib import Path

from ...kvstore.system_limits import NAMED, errno_of, explained
from ..errors import SettingsInvalid
from ..settings import EngineSettings

CUDA_SHARE = 0.85  # of the memory free after loading the weights; activations need the rest
HOST_SHARE = 0.125  # of all memory
HOST_MOST_BYTES = 1 << 30
MOST_TOKENS = 1 << 21  # unless more is asked for: each block costs the engine some work
PROCESS_BYTES = 280 << 20  # as measured: the interpreter, torch, and the compiled kernels with their compiler
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_bytes() -> int:
    """Bytes of this machine's memory, or of the container's if that is less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in LIMITS:
        try:
            limits.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # no limit there
            continue
    return min(limits)


def host_kv_bytes() -> int:
    """How many bytes KV of a CPU engine takes of this machine's memory if none are asked for."""
    return min(HOST_MOST_BYTES, int(HOST_SHARE * machine_bytes()))


def cuda_kv_bytes(free_bytes: int) -> int:
    """The share of ``free_bytes``, the device memory that is free after loading, that KV may take."""
    return int(CUDA_SHARE * free_bytes)


def blocks_of(settings: EngineSettings, block_bytes: int, allowed_bytes: int) -> int:
    """How many blocks the pool gets, perhaps 0: as the settings ask, else what ``allowed_bytes`` hold.
    ``block_bytes``: of one block.

    Raises `SettingsInvalid`: the ``kv_bytes`` asked for are not enough for one block.
    """
    if settings.blocks is not None:
        return settings.blocks
    if settings.kv_bytes is not None:
        if settings.kv_bytes < block_bytes:
            raise SettingsInvalid(
                f"--kv-bytes {settings.kv_bytes} holds no block: one of {settings.block_tokens} tokens takes"
                f" {block_bytes} bytes"
            )
        return settings.kv_bytes // block_bytes
    return min(allowed_bytes // block_bytes, MOST_TOKENS // settings.block_tokens)


def context_of(settings: EngineSettings, blocks: int, model_context: int) -> int:
    """How many tokens a sequence may hold by model and pool: ``model_context``, or what ``blocks`` blocks
    hold if that is less and no context was asked for.

    A context that was asked for is not cut to the pool, so that the operator learns that it does not fit.
    """
    if settings.max_context is not None:
        return model_context
    return min(model_context, blocks * settings.block_tokens)


def check_budget(name: str, asked: int, there: int, of: str) -> None:
    """Raise `SettingsInvalid`, naming both numbers, if ``asked`` bytes are more than ``there``. ``name``: of
    the setting with these bytes; ``of``: what has ``there`` bytes; both as text for the error."""
    if asked > there:
        raise SettingsInvalid(
            f"{name} = {shown(asked)} is {shown(asked - there)} more than {of}, {shown(there)}"
        )


def shown(count: float) -> str:
    """A number of bytes as text: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def rule_of(settings: EngineSettings, on_host: bool) -> str:
    """The rule by which `blocks_of` found the pool's size, as text for a line of the log. ``on_host``: the
    device's memory is this machine's."""
    if settings.blocks is not None:
        return f"blocks = {settings.blocks:,}, as asked"
    if settings.kv_bytes is not None:
        return f"kv_bytes = {shown(settings.kv_bytes)}, as asked"
    tokens = f"and at most {MOST_TOKENS:,} tokens"
    if on_host:
        share = f"min({HOST_SHARE:g} × {shown(machine_bytes())}, {shown(HOST_MOST_BYTES)})"
        return f"{share} = {shown(host_kv_bytes())}, {tokens}"
    return f"{CUDA_SHARE:g} of the memory free once the weights are there, {tokens}"


def memory_line(weights: int, blocks: int, block_bytes: int, block_tokens: int) -> str:
    """A line for the log: the memory of a loaded model as a sum of its parts. ``weights``: bytes."""
    pool = blocks * block_bytes
    total = weights + pool + PROCESS_BYTES
    return (
        f"weights {shown(weights)} + KV {shown(pool)} ({blocks:,} blocks × {block_bytes:,} B ="
        f" {blocks * block_tokens:,} tokens) + process {shown(PROCESS_BYTES)} = {shown(total)}"
        " without host memory"
    )


def refusal(error: BaseException, what: str) -> str | None:
    """If ``error`` comes from a limit of the process or the machine: a sentence that names ``what`` and that
    limit. None for any other error."""
    return explained(error, what) if errno_of(error) in NAMED else None
