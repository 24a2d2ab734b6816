"""How much memory KV gets: blocks as asked, or a share of the machine's memory; on a device with memory of its
own what weights and the largest step leave. Allocates nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...kvstore.system_limits import NAMED, errno_of, explained
from ..errors import SettingsInvalid
from ..settings import EngineSettings

HOST_SHARE = 0.125  # of all memory
HOST_MOST_BYTES = 1 << 30
MOST_TOKENS = 1 << 21  # unless more is asked for: each block costs the engine some work
PROCESS_BYTES = 280 << 20  # as measured: the interpreter, torch, and the compiled kernels with their compiler
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
SMALLER = "lower --max-step-tokens, --max-sequences, --cudagraph-capture-sizes"
MORE_FOR_STEPS = f"{SMALLER}, --kv-bytes or --gpu-memory-utilization"
"""What to do if a step runs out of memory."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a device's own memory is for, in bytes, when KV is sized.

    ``total``: all there is, of which ``utilization`` may be taken. ``weights``: of the model. ``activations``:
    what the largest step takes beside them; ``graphs``: all CUDA graphs; None before they are measured.
    ``others``: what is not of torch: the driver's context, kernels, other processes.
    """

    total: int
    utilization: float
    weights: int
    activations: int | None
    graphs: int | None
    others: int

    @property
    def _taken(self) -> int:
        return self.weights + (self.activations or 0) + (self.graphs or 0) + self.others

    @property
    def kv(self) -> int:
        """What is left for KV; less than 0 if the rest does not fit."""
        return int(self.utilization * self.total) - self._taken

    def line(self, kv_bytes: int) -> str:
        """A line for the log: the parts as a sum, with ``kv_bytes`` bytes of KV."""
        known = self.activations is not None and self.graphs is not None
        parts = {"weights": self.weights, "activations": self.activations, "graphs": self.graphs}
        parts |= {"context and others": self.others, "KV": kv_bytes}
        terms = (f"{name} {'?' if size is None else shown(size)}" for name, size in parts.items())
        told = "" if known else "an estimate, ? is measured at start: "
        return (
            f"{told}{' + '.join(terms)} = {shown(self._taken + kv_bytes)} of at most {self.utilization:g} ×"
            f" {shown(self.total)}"
        )

    def check(self, settings: EngineSettings, blocks: int, block_bytes: int) -> None:
        """Raise `SettingsInvalid` if ``blocks`` blocks of ``block_bytes`` bytes do not fit, or are none."""
        if not blocks:
            raise self.refusal("there is no room for KV", block_bytes)
        if blocks * block_bytes > self.kv:
            raise self.refusal(f"{rule_of(settings, False)}, does not fit", blocks * block_bytes)

    def refusal(self, cause: str, kv_bytes: int = 0) -> SettingsInvalid:
        """The error with this cause: it names each part of the memory, and what to lower."""
        return SettingsInvalid(
            f"{cause}: {self.line(kv_bytes)}; {SMALLER}, --kv-bytes or --max-context, or raise"
            " --gpu-memory-utilization"
        )


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


def blocks_of(settings: EngineSettings, block_bytes: int, allowed_bytes: int, groups: int = 1) -> int:
    """How many blocks the pool gets, perhaps 0: as the settings ask, else what ``allowed_bytes`` hold.
    ``block_bytes``: of one block; ``groups``: how many KV groups the tokens have blocks in.

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
    return min(allowed_bytes // block_bytes, MOST_TOKENS // settings.block_tokens * groups)


def context_of(settings: EngineSettings, blocks: int, model_context: int) -> int:
    """How many tokens a sequence may hold: as asked, by default what ``blocks`` blocks hold; at most
    ``model_context``.

    A context that was asked for is not cut to the pool, so that the operator learns that it does not fit.
    """
    return min(model_context, settings.max_context or blocks * settings.block_tokens)


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
    return (
        f"{settings.memory_utilization:g} of the device's memory (--gpu-memory-utilization), less weights,"
        f" others, and what the largest step and graphs take, as measured at start, {tokens}"
    )


def memory_line(weights: int, blocks: int, block_bytes: int, tokens: int) -> str:
    """A line for the log: the memory of a loaded model as a sum of its parts. ``weights``: bytes; ``tokens``:
    that the blocks hold."""
    pool = blocks * block_bytes
    total = weights + pool + PROCESS_BYTES
    return (
        f"weights {shown(weights)} + KV {shown(pool)} ({blocks:,} blocks × {block_bytes:,} B ="
        f" {tokens:,} tokens) + process {shown(PROCESS_BYTES)} = {shown(total)}"
        " without host memory"
    )


def refusal(error: BaseException, what: str) -> str | None:
    """If ``error`` comes from a limit of the process or the machine: a sentence that names ``what`` and that
    limit. None for any other error."""
    return explained(error, what) if errno_of(error) in NAMED else None
