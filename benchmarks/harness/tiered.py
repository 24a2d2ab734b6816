"""Our engine with all its tiers in one process, as a worker; KV can be dropped tier by tier. Run with ``python
-m``.

There is no link to a gateway, as in `ours`, so that a turn's time is the engine's alone. Besides the requests
that every worker answers (`peers.worker`), it answers `open`, `lose`, `again` and `rates`. Its loop waits as
the link's does: no longer than the engine asks for.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast.kernels.cpu.cores import bind
from holdfast.kvstore.disk.client import DiskTier
from holdfast.kvstore.disk.payload_file import FILE
from holdfast.kvstore.disk.process import DiskProcess
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.tier import Presence
from holdfast.runtime.kv_placement.costs import CostBook
from holdfast.runtime.kv_placement.tier_setup import host_memory, with_secret
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import Extend, Settle, Stop

from ..peers.worker import answer_all
from .ours import Ours
from .talker import apply, loaded, rest, spoken

Json = dict[str, Any]
HOST_BYTES = 1 << 30
DEVICE_BYTES = 192 << 20
DISK_BYTES = 2 << 30
READY_SECONDS = 30.0
CACHE_BYTES = 256 << 20  # more than the caches of a present server core


class Tiered(Ours):
    """One conversation with KV on the device, in the host tier and on disk; each tier can drop its copy."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._base = 0
        self._records: list[bytes] = []
        self._keeper: DiskProcess

    def load(self, folder: Path, dtype: str, threads: int) -> Json:
        """Load the model in ``folder`` with a host tier and a disk process, set up as the engine's supervisor
        does."""
        torch.set_num_threads(threads)
        settings = with_secret(
            EngineSettings(
                model=str(folder),
                device="cpu",
                dtype=dtype,
                kv_bytes=DEVICE_BYTES,
                host_bytes=HOST_BYTES,
                store=str(self._folder),
                disk_bytes=DISK_BYTES,
            )
        )
        memory = host_memory(settings)
        assert memory is not None
        self._keeper = DiskProcess(memory)
        control = os.dup(self._keeper.theirs.fileno())
        self._keeper.start()
        engine = loaded(settings, memory, control)
        # Restoring is measured: never recompute instead.
        engine.scheduler.placement.costs = CostBook(None)
        self._engine = engine
        bind()  # as the engine's own process does
        self._until_ready()
        return {"precision": {"weights": dtype, "kv": dtype}, "block_bytes": self._tier.memory.block_bytes}

    def close(self) -> None:
        self._engine.scheduler.placement.close()
        self._keeper.stop()

    # --- requests ---------------------------------------------------------------------------------------

    def open(self, request: Json) -> Json:
        """Begin a conversation with the request's ``tokens``: compute them, and keep their KV on every tier."""
        self.begin()
        self.turn(request["tokens"], 1)
        self._base = len(request["tokens"])
        rest(self._engine)
        self._flush()
        self._records = list(self._tier.in_order())
        return {}

    def again(self, request: Json) -> Json:
        """Take a turn: append ``tokens``, generate one token, and cut the conversation back to its first
        tokens. Gives the seconds to that token and where KV came from. The processor's caches are swept first,
        because before a real turn other data has filled them."""
        assert self._conversation is not None
        _sweep()
        began = time.perf_counter()
        apply(self._engine, Extend(0, self._conversation, request["tokens"]))
        self._generate(self._conversation, 1)
        first, _, work = spoken(self._engine, lambda: time.sleep(self._engine.due() or 0.0))
        rest(self._engine)
        self._rewind()
        return {"seconds": first - began, "work": msgspec.structs.asdict(work), **self._disk_process_faults()}

    def lose(self, request: Json) -> Json:
        """Drop the conversation's KV on the device; if ``host`` is set also in the host tier; if ``cold`` is
        set also the file's pages in the page cache."""
        assert self._conversation is not None
        self._flush()
        apply(self._engine, Settle(0, self._conversation))
        rest(self._engine)
        pool = self._engine.scheduler.pool
        pool.distrust([*pool.index.here.values()])
        if request["host"]:
            self._flush()
            for key in list(self._tier.in_order()):
                self._tier.drop(key)
        else:
            self._have_above_disk()
        if request["cold"]:
            self._forget_pages()
        return self._disk_process_faults()

    def rates(self, request: Json) -> Json:
        """For a number of ``bytes``: the seconds to copy them from memory to memory (``memcpy``), and to read
        them from a file that is in the page cache (``warm``) or is not (``cold``), block by block.

        Before each measurement the processor's caches are swept, so that the rate is the memory's and not a
        cache's.
        """
        size, block = request["bytes"], self._tier.memory.block_bytes
        source, target = _touched(size), _touched(size)
        _sweep()
        began = time.perf_counter()
        for at in range(0, size, block):
            target[at : at + block] = source[at : at + block]
        copied = time.perf_counter() - began
        path = self._folder / "rate.bin"
        path.write_bytes(source.tobytes())
        seconds = {"memcpy": copied}
        for name, cold in (("warm", False), ("cold", True)):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            if cold:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            _sweep()
            began = time.perf_counter()
            for at in range(0, size, block):
                os.preadv(fd, [target.data[at : at + block]], at)
            seconds[name] = time.perf_counter() - began
            os.close(fd)
        path.unlink()
        return seconds

    # --- inside -----------------------------------------------------------------------------------------

    @property
    def _tier(self) -> HostTier:
        return self._engine.scheduler.tiers.host

    @property
    def _disk(self) -> DiskTier:
        (disk,) = self._engine.scheduler.tiers.below
        assert isinstance(disk, DiskTier)
        return disk

    def _rewind(self) -> None:
        """Cut the conversation back to its first tokens, so that the next turn has the same history."""
        assert self._conversation is not None
        apply(self._engine, Stop(0, self._conversation, self._base))
        rest(self._engine)

    def _flush(self) -> None:
        """Wait until everything in the host tier is on disk, too."""
        scheduler = self._engine.scheduler
        scheduler.tiers.flush()
        while scheduler.tiers.busy:
            scheduler.tick(time.monotonic())
            time.sleep(0.001)

    def _have_above_disk(self) -> None:
        """Load into the host tier those records that earlier rounds dropped from it."""
        now, tiers = time.monotonic(), self._engine.scheduler.tiers
        for key in self._records:
            assert key in self._tier or tiers.fetch(key, now, 0) is Presence.FOUND, "lost for good"
        while self._disk.waiting:
            tiers.poll(now)

    def _until_ready(self) -> None:
        end = time.monotonic() + READY_SECONDS
        while not self._disk.ready:
            if time.monotonic() > end:
                raise RuntimeError("no disk process")
            self._engine.scheduler.tick(time.monotonic())
            time.sleep(0.01)

    def _forget_pages(self) -> None:
        """Drop the pages of the records' file from the page cache."""
        for path in self._folder.glob(f"kv/*/{FILE}"):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def _disk_process_faults(self) -> Json:
        """The number of major page faults of the disk process so far, and the disk tier's statistics."""
        words = Path(f"/proc/{self._keeper.pid}/stat").read_text().rpartition(")")[2].split()
        return {"major_faults": int(words[9]), "disk": self._disk.statistics()}


def _touched(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A buffer of so many bytes, each of its pages backed by memory."""
    return np.full(size, 7, dtype=np.uint8)


@cache
def _ballast() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return _touched(CACHE_BYTES)


def _sweep() -> None:
    """Read so much memory that nothing else is left in the processor's caches."""
    _ballast().max()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:
        tiered = Tiered(Path(store))
        answer_all(
            tiered, {"open": tiered.open, "again": tiered.again, "lose": tiered.lose, "rates": tiered.rates}
        )
        tiered.close()
